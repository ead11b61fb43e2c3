"""Dynamo: its configuration, and the `torch.compile` calls that it compiles for."""

import functools
import inspect
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import CodeType, FrameType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor

from coop_plan.runtime.locks import fork_safe_lock

__all__ = ["TorchDynamoException", "TorchRuntimeError"]

log = logging.getLogger("coop-plan")


_config: Any = torch._dynamo.config
_change_settings = _config._make_closure_patcher(optimize_ddp=False, allow_rnn=True)

SETTINGS_OF_THREADS = isinstance(_config._config["allow_rnn"].user_override, ContextVar)
"""True if Dynamo's settings belong to a thread (utils/_config_module.py:351); not in 2.11."""


def compile_whole_models() -> Callable[[], None]:
    """Let Dynamo compile whole models, in this thread; returns a function that ends it.

    DDPOptimizer would split a model into graphs that no budget can bound together, and without
    `allow_rnn` a recurrent layer is a graph break. Dynamo reads both before it calls the backend
    (_dynamo/convert_frame.py:2600, _dynamo/variables/builder.py:2463), so they are set around each
    call of a compiled function. Settings that all threads share are kept: another thread may be
    compiling at the end of the call.
    """
    restore: Callable[[], None] = _change_settings()
    return restore if SETTINGS_OF_THREADS else lambda: None


def allow_symbolic_module_ints() -> None:
    """Make changing integers of modules symbolic, as Dynamo does for those of other objects.

    Otherwise it compiles once per value. PyTorch has no such setting for one `torch.compile`.
    """
    if not torch._dynamo.config.allow_unspec_int_on_nn_module:
        torch._dynamo.config.allow_unspec_int_on_nn_module = True
        log.info(
            "a number in a graph changes, and may be an attribute of a module:"
            " torch._dynamo.config.allow_unspec_int_on_nn_module = True"
        )


class _Tracing(threading.local):
    depth = 0


_tracing = _Tracing()


def make_tracing_flag_thread_local() -> None:
    """Make FX's tracing flag thread-local, so that compiled functions run while others trace.

    Before 2.14, PyTorch has one flag per process. A compiled function raises while it is set
    (_dynamo/eval_frame.py:1116), before anything of its backend runs, and two threads that trace at
    once may leave it set (fx/_symbolic_trace.py:797): there is no way without a patch. Assumed: all
    traces go through `Tracer.trace`, and `torch.compile` looks up `is_fx_symbolic_tracing` in its
    module.
    """
    module: Any = torch.fx._symbolic_trace
    is_tracing, trace = getattr(module, "is_fx_symbolic_tracing", None), module.Tracer.trace
    if not hasattr(module, "_is_fx_tracing_flag") or is_tracing is None:
        return
    if hasattr(trace, "coop_counted"):
        return

    @functools.wraps(trace)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tracing.depth += 1
        try:
            return trace(self, *args, **kwargs)
        finally:
            _tracing.depth -= 1

    def is_fx_symbolic_tracing() -> bool:
        return _tracing.depth > 0 and bool(is_tracing())

    counted.coop_counted = True  # type: ignore[attr-defined]
    module.Tracer.trace = counted
    module.is_fx_symbolic_tracing = is_fx_symbolic_tracing


def block_other_compiles() -> AbstractContextManager[Any]:
    """Lock under which no other thread compiles.

    A trace patches `torch.nn.Module` (fx/_symbolic_trace.py, `_Patcher`), and Dynamo in another
    thread would compile the patches. Assumed: Dynamo compiles under this lock.
    """
    lock: Any = torch._dynamo.convert_frame.compile_lock
    return cast("AbstractContextManager[Any]", lock)


_converters: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Frame converters of the `torch.compile` calls with this backend, which have equal limits."""

_limit = 0
"""The limit of all of them; 0: that of the configuration."""

_sharing = fork_safe_lock()


def raise_recompile_limits(beyond: int) -> dict[str, int]:
    """Let Dynamo compile the current function more than `beyond` times; returns the new limits.

    Assumed: the frame converter has a limit for its `torch.compile` call, which overrides the
    configuration (_dynamo/convert_frame.py:771). Without one, and for the accumulated limit, the
    configuration of this thread is changed; Dynamo reads it before it calls the backend. Calls
    whose functions share code also share its count, so that all get the new limit.
    """
    global _limit
    raised: dict[str, int] = {}
    config: Any = torch._dynamo.config
    if config.accumulated_recompile_limit <= beyond:
        raised["accumulated_recompile_limit"] = 2 * beyond
        config.accumulated_recompile_limit = 2 * beyond
    if config.recompile_limit <= beyond:  # during a compilation: the limit of its call
        raised["recompile_limit"] = 2 * beyond
        frame = _frame_of(ConvertFrameAssert.__call__.__code__)
        converter: Any = None if frame is None else frame.f_locals["self"]
        if hasattr(converter, "_recompile_limit"):
            with _sharing:
                _limit = max(_limit, 2 * beyond)
                for each in {converter, *_converters}:
                    each._recompile_limit = max(2 * beyond, each._recompile_limit or 0)
        else:
            config.recompile_limit = 2 * beyond
    return raised


def forget_recompile_limit() -> None:
    """Give later `torch.compile` calls the configuration's limit, after Dynamo's reset."""
    global _limit
    _limit = 0


def share_recompile_limit() -> None:
    """Give the `torch.compile` call that begins in this thread the limit of the earlier ones.

    Assumed: the call runs in a function with its `_TorchDynamoContext` as `self`, whose callback
    leads to the frame converter (_dynamo/eval_frame.py:1077).
    """
    frame = outer_frame(inspect.currentframe())
    while frame is not None:
        found: Any = frame.f_locals.get("self")
        if isinstance(found, torch._dynamo.eval_frame._TorchDynamoContext):
            found = found.callback
            break
        frame = frame.f_back
    while frame is not None and found is not None and not isinstance(found, ConvertFrameAssert):
        inner = getattr(found, "_torchdynamo_orig_backend", None)
        found = getattr(found, "_inner_convert", inner)
    if not hasattr(found, "_recompile_limit"):
        return
    with _sharing:
        _converters.add(found)
        if _limit > torch._dynamo.config.recompile_limit:
            found._recompile_limit = max(_limit, found._recompile_limit or 0)


def watch_calls(
    backend: Callable[..., Any], asked: Callable[[Any], None], around: Callable[[Any], Any]
) -> None:
    """Call `asked(call)` at each `torch.compile` with `backend`; run its calls in a context.

    `around(call)` creates the context. `call` is the object that `compile_call` returns; it accepts
    attributes. Assumed: the object is a `torch._TorchCompileWrapper`, whose `__dict__` reaches
    `torch._dynamo.optimize`, which reads `backend_ctx_ctor` from it
    (_dynamo/repro/after_dynamo.py:87, _dynamo/eval_frame.py:1772).

    There is no way without a patch of that class. Until Dynamo has a graph, PyTorch reads nothing
    of a registered backend: the wrapper finds it in a `dict` (_dynamo/backends/registry.py:134) and
    does not forward its attributes. A frame that Dynamo skips never has a graph.
    """
    wrapper: Any = torch._TorchCompileWrapper
    initialize = wrapper.__init__

    def prepare(self: Any) -> None:
        self.backend_ctx_ctor = partial(around, self)
        _allow_tracing_torch_modules()
        ignore_once_loggers()
        allow_output_capturing_hooks()
        asked(self)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        initialize(self, *args, **kwargs)
        if self.compiler_fn is backend:
            prepare(self)

    def registered() -> None:
        frame = _frame_of(initialize.__code__)
        if frame is not None:
            prepare(frame.f_locals["self"])

    wrapper.__init__ = __init__
    _register_for_each(backend, registered)


def _register_for_each(backend: Any, registered: Callable[[], None]) -> None:
    """Let concurrent lookups of `backend` each register it; calls `registered()` each time.

    Assumed: a lookup loads the entry point and then calls `register_backend`, which raises if the
    name is in `_COMPILER_FNS` already (_dynamo/backends/registry.py:135). In between, only this
    dict is asked. Without a patch of the dict the second lookup fails, and the first function
    compiled is not prepared, since its lookup imports the backend.
    """
    registry: Any = torch._dynamo.backends.registry
    refuses = registry.register_backend.__code__

    class Known(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            frame = inspect.currentframe()
            caller = None if frame is None else frame.f_back
            registers = caller is not None and caller.f_code is refuses
            return super().__contains__(name) and not (registers and self[str(name)] is backend)

        def __setitem__(self, name: str, made: Any) -> None:
            super().__setitem__(name, made)
            if made is backend:
                registered()

    registry._COMPILER_FNS = Known(registry._COMPILER_FNS)


_top_frame_before: bool | None = None
"""Value of `wrap_top_frame` before `compile()` of a module class of PyTorch; None: not changed."""


def _allow_tracing_torch_modules() -> None:
    """Let `module.compile()` compile module classes of PyTorch, as `torch.nn.Sequential`.

    Dynamo skips frames in PyTorch's files. It wraps everything in a frame of its own except a
    module's `_call_impl`, which `compile()` compiles (_dynamo/eval_frame.py:1047).
    """
    global _top_frame_before
    restore_top_frame()
    frame = _frame_of(torch.nn.Module.compile.__code__)
    module = None if frame is None else frame.f_locals["self"]
    if module is not None and torch._dynamo.trace_rules.check(type(module).forward):
        _top_frame_before = torch._dynamo.config.wrap_top_frame
        torch._dynamo.config.wrap_top_frame = True


def ignore_once_loggers() -> None:
    """Let Dynamo ignore the log-once methods of transformers, which are graph breaks otherwise.

    GPT-2 calls one for its default loss. Assumed: they are methods of `logging.Logger`.
    """
    for name in ("warning_once", "info_once", "warning_advice"):
        method = getattr(logging.Logger, name, None)
        if method is not None:
            torch._dynamo.config.ignore_logging_functions.add(method)
    _tolerate_unserializable_config()


def allow_output_capturing_hooks() -> None:
    """Let transformers install the hooks that collect hidden states while a model is traced.

    It installs them at the first call that needs them, under a lock that Dynamo cannot trace.
    Assumed: `comptime` calls its argument during the trace, with access to the values of local
    variables (torch/_dynamo/comptime.py).
    """
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if install is not None:
        _call_while_traced(install)


@functools.cache
def _call_while_traced(install: Callable[[Any], None]) -> None:
    """Let Dynamo call a function of `model` during the trace, instead of tracing it."""

    def call(context: Any) -> None:
        local = context.get_local("model")
        install(local._i_will_not_complain_if_bc_breaks_VariableTracker().value)

    def traced(model: Any) -> None:
        comptime(call)

    torch.compiler.substitute_in_graph(install)(traced)


@contextmanager
def suppress_duplicate_reports() -> Iterator[None]:
    """Do not log the traceback of an op that fails on fake tensors; the error has it.

    Dynamo's warnings are off, too: each is a page of library stack.
    """
    logger = logging.getLogger(FakeTensor.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")
            yield
    finally:
        logger.disabled = before


def _tolerate_unserializable_config() -> None:
    """Skip Dynamo's configuration in its metrics if it cannot be serialized.

    2.11 raises if the functions above are in it (_dynamo/utils.py:1774).
    """
    utils: Any = torch._dynamo.utils
    write = utils._get_dynamo_config_for_logging
    try:
        write()
    except TypeError:
        utils._get_dynamo_config_for_logging = lambda: None


def restore_top_frame() -> None:
    """Undo `_allow_tracing_torch_modules`, after the first call of the module."""
    global _top_frame_before
    if _top_frame_before is not None:
        torch._dynamo.config.wrap_top_frame = _top_frame_before
        _top_frame_before = None


def recorded_nodes() -> int:
    """Number of autograd nodes that this thread has created; it never decreases."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def graph_break_counts() -> dict[str, int]:
    """Number of graph breaks so far, by reason."""
    return dict(torch._dynamo.utils.counters["graph_break"])


def refusal_counts() -> dict[str, int]:
    """Number of times that Dynamo left a frame, by reason."""
    return dict(torch._dynamo.utils.counters["unimplemented"])


def compile_call() -> object | None:
    """Identity of the `torch.compile` call that calls the backend; calls may share options.

    Assumed: the call's `torch._TorchCompileWrapper` calls the backend from a Python function.
    """
    frame = _frame_of(torch._TorchCompileWrapper.__call__.__code__)
    return None if frame is None else frame.f_locals["self"]


def _frame_of(code: CodeType) -> FrameType | None:
    """The innermost frame of this thread that runs `code`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def outer_frame(frame: FrameType | None) -> FrameType | None:
    """The frame that called `frame`: a walk that reads locals begins there.

    A frame whose `f_locals` were read holds them. One that holds itself, and so the frames that
    called it with their tensors, lives until garbage is collected.
    """
    return None if frame is None else frame.f_back


def compilation() -> tuple[int | None, int | None]:
    """Ids of the frame that Dynamo compiles, and of its compilation (0 is the first)."""
    found = CompileContext.current_compile_id()
    return (None, None) if found is None else (found.frame_id, found.frame_compile_id)


def compiled_call(module: torch.nn.Module) -> Any:
    """The call that `module.compile()` has set on a module, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Restore the value of `compiled_call`."""
    module._compiled_call_impl = call


def reset_dynamo() -> None:
    """Drop all compiled code.

    Where a CUDA device is available, PyTorch before 2.14 loads Inductor to drop its CUDA graphs:
    half of the CPU time of a first capture for an absent device. There are none if it is not
    loaded.
    """
    if "torch._inductor.cudagraph_trees" in sys.modules:
        torch._dynamo.reset()
        return
    with patch.object(torch.cuda, "is_available", lambda: False):
        torch._dynamo.reset()
