"""All that the runtime takes from the inside of PyTorch, each with what it assumes of it.

No other file of the runtime names anything private of PyTorch. Its test holds each assumption
against the installed version, and every other file against this rule. Files and lines named below
are those of 2.13.0.

Two assumptions are in C++. `device/arena.cpp`: an allocator given to `c10::SetCPUAllocator` with
priority 1 serves all memory of tensors on the CPU, by `allocate` or by `raw_allocate`.
`device/exchange.h`: PyTorch's CUDA allocator is an `at::Allocator` with a virtual table of the
Itanium ABI, and asks for the memory of tensors by its entry `allocate`.
"""

import ctypes
import functools
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.comptime import comptime
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch._dynamo.source import LocalSource
from torch._dynamo.utils import preserve_rng_state
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
)
from torch._guards import CompileContext
from torch._library import simple_registry
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    PythonFunctionalizeAPI,
)
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.node import _side_effectful_functions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from coop_plan.runtime.locks import fork_safe_lock

__all__ = [
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "InputMutationAOTOutput",
    "OpOverload",
    "SavedForBackwardsAOTOutput",
    "TorchDispatchMode",
    "TorchDynamoException",
    "TorchRuntimeError",
    "aot_autograd",
    "inplace_overload",
    "out_overload",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
    "unset_fake_temporarily",
]

log = logging.getLogger("coop-plan")

MERSENNE_TWISTER_OFFSETS = (24, 8, 16)
"""In bytes within the state of the CPU's generator: the 624 words, how many are left, the next.

Assumed: the state begins as `CPUGeneratorImplStateLegacy` does (ATen/CPUGeneratorImpl.cpp): a seed
of 64 bits, `left` and `seeded` of 32, `next` of 64, the words, each in 64.
"""

SUPPORTED = ((2, 11), (2, 14))
"""From this version of PyTorch on, up to but without that one: the range that tests have run on."""


def warn_of_version() -> None:
    """Say in the log if this PyTorch is none that the runtime was tested with."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    oldest, beyond = SUPPORTED
    if not oldest <= (major, minor) < beyond:
        log.warning(
            "PyTorch %s was not tested with coop-plan: versions from %d.%d on, below %d.%d, were",
            *(torch.__version__, *oldest, *beyond),
        )


# Dynamo: whom it compiles for, and its configuration.


def prepare_dynamo() -> None:
    """Let Dynamo hand whole models over, with all that this thread compiles from now on.

    DDPOptimizer would split a model into graphs that no budget can bound together; without
    `allow_rnn` a recurrent layer is a graph break. PyTorch lets neither be set for one
    `torch.compile`: both are read before the backend is asked (_dynamo/convert_frame.py:2600,
    _dynamo/variables/builder.py:2463), and of what a backend may bring along for its calls,
    `backend_ctx_ctor` (_dynamo/eval_frame.py:1772), `torch._TorchCompileWrapper`, which stands
    between it and the backend, passes nothing on (__init__.py:2540).
    """
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.allow_rnn = True
    _trace_each_thread_for_itself()
    log.debug("torch._dynamo.config: optimize_ddp = False, allow_rnn = True")


def let_numbers_of_modules_change() -> None:
    """Let Dynamo have symbols for numbers of modules that change, as for those of other objects.

    Otherwise it compiles for each value. PyTorch has no such setting for one `torch.compile`.
    """
    if not torch._dynamo.config.allow_unspec_int_on_nn_module:
        torch._dynamo.config.allow_unspec_int_on_nn_module = True
        log.info(
            "a number in a graph changes, and may be a module's:"
            " torch._dynamo.config.allow_unspec_int_on_nn_module = True"
        )


class _Tracing(threading.local):
    depth = 0


_tracing = _Tracing()


def _trace_each_thread_for_itself() -> None:
    """Let compiled functions be called while another thread traces, as AOTAutograd does.

    Whether something is traced is one flag of the process. A compiled function that is called
    meanwhile refuses (_dynamo/eval_frame.py:1116), as it does for good where two threads traced at
    once and left the flag set (fx/_symbolic_trace.py:797). Assumed: all traces go through
    `Tracer.trace`, and `torch.compile` looks `is_fx_symbolic_tracing` up in its module.
    """
    module: Any = torch.fx._symbolic_trace
    asks, trace = getattr(module, "is_fx_symbolic_tracing", None), module.Tracer.trace
    if asks is None or hasattr(trace, "coop_counted"):
        return

    @functools.wraps(trace)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tracing.depth += 1
        try:
            return trace(self, *args, **kwargs)
        finally:
            _tracing.depth -= 1

    def is_fx_symbolic_tracing() -> bool:
        return _tracing.depth > 0 and bool(asks())

    counted.coop_counted = True  # type: ignore[attr-defined]
    module.Tracer.trace = counted
    module.is_fx_symbolic_tracing = is_fx_symbolic_tracing


def no_other_compiles() -> AbstractContextManager[Any]:
    """While this lasts, other threads that want to compile wait, as they do for each other.

    A trace puts functions of its own into `torch.nn.Module` (fx/_symbolic_trace.py, `_Patcher`),
    which Dynamo in another thread would take for the user's. Assumed: it compiles under this lock.
    """
    lock: Any = torch._dynamo.convert_frame.compile_lock
    return cast("AbstractContextManager[Any]", lock)


def raise_recompile_limits(beyond: int) -> dict[str, int]:
    """Let Dynamo compile the present function more than `beyond` times: {limit: its new value}.

    Assumed: what compiles a frame keeps a limit for its `torch.compile` call, which goes before the
    configuration's (_dynamo/convert_frame.py:771). In versions without, and for the limit over all
    calls, the configuration of this thread is changed; Dynamo reads it before it asks the backend.
    """
    raised: dict[str, int] = {}
    config: Any = torch._dynamo.config
    if config.accumulated_recompile_limit <= beyond:
        raised["accumulated_recompile_limit"] = 2 * beyond
        config.accumulated_recompile_limit = 2 * beyond
    if config.recompile_limit <= beyond:  # the call's own, while it compiles
        raised["recompile_limit"] = 2 * beyond
        frame = _calling(ConvertFrameAssert.__call__.__code__)
        converter: Any = None if frame is None else frame.f_locals["self"]
        if hasattr(converter, "_recompile_limit"):
            converter._recompile_limit = 2 * beyond
        else:
            config.recompile_limit = 2 * beyond
    return raised


def watch_calls(
    backend: Callable[..., Any], asked: Callable[[Any], None], around: Callable[[Any], Any]
) -> None:
    """Call `asked(call)` when something is compiled with `backend`; give each call a context.

    `around(call)` makes the context; `call` is what `compile_call` finds, to which attributes may
    be given. Assumed: a `torch._TorchCompileWrapper` stands for the call; what it has in its
    `__dict__` gets to `torch._dynamo.optimize`, which asks it for `backend_ctx_ctor`
    (_dynamo/repro/after_dynamo.py:87, _dynamo/eval_frame.py:1772).
    """
    wrapper: Any = torch._TorchCompileWrapper
    initialize = wrapper.__init__

    def prepare(self: Any) -> None:
        self.backend_ctx_ctor = partial(around, self)
        _let_trace_pytorchs_own()
        pass_over_words_said_once()
        let_install_hooks()
        asked(self)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        initialize(self, *args, **kwargs)
        if self.compiler_fn is backend:
            prepare(self)

    def registered() -> None:
        frame = _calling(initialize.__code__)
        if frame is not None:
            prepare(frame.f_locals["self"])

    wrapper.__init__ = __init__
    _register_for_each(backend, registered)


def _register_for_each(backend: Any, registered: Callable[[], None]) -> None:
    """Let threads that look for `backend` at once each register it, and call `registered()` then.

    Assumed: who finds that an entry point is not loaded loads it and then calls
    `register_backend`, which refuses a name that is in `_COMPILER_FNS` already
    (_dynamo/backends/registry.py:135).
    """
    registry: Any = torch._dynamo.backends.registry
    refuses = registry.register_backend.__code__

    class Known(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            frame = inspect.currentframe()
            asks = frame is not None and frame.f_back is not None and frame.f_back.f_code is refuses
            return super().__contains__(name) and not (asks and self[str(name)] is backend)

        def __setitem__(self, name: str, made: Any) -> None:
            super().__setitem__(name, made)
            if made is backend:
                registered()

    registry._COMPILER_FNS = Known(registry._COMPILER_FNS)


_top_frame_before: bool | None = None
"""What `wrap_top_frame` was before a module of PyTorch's own was compiled in place."""


def _let_trace_pytorchs_own() -> None:
    """Let Dynamo compile a `torch.nn.Sequential`, say, of which `compile` is being called.

    It passes over frames in PyTorch's own files, and puts one of its own around everything but a
    module's `_call_impl`, which that compiles (_dynamo/eval_frame.py:1047).
    """
    global _top_frame_before
    end_in_place()
    frame = _calling(torch.nn.Module.compile.__code__)
    module = None if frame is None else frame.f_locals["self"]
    if module is not None and torch._dynamo.trace_rules.check(type(module).forward):
        _top_frame_before = torch._dynamo.config.wrap_top_frame
        torch._dynamo.config.wrap_top_frame = True


def pass_over_words_said_once() -> None:
    """Let Dynamo pass over what transformers logs once, or it would break the graph for it.

    GPT-2 says so that its loss is the default one. Assumed: the methods are of `logging.Logger`.
    """
    for name in ("warning_once", "info_once", "warning_advice"):
        method = getattr(logging.Logger, name, None)
        if method is not None:
            torch._dynamo.config.ignore_logging_functions.add(method)
    _let_write_the_configuration()


def let_install_hooks() -> None:
    """Let transformers put the hooks on a model that collect its hidden states, while it is traced.

    It does so under a lock, which Dynamo does not know, at the first call that asks for them.
    Assumed: `comptime` calls what it is given during the trace, and tells it the value of a local
    variable (torch/_dynamo/comptime.py).
    """
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if install is None or getattr(install, "_may_be_traced", False):
        return

    def traced(context: Any) -> None:
        local = context.get_local("model")
        install(local._i_will_not_complain_if_bc_breaks_VariableTracker().value)

    def install_hooks(model: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            comptime(traced)
        else:
            install(model)

    install_hooks._may_be_traced = True  # type: ignore[attr-defined]
    capturing.maybe_install_capturing_hooks = install_hooks


@contextmanager
def told_by_the_error_alone() -> Iterator[None]:
    """Keep an op that fails on fake tensors from being logged with its traceback as well.

    Nor does Dynamo warn of what it traces: each is a page with a stack, of code of libraries.
    """
    logger = logging.getLogger(FakeTensor.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")
            yield
    finally:
        logger.disabled = before


def _let_write_the_configuration() -> None:
    """Let Dynamo go on where it cannot write its configuration with its metrics.

    2.11 cannot if the functions above are in it, and says so as an error (_dynamo/utils.py:1774).
    """
    utils: Any = torch._dynamo.utils
    write = utils._get_dynamo_config_for_logging
    try:
        write()
    except TypeError:
        utils._get_dynamo_config_for_logging = lambda: None


def end_in_place() -> None:
    """What is compiled from now on is compiled as always; the first call asks for it."""
    global _top_frame_before
    if _top_frame_before is not None:
        torch._dynamo.config.wrap_top_frame = _top_frame_before
        _top_frame_before = None


def recorded_nodes() -> int:
    """How many nodes of autograd's graph this thread has made: a number that only rises."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def reasons_to_break() -> dict[str, int]:
    """Why Dynamo broke graphs so far, and how often each."""
    return dict(torch._dynamo.utils.counters["graph_break"])


def compile_call() -> object | None:
    """What stands for the `torch.compile` call that asks the backend; the options may be shared.

    Assumed: the call's `torch._TorchCompileWrapper` asks, by a function of Python.
    """
    frame = _calling(torch._TorchCompileWrapper.__call__.__code__)
    return None if frame is None else frame.f_locals["self"]


def _calling(code: CodeType) -> FrameType | None:
    """The innermost frame of this thread that runs `code`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def compilation() -> tuple[int | None, int | None]:
    """Numbers of the frame that Dynamo compiles, and of its compilation (0 is the first)."""
    found = CompileContext.current_compile_id()
    return (None, None) if found is None else (found.frame_id, found.frame_compile_id)


def compiled_call(module: torch.nn.Module) -> Any:
    """What `module.compile()` put in the place of a module's call, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Put back what `compiled_call` found."""
    module._compiled_call_impl = call


def called_from_compiled() -> bool:
    """Whether what is compiled now is called by a function that Dynamo has split at a graph break.

    Assumed: its code calls what it compiled, and the rest of itself, by names that begin so.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if any(
            name.startswith(("__compiled_fn_", "__resume_at_")) for name in frame.f_code.co_names
        ):
            return True
        frame = frame.f_back
    return False


def compiles_a_part() -> bool:
    """Whether Dynamo compiles a function within the one that it was given, which runs as it is.

    Assumed: around what compiles a frame are the frames that call it, `torch.compile`'s own one of
    `_dynamo/eval_frame.py`, with those of `nn.Module`'s call between.
    """
    frame = _calling(ConvertFrameAssert.__call__.__code__)
    between = (torch._dynamo.convert_frame.__file__, torch.nn.modules.module.__file__)
    while frame is not None and frame.f_code.co_filename in between:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename != torch._dynamo.eval_frame.__file__


def reset_dynamo() -> None:
    """Forget all compiled code."""
    torch._dynamo.reset()


# Dynamo's graphs.


def example_value(node: fx.Node) -> Any:
    """The fake value of a node in Dynamo's graph, with symbols where sizes may change."""
    return node.meta.get("example_value")


def is_boxed_number(node: fx.Node) -> bool:
    """Whether an input is no tensor of the user's: Dynamo puts floats that may change into one.

    NumPy's arrays are passed as tensors too, and are some, as `is_tensor` says.
    """
    given: Any = node.meta.get("grapharg")
    return bool(getattr(given, "pass_arg_as_tensor", False)) and not given.is_tensor


def is_static_input(node: fx.Node) -> bool:
    """Whether an input is a parameter or buffer, which has one address in all calls."""
    return bool((node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


def source_name(node: fx.Node) -> str | None:
    """Where Dynamo found an input, as an expression of the user's frame."""
    source = getattr(node, "_dynamo_source", None)
    return None if source is None else str(source.name)


def takes_gradients(gm: fx.GraphModule) -> bool:
    """Whether `torch.func.grad` or one of its kind runs inside Dynamo's graph.

    Assumed: such a stretch begins with a call of `_grad_increment_nesting`.
    """
    targets = (node.target for node in gm.graph.nodes if node.op == "call_function")
    return any("grad_increment_nesting" in getattr(name, "__name__", "") for name in targets)


def copy_dynamo_node(
    graph: fx.Graph, node: fx.Node, argument: Callable[[fx.Node], Any], *, example: bool = False
) -> fx.Node:
    """`graph.node_copy` of a node in Dynamo's graph, its source kept.

    And its fake value, `example`, if asked for: AOTAutograd does not take it for one to trace with.
    """
    copy = graph.node_copy(node, argument)
    if not example:
        copy.meta.pop("example_value", None)
    if hasattr(node, "_dynamo_source"):
        copy._dynamo_source = node._dynamo_source
    return copy


def scalar_input(graph: fx.Graph, after: fx.Node, name: str, dtype: torch.dtype) -> fx.Node:
    """An input more for one of Dynamo's graphs, `after` another: a tensor without dimensions."""
    with graph.inserting_after(after):
        node = graph.placeholder(name)
    node._dynamo_source = LocalSource(name)
    with FakeTensorMode():
        node.meta["example_value"] = torch.empty((), dtype=dtype, device="cpu")
    return node


def symbols_in(value: Any) -> set[Any]:
    """The symbols in a number, or in how a tensor lies in memory, of Dynamo's."""
    sizes = (size for size in _sizes(value) if isinstance(size, (torch.SymInt, torch.SymFloat)))
    return {symbol for size in sizes for symbol in size.node.expr.free_symbols}


def dynamo_module(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """`graph` as a module that AOTAutograd takes for one of Dynamo's, as `gm` is.

    Assumed: by the module's `meta` and `_param_name_to_source` it knows Dynamo's graphs, and the
    parameters among their inputs.
    """
    module = _make_graph_module(gm, graph)
    module.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        module._param_name_to_source = gm._param_name_to_source
    return module


def code_on_demand() -> AbstractContextManager[None]:
    """Let graphs that are interpreted or taken apart, as AOTAutograd's are, have no code made.

    As Dynamo does around its backends; this is for graphs that are compiled after it.
    """
    return cast("AbstractContextManager[None]", _use_lazy_graph_module(True))


class Symbols:
    """The symbols of one trace: sizes that Dynamo found to differ from call to call.

    `inputs` are stand-ins for those of Dynamo's graph, with symbols where `examples`, its own, have
    some; `values` are the inputs of a call. Assumed: what a trace found out about its symbols is in
    `guards`, `replacements` and their ranges; nothing is left open without deferred assertions.
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
            if not value.dim() and not value.requires_grad:  # with a source it had a symbol inside
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
        """What each symbol is at these inputs; None if the trace does not hold for them."""
        bound: dict[Any, int] = {}
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
        environment = self._environment
        if environment.deferred_runtime_asserts or environment.replacements:
            return None
        for symbol, allowed in environment.var_to_range.items():
            if symbol not in bound or not allowed.lower <= bound[symbol] <= allowed.upper:
                return None
        held = (guard.expr.xreplace(bound) for guard in environment.guards)
        return bound if all(bool(one == True) for one in held) else None  # noqa: E712 - of sympy


def _sizes(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [value]
    return [*value.shape, *value.stride(), value.storage_offset()]


def at_sizes(size: Any, bound: dict[Any, int]) -> int:
    """A size that may have symbols in it, where these have values; what is found is added there."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    found = bound.get(expression)
    if found is None:
        found = bound[expression] = int(expression.xreplace(bound))
    return found


def is_whole(value: object) -> bool:
    """Whether a value of a traced graph is an integer, which may have symbols in it."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_size(node: fx.Node) -> bool:
    """Whether a node of a traced graph stands for a number that is made of sizes."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymBool, torch.SymFloat))


def graph_break(gm: fx.GraphModule) -> tuple[str, int, str] | None:
    """File, line and reason of the graph break that ends Dynamo's graph `gm`, if one does."""
    ended = getattr(gm, "compile_subgraph_reason", None)
    if ended is None or not ended.graph_break or not ended.user_stack:
        return None
    frame = ended.user_stack[-1]
    return frame.filename, frame.lineno, str(ended.reason)


# AOTAutograd's joint graph, and the code that runs in its place.


def is_primal(node: fx.Node) -> bool:
    """Whether an input of a joint graph is one of the forward; AOTAutograd says so by its name."""
    return node.op == "placeholder" and str(node.target).startswith("primals")


def is_tangent(node: fx.Node) -> bool:
    """Whether an input of a joint graph is the gradient of an output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def plain_outputs(module: fx.GraphModule) -> list[Any]:
    """What AOTAutograd says of the outputs of a joint graph, to the first that is not one tensor.

    Assumed: the first are those of its autograd function, in order, which a subclass of tensors
    would have fewer of.
    """
    output = next(iter(reversed(module.graph.nodes)))
    plain = (InputMutationAOTOutput, IntermediateBaseAOTOutput, PlainAOTOutput)
    descs = output.meta.get("desc", [])
    end = next((i for i, desc in enumerate(descs) if not isinstance(desc, plain)), len(descs))
    return list(descs[:end])


def tangent_output(node: fx.Node) -> Any:
    """What `plain_outputs` has of the output that a tangent is the gradient of."""
    return getattr(node.meta.get("desc"), "output", None)


def compiled_node(outputs: Sequence[Any]) -> Any:
    """The node of autograd that runs the backward of a call with these outputs, if one shows.

    An output may be a view of one of AOTAutograd's. Assumed: the node is a `CompiledFunction`'s.
    """
    made = (value.grad_fn for value in outputs if isinstance(value, torch.Tensor))
    nodes: list[Any] = [node for node in made if node is not None]
    behind = [following for node in nodes for following, _ in node.next_functions]
    for node in (*nodes, *behind):
        if type(node).__name__ == "CompiledFunctionBackward":
            return node
    return None


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`run`, which AOTAutograd then gives its arguments in one list, for it to empty.

    Otherwise they live as long as the call.
    """
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def inside_backward() -> bool:
    """Whether this thread runs within a call of the autograd engine."""
    return bool(torch._C._current_graph_task_id() != -1)


def makes_a_graph() -> bool:
    """Whether the compiled backward that runs in this thread is asked for `create_graph=True`.

    Gradients are off while it runs, as within any `autograd.Function`. Assumed: AOTAutograd runs it
    from `_double_backward` then (_functorch/_aot_autograd/runtime_wrappers.py:3484).
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_double_backward":
            return True
        frame = frame.f_back
    return False


def tensor_version(tensor: torch.Tensor) -> int:
    """How often a tensor, or one that it shares its counter with, has been overwritten."""
    return 0 if tensor.is_inference() else int(tensor._version)


def when_gone(tensor: torch.Tensor) -> Callable[[], bool]:
    """Says later whether its storage is gone; autograd gives that to other tensors."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    gone: Callable[[], bool] = reference.expired
    return gone


# What autograd does with a gradient when the backward is over: `AccumulateGrad` adds it to `.grad`.


def hooks_use_gradient(leaf: torch.Tensor) -> bool:
    """Whether hooks are called when a gradient was added, and none with it before that."""
    return bool(leaf._post_accumulate_grad_hooks) and not leaf._backward_hooks


def leaves_of(gm: fx.GraphModule) -> list[torch.Tensor]:
    """The leaves with gradients among the inputs of Dynamo's graph, as the user has them.

    Assumed: while the backend is asked, Dynamo has its inputs in `grapharg`.
    """
    given = (node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder"))
    inputs = [None if of is None else of.example for of in given]
    tensors = (value for value in inputs if isinstance(value, torch.Tensor))
    return [value for value in tensors if value.is_leaf and value.requires_grad]


def all_use_gradients(gm: fx.GraphModule) -> bool:
    """Whether hooks are called after the gradient of every leaf among a graph's inputs."""
    leaves = leaves_of(gm)
    return bool(leaves) and all(map(hooks_use_gradient, leaves))


def gradient_hooks(leaf: torch.Tensor) -> bool:
    """Whether Python functions are called with a gradient before it is added, or after."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def accumulate_node(leaf: torch.Tensor) -> Any:
    """The node of autograd that adds to `leaf.grad`."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class _Called:
    """A hook of a leaf that was called in a backward already, in which autograd calls it again.

    Autograd calls them for a gradient of nothing, too. It stays in the hook's place.
    """

    def __init__(self, hook: Callable[[torch.Tensor], None]) -> None:
        self.hook = hook
        self.backward = -1  # the number that autograd has for it

    def __call__(self, leaf: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != self.backward:
            return self.hook(leaf)
        return None


def give_gradient(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Do what autograd does with the gradient of a leaf that has none, and with its hooks.

    It does not call them again in the backward that runs now. (torch/csrc/autograd/functions/
    accumulate_grad.h, cases 1.1 and 1.4, and utils/grad_layout_contract.h)
    """
    strides = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    if any(size > 1 and wanted != stride for size, wanted, stride in strides):
        gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
    leaf.grad = gradient.detach()
    hooks: Any = leaf._post_accumulate_grad_hooks
    for key, hook in tuple(hooks.items()):
        called = hooks[key] = hook if isinstance(hook, _Called) else _Called(hook)
        called.backward = torch._C._current_graph_task_id()
        if called.hook(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def after_this_backward(run: Callable[[], None]) -> None:
    """Call a function when the backward that runs now is over."""
    torch.autograd.Variable._execution_engine.queue_callback(run)


def runs_in_this_backward(node: Any) -> bool:
    """Whether autograd runs a leaf's node in the backward that runs now.

    `torch.autograd.grad` returns the gradient instead.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


# Ops and tensors.


def is_mutable(op: OpOverload) -> bool:
    """Whether an op overwrites an argument, by its schema."""
    return bool(op._schema.is_mutable)


def is_view_op(target: object) -> bool:
    """Whether an op returns one view of an argument, by its schema."""
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def out_overload(op: OpOverload) -> tuple[OpOverload, str] | None:
    """The overload of a functional op that writes its one result into a tensor it is given.

    With the name of that argument; None if there is none that takes the same otherwise.
    """
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        found = getattr(packet, name)
        written = [a.name for a in found._schema.arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in found._schema.arguments if not a.is_out]
        if len(written) == 1 and others == wanted:
            return found, written[0]
    return None


def inplace_overload(op: OpOverload) -> OpOverload | None:
    """The op of a functional op that writes over its first argument; None if there is none."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = getattr(torch.ops.aten, op._schema.name.partition("::")[2] + "_", None)
    found = None if packet is None else getattr(packet, op._overloadname, None)
    if op.namespace != "aten" or found is None:
        return None
    same = [(a.name, str(a.type)) for a in found._schema.arguments] == wanted
    return found if same and len(found._schema.returns) == 1 else None


def argument_names(op: OpOverload) -> list[str]:
    """The names of an op's arguments, in order."""
    return [argument.name for argument in op._schema.arguments]


def returns_of(op: OpOverload) -> int:
    """How many results an op has, by its schema."""
    return len(op._schema.returns)


def schema_text(op: OpOverload) -> str:
    """The schema of an op as `torch.library` takes it, namespace included."""
    return str(op._schema)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view that is read with the sign turned round, as `imag` of a conjugate is."""
    return torch._neg_view(tensor)


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for zeros that autograd makes without memory."""
    return tensor._is_zerotensor()


FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
EFFICIENT_BACKWARD: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""Attention's backwards on CUDA, whose arguments are the gradient, query, key, value, ..."""

SEEDS_ON_CPU = (
    EFFICIENT_BACKWARD.default,
    torch.ops.aten._efficient_attention_backward.default,
)
"""Backwards that dereference `philox_seed` and `philox_offset` outside a capture.

Assumed: aten/native/transformers/cuda/attention_backward.cu, where there is dropout.
"""

FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_ON_CPU: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD_ON_CPU: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors have in common only if they share their storage, while it lives."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def real_world() -> Iterator[None]:
    """Run ops on real tensors while a graph is traced: no fake mode, no autocast, no gradients.

    The generators stand where they stood when it ends.
    """
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        preserve_rng_state(),
    ):
        yield


@contextmanager
def below_autograd_in_grad_mode() -> Iterator[None]:
    """Let kernels run without autograd around them, as if it were: some read the grad mode."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        yield


# Ranks.


def first_rank(group: str) -> int:
    """The lowest global rank of the process group that c10d knows by a name."""
    c10d: Any = torch.distributed.distributed_c10d
    return min(torch.distributed.get_process_group_ranks(c10d._resolve_process_group(group)))


def is_object(value: object) -> bool:
    """Whether a value of a traced graph stands for an object that is neither tensor nor number."""
    return isinstance(value, FakeScriptObject)


def real_object(value: Any) -> Any:
    """What such a value stands for. Assumed: it is in `real_obj`."""
    return value.real_obj


def group_name(value: Any) -> str:
    """The name of the process group that a value of a traced graph stands for.

    Assumed: it is the name, the group, or a `FakeScriptObject` that stands for the group.
    """
    group = real_object(value) if is_object(value) else value
    return str(getattr(group, "group_name", group))


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there."""
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(tensor)
    return waited


def group_of_all() -> str | None:
    """The name of the process group of all ranks; None where this process is alone."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if torch.distributed.get_world_size() == 1:
        return None
    world: Any = torch.distributed.group.WORLD
    return str(world.group_name)


def ranks() -> int:
    """Of this job."""
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    return 1 if alone else torch.distributed.get_world_size()


def default_store() -> Any:
    """The store by which the ranks of this job found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


# How ops are traced. These two change PyTorch for all threads while they last: the tables are the
# process's. One thread at a time does so; what others trace meanwhile is traced alike.

_patched = fork_safe_lock()

_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextmanager
def python_kernels(wanted: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """Trace each op by the given Python function, or, with None, by its C++ code.

    Assumed: PyTorch's own Python versions of composite ops are in `py_kernels` of the op, under
    `Autograd` and `CompositeImplicitAutograd`; without an entry the C++ kernel runs; what was
    looked up before is in `_dispatch_cache`.
    """
    with _patched:
        kept = {op: {key: op.py_kernels.get(key) for key in _KEYS} for op in wanted}
        try:
            for op, kernel in wanted.items():
                _set_kernels(op, dict.fromkeys(_KEYS, kernel))
            yield
        finally:
            for op, kernels in kept.items():
                _set_kernels(op, kernels)


def _set_kernels(op: Any, kernels: Mapping[Any, Any]) -> None:
    for key, kernel in kernels.items():
        if kernel is None:
            op.py_kernels.pop(key, None)
        else:
            op.py_kernels[key] = kernel
    op._dispatch_cache.clear()


def run_composite(op: Any, *args: Any) -> Any:
    """Run the C++ code of a composite op, whatever stands in its `py_kernels`."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def composite_overloads(names: Sequence[str]) -> list[Any]:
    """All overloads of those of the named ATen ops that this PyTorch has."""
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


LINALG_CHECK: Any = torch.ops.aten._linalg_check_errors.default
"""Raises what `torch.linalg` raises, for a matrix that is singular, say."""


TO_NUMBER: Any = torch.ops.aten._local_scalar_dense.default
"""What `tensor.item()` calls."""

LOG_SOFTMAX_BACKWARD: Any = torch.ops.aten._log_softmax_backward_data.default
"""What the gradient of `log_softmax` is computed by, and of `cross_entropy`."""

SOFTMAXES: frozenset[Any] = frozenset(
    {
        torch.ops.aten._softmax.default,
        torch.ops.aten._log_softmax.default,
        torch.ops.aten._softmax_backward_data.default,
        LOG_SOFTMAX_BACKWARD,
    }
)
"""Ops of which each row of the result depends on that row alone."""

CPU_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
"""What `scaled_dot_product_attention` runs on the CPU where it can."""


def log_softmax_backward(
    gradient: torch.Tensor,
    output: torch.Tensor,
    dim: int,
    dtype: torch.dtype,
    *,
    out: torch.Tensor,
) -> None:
    """`LOG_SOFTMAX_BACKWARD`, written into `out`, which may be `output`."""
    torch.ops.aten._log_softmax_backward_data.out(gradient, output, dim, dtype, out=out)


@contextmanager
def kept_though_unused(op: OpOverload) -> Iterator[None]:
    """Trace an op without outputs where it stands, with no token from one effect to the next.

    Assumed: the registry's `effect` of an op says whether a token is handed through it, which 2.11
    does not for checks; and what is in `_side_effectful_functions` is no dead code.
    """
    holder: Any = getattr(simple_registry.singleton.find(op._schema.name), "effect", None)
    with _patched:
        kept = None if holder is None else holder.effect
        is_new = op not in _side_effectful_functions
        try:
            if holder is not None:
                holder.register(None)
            _side_effectful_functions.add(op)
            yield
        finally:
            if holder is not None:
                holder.register(kept)
            if is_new:
                _side_effectful_functions.discard(op)


@contextmanager
def before_functionalization(see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call `see(op, args)` before AOTAutograd functionalizes an op.

    Assumed: it asks `FunctionalTensorMode.__torch_dispatch__`, which it looks up at the class.
    """
    functional: Any = FunctionalTensorMode
    with _patched:
        kept = functional.__torch_dispatch__

        def dispatch(
            mode: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            see(func, args)
            return kept(mode, func, types, args, kwargs)

        functional.__torch_dispatch__ = dispatch
        try:
            yield
        finally:
            functional.__torch_dispatch__ = kept


def lay_out_functional(
    changed: Any, spread: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
) -> None:
    """Let a functional tensor stand for `spread(what it stands for, its strides)`.

    Nothing is done if it stands for a tensor of its own strides. Assumed: a `FunctionalTensor` has
    the strides of eager, and its `elem` those of the functional graph.
    """
    if not isinstance(changed, FunctionalTensor) or changed.stride() == changed.elem.stride():
        return
    trace = PythonFunctionalizeAPI()
    with trace.redispatch_to_next():
        moved = spread(trace.unwrap_tensors(changed), changed.stride())
    trace.replace(changed, moved)
    trace.commit_update(changed)
    trace.sync(changed)


# CUDA.

CUDA_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"

CUDA_ALLOCATOR = "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
"""`c10::cuda::CUDACachingAllocator::allocator`, a pointer to the allocator that PyTorch uses."""


def cuda_allocator() -> int | None:
    """The address of PyTorch's CUDA allocator, or None if there is none yet.

    Raises:
        OSError, ValueError: no such library, or no such name in it.
    """
    return ctypes.c_void_p.in_dll(ctypes.CDLL(str(CUDA_LIBRARY)), CUDA_ALLOCATOR).value


def cuda_function(name: str) -> int:
    """The address of a function of the CUDA runtime that PyTorch uses.

    Assumed: libc10_cuda is linked to it, so that what it is made of is found with it (dlsym).

    Raises:
        OSError, AttributeError: no such library, or no such name.
    """
    function = getattr(ctypes.CDLL(str(CUDA_LIBRARY)), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def keep_busy(cycles: int) -> None:
    """Occupy the current stream for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def believe_in_cuda(name: str, memory_bytes: int) -> None:
    """Let Python's side of CUDA not ask for a device (`runtime/capture/deviceless.py`).

    Scripts ask what it is called and has, `torch.nn.DataParallel` for its multiprocessors, too: it
    says one, as how many is not known, and there is no other device to compare it with.

    Assumed: what makes a tensor on CUDA calls `torch.cuda._lazy_init`, which refuses in builds
    without CUDA; autocast does nothing unless `torch.cuda.is_available()`, as other modules do;
    a fake mode that avoids devices keeps its constants off them (`avoid_device_init`).
    """
    mode: Any = FakeTensorMode
    mode.avoid_device_init = True
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    has = SimpleNamespace(name=name, total_memory=memory_bytes, multi_processor_count=1)
    cuda.get_device_properties = lambda device=None: has
    cuda.get_device_name = lambda device=None: name
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()  # around what is traced
    cuda.set_rng_state = lambda state, device="cuda": None
    cudnn: Any = torch.backends.cudnn
    cudnn.is_acceptable = lambda tensor: False  # it would warn at each recurrent layer


@contextmanager
def copyable_fakes() -> Iterator[None]:
    """Let `copy.deepcopy` copy fake parameters, as `torch.nn.Transformer` copies its layers.

    Assumed: a fake tensor is copied with its attributes, its mode among them
    (torch/_tensor.py:158); of two modes tensors do not mix.
    """
    mode: Any = FakeTensorMode
    mode.__deepcopy__ = lambda self, _: self
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        del mode.__deepcopy__


@contextmanager
def tensors_of_sizes(device: torch.device) -> Iterator[None]:
    """Let `torch.Tensor(3, 4)` make its tensor on `device`, as `torch.empty(3, 4)` does there.

    Assumed: `torch.Tensor` is a class of Python that leaves `__new__` to its base, which knows no
    default device.
    """
    tensor: Any = torch.Tensor
    original = tensor.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        return made.to(device) if cls is tensor else made

    tensor.__new__ = new
    try:
        yield
    finally:
        tensor.__new__ = original


@contextmanager
def nothing_drawn_twice() -> Iterator[None]:
    """Let `torch.nn.init.trunc_normal_` leave fake parameters as they are.

    It draws anew until all values are within its bounds, which asks for them. Assumed: it calls
    `_no_grad_trunc_normal_` of its module.
    """
    init: Any = torch.nn.init
    original = init._no_grad_trunc_normal_

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    init._no_grad_trunc_normal_ = drawn
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


@contextmanager
def convertible_modules() -> Iterator[None]:
    """Let `module.to(...)` work on fake parameters.

    `torch.nn.Module._apply` swaps the contents of fake tensors, which it may not do with those that
    are referred to elsewhere, as the fake mode does. Here a parameter is replaced, one that several
    modules have by one new one.
    """
    made: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}

    def converted(given: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if id(given) not in made:
            with torch.no_grad():
                value = fn(given)
            new = torch.nn.Parameter(value, given.requires_grad)
            made[id(given)] = given, cast("Any", given) if value is given else new
        return made[id(given)][1]

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, given in self._parameters.items():
            if given is not None:
                self._parameters[name] = converted(given, fn)
        for name, given in self._buffers.items():
            if given is not None:
                self._buffers[name] = fn(given)
        return self

    module: Any = torch.nn.Module
    original, module._apply = module._apply, _apply
    try:
        yield
    finally:
        module._apply = original
