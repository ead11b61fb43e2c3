"""Dynamo's graphs: inputs, and symbolic sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


def example_value(node: fx.Node) -> Any:
    """The fake value of a node in Dynamo's graph; sizes that change are symbolic."""
    return node.meta.get("example_value")


def is_boxed_scalar(node: fx.Node) -> bool:
    """True if an input is a float that Dynamo passes as a tensor, because it may change.

    NumPy arrays are passed as tensors, too; for them `is_tensor` is true.
    """
    given: Any = node.meta.get("grapharg")
    return bool(getattr(given, "pass_arg_as_tensor", False)) and not given.is_tensor


def is_static_input(node: fx.Node) -> bool:
    """True if an input is a parameter or buffer, with one address in all calls."""
    return bool((node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


def source_name(node: fx.Node) -> str | None:
    """The source of an input, as an expression in the user's frame."""
    source = getattr(node, "_dynamo_source", None)
    return None if source is None else str(source.name)


def assigns_data(gm: fx.GraphModule) -> bool:
    """True if a graph assigns a tensor's `data`.

    Dynamo traces that as `Tensor.set_`, since PyTorch 2.14 as `aten.shallow_copy_data_`.
    """
    targets = [node.target for node in gm.graph.nodes]
    return torch.Tensor.set_ in targets or any("shallow_copy_data_" in str(t) for t in targets)


def uses_functorch_grad(gm: fx.GraphModule) -> bool:
    """True if `torch.func.grad` or a similar transform runs inside Dynamo's graph.

    Assumed: such a region begins with a call of `_grad_increment_nesting`.
    """
    targets = (node.target for node in gm.graph.nodes if node.op == "call_function")
    return any("grad_increment_nesting" in getattr(name, "__name__", "") for name in targets)


def copy_dynamo_node(
    graph: fx.Graph, node: fx.Node, argument: Callable[[fx.Node], Any], *, example: bool = False
) -> fx.Node:
    """`graph.node_copy` of a node in Dynamo's graph, with its source.

    `example` keeps its fake value, too; AOTAutograd does not trace with it.
    """
    copy = graph.node_copy(node, argument)
    if not example:
        copy.meta.pop("example_value", None)
    if hasattr(node, "_dynamo_source"):
        copy._dynamo_source = node._dynamo_source
    return copy


def scalar_input(graph: fx.Graph, after: fx.Node, name: str, dtype: torch.dtype) -> fx.Node:
    """Add a 0-dimensional tensor as an input of Dynamo's graph, `after` another input."""
    with graph.inserting_after(after):
        node = graph.placeholder(name)
    node._dynamo_source = LocalSource(name)
    with FakeTensorMode():
        node.meta["example_value"] = torch.empty((), dtype=dtype, device="cpu")
    return node


def symbols_in(value: Any) -> set[Any]:
    """The symbols in a number of Dynamo's, or in a tensor's shape, strides and offset."""
    sizes = (size for size in _sizes(value) if isinstance(size, (torch.SymInt, torch.SymFloat)))
    return {symbol for size in sizes for symbol in size.node.expr.free_symbols}


def dynamo_module(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """`graph` as a module that AOTAutograd treats as one of Dynamo's, like `gm`.

    Assumed: AOTAutograd recognizes Dynamo's graphs, and the parameters among their inputs, by
    `meta` and `_param_name_to_source` of the module.
    """
    module = _make_graph_module(gm, graph)
    module.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        module._param_name_to_source = gm._param_name_to_source
    return module


class Symbols:
    """The symbols of one trace, for sizes that differ between calls.

    `inputs` are fake inputs of Dynamo's graph, symbolic in the dimensions in which its `examples`
    are. `values` are the inputs of a call. Assumed: a trace records all constraints on its symbols
    in `guards`, `replacements` and ranges, unless there are deferred assertions.
    """

    def __init__(self, examples: Sequence[Any], values: Sequence[Any]) -> None:
        self._environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=self._environment)
        self.inputs = [
            self._stand_in(mode, f"input_{i}", example, value)
            for i, (example, value) in enumerate(zip(examples, values, strict=True))
        ]

    def _stand_in(self, mode: FakeTensorMode, name: str, example: Any, value: Any) -> Any:
        source = LocalSource(name)
        if isinstance(value, torch.Tensor):
            if not value.dim() and not value.requires_grad:  # with a source it would get a symbol
                return mode.from_tensor(value)
            sizes = [
                DimDynamic.STATIC if isinstance(size, int) else DimDynamic.DUCK
                for size in example.shape
            ]
            context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
            return mode.from_tensor(value, source=source, symbolic_context=context)
        made = self._environment.create_symbol(value, source=source, dynamic_dim=DimDynamic.DUCK)
        return self._environment.create_symintnode(made, hint=value, source=source)

    def bind(self, values: Sequence[Any]) -> dict[Any, int] | None:
        """The value of each symbol for these inputs; None if the trace is not valid for them."""
        environment = self._environment
        replaced = environment.replacements  # with dynamic=True, also the width of an input
        if environment.deferred_runtime_asserts or not all(v.is_Integer for v in replaced.values()):
            return None
        bound = {symbol: int(value) for symbol, value in replaced.items()}
        pairs = [
            pair
            for made, value in zip(self.inputs, values, strict=True)
            for pair in zip(_sizes(made), _sizes(value), strict=True)
        ]
        for made, size in pairs:
            if not isinstance(made, int) and made.node.expr.is_Symbol:
                bound[made.node.expr] = size
        if any(at_sizes(made, bound) != size for made, size in pairs):
            return None
        for symbol, allowed in environment.var_to_range.items():
            size = bound.get(symbol)  # None: of the base of a view
            if size is not None and not allowed.lower <= size <= allowed.upper:
                return None
        held = (guard.expr.xreplace(bound) for guard in environment.guards)
        return bound if all(bool(one == True) for one in held) else None  # noqa: E712 - of sympy


def _sizes(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [value]
    return [*value.shape, *value.stride(), value.storage_offset()]


def at_sizes(size: Any, bound: dict[Any, int]) -> int:
    """The value of a size whose symbols are in `bound`; new values are added to `bound`."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    found = bound.get(expression)
    if found is None:
        found = bound[expression] = int(expression.xreplace(bound))
    return found


def expression_of(size: Any) -> Any:
    """A size as it is written in the symbols of its trace."""
    return size if isinstance(size, int) else size.node.expr


def is_integer(value: object) -> bool:
    """True if a value of a traced graph is an integer, constant or symbolic."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_size(node: fx.Node) -> bool:
    """True if a node of a traced graph is a number computed from sizes."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymBool, torch.SymFloat))


def graph_break(gm: fx.GraphModule) -> tuple[str, int, str] | None:
    """File, line and reason of the graph break that ends Dynamo's graph `gm`, if one does."""
    ended = getattr(gm, "compile_subgraph_reason", None)
    if ended is None or not ended.graph_break or not ended.user_stack:
        return None
    frame = ended.user_stack[-1]
    return frame.filename, frame.lineno, str(ended.reason)


def leaves_of(gm: fx.GraphModule) -> list[torch.Tensor]:
    """The user's leaves that require gradients among the inputs of Dynamo's graph.

    Assumed: Dynamo keeps its inputs in `grapharg` while it calls the backend.
    """
    given = (node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder"))
    inputs = [None if of is None else of.example for of in given]
    tensors = (value for value in inputs if isinstance(value, torch.Tensor))
    return [value for value in tensors if value.is_leaf and value.requires_grad]
