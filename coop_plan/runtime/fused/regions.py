"""Fused regions of a joint graph: each is one op, which Inductor compiles into few kernels.

A region is a convex set of pointwise ops, reductions, norms and moves, within the forward or within
the backward. It reads storages and returns new ones; views are made again inside it, and outside
from its results. Regions of equal structure are one op, so deep networks have few.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import GETITEM, OP_MAKER, is_view
from coop_plan.runtime.capture.joint_graph import forward_nodes, keeps_program_order
from coop_plan.runtime.fused.clusters import clusters_of, parts_of
from coop_plan.runtime.fused.compiled import RegionGraph, compiled_ops
from coop_plan.runtime.fused.in_kernel import recompute_in_kernels
from coop_plan.runtime.fused.norms import decompose_norms
from coop_plan.runtime.fused.ops import is_creation, is_fusible, producer_of, storage_of
from coop_plan.runtime.torch_internals.joint_graphs import checkpoint_of
from coop_plan.runtime.torch_internals.ops import UNTAGGED_VIEWS, OpOverload

MakeOps = Callable[[Sequence[RegionGraph]], Sequence[OpOverload]]
"""Makes the ops of regions (`fused.compiled`)."""


REGION = "coop_region"
"""Key in the meta of a region's node: the number of the region, or of that which it is a part of.

Regions of one joint graph have the same numbers in each copy of it."""


def fuse_regions(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    ops_of: MakeOps = compiled_ops,
    limits: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Replace the regions of a joint graph by one node each, in place.

    The op of a node is known when the layouts of its inputs are (`OP_MAKER`). Ops for the layouts
    of the joint graph, which hardly differ, are made here, together.

    Args:
        module: AOTAutograd's joint graph; `meta["val"]` of every node is set.
        num_fwd_outputs: how many of its outputs are the forward's.
        ops_of: makes the ops of regions; `modelled_ops` for an absent device.
        limits: by the number of a region to split, the most bytes that its parts read and make.
    """
    graph = module.graph
    decompose_norms(graph)
    outputs: Any = next(iter(reversed(graph.nodes))).args[0]
    forward = forward_nodes(module, outputs[:num_fwd_outputs])
    recompute_in_kernels(graph, forward, {v for v in outputs if isinstance(v, fx.Node)})
    _merge_equal(graph, forward)
    _erase_unused(graph)
    ops = [n for n in graph.nodes if n.op == "call_function" and n.target is not GETITEM]
    ops = [op for op in ops if not is_view(op)]
    before = {op: {producer_of(argument) for argument in op.all_input_nodes} for op in ops}
    in_order = [op for op in ops if keeps_program_order(op)]
    for earlier, later in itertools.pairwise(in_order):
        before[later].add(earlier)
    before = {op: {other for other in others if other in before} for op, others in before.items()}
    half_of = {op: _half_of(op, forward) for op in ops if is_fusible(op)}
    clusters = clusters_of(ops, before, half_of)
    regions = [
        Region.of(members, number)
        for number, cluster in enumerate(clusters)
        for members in (parts_of(cluster, ops, limits[number]) if number in limits else [cluster])
        if len(members) > 1 and not all(map(is_creation, members))
    ]
    ops_of([(found.graph, [node.meta["val"] for node in found.inputs]) for found in regions])
    module.graph = _with_regions(graph, regions, in_order, ops_of)
    _erase_unused(module.graph)
    module.graph.lint()


@dataclass(eq=False)
class Region:
    """A region: its ops in program order, and the graph of them that is compiled.

    `inputs` are the nodes outside whose storages it reads, `outputs` the nodes inside that are read
    outside, in the order of the inputs and results of `graph`. `inside` also has the nodes that
    take single results of its ops.
    """

    number: int
    members: Sequence[fx.Node]
    inside: set[fx.Node]
    graph: fx.Graph
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]

    @classmethod
    def of(cls, members: Sequence[fx.Node], number: int) -> "Region":
        """The region of a convex set of ops in program order, with its number (`REGION`)."""
        inside = {*members}
        inside |= {user for op in members for user in op.users if user.target is GETITEM}
        body: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}

        def take(node: fx.Node) -> None:
            if node in body or node in inputs:
                return
            if node not in inside and not is_view(node):
                inputs[node] = None
                return
            for argument in node.all_input_nodes:
                take(argument)
            body[node] = None

        for op in members:
            take(op)
        results: dict[Any, fx.Node] = {}
        for op in members:
            for part in _parts(op):
                if _is_read_outside(part, inside):
                    results.setdefault((op, *part.args[1:]) if part is not op else op, part)
        graph, placed = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            placed[node] = graph.placeholder(f"input_{len(placed)}")
        for node in dict.fromkeys((*body, *results.values())):
            placed[node] = graph.node_copy(node, placed.__getitem__)
            if node.target in UNTAGGED_VIEWS:
                placed[node].target = torch.ops.aten.reshape.default  # may need a copy as measured
        graph.output(tuple(placed[node] for node in results.values()))
        return cls(number, members, inside, graph, list(inputs), list(results.values()))


def _parts(op: fx.Node) -> Iterator[fx.Node]:
    """An op with one result, or the nodes that take its results."""
    if isinstance(op.meta["val"], torch.Tensor):
        yield op
    else:
        yield from (user for user in op.users if user.target is GETITEM)


def _parts_at(op: fx.Node, index: object) -> list[fx.Node]:
    return [part for part in _parts(op) if part.args[1] == index]


def _is_read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(
        user not in inside and (not is_view(user) or _is_read_outside(user, inside))
        for user in node.users
    )


def region(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Graph op of a region that is not compiled yet."""
    raise NotImplementedError


Unit = fx.Node | Region


def _with_regions(
    graph: fx.Graph, regions: Sequence[Region], in_order: Sequence[fx.Node], ops_of: MakeOps
) -> fx.Graph:
    """The graph with a node for each region, in program order as far as its edges allow.

    A region takes the place of its last op or of its first reader, whichever is first.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    unit_of: dict[fx.Node, Unit] = {node: node for node in graph.nodes}
    for found in regions:
        unit_of |= dict.fromkeys(found.inside, found)
    before: dict[Unit, set[Unit]] = {}
    place: dict[Unit, int] = {}
    for node, unit in unit_of.items():
        inputs = unit.inputs if isinstance(unit, Region) else node.all_input_nodes
        before.setdefault(unit, {unit_of[value] for value in inputs})
        place.setdefault(unit, position[node])
    for earlier, later in itertools.pairwise(in_order):
        before[later].add(earlier)
    for found in regions:
        users = {user for node in found.outputs for user in node.users} - found.inside
        place[found] = min(position[node] for node in (found.members[-1], *users))
    after: dict[Unit, list[Unit]] = {}
    for unit, others in before.items():
        for other in others:
            after.setdefault(other, []).append(unit)
    missing = {unit: len(others) for unit, others in before.items()}
    units = list(before)
    number = {unit: i for i, unit in enumerate(units)}
    ready = [(place[unit], number[unit]) for unit in units if not missing[unit]]
    heapq.heapify(ready)
    made, placed = fx.Graph(), dict[fx.Node, fx.Node]()
    while ready:
        unit = units[heapq.heappop(ready)[1]]
        if isinstance(unit, Region):
            _emit(made, unit, placed, ops_of)
        elif all(argument in placed for argument in unit.all_input_nodes):
            # otherwise a view that only its own region reads
            placed[unit] = made.node_copy(unit, placed.__getitem__)
        for reader in after.get(unit, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (place[reader], number[reader]))
    return made


def _emit(graph: fx.Graph, found: Region, placed: dict[fx.Node, fx.Node], ops_of: MakeOps) -> None:
    """Add the node of a region, and those that take its results."""
    node = graph.call_function(region, ([placed[value] for value in found.inputs],))
    values = [result.meta["val"] for result in found.outputs]
    maker = partial(_op_of, found.graph, ops_of)
    node.meta = {**found.members[-1].meta, "val": values, OP_MAKER: maker, REGION: found.number}
    for i, result in enumerate(found.outputs):
        item = placed[result] = graph.call_function(GETITEM, (node, i))
        item.meta["val"] = values[i]
        if result.target is GETITEM:
            placed |= dict.fromkeys(_parts_at(producer_of(result), result.args[1]), item)


def _op_of(graph: fx.Graph, ops_of: MakeOps, inputs: Sequence[torch.Tensor]) -> OpOverload:
    return ops_of([(graph, inputs)])[0]


def _half_of(op: fx.Node, forward: set[fx.Node]) -> object:
    """The part of the step that the region of an op lies within."""
    return op in forward, checkpoint_of(op)


def _merge_equal(graph: fx.Graph, forward: set[fx.Node]) -> None:
    """Merge equal fusible ops of one part of the forward if the backward is given each's result.

    Layers often make the same mask, each for itself. One of the results is live anyway from the
    first op to the last reader. A result that the backward is not given would be live longer than
    in the kernels of its readers. Results of the step stay apart: the caller may write to them.
    So do creations, which cost nothing.
    """
    output = next(iter(reversed(graph.nodes)))
    returned = {storage_of(value) for value in output.all_input_nodes}
    given = {
        storage_of(value)
        for node in graph.nodes
        if node.op == "call_function" and node not in forward and not is_view(node)
        for value in node.all_input_nodes
    }
    kept = (given & forward) - returned
    firsts: dict[fx.Node, fx.Node] = {}  # by node: the first of an equal value
    equal: dict[object, fx.Node] = {}
    merged: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        firsts[node] = node
        fusible = is_fusible(node)
        if not (fusible or node.target is GETITEM or is_view(node)):
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), firsts.__getitem__)
        of = _half_of(node, forward) if fusible else None
        first = firsts[node] = equal.setdefault((node.target, repr(arguments), of), node)
        if fusible and node in kept and not is_creation(node):
            one = merged.setdefault(first, node)
            if one is not node:
                node.replace_all_uses_with(one)
                graph.erase_node(node)


def _erase_unused(graph: fx.Graph) -> None:
    """Erase fusible ops and views that nothing reads."""
    for node in reversed(graph.nodes):
        unused = node.op == "call_function" and not node.users
        if unused and (node.target is GETITEM or is_view(node) or is_fusible(node)):
            graph.erase_node(node)
