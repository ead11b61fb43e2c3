"""Rules of the independent verifier, which replays a plan on its graph and lists every fault.

It shares no code with the planning methods. The rules define the meaning of a plan:

Compute. `reads` follow the op's inputs and `writes` its outputs (the variant's, if one is chosen).
A read is the id of a live arena buffer that holds exactly that tensor, or `{"tensor": t}` for a
resident tensor or an output already written outside the arena (and only so: the buffer id of a
write outside is never read). A write creates a new buffer of exactly the tensor's bytes. Reads,
writes and workspace are live together and overlap neither each other nor any other live buffer.
Offsets are multiples of `alignment` inside the arena; 0 bytes overlap nothing.

In place. A write at the offset of a buffer that the step reads takes it over, if the op (or its
chosen variant) allows the pair, the op does not mutate that input, and the write is not larger. The
old buffer then ends, and no `free` names it. A write takes over one buffer, and a buffer is taken
over by one write.

Versions. A tensor's version is the number of earlier ops, in program order, that mutate it. An op
reads each input at its version in program order, at every run. A mutating op turns the buffer (or
the resident or outside tensor) that it reads into the next version; a newly computed buffer has
version 0. So a recompute that needs an overwritten parameter is a fault.

Order. Every op runs at least once, in any order that respects data dependences. An op that is not
recomputable runs exactly once, and these ops run in program order (all ranks must issue collectives
in the same order). First runs of random ops are in program order (the generator's stream).

Outputs. With `outputs` "outside", the first production of an output has offset null and any later
one writes an arena buffer; with "arena", null never occurs; with "gradients" the former holds for
outputs of forward ops and the latter for those of other ops. At the end each output exists once, in
its final version, and no other buffer is live in the arena.

Transfers. `offload` copies a readable buffer to the host. Until the `wait` on it, which completes
the copy, the buffer may be read but not freed, overwritten or mutated. `prefetch` copies a complete
host copy, at its version, into a new buffer, readable after `wait`. Every transfer has a `wait`.
Times are those of one compute stream and one engine per direction. The host launches computes of
more than 0 µs and transfers in the order of the steps, in `launch_us` and `copy_launch_us` of the
device, the latter for computes on the host; on a device of the kind "cpu" it starts to when the
compute stream reaches the step, which waits for it. A compute starts when it is launched. A
transfer starts when it is launched, the compute stream reaches it and its engine is free; it takes
the device's latency plus its bytes at the engine's bandwidth (`link_bytes_per_s` of the plan if
set). `wait` stalls the compute stream.

On the host. A run of a variant on the host reads `{"tensor": t}` at t's home and a buffer id in its
copy on the host, complete or in flight; it overwrites homes. It begins when the compute stream
reaches it, the host is free and those copies have ended; the compute stream does not wait for it.
No copy to or from these homes is in flight then, and none follows. The copies that it reads are
live to the end of the step. Run-once ops on the host run once, in any order that their data allows.

Homes. A tensor in `homes` is on the host before and after the step, at its offset of the slab. It
is no resident of the device: an op reads or overwrites a buffer, which a `prefetch` from the home
(`from` null) or from another copy filled. An `offload` to the home's offset overwrites the home.
At the end each home has the final version.

The host. A copy has an offset in one slab of `host_arena_bytes`, a multiple of the alignment, and
the bytes of its buffer. It is live from its offload to the last wait on it or on a prefetch from
it, in the order of the steps, and overlaps no other live copy.

Figures. All are recomputed, if the steps have no fault. `cost_us` is the end of the compute stream,
or of the last run on the host if later; the stalls are the times that waits on offloads and on
prefetches stalled compute. The live bytes in `fragmentation` are the maximum over compute and
prefetch steps of exact bytes, workspace included, an address shared in place counted once.

| code | fault |
| --- | --- |
| wrong-graph | the plan's fingerprint is another graph's (returned alone) |
| malformed | a value that is negative, not an integer, or not finite (returned alone) |
| unknown-op, unknown-variant | the graph has no such op, or the op no such variant |
| approximate-variant | a variant whose results differ in a bit from the op's |
| wrong-reads, wrong-writes | not as many as the op has inputs or outputs |
| wrong-tensor, wrong-bytes | another tensor, or another size, than the op and graph say |
| missing-input | `{"tensor": t}` of a tensor that is not readable outside the arena |
| not-live, double-free | a buffer that does not exist or has ended; one freed twice |
| stale-version | a tensor read at another version than in program order |
| split-mutation | one op mutates a tensor that it reads from two places |
| reused-buffer | a write or prefetch to a buffer id used before |
| overlap | two live buffers, or two copies on the host, share bytes |
| inplace | an address shared in place without a pair, or by a larger output |
| misaligned, outside-arena | an offset off the alignment; an end past the arena or the slab |
| no-host-offset | a copy on the host without an offset |
| wrong-workspace | workspace of another size than the op needs |
| output-in-arena, output-outside | the first production of an output belongs outside; here not |
| output-twice | an output written outside the arena twice |
| repeated-op, missing-op, once-order, rng-order | see Order |
| early-free | a free or overwrite during a transfer; the free of an output outside the arena |
| not-ready, no-transfer, not-offloaded | use before `wait`; nothing to wait for; no host copy |
| no-bandwidth, unfinished-transfer | the device's bandwidth is 0; a transfer without a wait |
| wrong-home, stale-home | a home of no movable resident; one without the final version |
| missing-output, leak | at the end: an output does not exist; another buffer is still live |
| over-budget | the peak or the host slab exceeds its budget; a transfer with a host budget of 0 |
| wrong-figure | a figure differs from the recomputed one |
| no-proof, wrong-bound | "optimal" without an equal lower bound; a bound above its figure |
"""

import math

from coop_plan.planner.verifier.clock import Clock
from coop_plan.planner.verifier.replay import Replay
from coop_plan.planner.verifier.state import Fault
from coop_plan.planner.verifier.wellformed import malformed
from coop_plan.schemas import Compute, Free, Graph, Offload, Plan, Prefetch, Wait, fingerprint

__all__ = ["Fault", "InvalidPlanError", "find_faults", "verify"]

TOLERANCE = 1e-6
"""Relative tolerance of recomputed costs and ratios."""


class InvalidPlanError(ValueError):
    """A plan with faults, which must not run; `faults` lists at least one."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"{faults[0]}{more}")


def verify(graph: Graph, plan: Plan) -> None:
    """Check that `plan` is valid for `graph`.

    Raises:
        InvalidPlanError: the plan has faults.
    """
    faults = find_faults(graph, plan)
    if faults:
        raise InvalidPlanError(faults)


def find_faults(graph: Graph, plan: Plan, *, limit: int = 20, structure: str = "") -> list[Fault]:
    """
    At most `limit` faults in the order of the plan's steps; later ones may follow from the first.

    `structure` is the graph's fingerprint, "" to compute it.
    """
    expected = structure or fingerprint(graph)
    if plan.graph != expected:
        message = f"the plan is for graph {plan.graph}, not for {expected}"
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
    homes = replay.homes.offset
    resident = sum(t.bytes for t in graph.tensors if t.resident and t.id not in homes)
    outside = sum(tensor.bytes for tensor in graph.tensors if tensor.id in replay.outside_outputs)
    arena = replay.arena_bytes
    peak = resident + arena + outside
    once = Clock(graph.device)
    for op in graph.ops:
        once.run(op.cost_us)
    base_us = once.now_us
    cost_us = max(replay.clock.now_us, replay.clock.host_free_us)
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
    # A ratio near 0 is a difference of numbers near 1, so its tolerance is absolute.
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
    host, limit = replay.slab.arena_bytes, plan.host_budget_bytes
    if limit is not None and (host > limit or (limit == 0 and replay.swapped_bytes)):
        message = f"copies take {host} bytes of the host, whose budget is {limit} bytes"
        replay.fault("over-budget", "/host_budget_bytes", message)
    bound_us = plan.lower_bound_us
    if bound_us is not None and bound_us > cost_us * (1 + 1e-9):
        message = f"the lower bound {bound_us:.9g} is above the cost {cost_us:.9g}"
        replay.fault("wrong-bound", "/lower_bound_us", message)
    bound = plan.budget_lower_bound_bytes
    if bound is not None and bound > peak:
        message = f"the budget's lower bound of {bound} bytes is above the peak of {peak} bytes"
        replay.fault("wrong-bound", "/budget_lower_bound_bytes", message)
    if plan.status == "optimal" and (
        bound_us is None or not math.isclose(bound_us, cost_us, rel_tol=TOLERANCE)
    ):
        message = f"the status is optimal, but lower bound {bound_us} and cost {cost_us} differ"
        replay.fault("no-proof", "/status", message)
