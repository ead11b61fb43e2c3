"""Gradients that live longer than a step says, or not as long.

A gradient that is still there when the next forward begins (micro-batches, `zero_grad` between
forward and backward, a list of the user's) takes its bytes all through a step. So it has a home
outside the arena. The op that makes a new one is followed by an op that adds it to the home, as
`AccumulateGrad` would when the backward is over, or, where the old one was given up on the way,
makes it in the home's place.

A gradient that a hook of its leaf uses up during the backward, as an optimizer there does, is
handed over as soon as the program reads the leaf no more. It lies outside the arena, as what a hook
keeps must not be overwritten.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.capture.op_profile import OpProfile
from coop_plan.schemas import Op
from coop_plan.schemas.graph_editor import GraphEditor

BYTES_PER_US = 1e4
"""At which three tensors are read or written: a model, as the op runs once whatever it costs."""


@dataclass(frozen=True)
class Circumstances:
    """What a step finds beside what its graph says. Gradients by their position among the primals.

    `lasting` gradients have a home, and what is new is added there; `beside` are held from before
    too, but a new one must be kept for autograd until the backward ends. Those `used` are gone when
    the hooks of their leaves have run. `reserve` bytes are taken by others while the step lasts.
    """

    lasting: frozenset[int] = frozenset()
    beside: frozenset[int] = frozenset()
    used: frozenset[int] = frozenset()
    reserve: int = 0


def accumulate(flight: Any, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
    """Stands in a graph for what `flight` does with a gradient that has a home."""
    found: torch.Tensor | None = flight.take_in(position, gradient)
    return found


def hand_over(flight: Any, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
    """Stands in a graph for what `flight` does with a gradient that is used up at once."""
    found: torch.Tensor | None = flight.hand_over(position, gradient)
    return found


TAKING = (accumulate, hand_over)
"""What takes a gradient away from autograd, for nodes of a graph to call."""


def movable(captured: Captured) -> dict[int, int]:
    """The gradients that can have a home: {position among the primals: tensor}.

    Those with a storage of their own, made in the backward.
    """
    gradients = captured.output_args[captured.num_fwd_outputs :]
    others = {
        t
        for value in captured.output_args[: captured.num_fwd_outputs]
        if isinstance(value, fx.Node)
        for t in captured.storages[value]
    }
    found: dict[int, int] = {}
    seen: dict[int, int] = {}
    made = {t for op in captured.graph.ops if op.phase == "backward" for t in op.outputs}
    for position, value in enumerate(gradients):
        if not isinstance(value, fx.Node) or len(captured.storages[value]) != 1:
            continue
        (t,) = captured.storages[value]
        if t is None:
            continue
        seen[t] = seen.get(t, 0) + 1
        if t in made and t not in others:
            found[position] = t
    return {position: t for position, t in found.items() if seen[t] == 1}


def sizes(captured: Captured) -> dict[int, int]:
    """Bytes of each gradient, by position among the primals."""
    gradients = captured.output_args[captured.num_fwd_outputs :]
    return {
        position: captured.graph.tensors[t].bytes
        for position, value in enumerate(gradients)
        if isinstance(value, fx.Node)
        for t in captured.storages[value]
        if t is not None
    }


def usable(captured: Captured) -> dict[int, tuple[int, int]]:
    """The gradients that can be used up at once: {position: (tensor, parameter)}.

    Those that can have a home, and are read by no op.
    """
    homes = movable(captured)
    inputs = captured.module.graph.find_nodes(op="placeholder")
    read = {t for op in captured.graph.ops for t in op.inputs}
    found: dict[int, tuple[int, int]] = {}
    for position, t in homes.items():
        (leaf,) = captured.storages[inputs[position]]
        if leaf is not None and t not in read:
            found[position] = t, leaf
    return found


def under(captured: Captured, circumstances: Circumstances) -> Captured:
    """The step as it is under these circumstances."""
    if circumstances == Circumstances():
        return captured
    homes = movable(captured)
    own = sizes(captured)
    lasting = {p: t for p, t in homes.items() if p in circumstances.lasting}
    at_once = circumstances.used - circumstances.beside - lasting.keys()
    used = {p: found for p, found in usable(captured).items() if p in at_once}
    graph, editor = captured.graph, GraphEditor(captured.graph)
    made_at = {t: op.id for op in graph.ops for t in op.outputs}
    last_read = {t: op.id for op in graph.ops for t in op.inputs}
    after: list[tuple[int, int, int, int]] = []  # (op, position, gradient, changed tensor)
    for position, t in lasting.items():
        editor.change_tensor(t, kind="activation")
        home = editor.add_tensor(f"held gradient {position}", own[position], "buffer")
        after.append((made_at[t], position, t, home))
    there = [0] * (len(graph.ops) + 1)  # bytes of those used that come with an op, and go
    for position, (t, leaf) in used.items():
        editor.change_tensor(t, kind="activation", bytes=0)
        at = max(made_at[t], last_read.get(leaf, 0))
        after.append((at, position, t, leaf))
        there[made_at[t]] += own[position]
        there[at + 1] -= own[position]
    beside = sum(own[p] for p in circumstances.beside - lasting.keys() if p in own)
    taken = beside + circumstances.reserve + max(itertools.accumulate(there))
    if taken:
        editor.add_tensor("held beside the plan", taken, "buffer")
    nodes = _nodes(captured, lasting, accumulate) | _nodes(captured, used, hand_over)
    ops, profiles = list(captured.ops), list(captured.profiles)
    # Backwards, so that positions before an insertion hold; ties end in the order of `after`.
    for at, position, gradient, changed in sorted(after[::-1], key=itemgetter(0), reverse=True):
        cost = 3 * own[position] / BYTES_PER_US
        op = Op(
            id=0,
            name=f"coop_plan.{'hand_over' if position in used else 'accumulate'}",
            phase="backward",
            inputs=[gradient, changed],
            outputs=[],
            mutates=[changed],
            recomputable=False,
            cost_us=cost,
        )
        editor.add_op(op, at=at + 1)
        ops.insert(at + 1, nodes[position])
        profiles.insert(at + 1, OpProfile(cost, (), (), 0, 0))
    outputs = list(captured.output_args)
    for position, node in nodes.items():
        outputs[captured.num_fwd_outputs + position] = node
    return replace(
        captured,
        graph=editor.graph(),
        ops=ops,
        profiles=profiles,
        storages={**captured.storages, **dict.fromkeys(nodes.values(), (None,))},
        output_args=outputs,
        resident_within=captured.resident_within + taken + sum(own[p] for p in lasting),
    )


def _nodes(
    captured: Captured, positions: Iterable[int], target: Callable[..., Any]
) -> dict[int, fx.Node]:
    """A node of the joint graph for each gradient that an op of ours takes."""
    graph = captured.module.graph
    gradients: Sequence[Any] = captured.output_args[captured.num_fwd_outputs :]
    there = {node.args[1]: node for node in graph.find_nodes(op="call_function", target=target)}
    end = next(iter(reversed(graph.nodes)))
    for position in positions:
        if position not in there:
            with graph.inserting_before(end):
                node = graph.call_function(target, (None, position, gradients[position]))
            node.meta["val"] = gradients[position].meta["val"]
            there[position] = node
    return {position: there[position] for position in positions}
