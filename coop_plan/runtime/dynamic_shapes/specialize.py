"""One compiled function at many input shapes: every shape is a static graph of its own."""

import hashlib
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.cost_scaling import CostHistory
from coop_plan.runtime.dynamic_shapes.history import Others
from coop_plan.runtime.dynamic_shapes.scalar_inputs import InTensors, is_item
from coop_plan.runtime.dynamic_shapes.symbolic_trace import Trace, signature
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.reports import REPORT, drop
from coop_plan.runtime.torch_internals.dynamo import (
    block_other_compiles,
    compilation,
    raise_recompile_limits,
)
from coop_plan.runtime.torch_internals.dynamo_graphs import (
    copy_dynamo_node,
    dynamo_module,
    example_value,
    is_boxed_scalar,
    is_static_input,
    leaves_of,
    source_name,
)
from coop_plan.runtime.torch_internals.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from coop_plan.runtime.torch_internals.joint_graphs import lazy_graph_code
from coop_plan.runtime.torch_internals.ops import storage_key

log = logging.getLogger("coop-plan")

Number = int | float | bool
Shape = tuple[tuple[int, ...], ...]
"""Sizes of the tensors among a graph's inputs, in order; without parameters, buffers, scalars."""

CompileStatic = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

AtSizes = Callable[[fx.GraphModule], Callable[..., Any]]
"""From a static joint graph to what runs it, given all inputs of Dynamo's graph."""

CompileAll = Callable[[fx.GraphModule, Sequence[Any], Sequence[Any]], tuple[Trace, AtSizes]]
"""From a graph, its stand-ins with symbols in them, and the inputs of a call."""

SIGNATURE = "coop_signature"
"""Attribute of what `CompileStatic` makes: the `lengths.signature` of its joint graph."""

ENOUGH = 2
"""Shapes traced one by one with which a trace for all has to agree."""

MANY_NUMBERS = 8
"""Graphs of one shape, different in their Python numbers alone, from which on we warn."""

MOST_SHAPES = 100
"""Of one function, whose steps are kept: of others, the one that was not used for longest goes."""

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(gm: fx.GraphModule) -> bool:
    """Whether sizes or numbers among the inputs of Dynamo's graph are symbols."""
    return any(_Input.of(node).varies for node in gm.graph.find_nodes(op="placeholder"))


def shape_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> Shape:
    """The shape that `inputs` of `gm`, a static graph, have."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return _shape(map(_Input.of, nodes), inputs)


def _shape(given: "Iterable[_Input]", values: Iterable[Any]) -> Shape:
    return tuple(
        tuple(value.shape)
        for of, value in zip(given, values, strict=True)
        if isinstance(value, torch.Tensor) and value.dim() and not of.static
    )


@dataclass(frozen=True)
class _Input:
    """What of one graph input differs from call to call.

    `number` is a Python number, which Dynamo passes `boxed` in a tensor if it is a float;
    `sized` is a tensor with symbols in its layout, `static` a parameter or buffer.
    """

    node: fx.Node
    number: bool
    boxed: bool
    sized: bool
    static: bool

    @classmethod
    def of(cls, node: fx.Node) -> "_Input":
        value, boxed = example_value(node), is_boxed_scalar(node)
        sized = False
        if isinstance(value, torch.Tensor) and not boxed:
            layout = (*value.shape, *value.stride(), value.storage_offset())
            sized = not all(isinstance(size, int) for size in layout)
        number = isinstance(value, _NUMBERS) or boxed
        return cls(node, number, boxed, sized, is_static_input(node))

    @property
    def varies(self) -> bool:
        return self.number or self.sized


class ByShape:
    """Runs a graph with symbols in it: for each shape, as the static graph of that shape.

    Dynamo's guards say for which shapes the graph holds. The static graph is traced when its
    shape is first met, from fake copies: no input is kept alive. After a few shapes it is traced
    once for all, if sizes are all that differs. Numbers that may be tensors are (`numbers`).
    """

    def __init__(
        self, gm: fx.GraphModule, compile_static: CompileStatic, compile_all: CompileAll | None
    ) -> None:
        self._in_tensors = InTensors(gm)
        self._gm = gm = self._in_tensors.module
        self._compile = compile_static
        self._compile_all = compile_all
        self._known: list[tuple[Sequence[Any], list[object]]] = []
        self._for_all: tuple[Trace, AtSizes] | None = None
        self._inputs = [_Input.of(node) for node in gm.graph.find_nodes(op="placeholder")]
        self._kept = [i for i, given in enumerate(self._inputs) if not _vanishes(given)]
        self._watched = [
            i for i, given in enumerate(self._inputs) if given.varies or not given.static
        ]
        self._steps: dict[object, Callable[..., Any]] = {}  # used last, last
        self._told = False
        self._per_shape: dict[Shape, int] = {}

    def run(self, *given: Any) -> Any:
        """Run one call.

        Raises:
            CaptureError, planner.InfeasibleBudgetError: for a shape not met before.
        """
        args, numbers = self._in_tensors.inputs(given)
        key = self._key(args)
        step = self._steps.pop(key, None)
        if step is None:
            with block_other_compiles():
                step = self._specialise(args)
            self._make_room()
        self._steps[key] = step
        return self._in_tensors.outputs(step(*args), numbers)

    def _make_room(self) -> None:
        while len(self._steps) >= MOST_SHAPES:
            gone = self._steps.pop(next(iter(self._steps)), None)
            drop(getattr(gone, REPORT, None))
            if not self._told:
                self._told = True
                log.warning(
                    "more than %d shapes of one function: the step not used for longest is"
                    " forgotten, and planned again when its shape comes; pad lengths to multiples",
                    MOST_SHAPES,
                )

    def _key(self, args: Sequence[Any]) -> object:
        """All that the static graph depends on and Dynamo does not guard to be the same."""
        key: list[object] = []
        seen: dict[int, int] = {}
        for i in self._watched:
            given, value = self._inputs[i], args[i]
            if given.number:
                number = value.item() if given.boxed else value
                key.append(number.hex() if isinstance(number, float) else number)  # NaN, -0.0
                continue
            if given.sized:
                key.append((tuple(value.shape), value.stride()))
            # AOTAutograd traces inputs that overlap in memory differently.
            if isinstance(value, torch.Tensor) and not given.static:
                first = seen.setdefault(storage_key(value), i)
                if first != i:
                    key.append((first, args[first].storage_offset(), value.storage_offset()))
        return tuple(key)

    def _specialise(self, args: Sequence[Any]) -> Callable[..., Any]:
        mode = FakeTensorMode()
        fakes = [
            mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args
        ]
        found = self._of_all(fakes)
        if found is not None:
            return found
        numbers = {
            given.node: value.item() if given.boxed else value
            for given, value in zip(self._inputs, args, strict=True)
            if given.number
        }
        nodes = {self._inputs[i].node for i in self._kept}
        kept = [fakes[i] for i in self._kept]
        try:
            with lazy_graph_code():
                static = _static(self._gm, numbers, nodes)
                self._count(shape_of(static, kept))
                compiled = self._compile(static, kept)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError.out_of_data(error.func, "numbers or sizes") from error
        positions = self._kept

        def run(*given: Any) -> Any:
            return compiled(*(given[i] for i in positions))

        setattr(run, REPORT, getattr(compiled, REPORT, None))
        self._learn(args, fakes, getattr(compiled, SIGNATURE, []))
        return run

    def _of_all(self, fakes: Sequence[Any]) -> Callable[..., Any] | None:
        """The step of the trace for all sizes, if there is one and it holds for these."""
        if self._for_all is None:
            return None
        trace, at_sizes = self._for_all
        if (joint := trace.at(fakes)) is None:
            return None
        self._count(_shape(self._inputs, fakes))
        with lazy_graph_code():
            return at_sizes(joint)

    def _learn(self, args: Sequence[Any], fakes: Sequence[Any], of: list[object]) -> None:
        """Trace for all sizes once enough of them were traced, if it makes the same of these."""
        examples = [example_value(given.node) for given in self._inputs]
        if not of or self._compile_all is None or any(map(_is_more_than_sizes, examples, fakes)):
            return
        self._known.append((fakes, of))
        if len(self._known) < ENOUGH:
            return
        compile_all, self._compile_all = self._compile_all, None
        try:
            with lazy_graph_code():
                nodes = {given.node for given in self._inputs}
                for_all = compile_all(_static(self._gm, {}, nodes), examples, args)
            made = ((for_all[0].at(known), wanted) for known, wanted in self._known)
            if all(joint is not None and signature(joint) == wanted for joint, wanted in made):
                self._for_all = for_all
        except Exception as error:  # whatever PyTorch finds: each size is traced then, as before
            log.debug("a function cannot be traced for all sizes at once: %r", error)
        self._known = []

    def _count(self, shape: Shape) -> None:
        count = self._per_shape[shape] = self._per_shape.get(shape, 0) + 1
        if count == MANY_NUMBERS:
            log.warning(
                "%d graphs for one input shape, different in their Python numbers alone: pass a"
                " number that changes with every call as a tensor",
                count,
            )


def _is_more_than_sizes(example: Any, value: Any) -> bool:
    """Whether an input is no plain tensor, and no integer that Dynamo has a symbol for."""
    if isinstance(example, torch.Tensor) and isinstance(value, FakeTensor):
        return example.layout != torch.strided
    return not (isinstance(example, torch.SymInt) and type(value) is int)


def _vanishes(given: _Input) -> bool:
    """Whether nothing is left of an input in the static graph."""
    return given.number and (not given.boxed or all(map(is_item, given.node.users)))


def _static(
    gm: fx.GraphModule, numbers: Mapping[fx.Node, Number], kept: set[fx.Node]
) -> fx.GraphModule:
    """`gm` with inputs replaced by `numbers`, as Dynamo would give it with dynamic=False."""
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node not in kept:
            made[node] = numbers[node]
        elif is_item(node) and node.args[0] in numbers:
            made[node] = numbers[node.args[0]]
        else:
            made[node] = copy_dynamo_node(graph, node, made.__getitem__)
    return dynamo_module(gm, graph)


class FirstShapes:
    """Of each function of one `torch.compile` call, the `owner`, the shape planned first.

    And what its ops cost, at whatever shapes it was captured, and what is known of its steps.
    """

    def __init__(self, owner: object) -> None:
        self.owner = owner  # its id stays its own
        self.shapes: dict[str, Shape] = {}
        self._numbers: dict[tuple[str, str], list[Number]] = {}
        self.costs: defaultdict[str, CostHistory] = defaultdict(CostHistory)
        self.others: defaultdict[str, Others] = defaultdict(Others)

    def numbers_change(self, function: str, gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether a graph was another for such inputs before, by the numbers in it alone.

        And for the same parameters: layers may have numbers of their own.
        """
        numbers: list[Number] = []
        shapes = str([value.shape for value in inputs if isinstance(value, torch.Tensor)])
        shapes += str([*map(id, leaves_of(gm))])

        def note(value: Any) -> Any:
            if isinstance(value, (int, float)):
                numbers.append(value)
            return value

        for node in gm.graph.nodes:
            fx.node.map_aggregate((node.args, node.kwargs), note)
        return self._numbers.setdefault((function, shapes), numbers) != numbers


_firsts: "weakref.WeakValueDictionary[int, FirstShapes]" = weakref.WeakValueDictionary()


def first_shapes(owner: object) -> FirstShapes:
    """The one of `owner`, as long as somebody has it."""
    found = _firsts.get(id(owner))
    if found is None:
        found = _firsts[id(owner)] = FirstShapes(owner)
    return found


def function_of(gm: fx.GraphModule) -> str:
    """A name for the function that `gm` is a graph of, at whatever shape.

    Graphs are of one function if they were traced from one code object and are equal but for
    numbers: the same inputs, the same ops on the same values.
    """
    names: dict[fx.Node, str] = {}
    lines = [str(compilation()[0])]

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return names.get(value, "number")
        if isinstance(value, _NUMBERS) and not isinstance(value, bool):
            return "number"
        return value

    for node in gm.graph.nodes:
        if _is_number(node):
            continue
        names[node] = f"%{len(names)}"
        target = source_name(node) or node.target
        args = fx.node.map_aggregate((node.args, node.kwargs), plain)
        lines.append(f"{node.op} {target} {args}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_number(node: fx.Node) -> bool:
    """Whether a node stands for numbers, which a static graph has as constants."""
    if node.op == "placeholder":
        return _Input.of(node).number
    value = example_value(node)
    if isinstance(value, (tuple, list)) and value:
        return all(isinstance(part, _NUMBERS) for part in value)
    return isinstance(value, _NUMBERS)


def keep_recompiling(where: str) -> None:
    """Let Dynamo compile the function at `where` once more after now.

    From its recompile limit on Dynamo runs a function eagerly, without asking the backend: a new
    shape would run outside any budget. A graph with symbols in it does not come near the limit.
    """
    _, earlier = compilation()
    if earlier is None:
        return
    count = earlier + 1
    for limit, raised in raise_recompile_limits(count).items():
        log.warning(
            "%s: compiled %d times, each time planned anew; its %s is now %d, or it would run as"
            " eager autograd, not within the budget (a number that changes is a constant to Dynamo"
            " if it is a global, or of one: pass it as an argument)",
            *(where, count, limit, raised),
        )
