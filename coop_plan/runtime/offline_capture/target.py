"""Capturing what a user names as `package.module:function`."""

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.tracing_rules import as_eager
from coop_plan.runtime.capture.joint_graph import capture_joint
from coop_plan.runtime.capture.diagnostics import reason
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.offline_capture.optimizer_state import with_state
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals.dynamo import (
    TorchDynamoException,
    let_install_hooks,
    pass_over_words_said_once,
    prepare_dynamo,
    reset_dynamo,
    told_by_the_error_alone,
)
from coop_plan.runtime.torch_internals.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from coop_plan.runtime.torch_internals.joint_graphs import aot_autograd
from coop_plan.schemas import Graph, InvalidInputError


def capture_target(
    spec: str,
    batch: int | None = None,
    optimizer: str | None = None,
    masters: bool = False,
    *,
    variants: bool = False,
) -> Graph:
    """The profiled graph of the step that `package.module:function` describes.

    Raises:
        InvalidInputError: no such module or function, or not such a result.
        CaptureError: the step cannot be captured.
    """
    step, args = called(spec, batch)
    name = spec.rpartition(":")[2]
    return capture(step, args, name=name, optimizer=optimizer, masters=masters, variants=variants)


def called(spec: str, batch: int | None = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What the function `package.module:function` returns: a callable and its example arguments.

    The function takes no arguments, or one named `batch`, and returns a callable and its example
    arguments, a tuple or list; the callable returns a loss, or several tensors that need gradients.

    Raises:
        InvalidInputError: no such module or function, not such a result, or no argument `batch`
            where one is given.
    """
    module_name, colon, function_name = spec.partition(":")
    if not colon or not module_name or not function_name:
        raise InvalidInputError(f"'{spec}' is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
        if not callable(function):
            raise InvalidInputError(f"module '{module_name}' has no function '{function_name}'")
        if batch is not None and "batch" not in inspect.signature(function).parameters:
            raise InvalidInputError(
                f"'{spec}' takes no argument 'batch', by which its batch could be chosen: let it be"
                f" {function_name}(batch=...)"
            )
        given = {} if batch is None else {"batch": batch}
        _check_call(spec, function, given)
        result = function(**given)
    except InvalidInputError:
        raise
    except SystemExit as error:
        message = f"'{spec}' ended in {_place(error)}: SystemExit: {error}"
        raise InvalidInputError(message) from None
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"no module named '{error.name}' (from '{spec}')") from None
    except Exception as error:  # the user's own code failed: say where in it
        message = f"'{spec}' failed in {_place(error)}: {type(error).__name__}: {error}"
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            message = (
                f"'{spec}' asks for a value in {_place(error)} ({error.func}), and without the"
                " device nothing is computed: take it from Python numbers, or capture without"
                " --device"
            )
        raise InvalidInputError(message) from error
    if (
        not isinstance(result, Sequence)
        or len(result) != 2
        or not callable(result[0])
        or not isinstance(result[1], Sequence)
    ):
        raise InvalidInputError(
            f"'{spec}' must return a callable and its example arguments, (step, (batch, ...))"
        )
    return result[0], tuple(result[1])


def _check_call(spec: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        message = f"'{spec}' cannot be called: {error}"
        if not given and "batch" in inspect.signature(function).parameters:
            message += " (--batch N)"
        raise InvalidInputError(message) from None


def _place(error: BaseException) -> str:
    """The last line outside Python, PyTorch and the runtime that an error came through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<frozen "
    frame = next((f for f in reversed(frames) if not f.filename.startswith(inside)), frames[-1])
    return f"{frame.filename}, line {frame.lineno}"


def capture(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    name: str = "step",
    model: Roofline | None = None,
    optimizer: str | None = None,
    masters: bool = False,
    *,
    variants: bool = False,
) -> Graph:
    """The profiled joint graph of `step(*args, **kwargs)`; the step itself is not run.

    With a `model` the tensors are fake ones, and ops cost what it says. The state of an
    `optimizer` is resident (`capture.state`). For `variants` see `joint.capture_joint`.

    Raises:
        CaptureError: a graph break, nothing that needs a gradient, or an op that cannot be planned.
    """
    found: list[Graph] = []

    def partition(
        joint: fx.GraphModule,
        _: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **__: Any,
    ) -> Any:
        static = static_lifetime_input_indices or ()
        captured = capture_joint(joint, num_fwd_outputs, static, name, model, variants=variants)
        graph = captured.graph
        found.append(with_state(captured, optimizer, masters) if optimizer else graph)
        raise _CapturedError

    def refuse(*_: Any) -> Any:
        raise CaptureError(
            "it needs no gradient: return the loss, of parameters or arguments that require one"
        )

    backend = aot_autograd(
        fw_compiler=refuse, bw_compiler=refuse, inference_compiler=refuse, partition_fn=partition
    )
    prepare_dynamo()
    pass_over_words_said_once()
    let_install_hooks()
    reset_dynamo()

    def traced(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with as_eager():
            return backend(module, inputs)

    try:
        compiled: Any = torch.compile(step, backend=traced, fullgraph=True, dynamic=False)
        with told_by_the_error_alone():
            compiled(*args, **(kwargs or {}))
    except (TorchDynamoException, TypeError) as error:  # or a wrong call
        if not found:
            raise CaptureError(f"'{name}' cannot be captured: {reason(error)}") from None
    if not found:
        raise CaptureError(f"'{name}' was not captured: it runs no PyTorch op")
    return found[0]


class _CapturedError(Exception):
    """Ends the compilation once the graph is known."""
