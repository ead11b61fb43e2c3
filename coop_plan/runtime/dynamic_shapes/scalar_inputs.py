"""Python numbers that change from call to call as scalar inputs of one step.

Dynamo passes a changing integer as it is and a float in a tensor, and its graph computes with both.
If every use of a number gives the same bits with a 0-dim tensor in its place, the graph takes that
tensor: one graph, and one plan, for all values. Numbers computed from numbers alone are computed
before each call, in Python, as in eager.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.torch_internals.dynamo_graphs import (
    copy_dynamo_node,
    dynamo_module,
    example_value,
    is_boxed_scalar,
    scalar_input,
    symbols_in,
)
from coop_plan.runtime.torch_internals.fakes import FakeTensor

_SYMMETRIC = (operator.mul, operator.add, torch.mul, torch.add, "mul", "add")
_NUMBER_FIRST = (operator.sub, operator.truediv)
_TENSOR_FIRST = (
    *(*_NUMBER_FIRST, operator.imul, operator.iadd, operator.isub, operator.itruediv),
    *(torch.sub, torch.div, "sub", "div", "mul_", "add_", "sub_", "div_"),
)
_NAMES = ("lt", "le", "gt", "ge", "eq", "ne")
_COMPARISONS = (
    *_NAMES,
    *(getattr(module, name) for module in (operator, torch) for name in _NAMES),
)
_FILLING = {"full": 2, "full_like": 2, "tensor": 1, "scalar_tensor": 1}
_EXACT = (torch.float32, torch.float64)
_FLOATS = (*_EXACT, torch.bfloat16, torch.float16)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)

Numbers = Sequence[int | float]


class NumbersAsTensors:
    """Dynamo's graph `gm` with 0-dim tensors for the numbers that need not be constants.

    `module` is `gm` itself without such numbers. It does not return the numbers that `gm` returns.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.module = gm
        self._numbers: Callable[..., Numbers] | None = None
        self._returned: dict[int, int] = {}
        found = _Candidates(gm)
        if found.vanishing:
            inputs = gm.graph.find_nodes(op="placeholder")
            self._kept = [i for i, node in enumerate(inputs) if node not in found.vanishing]
            self._types = [_type(node) for node in found.given]
            self._returned = {at: i for i, at in enumerate(found.returned)}
            self._numbers = _computing(gm, [*found.returned.values(), *found.given])
            self.module = _taking(gm, found)

    def inputs(self, args: Sequence[Any]) -> tuple[Sequence[Any], Numbers]:
        """Converts arguments of `gm` to those of `module`, and to numbers for `outputs`."""
        if self._numbers is None:
            return args, ()
        numbers = self._numbers(*args)
        made = zip(numbers[len(self._returned) :], self._types, strict=True)
        tensors = [torch.tensor(number, dtype=dtype, device="cpu") for number, dtype in made]
        return [*(args[i] for i in self._kept), *tensors], numbers

    def outputs(self, made: Sequence[Any], numbers: Numbers) -> Sequence[Any]:
        """Converts the results of `module` to those of `gm`."""
        if not self._returned:
            return made
        found = [*made]
        for at, i in self._returned.items():  # in their order
            found.insert(at, numbers[i])
        return found


def is_item(node: fx.Node) -> bool:
    """True for a node that reads a number out of a tensor."""
    return node.op == "call_method" and node.target == "item"


class _Candidates:
    """The `numbers` of a graph that are inputs or computed from numbers alone.

    Ops can take those in `given` as tensors. Inputs in `vanishing` have no other use.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        inputs = gm.graph.find_nodes(op="placeholder")
        boxes = set(filter(is_boxed_scalar, inputs))
        self.numbers: set[fx.Node] = set()
        for node in gm.graph.nodes:
            value, of = example_value(node), node.all_input_nodes
            if isinstance(value, _NUMBERS) and not isinstance(value, bool):
                taken_out = is_item(node) and of[0] in boxes
                if node.op == "placeholder" or taken_out or (of and self.numbers.issuperset(of)):
                    self.numbers.add(node)
        free: set[fx.Node] = set()  # no op needs it, or a number computed from it, as a constant
        for node in reversed(gm.graph.nodes):
            if node in self.numbers and all(
                user in free if user in self.numbers else _may_take(user, node)
                for user in node.users
            ):
                free.add(node)
        sizes: set[Any] = set()
        for node in inputs:
            if isinstance(value := example_value(node), torch.Tensor):
                sizes |= symbols_in(value)
        self.vanishing = {
            node
            for node in inputs
            if (free.issuperset(node.users) if node in boxes else node in free)
            and sizes.isdisjoint(symbols_in(example_value(node)))
        }
        changing = set(self.vanishing)
        for node in gm.graph.nodes:
            if node in free and not changing.isdisjoint(node.all_input_nodes):
                changing.add(node)
        changing &= free
        self.given = [node for node in gm.graph.nodes if node in changing and self.takers(node)]
        (output,) = gm.graph.find_nodes(op="output")
        self.returned = {at: node for at, node in enumerate(output.args[0]) if node in changing}

    def takers(self, number: fx.Node) -> list[fx.Node]:
        """Ops that take a number and return none."""
        users = (user for user in number.users if user not in self.numbers)
        return [user for user in users if user.op != "output"]


def _type(number: fx.Node) -> torch.dtype:
    whole = isinstance(example_value(number), (int, torch.SymInt))
    return torch.int64 if whole else torch.float64


def _may_take(user: fx.Node, number: fx.Node) -> bool:
    """True if an op gives the same bits with a 0-dim tensor in place of a number.

    True also for the output node: the function may return a number.
    """
    if user.op == "output":
        (made,) = user.args
        return isinstance(made, (tuple, list)) and number in made
    others: list[Any] = [arg for arg in user.args if arg is not number]
    value = None
    if _fills(user) and user.args[-1] is number:
        value = example_value(user)
    elif len(user.args) == 2 and len(others) == 1 and not user.kwargs:
        first = user.args[0] is number
        known = (*_SYMMETRIC, *_COMPARISONS, *(_NUMBER_FIRST if first else _TENSOR_FIRST))
        if user.target in known and isinstance(others[0], fx.Node):
            value = example_value(others[0])
    if not isinstance(value, FakeTensor) or value.layout != torch.strided:
        return False
    if value.dtype == torch.int64:
        return _type(number) == torch.int64
    return value.dtype in (_FLOATS if value.dim() else _EXACT)  # else the number makes the type


def _fills(user: fx.Node) -> bool:
    """True for a node that fills a tensor with a number, its last argument."""
    name, module = (getattr(user.target, of, "") for of in ("__name__", "__module__"))
    return (
        user.op == "call_function"
        and module in ("torch", "torch._refs")
        and _FILLING.get(name) == len(user.args)
        and user.kwargs.keys() <= {"dtype", "device"}
    )


def _computing(gm: fx.GraphModule, numbers: Sequence[fx.Node]) -> Callable[..., Numbers]:
    """A function from the arguments of `gm` to these numbers."""
    needed = set(numbers)
    for node in reversed(gm.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in needed or node.op == "placeholder":
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made[node] for node in numbers])
    function: Callable[..., Numbers] = fx.GraphModule({}, graph).forward
    return function


def _taking(gm: fx.GraphModule, found: _Candidates) -> fx.GraphModule:
    """A copy of `gm` that takes tensors in place of numbers."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        made[node] = copy_dynamo_node(graph, node, made.__getitem__, example=True)
    *_, last = graph.find_nodes(op="placeholder")
    for i, number in enumerate(found.given):
        last = scalar_input(graph, last, f"number_{i}", _type(number))
        for user in found.takers(number):
            _give(made[user], made[number], last)
    output: Any = made[next(iter(gm.graph.find_nodes(op="output")))]
    results = enumerate(output.args[0])
    output.args = (tuple(node for at, node in results if at not in found.returned),)
    for node in reversed(gm.graph.nodes):
        unused = node in (found.vanishing if node.op == "placeholder" else found.numbers)
        if unused and not made[node].users:
            graph.erase_node(made[node])
    return dynamo_module(gm, graph)


def _give(user: fx.Node, number: fx.Node, tensor: fx.Node) -> None:
    """Let an op take a tensor in place of a number, with eager's arithmetic."""
    graph = user.graph
    with graph.inserting_before(user):
        if _fills(user):
            value = example_value(user)
            like = isinstance(user.args[0], fx.Node) and user.args[0] is not number
            of = user.args[:1] if len(user.args) == 2 else ((),)
            options = {"dtype": value.dtype, "device": value.device}
            ones = graph.call_function(torch.ones_like if like else torch.ones, of, options)
            user.target, user.args, user.kwargs = operator.mul, (ones, number), {}
        else:
            (other,) = (arg for arg in user.all_input_nodes if arg is not number)
            value = example_value(other)
            if user.target is operator.truediv and user.args[0] is number:
                user.target = operator.mul
                user.args = graph.call_method("reciprocal", (other,)), number
            elif user.args[0] is number and user.target in _SYMMETRIC:
                user.args = user.args[1], number
        given = tensor
        if not value.dim():  # or the number's 64 bits would make the result's
            given = graph.call_method("to", (tensor, value.dtype))
    user.args = tuple(given if arg is number else arg for arg in user.args)
