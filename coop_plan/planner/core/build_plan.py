"""Conversion of a placed schedule to the plan document and its figures (see `schemas.plan`)."""

import platform

import numpy

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.lifetimes import OUTSIDE
from coop_plan.planner.core.schedule import Offload, PlacedSchedule, Prefetch, Run, Wait
from coop_plan.planner.method import Solution
from coop_plan.schemas import (
    Compute,
    Free,
    Plan,
    Step,
    TensorRead,
    Workspace,
    Write,
    fingerprint,
)
from coop_plan.schemas import Offload as OffloadStep
from coop_plan.schemas import Prefetch as PrefetchStep
from coop_plan.schemas import Wait as WaitStep


def assemble(
    solution: Solution,
    *,
    host_offsets: Ints,
    host_arena_bytes: int,
    link_bytes_per_s: float | None,
    method: str,
    budget_bytes: int,
    solve_seconds: float,
    budget_lower_bound_bytes: int | None = None,
) -> Plan:
    """The plan of a method's solution.

    `host_offsets` (bytes) has the address in the host slab per offload, in order;
    `link_bytes_per_s` is the requested bandwidth, None for the device's own.
    """
    placed = solution.placed
    problem, schedule = placed.problem, placed.schedule
    arena = placed.arena_bytes
    base, cost = problem.base_cost_us, schedule.cost_us
    live = int(schedule.live_bytes(exact=True).max(initial=0))
    runs = sum(variant >= 0 for variant in schedule.variants)
    moved = schedule.trace.moved[schedule.trace.moved >= 0]
    steps = _Steps(placed, host_offsets)
    return Plan(
        schema_="coop-plan/plan/1",
        graph=fingerprint(problem.graph),
        method=method,
        status=solution.status,
        budget_bytes=budget_bytes,
        host_budget_bytes=problem.host_budget,
        link_bytes_per_s=link_bytes_per_s,
        resident_bytes=problem.resident_bytes,
        arena_bytes=arena,
        host_arena_bytes=host_arena_bytes,
        peak_bytes=problem.fixed_bytes + arena,
        base_cost_us=base,
        cost_us=cost,
        overhead=cost / base - 1 if base else 0.0,
        lower_bound_us=solution.lower_bound_us,
        lower_bound_model=solution.bound_model,
        budget_lower_bound_bytes=budget_lower_bound_bytes,
        fragmentation=1 - live / arena if arena else 0.0,
        eviction_free_ratio=solution.eviction_free_ratio,
        evictions=solution.evictions,
        recomputed_ops=runs - problem.op_count,
        swapped_bytes=steps.copied_bytes(moved),
        prefetch_stall_us=schedule.timeline.prefetch_stall_us,
        offload_stall_us=schedule.timeline.offload_stall_us,
        solve_seconds=solve_seconds,
        alignment=problem.alignment,
        outputs=problem.outputs,
        versions={"python": platform.python_version(), "numpy": numpy.__version__},
        steps=steps.build(),
    )


class _Steps:
    """Builder of the plan's steps, which takes most of the time of the conversion.

    Equal parts of steps are one object each: reads outside the arena, and the empty workspace.
    """

    def __init__(self, placed: PlacedSchedule, host_offsets: Ints) -> None:
        problem, schedule = placed.problem, placed.schedule
        tensors = problem.graph.tensors
        self.problem, self.schedule = problem, schedule
        self.tensor = schedule.tensor
        self.offset: list[int] = placed.offset.tolist()
        self.workspace: list[int] = placed.workspace_offset.tolist()
        self.host_offsets = iter(host_offsets.tolist())
        self.outside_reads = {
            t: TensorRead(tensor=tensor.id)
            for t, tensor in enumerate(tensors)
            if problem.resident[t] or problem.outside[t]
        }
        self.no_workspace = Workspace(offset=0, bytes=0)
        self.next_buffer = len(self.tensor)  # ids of outputs outside the arena follow

    def copied_bytes(self, moved: Ints) -> int:
        """Bytes of all transfers; `moved` names each twice, at its start and at its wait."""
        total: int = sum(self.problem.bytes[self.tensor[b]] for b in moved.tolist())
        return total // 2

    def build(self) -> list[Step]:
        """All steps, with a free step after each event at which buffers end."""
        ends = self._ends()
        steps: list[Step] = []
        for number, event in enumerate(self.schedule.events()):
            match event:
                case Run():
                    steps.append(self._compute(event, self.workspace[number]))
                case Offload(buffer):
                    steps.append(OffloadStep(buffer=buffer, host_offset=next(self.host_offsets)))
                case Prefetch():
                    steps.append(self._prefetch(event))
                case Wait(buffer):
                    steps.append(WaitStep(buffer=buffer))
            if ends[number]:
                steps.append(Free(buffers=ends[number]))
        return steps

    def _ends(self) -> list[list[int]]:
        """Per event the buffers to free after it, without those taken over in place."""
        t = self.schedule.trace
        ends: list[list[int]] = [[] for _ in range(len(self.schedule))]
        freed = t.survives == 0
        freed[t.shares[t.shares >= 0]] = False
        for buffer in numpy.flatnonzero(freed).tolist():
            ends[self.schedule.last[buffer]].append(buffer)
        return ends

    def _compute(self, run: Run, workspace_offset: int) -> Compute:
        problem = self.problem
        variant = problem.variants[run.variant]
        writes = []
        for t, buffer in zip(variant.outputs, run.writes, strict=True):
            offset: int | None
            if buffer == OUTSIDE:
                offset, number = None, self.next_buffer
                self.next_buffer += 1
            else:
                offset, number = self.offset[buffer], buffer
            writes.append(
                Write(
                    buffer=number,
                    tensor=problem.graph.tensors[t].id,
                    offset=offset,
                    bytes=problem.bytes[t],
                )
            )
        workspace = self.no_workspace
        if variant.workspace_bytes:
            workspace = Workspace(offset=workspace_offset, bytes=variant.workspace_bytes)
        return Compute(
            op=problem.graph.ops[variant.op].id,
            variant=variant.name,
            reads=[
                self.outside_reads[t] if buffer == OUTSIDE else buffer
                for t, buffer in zip(variant.inputs, run.reads, strict=True)
            ],
            writes=writes,
            workspace=workspace,
        )

    def _prefetch(self, event: Prefetch) -> PrefetchStep:
        t = self.tensor[event.buffer]
        return PrefetchStep(
            buffer=event.buffer,
            tensor=self.problem.graph.tensors[t].id,
            offset=self.offset[event.buffer],
            bytes=self.problem.bytes[t],
            from_=event.source,
        )
