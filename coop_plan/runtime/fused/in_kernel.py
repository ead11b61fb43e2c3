"""Recomputation inside kernels: forward results that the backward need not be given.

A region of the backward that reads a result of the forward can compute it again from what it reads
anyway, without a pass over memory. A result is computed again if pointwise ops make it from
tensors that the backward is given anyway. So the backward is given strictly fewer bytes. Each copy
is made of these alone: of a chain of results, each made of the one before, the backward would begin
with the whole chain, and keep it.
"""

from collections.abc import Iterator

from torch import fx

from coop_plan.runtime.capture.graph_builder import is_view
from coop_plan.runtime.fused.ops import bytes_of, is_creation, is_fusible, is_pointwise, storage_of
from coop_plan.runtime.torch_internals.joint_graphs import CHECKPOINT_KEYS

MOST_OPS = 24
"""Most ops that are copied into the backward for one result."""

MOST_READ = 3
"""Most tensors that are not small and are read to compute one result again."""

SMALL = 16
"""A tensor of at most 1/16 of a result's bytes is kept for it, such as the statistics of a norm."""


def recompute_in_kernels(graph: fx.Graph, forward: set[fx.Node], results: set[fx.Node]) -> None:
    """Copy the pointwise ops of forward results into the backward that reads them.

    Args:
        graph: a joint graph, changed in place.
        forward: its nodes that belong to the forward.
        results: nodes that the step returns; they are kept anyway.
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node not in forward and not is_view(node):
            for argument in node.all_input_nodes:
                read = storage_of(argument)
                if read in forward and read.op == "call_function":
                    readers.setdefault(read, []).append(node)
    kept = {storage_of(node) for node in results}
    kept |= {read for read, by in readers.items() if not all(map(is_fusible, by))}
    candidates = [n for n in readers if n not in kept and is_pointwise(n) and is_fusible(n)]
    given = set(readers) | kept
    for node in sorted(candidates):  # by position in the graph
        given.discard(node)
        recipe = _recipe(node, given)
        if recipe is None:
            given.add(node)
        else:
            _copy_into_backward(graph, node, recipe, forward)


def _recipe(node: fx.Node, given: set[fx.Node]) -> list[fx.Node] | None:
    """Nodes, in order, that make `node` of what the backward is given; None if no few do."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    read: set[fx.Node] = set()

    def add(needed: fx.Node) -> bool:
        if needed in seen or needed.op in ("placeholder", "get_attr"):
            return True
        if needed is not node and not is_view(needed):
            if bytes_of(needed) * SMALL <= bytes_of(node):
                return True
            if needed in given:
                read.add(needed)
                return len(read) <= MOST_READ
        made = is_pointwise(needed) or is_creation(needed)
        if not (is_view(needed) or (made and is_fusible(needed))):
            return False
        seen.add(needed)
        if len(seen) > MOST_OPS or not all(map(add, needed.all_input_nodes)):
            return False
        found.append(needed)
        return True

    return found if add(node) else None


def _copy_into_backward(
    graph: fx.Graph, node: fx.Node, recipe: list[fx.Node], forward: set[fx.Node]
) -> None:
    """Let the backward read a copy of `node` that is made before its first reader."""
    same = [node, *_views_of(node, forward)]
    users = [user for value in same for user in value.users if user not in forward]
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(min(users)):
        for original in [*recipe, *same[1:]]:
            copy = copies[original] = graph.node_copy(original, lambda arg: copies.get(arg, arg))
            for key in CHECKPOINT_KEYS:  # the copy is of no checkpoint
                copy.meta.pop(key, None)
    new = set(copies.values())
    for value in same:
        for user in list(value.users):
            if user not in forward and user not in new:
                user.replace_input_with(value, copies[value])


def _views_of(node: fx.Node, forward: set[fx.Node]) -> Iterator[fx.Node]:
    """Views of a result that the forward makes, each after the view it is made of."""
    for user in node.users:
        if user in forward and is_view(user) and user.all_input_nodes[0] is node:
            yield user
            yield from _views_of(user, forward)
