"""Dynamo: whom it compiles for, and its configuration."""

import functools
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["TorchDynamoException", "TorchRuntimeError"]

log = logging.getLogger("coop-plan")


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
