"""Capturing what a user names as `package.module:function`."""

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.composites import as_eager
from coop_plan.runtime.capture.joint import capture_joint
from coop_plan.runtime.capture.roofline import Roofline
from coop_plan.runtime.capture.state import with_state
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    TorchDynamoException,
    TorchRuntimeError,
    aot_autograd,
    pass_over_words_said_once,
    prepare_dynamo,
    reset_dynamo,
    told_by_the_error_alone,
)
from coop_plan.schemas import Graph, InvalidInputError

WITH_FAKES = "when running FX node"
"""What Dynamo says first where an op fails on fake tensors in other ways than an op's own."""


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
        result = function() if batch is None else function(batch=batch)
    except InvalidInputError:
        raise
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


def _place(error: BaseException) -> str:
    """The last line outside PyTorch and the runtime that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
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
        raise CaptureError(f"'{name}' needs no gradient: nothing of it is kept for a backward")

    backend = aot_autograd(
        fw_compiler=refuse, bw_compiler=refuse, inference_compiler=refuse, partition_fn=partition
    )
    prepare_dynamo()
    pass_over_words_said_once()
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
            raise CaptureError(f"'{name}' cannot be captured: {_reason(error)}") from None
    if not found:
        raise CaptureError(f"'{name}' was not captured: it runs no PyTorch op")
    return found[0]


class _CapturedError(Exception):
    """Ends the compilation once the graph is known."""


def _reason(error: Exception) -> str:
    """In one line: what Dynamo came upon, where in the user's code, and its advice."""
    cause = getattr(error, "inner_exception", error)
    raised = re.search(r"debug context: raised exception (.+)", str(cause))
    if isinstance(cause, TorchRuntimeError) or WITH_FAKES in str(cause):
        # An op that fails on fake tensors: in its own words.
        while (earlier := cause.__cause__ or cause.__context__) is not None:
            if isinstance(earlier, CaptureError):  # of an attempt before this one
                break
            cause = earlier
    elif raised:  # by the user's own code, or by what it calls
        # PyTorch 2.11: ValueError([ConstantVariable(str: 'what it says')])
        said = re.sub(r"\[ConstantVariable\(\w+: (.*)\)\]", r"\1", raised[1])
        return f"it raises {said}" + _user_place(error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [repr(cause)]
    said = lines[0]
    if lacking := re.match(r"(\S+): attempted to run this operator with Meta tensors", said):
        said = f"{lacking[1]} has no kernel for fake tensors: without one its results are not known"
    said += _user_place(error)
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    return said + (f"; {hints[0]}" if hints else "")


def _user_place(error: Exception) -> str:
    """Where Dynamo was in the user's code, in brackets."""
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error).partition("from user code")[2])
    users = [place for place in places if not place[0].startswith(str(Path(torch.__file__).parent))]
    places = users or places
    return f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
