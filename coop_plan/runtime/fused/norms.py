"""Decomposition of norms into their statistics and pointwise ops.

The result of a norm can then be computed again from its input and the statistics, which are small.
"""

from typing import Any

from torch import fx

from coop_plan.runtime.capture.graph_builder import GETITEM
from coop_plan.runtime.fused.ops import is_fusible
from coop_plan.runtime.torch_internals.inductor import NORMS, decomposed


def decompose_norms(graph: fx.Graph) -> None:
    """Replace the norms of a joint graph by the ops that Inductor makes of them."""
    for norm in NORMS:
        for node in graph.find_nodes(op="call_function", target=norm):
            if is_fusible(node) and all(user.target is GETITEM for user in node.users):
                _decompose(graph, node)


def _decompose(graph: fx.Graph, node: fx.Node) -> None:
    target: Any = node.target
    inputs = node.all_input_nodes

    def run(*given: Any) -> Any:
        values = dict(zip(inputs, given, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return tuple(target(*args, **kwargs))

    inner = decomposed(run, [value.meta["val"] for value in inputs])
    placed: dict[Any, fx.Node] = dict(zip(inner.find_nodes(op="placeholder"), inputs, strict=True))
    output = next(iter(reversed(inner.nodes)))
    with graph.inserting_before(node):
        for part in inner.nodes:
            if part.op == "call_function":
                placed[part] = graph.node_copy(part, placed.__getitem__)
                placed[part].meta = {**node.meta, "val": part.meta["val"]}
    for user in list(node.users):
        user.replace_all_uses_with(placed[output.args[0][user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(node)
