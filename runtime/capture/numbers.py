"""Python numbers that change from call to call as inputs of a step, and not as constants of many.

Dynamo passes a float that may change in a tensor, and its graph takes the number out by `item`.
Where all that is done with the number gives the same bits with a tensor of no dimensions in
its place, that takes it: one graph, and one plan, for all values.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.torch_internals import copy_dynamo_node, example_value

_SYMMETRIC = (operator.mul, operator.add, torch.mul, torch.add, "mul", "add")
_OF_TWO = (*_SYMMETRIC, operator.sub, operator.truediv, torch.sub, torch.div, "sub", "div")
_OF_NUMBERS = (operator.mul, operator.add, operator.sub, operator.neg)
_EXACT = (torch.float32, torch.float64)
_FLOATS = (*_EXACT, torch.bfloat16, torch.float16)


def is_item(node: fx.Node) -> bool:
    """Whether a node takes a number out of a tensor."""
    return node.op == "call_method" and node.target == "item"


def may_be_tensor(given: fx.Node) -> bool:
    """Whether a number that is given in a tensor need not be taken out of it."""
    return bool(given.users) and all(is_item(user) and _may(user) for user in given.users)


def _may(number: fx.Node) -> bool:
    """Whether all that takes this number, of 64 bits, may be given a tensor of no dimensions."""
    for user in number.users:
        if user.kwargs or user.op not in ("call_function", "call_method"):
            return False
        others: list[Any] = [arg for arg in user.args if arg is not number]
        tensors = [arg for arg in others if _tensor(arg) is not None]
        if not tensors:
            plain = (arg for arg in others if not isinstance(arg, fx.Node))
            if user.target not in _OF_NUMBERS or not all(
                isinstance(a, (int, float)) for a in plain
            ):
                return False
            if not _may(user):
                return False
        elif user.target not in _OF_TWO or len(user.args) != 2 or len(tensors) != 1:
            return False
        elif user.target is operator.truediv and user.args[0] is number:
            return False  # eager multiplies with the reciprocal
        else:
            (value,) = (_tensor(arg) for arg in tensors)
            assert value is not None
            if value.dtype not in (_FLOATS if value.dim() else _EXACT):
                return False
    return True


def _tensor(arg: object) -> torch.Tensor | None:
    value = example_value(arg) if isinstance(arg, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def copy_with_tensor(
    graph: fx.Graph, node: fx.Node, made: Mapping[fx.Node, Any], numbers: set[fx.Node]
) -> fx.Node:
    """A copy of a node of Dynamo's graph; where it takes `numbers`, they are tensors in the copy.

    `numbers` grows by the node if it makes a number of them.
    """
    args: tuple[Any, ...] = node.args
    number = next(arg for arg in args if arg in numbers)
    met = next((arg for arg in args if _tensor(arg) is not None), None)
    if met is None:
        numbers.add(node)
        return copy_dynamo_node(graph, node, made.__getitem__)
    value = _tensor(met)
    assert value is not None
    given = made[number]
    if not value.dim():  # or the number's 64 bits would make the result's
        given = graph.call_method("to", (given, value.dtype))
    first = args[0] is number and node.target not in _SYMMETRIC
    copy = graph.create_node(
        node.op, node.target, (given, made[met]) if first else (made[met], given)
    )
    copy.meta = {key: kept for key, kept in node.meta.items() if key != "example_value"}
    return copy
