"""Adjusts a captured step to gradients that live longer or shorter than its outputs.

A gradient that is alive when the next forward begins (micro-batches, `zero_grad` between forward
and backward, a list of the user's) is held across steps, outside the arena. An op after the
producer adds the new gradient to the held one, as `AccumulateGrad` would after the backward. If the
held one was released meanwhile, the new gradient takes its place.

A gradient that a hook of its leaf consumes during the backward, as an optimizer there does, is
handed over after the last op that reads the leaf. It lies outside the arena, since a tensor that a
hook keeps must not be overwritten. Producers of such gradients read the memory beside the plan, and
hooks overwrite it: so they keep program order, for which that memory is counted.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.op_profile import BYTES_PER_US, OpProfile
from coop_plan.schemas import Op
from coop_plan.schemas.graph_editor import GraphEditor

BESIDE = "held beside the plan"
"""Name of the tensor for gradients and other memory outside the plan, temporaries of hooks too."""


HELD = "held gradient"
"""Beginning of the name of a gradient that is held across steps."""


@dataclass(frozen=True)
class MemoryEnvironment:
    """Memory that a step meets beyond its graph. Gradients by position among the primals.

    New gradients are added to those held `across_steps`. `duplicated` ones are held too, but the
    new gradient is kept for autograd until the backward ends. `consumed` ones are dead after the
    hooks of their leaves, each of which takes at most `hook_bytes` meanwhile. `reserve` bytes are
    allocated outside the plan during the step.
    """

    across_steps: frozenset[int] = frozenset()
    duplicated: frozenset[int] = frozenset()
    consumed: frozenset[int] = frozenset()
    reserve: int = 0
    hook_bytes: int = 0


def accumulate(invocation: Any, position: int, gradient: torch.Tensor) -> Any:
    """Graph op: `invocation` adds a new gradient to the held one."""
    return invocation.accumulate(position, gradient)


def hand_over(invocation: Any, position: int, gradient: torch.Tensor) -> Any:
    """Graph op: `invocation` passes a gradient to the hooks of its leaf."""
    return invocation.hand_over(position, gradient)


def update(invocation: Any, position: int, gradient: torch.Tensor, *copies: Any) -> None:
    """Graph op: `invocation` updates a parameter by its gradient (`whole_iteration`).

    `copies` are those of its home and its states', as far as the plan has them (`execute.homes`).
    """
    invocation.updates[position](gradient, *copies)


GRADIENT_SINKS = (accumulate, hand_over, update)
"""Graph ops that take a gradient away from autograd."""


def accumulable(captured: Captured) -> dict[int, int]:
    """Gradients that can be added to a held one: {position among the primals: tensor}.

    They have a storage of their own, made in the backward.
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


def consumable(captured: Captured) -> dict[int, tuple[int, int]]:
    """Gradients that hooks can consume in the backward: {position: (tensor, parameter)}.

    They are accumulable, and no op reads them.
    """
    candidates = accumulable(captured)
    inputs = captured.module.graph.find_nodes(op="placeholder")
    read = {t for op in captured.graph.ops for t in op.inputs}
    found: dict[int, tuple[int, int]] = {}
    for position, t in candidates.items():
        (leaf,) = captured.storages[inputs[position]]
        if leaf is not None and t not in read:
            found[position] = t, leaf
    return found


def with_held(captured: Captured, reserve: int) -> MemoryEnvironment:
    """The environment of a micro-batch: earlier ones left all gradients, and `reserve` bytes."""
    across_steps = frozenset(accumulable(captured))
    duplicated = frozenset(sizes(captured).keys() - across_steps)
    return MemoryEnvironment(across_steps, duplicated, reserve=reserve)


def under(captured: Captured, environment: MemoryEnvironment) -> Captured:
    """The step in this memory environment."""
    if environment == MemoryEnvironment():
        return captured
    candidates = accumulable(captured)
    own = sizes(captured)
    across_steps = {p: t for p, t in candidates.items() if p in environment.across_steps}
    at_once = environment.consumed - environment.duplicated - across_steps.keys()
    consumed = {p: found for p, found in consumable(captured).items() if p in at_once}
    graph, editor = captured.graph, GraphEditor(captured.graph)
    made_at = {t: op.id for op in graph.ops for t in op.outputs}
    last_read = {t: op.id for op in graph.ops for t in op.inputs}
    after: list[tuple[int, int, int, int]] = []  # (op, position, gradient, changed tensor)
    for position, t in across_steps.items():
        editor.change_tensor(t, kind="activation")
        held = editor.add_tensor(f"{HELD} {position}", own[position], "buffer")
        after.append((made_at[t], position, t, held))
    change = [0] * (len(graph.ops) + 1)  # change of the live bytes of consumed gradients, by op
    for position, (t, leaf) in consumed.items():
        editor.change_tensor(t, kind="activation", bytes=0)
        at = max(made_at[t], last_read.get(leaf, 0))
        after.append((at, position, t, leaf))
        change[made_at[t]] += own[position]
        change[at + 1] -= own[position]
    duplicated = sum(own[p] for p in environment.duplicated - across_steps.keys() if p in own)
    taken = duplicated + environment.reserve + max(itertools.accumulate(change))
    taken += environment.hook_bytes if consumed else 0
    beside = [editor.add_tensor(BESIDE, taken, "buffer")] if taken or consumed else []
    for at in {made_at[t] for t, _ in consumed.values()}:
        editor.add_inputs(at, beside)
    nodes = _nodes(captured, across_steps, accumulate) | _nodes(captured, consumed, hand_over)
    ops, profiles = list(captured.ops), list(captured.profiles)
    after.sort(key=itemgetter(0))
    for at, position, gradient, changed in reversed(after):  # so that earlier positions stay
        cost = 3 * own[position] / BYTES_PER_US[graph.device.kind]
        name = f"coop_plan.{'hand_over' if position in consumed else 'accumulate'}"
        overwritten = [changed, *(beside if position in consumed else [])]
        op = Op(
            id=0,
            name=name,
            phase="backward",
            inputs=[gradient, *overwritten],
            outputs=[],
            cost_us=cost,
            mutates=overwritten,
            recomputable=False,
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
        resident_in_step=captured.resident_in_step + taken + sum(own[p] for p in across_steps),
    )


def _nodes(
    captured: Captured, positions: Iterable[int], target: Callable[..., Any]
) -> dict[int, fx.Node]:
    """Nodes of the joint graph that call `target`, by position of the gradient."""
    graph = captured.module.graph
    gradients: Sequence[Any] = captured.output_args[captured.num_fwd_outputs :]
    found = {node.args[1]: node for node in graph.find_nodes(op="call_function", target=target)}
    end = next(iter(reversed(graph.nodes)))
    for position in positions:
        if position not in found:
            with graph.inserting_before(end):
                node = graph.call_function(target, (None, position, gradients[position]))
            node.meta["val"] = gradients[position].meta["val"]
            found[position] = node
    return {position: found[position] for position in positions}
