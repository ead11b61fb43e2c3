"""Specialization of a compiled function: one static graph for each input shape."""

import hashlib
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import fx

from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime.capture.cost_scaling import CostHistory
from coop_plan.runtime.capture.sized_numbers import Numbers
from coop_plan.runtime.dynamic_shapes.history import ShapeHistory
from coop_plan.runtime.dynamic_shapes.scalar_inputs import NumbersAsTensors, is_item
from coop_plan.runtime.dynamic_shapes.symbolic_trace import Sizes, Trace, signature
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
"""Sizes of a graph's input tensors, in order, without parameters, buffers and scalars."""

CompileStatic = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

AtSizes = Callable[[fx.GraphModule], Callable[..., Any]]
"""From a static joint graph to a function of all inputs of Dynamo's graph."""

AtNumbers = Callable[[Numbers], Callable[..., Any]]
"""From the numbers of some sizes to a function of all inputs of Dynamo's graph."""


class ForAllSizes(NamedTuple):
    """Results of a function's trace for all sizes: steps `at` some sizes, and steps `up_to` them.

    `up_to` plans a joint graph for any sizes; None if it does not fit. `backwards` counts those of
    the function so far.
    """

    trace: Trace
    at: AtSizes
    up_to: Callable[[fx.GraphModule], AtNumbers | None]
    backwards: Callable[[], int]


CompileAll = Callable[[fx.GraphModule, Sequence[Any], Sequence[Any]], ForAllSizes]
"""From a graph, its symbolic fake inputs, and the inputs of a call."""

SIGNATURE = "coop_signature"
"""Attribute of a compiled function: the `symbolic_trace.signature` of its joint graph."""

SHAPES_BEFORE_TRACE = 2
"""Shapes traced one by one, with which the symbolic trace must agree."""

MAX_NUMBER_GRAPHS = 8
"""Graphs of one shape that differ in Python numbers alone, at which a warning is logged."""

MAX_SHAPES = 100
"""Shapes of one function whose steps are kept; the least recently used one is evicted."""

BORROWING_TURNS = 2
"""First turns of a shape that run by the plan of larger sizes; then the shape gets its own. Calls
without a backward between them, as of equal layers, are one turn."""

MAX_OWN_PLANS = 16
"""Shapes of one function with plans of their own, after which others keep to larger plans."""

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(gm: fx.GraphModule) -> bool:
    """True if sizes or numbers among the inputs of Dynamo's graph are symbols."""
    return any(_Input.of(node).varies for node in gm.graph.find_nodes(op="placeholder"))


def shape_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> Shape:
    """Shape of the inputs of `gm`, a static graph."""
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
    """Kind of a graph input, by which it varies from call to call.

    `number` is a Python number, which Dynamo passes `boxed` in a tensor if it is a float; `sized`
    is a tensor with symbols in its layout; `static` is a parameter or buffer.
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
    """Runs a symbolic graph as one static graph for each shape.

    Dynamo's guards decide for which shapes the graph holds. A static graph is traced at the first
    call with its shape, from fake inputs, so that no input is kept alive. After a few shapes that
    differ in sizes alone, one symbolic trace serves all. Then the first turns of a shape run by a
    plan of larger sizes, which is made if there is none: where no two batches are alike, hardly any
    is planned for. Numbers are passed as tensors if possible (`scalar_inputs`).
    """

    def __init__(
        self, gm: fx.GraphModule, compile_static: CompileStatic, compile_all: CompileAll | None
    ) -> None:
        self._in_tensors = NumbersAsTensors(gm)
        self._gm = gm = self._in_tensors.module
        self._compile = compile_static
        self._compile_all = compile_all
        self._known: list[tuple[Sequence[Any], list[object]]] = []
        self._symbolic: ForAllSizes | None = None
        self._up_to: list[tuple[Sizes, AtNumbers]] = []
        # Turns of shapes without a plan of their own, by the number of backwards before them.
        self._borrowing: dict[object, set[int]] = {}
        self._own_plans = 0
        self._inputs = [_Input.of(node) for node in gm.graph.find_nodes(op="placeholder")]
        self._kept = [i for i, given in enumerate(self._inputs) if not _vanishes(given)]
        # Floats are constants of the symbolic trace, too, with the values at which it was made.
        self._fixed = [i for i, of in enumerate(self._inputs) if of.boxed and _vanishes(of)]
        self._traced = [i for i in range(len(self._inputs)) if i not in self._fixed]
        self._fixed_values: list[Number] = []
        self._key_inputs = [
            i for i, given in enumerate(self._inputs) if given.varies or not given.static
        ]
        self._steps: dict[object, Callable[..., Any]] = {}  # most recently used last
        self._logged = False
        self._per_shape: dict[Shape, int] = {}

    def run(self, *given: Any) -> Any:
        """Run one call.

        Raises:
            CaptureError, planner.InfeasibleBudgetError: at the first call with a shape.
        """
        args, numbers = self._in_tensors.inputs(given)
        key = self._key(args)
        step = self._steps.pop(key, None)
        if step is None or self._may_stop_borrowing(key):
            with block_other_compiles():
                step = self._specialise(args, key)
            self._make_room()
        self._steps[key] = step
        return self._in_tensors.outputs(step(*args), numbers)

    def _make_room(self) -> None:
        while len(self._steps) >= MAX_SHAPES:
            key = next(iter(self._steps))
            evicted = self._steps.pop(key, None)
            if self._borrowing.pop(key, None) is not None:
                continue
            drop(getattr(evicted, REPORT, None))
            if not self._logged:
                self._logged = True
                log.warning(
                    "more than %d shapes of one function: the least recently used step is dropped,"
                    " and planned again for the next call with its shape; pad lengths to multiples",
                    MAX_SHAPES,
                )

    def _key(self, args: Sequence[Any]) -> object:
        """Properties that a static graph depends on and Dynamo does not guard."""
        key: list[object] = []
        seen: dict[int, int] = {}
        for i in self._key_inputs:
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

    def _may_stop_borrowing(self, key: object) -> bool:
        """Count a turn of a shape; True if it borrowed a plan often enough to get its own."""
        turns = self._borrowing.get(key)
        if turns is None or self._symbolic is None or self._own_plans >= MAX_OWN_PLANS:
            return False
        turns.add(self._symbolic.backwards())
        return len(turns) > BORROWING_TURNS

    def _specialise(self, args: Sequence[Any], key: object) -> Callable[..., Any]:
        mode = FakeTensorMode()
        fakes = [
            mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args
        ]
        if self._fixed_values == [args[i].item() for i in self._fixed]:
            found = self._from_trace([fakes[i] for i in self._traced], key)
            if found is not None:
                return _of_inputs(found, self._traced) if self._fixed else found
        self._own_plans += 1
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
        self._learn(args, fakes, getattr(compiled, SIGNATURE, []))
        return _of_inputs(compiled, self._kept)

    def _from_trace(self, fakes: Sequence[Any], key: object) -> Callable[..., Any] | None:
        """The step made from the symbolic trace, if there is one that holds for these sizes."""
        if self._symbolic is None or (sizes := self._symbolic.trace.sizes(fakes)) is None:
            return None
        if key not in self._borrowing:
            borrowed = self._borrow(fakes, sizes)
            if borrowed is not None:
                self._borrowing[key] = {self._symbolic.backwards()}
                return borrowed
        turns = self._borrowing.pop(key, None)
        self._own_plans += 1
        self._count(self._traced_shape(fakes))
        joint = self._symbolic.trace.at(fakes)
        assert joint is not None
        try:
            with lazy_graph_code():
                return self._symbolic.at(joint)
        except InfeasibleBudgetError:  # the search may miss what it found for larger sizes
            if turns is None:
                raise
            self._own_plans, self._borrowing[key] = MAX_OWN_PLANS, turns
            return self._borrow(fakes, sizes)

    def _borrow(self, fakes: Sequence[Any], sizes: Sizes) -> Callable[..., Any] | None:
        """The step of the smallest plan for these and larger sizes; None if none can be made."""
        assert self._symbolic is not None
        larger = [(of.reaches, at) for of, at in self._up_to if sizes.within(of)]
        if larger:
            return min(larger, key=itemgetter(0))[1](sizes.numbers)
        joint = self._symbolic.trace.at(fakes, any_sizes=True)
        if joint is None:
            return None
        self._count(self._traced_shape(fakes))
        with lazy_graph_code():
            made = self._symbolic.up_to(joint)
        if made is None:
            return None
        self._up_to.append((sizes, made))
        return made(sizes.numbers)

    def _learn(self, args: Sequence[Any], fakes: Sequence[Any], of: list[object]) -> None:
        """After some shapes, trace for all sizes; kept if it reproduces their graphs."""
        inputs = [self._inputs[i] for i in self._traced]
        examples = [example_value(given.node) for given in inputs]
        fakes = [fakes[i] for i in self._traced]
        if not of or self._compile_all is None or any(map(_differs_beyond_sizes, examples, fakes)):
            return
        self._known.append((fakes, of))
        if len(self._known) < SHAPES_BEFORE_TRACE:
            return
        compile_all, self._compile_all = self._compile_all, None
        try:
            with lazy_graph_code():
                values = [args[i].item() for i in self._fixed]
                numbers = {
                    self._inputs[i].node: v for i, v in zip(self._fixed, values, strict=True)
                }
                static = _static(self._gm, numbers, {given.node for given in inputs})
                for_all = compile_all(static, examples, [args[i] for i in self._traced])
                made = ((for_all.trace.at(known), wanted) for known, wanted in self._known)
                if all(joint is not None and signature(joint) == wanted for joint, wanted in made):
                    self._symbolic, self._fixed_values = for_all, values
        except Exception as error:  # any of PyTorch's: each size is then traced, as before
            log.debug("a function cannot be traced for all sizes at once: %r", error)
        self._known = []

    def _traced_shape(self, fakes: Sequence[Any]) -> Shape:
        return _shape((self._inputs[i] for i in self._traced), fakes)

    def _count(self, shape: Shape) -> None:
        count = self._per_shape[shape] = self._per_shape.get(shape, 0) + 1
        if count == MAX_NUMBER_GRAPHS:
            log.warning(
                "%d graphs for one input shape, which differ in Python numbers alone: pass a number"
                " that changes with every call as a tensor",
                count,
            )


def _of_inputs(compiled: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """A function of all inputs, of which the compiled one takes those at these positions."""

    def run(*given: Any) -> Any:
        return compiled(*(given[i] for i in positions))

    setattr(run, REPORT, getattr(compiled, REPORT, None))
    return run


def _differs_beyond_sizes(example: Any, value: Any) -> bool:
    """True unless an input is a strided tensor or an integer with a symbol."""
    if isinstance(example, torch.Tensor) and isinstance(value, FakeTensor):
        return example.layout != torch.strided
    return not (isinstance(example, torch.SymInt) and type(value) is int)


def _vanishes(given: _Input) -> bool:
    """True if the static graph has constants in place of an input."""
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


class CallState:
    """State of one `torch.compile` call (`owner`), by function.

    It has the shape planned first, op costs at all captured shapes, and the shape history.
    """

    def __init__(self, owner: object) -> None:
        self.owner = owner  # its id stays its own
        self.shapes: dict[str, Shape] = {}
        self._numbers: dict[tuple[str, str], list[Number]] = {}
        self.costs: defaultdict[str, CostHistory] = defaultdict(CostHistory)
        self.history: defaultdict[str, ShapeHistory] = defaultdict(ShapeHistory)
        self.compilations: Counter[int | None] = Counter()  # by frame
        self._experts_named = False

    def names_experts(self) -> bool:
        """True at the first graph break in experts."""
        first, self._experts_named = not self._experts_named, True
        return first

    def numbers_change(self, function: str, gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """True if the graph for such inputs and parameters had other numbers before."""
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


_firsts: "weakref.WeakValueDictionary[int, CallState]" = weakref.WeakValueDictionary()


def call_state(owner: object) -> CallState:
    """State of the `torch.compile` call `owner`, kept while referenced."""
    found = _firsts.get(id(owner))
    if found is None:
        found = _firsts[id(owner)] = CallState(owner)
    return found


def function_of(gm: fx.GraphModule) -> str:
    """Digest that names the function of a graph, at any shape.

    Graphs have the same function if they were traced from one code object and differ in numbers
    alone: the same inputs, and the same ops on the same values.
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
    """True for a node with numbers, which a static graph has as constants."""
    if node.op == "placeholder":
        return _Input.of(node).number
    value = example_value(node)
    if isinstance(value, (tuple, list)) and value:
        return all(isinstance(part, _NUMBERS) for part in value)
    return isinstance(value, _NUMBERS)


def keep_recompiling(where: str, call: CallState) -> None:
    """Raise Dynamo's recompile limits so that the function at `where` can compile once more.

    Above its limit, Dynamo runs a function eagerly without asking the backend: a new shape would
    run outside any budget. A symbolic graph stays far below the limit. Other calls may have
    compiled the same code, as that of a `Sequential`; a warning is logged for a call's own count.
    """
    frame, earlier = compilation()
    call.compilations[frame] += 1
    if earlier is None:
        return
    count = earlier + 1
    for limit, raised in raise_recompile_limits(count).items():
        log.log(
            logging.WARNING if call.compilations[frame] >= count else logging.DEBUG,
            "%s: compiled %d times, and planned each time; its %s is now %d, or it would run as"
            " eager autograd, not within the budget (a number that changes is a constant to Dynamo"
            " if it is a global, or of one: pass it as an argument)",
            *(where, count, limit, raised),
        )
