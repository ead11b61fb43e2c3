"""
The independent verifier: replays a plan on its graph and names every fault.

It shares no code with the methods. What a plan means, and so what is checked:

Compute. `reads` follow the op's inputs and `writes` its outputs (the variant's, if one is chosen).
A read is the id of a live arena buffer that holds exactly that tensor, or `{"tensor": t}` for a
resident tensor or an output already written outside the arena (and only so: the buffer id of a
write outside is never read). A write makes a new buffer of exactly the tensor's bytes. Reads,
writes and workspace are live together and overlap neither each other nor any other live buffer.
Offsets are multiples of `alignment` inside the arena; 0 bytes overlap nothing.

In place. A write at the offset of a buffer that the step reads takes it over, if the op (or its
chosen variant) allows the pair, the op does not mutate that input, and the write is not larger: the
old buffer ends here, and no `free` names it. A write takes over one buffer, and a buffer is taken
over by one write.

Versions. A tensor's version is the number of ops before, in program order, that mutate it. An op
reads each input at the version it would see in program order, whenever it runs; a mutator turns
the buffer (or the resident or outside tensor) it reads into the next version; a freshly computed
buffer has version 0. So a recompute that needs an overwritten parameter is a fault.

Order. Every op runs at least once, in any order that respects data; an op that is not recomputable
runs exactly once, and all of these in program order (every rank must issue its collectives as the
others do); random ops run for the first time in program order (the generator's stream).

Outputs. With `outputs` "outside", the first production of an output has offset null and any later
one goes to an arena buffer; with "arena", null never occurs; with "gradients" the former holds for
outputs of forward ops and the latter for those of other ops. At the end each output exists once, in
its final version, and nothing else is live in the arena.

Transfers. `offload` copies a readable buffer to the host; `wait` on it completes the copy, and
until then it may be read but not freed, overwritten or mutated. `prefetch` copies a completed
host copy, with the version it was taken at, into a new buffer, readable after `wait`. All are
waited for. Times are those of one compute stream and one engine per direction: a transfer starts
when the compute stream reaches it and its engine is free, and takes the device's latency and its
bytes at the engine's bandwidth (the plan's `link_bytes_per_s` where it names one); `wait` stalls
the compute stream.

The host. A copy has an offset in one slab of `host_arena_bytes`, a multiple of the alignment, and
the bytes of its buffer. It lives there from its offload to the last wait on it or on a prefetch
from it, in the order of the steps, and overlaps no other copy that lives.

Figures. All are recomputed: `cost_us` is the compute stream's end, the stalls are how long waits on
offloads and on prefetches held it; the live bytes in
`fragmentation` are exact bytes at the fullest compute or prefetch step, workspace included, an
address shared in place counted once. They are compared only if the steps have no fault.

| code | fault |
| --- | --- |
| wrong-graph | the plan's fingerprint is another graph's (returned alone) |
| malformed | a value that is negative, no whole number, or not finite (returned alone) |
| unknown-op, unknown-variant | the graph has no such op, or the op no such variant |
| wrong-reads, wrong-writes | not as many as the op has inputs or outputs |
| wrong-tensor, wrong-bytes | another tensor, or another size, than the op and graph say |
| missing-input | `{"tensor": t}` of a tensor that is not there outside the arena |
| not-live, double-free | a buffer that does not exist (any more), or freed again |
| stale-version | a tensor read at another version than in program order |
| split-mutation | one op mutates a tensor that it reads from two places |
| reused-buffer | a write or prefetch to a buffer id used before |
| overlap | two live buffers, or two copies on the host, share bytes |
| inplace | a shared address that is not allowed |
| misaligned, outside-arena | an offset off the alignment; an end past the arena or the slab |
| no-host-offset | a copy on the host without an offset |
| wrong-workspace | workspace of another size than the op needs |
| output-in-arena, output-outside | the first production of an output belongs outside; here not |
| output-twice | an output written outside the arena twice |
| repeated-op, missing-op, once-order, rng-order | see Order |
| early-free | an end or overwrite during a transfer, or the free of an output outside the arena |
| not-ready, no-transfer, not-offloaded | use before `wait`; nothing to wait for; no host copy |
| no-bandwidth, unfinished-transfer | the device's bandwidth is 0; a transfer never waited for |
| missing-output, leak | the end: an output is not there, something else still is |
| over-budget | the peak, or what is on the host, exceeds its budget; a transfer where that is 0 |
| wrong-figure | a figure is not what is recomputed |
| no-proof, wrong-bound | "optimal" without an equal lower bound; a bound above the cost |
"""

import math

from coop_plan.planner.verifier.replay import Fault, Replay
from coop_plan.planner.verifier.wellformed import malformed
from coop_plan.schemas import Compute, Free, Graph, Offload, Plan, Prefetch, Wait, fingerprint

__all__ = ["Fault", "InvalidPlanError", "find_faults", "verify"]

TOLERANCE = 1e-6
"""Relative tolerance of recomputed costs and ratios."""


class InvalidPlanError(ValueError):
    """A plan that must not run. `faults` holds at least one."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"{faults[0]}{more}")


def verify(graph: Graph, plan: Plan) -> None:
    """
    Return if `plan` is valid for `graph`.

    Raises:
        InvalidPlanError: with the faults found.
    """
    faults = find_faults(graph, plan)
    if faults:
        raise InvalidPlanError(faults)


def find_faults(graph: Graph, plan: Plan, *, limit: int = 20, structure: str = "") -> list[Fault]:
    """
    At most `limit` faults in the order of the plan; later ones may follow from the first.

    `structure` is the graph's fingerprint, where it is known already.
    """
    expected = structure or fingerprint(graph)
    if plan.graph != expected:
        message = f"the plan is for the graph {plan.graph}, not for {expected}"
        return [Fault("wrong-graph", "/graph", message)]
    faults = malformed(plan)
    if faults:
        return faults[:limit]
    replay = Replay(graph, plan)
    for number, step in enumerate(plan.steps):
        at = ("/steps/", number)
        match step:
            case Compute():
                replay.compute(step, at)
            case Free():
                replay.free(step, at)
            case Offload():
                replay.offload(step, at, number)
            case Prefetch():
                replay.prefetch(step, at)
            case Wait():
                replay.wait(step, at)
        if len(replay.faults) >= limit:
            return replay.faults[:limit]
    replay.check_end()
    if not replay.faults:
        _check_figures(graph, plan, replay)
    return replay.faults[:limit]


def _check_figures(graph: Graph, plan: Plan, replay: Replay) -> None:
    resident = sum(tensor.bytes for tensor in graph.tensors if tensor.resident)
    outside = sum(tensor.bytes for tensor in graph.tensors if tensor.id in replay.leaving)
    arena = replay.arena_bytes
    peak = resident + arena + outside
    base_us = sum(op.cost_us for op in graph.ops)
    cost_us = replay.now_us
    exact = {
        "resident_bytes": resident,
        "arena_bytes": arena,
        "host_arena_bytes": replay.slab.arena_bytes,
        "peak_bytes": peak,
        "recomputed_ops": sum(replay.runs.values()) - len(replay.runs),
        "swapped_bytes": replay.swapped_bytes,
    }
    for field, count in exact.items():
        if getattr(plan, field) != count:
            message = f"{field} is {count}, not {getattr(plan, field)}"
            replay.fault("wrong-figure", f"/{field}", message)
    # Ratios near 0 are differences of numbers near 1: the tolerance is relative to those.
    measured = {
        "base_cost_us": (base_us, 0.0),
        "cost_us": (cost_us, 0.0),
        "prefetch_stall_us": (replay.prefetch_stall_us, TOLERANCE * cost_us),
        "offload_stall_us": (replay.offload_stall_us, TOLERANCE * cost_us),
        "overhead": (cost_us / base_us - 1 if base_us else 0.0, TOLERANCE),
        "fragmentation": (1 - replay.peak_live_bytes / arena if arena else 0.0, TOLERANCE),
    }
    for field, (value, absolute) in measured.items():
        if not math.isclose(getattr(plan, field), value, rel_tol=TOLERANCE, abs_tol=absolute):
            message = f"{field} is {value:.9g}, not {getattr(plan, field):.9g}"
            replay.fault("wrong-figure", f"/{field}", message)
    if peak > plan.budget_bytes:
        message = f"the peak of {peak} bytes exceeds the budget of {plan.budget_bytes} bytes"
        replay.fault("over-budget", "/budget_bytes", message)
    host, most = replay.slab.arena_bytes, plan.host_budget_bytes
    if most is not None and (host > most or (most == 0 and replay.swapped_bytes)):
        message = f"copies take {host} bytes of the host, whose budget is {most} bytes"
        replay.fault("over-budget", "/host_budget_bytes", message)
    bound_us = plan.lower_bound_us
    if bound_us is not None and bound_us > cost_us * (1 + 1e-9):
        message = f"the lower bound {bound_us:.9g} is above the cost {cost_us:.9g}"
        replay.fault("wrong-bound", "/lower_bound_us", message)
    least = plan.budget_lower_bound_bytes
    if least is not None and least > peak:
        message = f"no budget is below {least} bytes, it says, but the peak is {peak} bytes"
        replay.fault("wrong-bound", "/budget_lower_bound_bytes", message)
    if plan.status == "optimal" and (
        bound_us is None or not math.isclose(bound_us, cost_us, rel_tol=TOLERANCE)
    ):
        message = "the status is optimal, but the lower bound is not equal to the cost"
        replay.fault("no-proof", "/status", message)
