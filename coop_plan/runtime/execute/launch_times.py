"""Times in which the CPU launches ops and copies of a planned step."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import fx

from coop_plan.runtime.capture.op_timing import empty_caches, time_op
from coop_plan.runtime.device.arena import COPIES, Arena, Memory, Run
from coop_plan.runtime.execute.plan_index import Buffer, Transfer
from coop_plan.runtime.execute.straight_line import INVOCATION, straight_line
from coop_plan.runtime.execute.transfers import TransferProgram, TransferRunner, starts_of
from coop_plan.runtime.op_profile import LaunchTimes
from coop_plan.schemas import Device

ROUNDS = 16
"""Ops of the step that is timed; each has a copy to the host and one back."""

REPEATS = 5
"""Number of timed steps; the shortest one counts, without the first."""

BYTES = 1 << 12
"""Bytes of a tensor of the step: so few that they are copied while the copy is started."""

OP = torch.ops.aten.relu.default


def measure_launches() -> LaunchTimes:
    """Launch times of `Device` for a planned step on the CPU, µs.

    The launch of an op is its time in a step beyond its profile, among others of its kind. Before
    each copy the caches are emptied: in a step ops run between them.
    """
    slots = [[(BYTES, 0)]] * ROUNDS + [[(BYTES, BYTES)]] * ROUNDS
    arena = Arena(2 * BYTES, slots, [0] * ROUNDS + [COPIES] * ROUNDS)
    moved = []
    for i in range(ROUNDS):
        buffer = Buffer(i, i, 0, BYTES, 0)
        moved += [Transfer(buffer, 0, True), Transfer(buffer, 0, False, source=2 * i)]
    starts = starts_of(moved, ROUNDS, Device().with_link(1e30))
    runner = TransferRunner(TransferProgram(starts, BYTES, arena, torch.device("cpu")), None)
    half, memory, run = _half(arena), Memory(), Run(arena)
    value = torch.zeros(BYTES // 4, device="cpu")
    times = []
    for _ in range(REPEATS):
        runner.begin(memory)
        run.begin(memory, fresh=True)
        try:
            half(SimpleNamespace(transfers=runner), [value])
        finally:
            arena.leave()
        found = run.counters()
        times.append((found.compute_us / ROUNDS, found.copies_us / len(moved)))
    run.end()
    ops, copies = zip(*times[1:], strict=True)
    alone = time_op(lambda: OP(value), slots[0], BYTES, None).again_us
    return {"launch_us": max(0.0, min(ops) - alone), "copy_launch_us": min(copies)}


def _half(arena: Arena) -> Callable[..., object]:
    """The step."""
    graph = fx.Graph()
    invocation, value = graph.placeholder(INVOCATION), graph.placeholder("value")
    for i in range(ROUNDS):
        graph.call_function(arena.enter, (i,))
        made = graph.call_function(OP, (value,))
    for i in range(ROUNDS):
        _pause(graph, arena)
        graph.call_method("transfers.offload", (invocation, 2 * i, made))
        graph.call_method("transfers.wait", (invocation, 2 * i))
        _pause(graph, arena)
        graph.call_method("transfers.prefetch", (invocation, 2 * i + 1))
        graph.call_method("transfers.wait", (invocation, 2 * i + 1))
    graph.output(())
    return straight_line(graph, fx.GraphModule({}, fx.Graph()))


def _pause(graph: fx.Graph, arena: Arena) -> None:
    graph.call_function(arena.pause)
    graph.call_function(empty_caches)
