"""Symbolic trace: one joint graph for all sizes of a function, specialized for each, or for any.

Tracing is most of the cost of a new length. The ops of a step rarely depend on its sizes; if they
do, the trace has a guard. The graphs that a symbolic trace makes are compared with those traced at
earlier sizes (`signature`), and the trace is not used if any differs.

A graph for any sizes has `sized_numbers` where the trace has symbols. It keeps a view that changes
nothing at the sizes of the graph alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from coop_plan.runtime.capture.sized_numbers import Numbers, sized
from coop_plan.runtime.torch_internals.dynamo_graphs import (
    Symbols,
    at_sizes,
    expression_of,
    is_integer,
    is_size,
)
from coop_plan.runtime.torch_internals.fakes import FakeTensor
from coop_plan.runtime.torch_internals.joint_graphs import interpreted_module, is_primal, is_tangent
from coop_plan.runtime.torch_internals.ops import is_view_op, negative_view, tree_flatten, tree_map


class Sizes(NamedTuple):
    """Sizes for which a trace holds: the values of its numbers, and the reach of its tensors."""

    numbers: Numbers
    reaches: Sequence[int]

    def within(self, larger: "Sizes") -> bool:
        """True if no tensor reaches over more elements than at the `larger` sizes."""
        pairs = zip(self.reaches, larger.reaches, strict=True)
        return all(own <= other for own, other in pairs)


class Trace:
    """A joint graph that was traced with `symbols`."""

    def __init__(self, symbols: Symbols, joint: fx.GraphModule) -> None:
        self._symbols = symbols
        self._joint = joint
        self._places = {
            node: place for place, node in enumerate(filter(is_size, joint.graph.nodes))
        }
        values = (node.meta.get("val") for node in joint.graph.nodes)
        tensors = (v for v in tree_flatten([*values])[0] if isinstance(v, torch.Tensor))
        distinct = {
            tuple(map(expression_of, (*made.shape, *made.stride()))): (made.shape, made.stride())
            for made in tensors
        }
        self._layouts = [*distinct.values()]

    def sizes(self, inputs: Sequence[Any]) -> Sizes | None:
        """The sizes of fake tensors and numbers; None if they must be traced."""
        bound = self._symbols.bind(inputs)
        if bound is None:
            return None
        values: dict[fx.Node, Any] = {}
        for node in self._places:
            value = node.meta["val"]
            if is_integer(value):
                values[node] = at_sizes(value, bound)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                target: Any = node.target
                values[node] = target(*args, **kwargs)
        reaches = [
            reach([at_sizes(n, bound) for n in shape], [at_sizes(n, bound) for n in stride])
            for shape, stride in self._layouts
        ]
        return Sizes(tuple(values.values()), reaches)

    def at(self, inputs: Sequence[Any], *, any_sizes: bool = False) -> fx.GraphModule | None:
        """Static graph for fake tensors and numbers; None if these sizes must be traced.

        A graph for `any_sizes` is None also if an op reads a comparison of sizes.
        """
        bound = self._symbols.bind(inputs)
        if bound is None or (any_sizes and any(map(_is_read_truth, self._places))):
            return None
        making = _Making(self._joint, bound, self._places if any_sizes else {})
        mode = next(given.fake_mode for given in inputs if isinstance(given, FakeTensor))
        primals = iter(inputs)
        with mode:
            for node in self._joint.graph.nodes:
                if node.op == "placeholder":
                    making.take(node, None if is_tangent(node) else next(primals))
                elif node.op == "get_attr":
                    making.take(node, None)
                elif node.op == "call_function":
                    making.call(node)
                else:
                    making.end(node)
        return interpreted_module(self._joint, making.graph)


class _Making:
    """A static graph under construction, in a fake mode.

    `_values` has the fake tensor or number of each symbolic node, `_nodes` its node in the static
    graph, where numbers are constants. A graph for any sizes has `places` for them.
    """

    def __init__(
        self, joint: fx.GraphModule, bound: dict[Any, int], places: Mapping[fx.Node, int]
    ) -> None:
        self.graph = fx.Graph()
        self._joint = joint
        self._bound = bound
        self._places = places
        self._values: dict[fx.Node, Any] = {}
        self._nodes: dict[fx.Node, Any] = {}

    def take(self, node: fx.Node, value: Any) -> None:
        """Copy an input with its value; the value of a tangent or constant is made here."""
        if value is None:
            value = node.meta.get("val", getattr(self._joint, str(node.target), None))
            if isinstance(value, torch.Tensor):
                value = self._stand_in(value)
        made = self.graph.node_copy(node)
        made.meta["val"] = value
        self._values[node] = value
        self._nodes[node] = self._number(node, value) if is_size(node) else made

    def _number(self, node: fx.Node, value: Any) -> Any:
        place = self._places.get(node)
        return value if place is None or isinstance(value, bool) else sized(value, place)

    def _at(self, value: Any) -> Any:
        """A result at these sizes, by the layout in the trace: no op has to run."""
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        return at_sizes(value, self._bound) if is_integer(value) else value

    def _stand_in(self, like: torch.Tensor) -> torch.Tensor:
        sizes = [at_sizes(size, self._bound) for size in like.shape]
        strides = [at_sizes(stride, self._bound) for stride in like.stride()]
        offset = at_sizes(like.storage_offset(), self._bound)
        made = torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
        if offset:
            made = made.new_empty(offset + reach(sizes, strides)).as_strided(sizes, strides, offset)
        made = made.conj() if like.is_conj() else made
        return negative_view(made) if like.is_neg() else made

    def call(self, node: fx.Node) -> None:
        """Copy an op, or evaluate it if it computes a size."""
        target: Any = node.target
        value = node.meta.get("val")
        if is_size(node) and not is_integer(value):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
            value = target(*args, **kwargs)
        else:
            value = tree_map(self._at, value)
        self._values[node] = value
        if is_size(node):
            self._nodes[node] = self._number(node, value)
        elif changes_nothing(node, value, self._values) and (
            not self._places or _changes_nothing_at_any_sizes(node)
        ):
            self._nodes[node] = self._nodes[node.all_input_nodes[0]]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._nodes.__getitem__)
            made = self.graph.call_function(target, args, kwargs)
            made.meta = {**node.meta, "val": value}
            self._nodes[node] = made

    def end(self, node: fx.Node) -> None:
        """Copy the outputs."""
        made = self.graph.output(fx.node.map_arg(node.args[0], self._nodes.__getitem__))
        made.meta = dict(node.meta)


def reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor, both included."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def changes_nothing(node: fx.Node, value: Any, values: Mapping[fx.Node, Any]) -> bool:
    """True for a view that equals its base, or the gradient of one.

    With symbolic sizes, indexing adds slices over all elements that static tracing omits.
    """
    slices = node.target is torch.ops.aten.slice_backward.default
    if not (slices or is_view_op(node.target)) or any(user.op == "output" for user in node.users):
        return False
    of = values[node.all_input_nodes[0]]
    return isinstance(of, torch.Tensor) and _layout(of) == _layout(value)


def _is_read_truth(node: fx.Node) -> bool:
    truth = isinstance(node.meta["val"], bool | torch.SymBool)
    return truth and not all(map(is_size, node.users))


def _changes_nothing_at_any_sizes(node: fx.Node) -> bool:
    made, of = node.meta["val"], node.all_input_nodes[0].meta["val"]
    layouts = [
        [*map(expression_of, (*value.shape, *value.stride(), value.storage_offset()))]
        for value in (made, of)
    ]
    return layouts[0] == layouts[1]


def _layout(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    parts = value.shape, value.stride(), value.storage_offset()
    return (value.dtype, *parts, value.is_conj(), value.is_neg())


def signature(joint: fx.GraphModule) -> list[object]:
    """Computations of a static joint graph, with the layouts of their results.

    Omits number inputs, views that change nothing, and names.
    """
    values = {node: node.meta.get("val") for node in joint.graph.nodes}
    sizes = [is_size(node) for node in filter(is_primal, joint.graph.nodes)]
    numbers: dict[fx.Node, Any] = {}
    lines: list[object] = []
    for node in joint.graph.nodes:
        if node.op == "placeholder" and not isinstance(values[node], torch.Tensor):
            numbers[node] = values[node]
        elif changes_nothing(node, values[node], values):
            numbers[node] = numbers[node.all_input_nodes[0]]
        elif node.op == "output":
            named: Any = fx.node.map_arg(node.args[0], numbers.__getitem__)
            gradients = zip(named[len(named) - len(sizes) :], sizes, strict=True)
            lines += named[: len(named) - len(sizes)]
            lines += [gradient for gradient, of_size in gradients if not of_size]
        else:
            args = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
            made = tuple(_layout(value) for value in tree_flatten(values[node])[0])
            target = node.target if node.op == "call_function" else node.op
            lines.append((str(target), str(args) if node.op != "placeholder" else "", made))
            numbers[node] = f"%{len(lines)}"
    return lines
