"""From a placed schedule to the plan document and its figures."""

import platform
from typing import Literal

import numpy

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import OUTSIDE, Schedule
from coop_plan.schemas import Compute, Free, Plan, TensorRead, Workspace, Write, fingerprint


def arena_bytes(schedule: Schedule) -> int:
    """Exact size of the arena in bytes: the highest end of a buffer or a workspace."""
    assert schedule.offset is not None
    assert schedule.workspace_offset is not None
    problem = schedule.problem
    ends = [
        offset + problem.bytes[t]
        for offset, t in zip(schedule.offset, schedule.tensor, strict=True)
        if problem.bytes[t]
    ]
    for offset, op in zip(schedule.workspace_offset, schedule.ops, strict=True):
        workspace = problem.graph.ops[op].workspace_bytes
        if workspace:
            ends.append(offset + workspace)
    return max(ends, default=0)


def peak_live_bytes(schedule: Schedule) -> int:
    """Largest sum of exact bytes live in the arena at any event, workspace included."""
    problem = schedule.problem
    change = [0] * (len(schedule.ops) + 1)
    for buffer, t in enumerate(schedule.tensor):
        size = problem.bytes[t]
        source = schedule.shares[buffer]
        change[schedule.first[buffer]] += size
        change[schedule.last[buffer] + 1] -= size
        if source >= 0:  # during the event both names mean one address: count the larger once
            shared = min(size, problem.bytes[schedule.tensor[source]])
            change[schedule.first[buffer]] -= shared
            change[schedule.first[buffer] + 1] += shared
    live = peak = 0
    for event, op in enumerate(schedule.ops):
        live += change[event]
        peak = max(peak, live + problem.graph.ops[op].workspace_bytes)
    return peak


def assemble(
    schedule: Schedule,
    *,
    method: str,
    budget_bytes: int,
    status: Literal["optimal", "feasible"],
    lower_bound_us: float | None,
    eviction_free_ratio: float | None,
    evictions: int | None,
    solve_seconds: float,
) -> Plan:
    """The plan of a placed schedule; figures as DESIGN.md section 4 defines them."""
    problem = schedule.problem
    arena = arena_bytes(schedule)
    base = problem.base_cost_us
    cost = schedule.cost_us if len(schedule.ops) > problem.op_count else base
    live = peak_live_bytes(schedule)
    return Plan(
        schema="coop-plan/plan/1",
        graph=fingerprint(problem.graph),
        method=method,
        status=status,
        budget_bytes=budget_bytes,
        resident_bytes=problem.resident_bytes,
        arena_bytes=arena,
        peak_bytes=problem.fixed_bytes + arena,
        base_cost_us=base,
        cost_us=cost,
        overhead=cost / base - 1 if base else 0.0,
        lower_bound_us=lower_bound_us,
        fragmentation=1 - live / arena if arena else 0.0,
        eviction_free_ratio=eviction_free_ratio,
        evictions=evictions,
        recomputed_ops=len(schedule.ops) - problem.op_count,
        swapped_bytes=0,
        solve_seconds=solve_seconds,
        alignment=problem.alignment,
        outputs=problem.outputs,
        versions={"python": platform.python_version(), "numpy": numpy.__version__},
        steps=_steps(problem, schedule),
    )


def _steps(problem: Problem, schedule: Schedule) -> list[Compute | Free]:
    assert schedule.offset is not None
    assert schedule.workspace_offset is not None
    tensors, ops = problem.graph.tensors, problem.graph.ops
    ends: list[list[int]] = [[] for _ in schedule.ops]
    overwritten = {source for source in schedule.shares if source >= 0}
    for buffer, event in enumerate(schedule.last):
        if buffer not in overwritten and buffer not in schedule.survivors:
            ends[event].append(buffer)
    steps: list[Compute | Free] = []
    # One object each for what most steps repeat: building them is the larger part of the work.
    no_workspace = Workspace.model_construct(offset=0, bytes=0)
    named = {
        t: TensorRead.model_construct(tensor=tensor.id)
        for t, tensor in enumerate(tensors)
        if problem.resident[t] or problem.outside[t]
    }
    next_buffer = len(schedule.tensor)  # ids of the outputs outside the arena follow the others
    for event, op in enumerate(schedule.ops):
        writes = []
        for t, buffer in zip(problem.op_outputs[op], schedule.writes[event], strict=True):
            if buffer == OUTSIDE:
                offset, number = None, next_buffer
                next_buffer += 1
            else:
                offset, number = schedule.offset[buffer], buffer
            writes.append(
                Write.model_construct(
                    buffer=number, tensor=tensors[t].id, offset=offset, bytes=problem.bytes[t]
                )
            )
        reads = [
            named[t] if buffer == OUTSIDE else buffer
            for t, buffer in zip(problem.op_inputs[op], schedule.reads[event], strict=True)
        ]
        workspace = no_workspace
        if ops[op].workspace_bytes:
            workspace = Workspace.model_construct(
                offset=schedule.workspace_offset[event], bytes=ops[op].workspace_bytes
            )
        steps.append(
            Compute.model_construct(
                do="compute",
                op=ops[op].id,
                variant=None,
                reads=reads,
                writes=writes,
                workspace=workspace,
            )
        )
        if ends[event]:
            steps.append(Free.model_construct(do="free", buffers=ends[event]))
    return steps
