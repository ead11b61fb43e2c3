"""Conversion of a plan of a lowered graph (`planner.homes.lower`) to one of the graph itself."""

import time
from collections.abc import Iterable

import numpy as np

from coop_plan.planner.core.build_plan import assemble
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.timeline import base_cost_us, plan_timeline
from coop_plan.planner.homes.lower import Lowered
from coop_plan.planner.inspect.buffers import replay_plan
from coop_plan.planner.method import Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.placement import place
from coop_plan.planner.verifier import verify
from coop_plan.schemas import (
    Compute,
    Free,
    Graph,
    Home,
    Offload,
    Plan,
    Prefetch,
    Step,
    TensorRead,
    Wait,
    fingerprint,
)


def assembled(
    problem: Problem,
    low: Lowered,
    solution: Solution,
    options: PlanOptions,
    budget: int,
    began: float,
) -> Plan | None:
    """The verified plan within a budget (bytes) of a solution of `low`, which is `problem` lowered.

    None if the copies on the host exceed the host budget. `began` is the `time.monotonic` value in
    seconds at the start of planning.
    """
    original = low.form.placed_to_original(solution.placed)
    made = assemble(
        Solution(
            original,
            eviction_free_ratio=solution.eviction_free_ratio,
            evictions=solution.evictions,
        ),
        host_offsets=np.zeros(len(original.schedule), dtype=np.int64),
        host_arena_bytes=0,
        link_bytes_per_s=options.link,
        method=options.info.name,
        budget_bytes=budget,
        solve_seconds=time.monotonic() - began,
    )
    host = problem.host_budget
    found = restored(problem.graph, low, made).model_copy({"host_budget_bytes": host})
    if host is not None and found.host_arena_bytes > host:
        return None
    verify(problem.graph, found)
    return found


def restored(graph: Graph, low: Lowered, plan: Plan) -> Plan:
    """The plan of `graph` with homes for the residents that are activations in `low`.

    `plan` is one of the lowered graph. The artificial ops and their transfers are left out; copies
    on the host get new offsets, beside the homes, and updates on the host are inserted.
    """
    steps = _with_host_updates(graph, low, _without_artificial_ops(low, plan.steps))
    size = {tensor.id: tensor.bytes for tensor in graph.tensors}
    steps, homes, slab = _with_host_offsets(low, steps, size, plan.alignment)
    made = plan.model_copy({"graph": fingerprint(graph), "homes": homes, "steps": steps})
    view, timeline = replay_plan(graph, made), plan_timeline(graph, made)
    resident = sum(t.bytes for t in graph.tensors if t.resident and t.id not in low.homes)
    outside = plan.peak_bytes - plan.resident_bytes - plan.arena_bytes
    arena = max((r.offset + r.bytes for r in view.rectangles if r.bytes), default=0)
    copies = (moment for moment in view.moments if moment.engine in ("offload", "prefetch"))
    cost, base = timeline.end_us, base_cost_us(graph)
    return made.model_copy(
        {
            "resident_bytes": resident,
            "arena_bytes": arena,
            "host_arena_bytes": slab,
            "peak_bytes": resident + arena + outside,
            "fragmentation": 1 - max(view.live) / arena if arena else 0.0,
            "swapped_bytes": sum(copy.bytes for copy in copies),
            "base_cost_us": base,
            "cost_us": cost,
            "overhead": cost / base - 1 if base else 0.0,
            "prefetch_stall_us": timeline.prefetch_stall_us,
            "offload_stall_us": timeline.offload_stall_us,
        }
    )


def _without_artificial_ops(low: Lowered, steps: Iterable[Step]) -> list[Step]:
    """The steps without artificial ops, their buffers, and the transfers of these."""
    begins, ends = set(low.begins), set(low.ends)
    read: set[int] = set()  # by ops of the graph
    dropped: set[int] = set()  # buffers of artificial ops
    for step in steps:
        if isinstance(step, Compute):
            buffers = {entry for entry in step.reads if isinstance(entry, int)}
            if step.op in ends:
                dropped |= buffers
            else:
                read |= buffers
    dropped -= read
    kept: list[Step] = []
    for step in steps:
        match step:
            case Compute():
                if step.op in begins:
                    dropped |= {write.buffer for write in step.writes}
                elif step.op not in ends:
                    kept.append(step)
            case Free():
                buffers_left = [b for b in step.buffers if b not in dropped]
                if buffers_left:
                    kept.append(Free(buffers=buffers_left))
            case Prefetch():
                if step.buffer not in dropped:
                    home = step.tensor in low.homes
                    kept.append(step.model_copy({"from_": None}) if home else step)
            case Offload() | Wait():
                if step.buffer not in dropped:
                    kept.append(step)
    return kept


def _with_host_updates(graph: Graph, low: Lowered, steps: list[Step]) -> list[Step]:
    """The steps with each update on the host as early as its gradient and its homes allow.

    That is after the offload of its gradient begins, after the last prefetch from a home that it
    uses has ended, and after the first runs of all forward ops.
    """
    left, forwards = {op.id for op in graph.ops if op.phase == "forward"}, 0
    tensor: dict[int, int] = {}
    sent: dict[int, tuple[int, int]] = {}  # by gradient the step of its offload, and its buffer
    fetched: dict[int, int] = {}  # by home the last wait on a prefetch from it
    from_home: set[int] = set()
    for number, step in enumerate(steps):
        match step:
            case Compute():
                tensor |= {write.buffer: write.tensor for write in step.writes}
                if step.op in left:
                    left.remove(step.op)
                    forwards = number
            case Prefetch():
                tensor[step.buffer] = step.tensor
                if step.from_ is None:
                    from_home.add(step.buffer)
            case Offload():
                sent[tensor[step.buffer]] = number, step.buffer
            case Wait() if step.buffer in from_home:
                fetched[tensor[step.buffer]] = number
            case _:
                pass
    after: dict[int, list[tuple[int, Step]]] = {}
    for update in low.updates:
        at, buffer = sent[update.gradient]
        last = max([forwards, at, *(fetched[t] for t in update.residents if t in fetched)])
        reads = [buffer if t == update.gradient else TensorRead(tensor=t) for t in update.inputs]
        run = Compute(op=update.op, variant=update.variant, reads=reads, writes=[])
        after.setdefault(last, []).append((at, run))
    return [
        each
        for number, step in enumerate(steps)
        for each in (step, *(run for _, run in sorted(after.get(number, ()), key=lambda x: x[0])))
    ]


def _with_host_offsets(
    low: Lowered, steps: list[Step], size: dict[int, int], alignment: int
) -> tuple[list[Step], list[Home], int]:
    """The steps with offsets of all copies on the host, the homes, and the bytes of the slab."""
    homes = sorted(low.homes)
    lower, upper, bytes_ = [0] * len(homes), [len(steps)] * len(homes), [size[t] for t in homes]
    row, on_host = {tensor: k for k, tensor in enumerate(homes)}, {u.op for u in low.updates}
    row_of_step: dict[int, int] = {}
    tensor: dict[int, int] = {}
    copy: dict[int, int] = {}  # per buffer its last copy
    pending: dict[int, int] = {}  # per buffer the copy that its transfer in flight uses
    for number, step in enumerate(steps):
        match step:
            case Compute():
                tensor |= {write.buffer: write.tensor for write in step.writes}
                for read in step.reads if step.op in on_host else ():
                    if isinstance(read, int):
                        upper[copy[read]] = len(steps)
            case Prefetch():
                tensor[step.buffer] = step.tensor
                pending[step.buffer] = row[step.tensor] if step.from_ is None else copy[step.from_]
            case Offload():
                t = tensor[step.buffer]
                if t not in row:
                    lower.append(number)
                    upper.append(number + 1)
                    bytes_.append(size[t])
                found = row[t] if t in row else len(lower) - 1
                row_of_step[number] = copy[step.buffer] = pending[step.buffer] = found
            case Wait():
                k = pending.pop(step.buffer)
                upper[k] = max(upper[k], number + 1)
            case Free():
                pass
    placed = place(np.array(lower), np.array(upper), np.array(bytes_), alignment=alignment)
    offset = placed.offsets.tolist()
    changed = [
        step.model_copy({"host_offset": offset[row_of_step[number]]})
        if isinstance(step, Offload)
        else step
        for number, step in enumerate(steps)
    ]
    slots = [Home(tensor=t, host_offset=offset[k]) for t, k in row.items()]
    return changed, slots, placed.peak
