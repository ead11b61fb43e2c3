"""Updates of buffers that a step overwrites, as BatchNorm does with its running statistics.

AOTAutograd returns the new value of each, and copies it after the forward. As an op of the graph an
update is written as soon as its value exists, as in eager, and the value dies there. The op runs
once: not in a forward that runs again. Other new values are returned.

A later recomputation must not read an updated buffer. An op of which only new values depend on the
buffer is not recomputed later. A batch norm in training reads its statistics for their new values
alone. For other readers a copy is made when the step begins, and never evicted.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import GETITEM, SNAPSHOT, UNREAD, is_view, write_input
from coop_plan.runtime.torch_internals.joint_graphs import (
    InputMutationAOTOutput,
    is_primal,
    is_tangent,
    tangent_output,
)
from coop_plan.runtime.torch_internals.ops import BATCH_NORM_BACKWARDS, BATCH_NORMS

STATISTICS = slice(3, 5)
"""Positions of the running statistics among the arguments of a batch norm, and of its backward."""

TRAINING = 7
"""Position of the flag for training among the arguments of a backward."""


def add_updates(
    module: fx.GraphModule, outputs: list[Any], num_fwd_outputs: int, static_inputs: Collection[int]
) -> None:
    """Add the updates to a joint graph, and the copies of overwritten inputs.

    `outputs` are those of the joint graph; an update replaces its output there.
    """
    graph = module.graph
    output = next(iter(reversed(graph.nodes)))
    descs = output.meta.get("desc", [])[:num_fwd_outputs]
    inputs = graph.find_nodes(op="placeholder")
    named = {node.meta.get("desc"): node for node in inputs}
    overwritten = {
        position: named[desc.mutated_input]
        for position, desc in enumerate(descs)
        if isinstance(desc, InputMutationAOTOutput) and desc.mutated_input in named
    }
    static = {node for i, node in enumerate(filter(is_primal, inputs)) if i in static_inputs}
    differentiated = [tangent_output(node) for node in inputs if is_tangent(node)]
    early = {
        position: buffer
        for position, buffer in overwritten.items()
        if buffer in static
        and descs[position] not in differentiated
        and _is_new(outputs[position], outputs, buffer)
    }
    omit_statistics(graph)
    needed = _needed(graph, [node for i, node in enumerate(outputs) if i not in early])
    copied = [node for node in overwritten.values() if node in needed]
    for node in copied:
        _read_copy(graph, node, inputs[-1])
    order = {node: i for i, node in enumerate(graph.nodes)}
    for position, buffer in early.items():
        value = outputs[position]
        after = max((value, *_readers(buffer)), key=order.__getitem__)
        with graph.inserting_after(after):
            node = graph.call_function(write_input, (None, value, buffer))
        node.meta = {"val": value.meta["val"]}
        outputs[position] = node
    for node in graph.nodes:
        unread = {arg for arg in _statistics(node) if arg in early.values()}
        if unread:
            node.meta[UNREAD] = unread


def _is_new(value: object, outputs: Sequence[Any], buffer: fx.Node) -> bool:
    """True if an op makes the value, in the buffer's layout, and no other output is it."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or is_view(value):
        return False
    made, held = value.meta["val"], buffer.meta["val"]
    layouts = [(each.dtype, each.device, each.shape, each.stride()) for each in (made, held)]
    return layouts[0] == layouts[1] and outputs.count(value) == 1 and not held.requires_grad


def _statistics(node: Any) -> Sequence[Any]:
    """The running statistics that a batch norm in training reads for their new values alone."""
    if node.op != "call_function" or node.target not in BATCH_NORMS:
        return ()
    flag, _ = BATCH_NORMS[node.target]
    found: Sequence[Any] = node.args[STATISTICS]
    return found if flag is None or node.args[flag] else ()


def omit_statistics(graph: fx.Graph) -> None:
    """Leave them out of the backward, which does not read them in training."""
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target in BATCH_NORM_BACKWARDS
            and node.args[TRAINING]
        ):
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes on which a value depends: those of new statistics are the old ones, too."""
    unread = _statistics(node)
    found = [argument for argument in node.all_input_nodes if argument not in unread]
    if node.target is GETITEM:
        norm: Any
        position: Any
        norm, position = node.args
        if (statistics := _statistics(norm)) and position >= BATCH_NORMS[norm.target][1]:
            found += statistics
    return found


def _needed(graph: fx.Graph, outputs: Sequence[Any]) -> set[fx.Node]:
    """Nodes on which an output depends, or an op without users."""
    stack = [node for node in outputs if isinstance(node, fx.Node)]
    stack += [node for node in graph.nodes if node.op == "call_function" and not node.users]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += _inputs(node)
    return found


def _readers(node: fx.Node) -> list[fx.Node]:
    """The ops that read a node or a view of it, views included."""
    found = [user for user in node.users if user.op != "output"]
    return found + [reader for user in found if is_view(user) for reader in _readers(user)]


def _read_copy(graph: fx.Graph, node: fx.Node, after: fx.Node) -> None:
    """Redirect the reads of an input to a copy of it."""
    with graph.inserting_after(after):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {"val": node.meta["val"], SNAPSHOT: True}
    for user in [user for user in node.users if user is not copy and user.op != "output"]:
        user.replace_input_with(node, copy)
