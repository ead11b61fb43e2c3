"""Capturing what a user names as `package.module:function`."""

import importlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.composites import as_eager
from coop_plan.runtime.capture.joint import capture_joint
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals import TorchDynamoException, aot_autograd, reset_dynamo
from coop_plan.schemas import Graph, InvalidInputError


def capture_target(spec: str) -> Graph:
    """The profiled graph of the step that `package.module:function` describes.

    The function takes no arguments and returns a callable and its example arguments, a tuple or
    list; the callable returns a loss (or several tensors that need gradients).

    Raises:
        InvalidInputError: no such module or function, or not such a result.
        CaptureError: the step cannot be captured.
    """
    module_name, colon, function_name = spec.partition(":")
    if not colon or not module_name or not function_name:
        raise InvalidInputError(f"'{spec}' is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
        if not callable(function):
            raise InvalidInputError(f"module '{module_name}' has no function '{function_name}'")
        result = function()
    except InvalidInputError:
        raise
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"no module named '{error.name}' (from '{spec}')") from None
    except Exception as error:  # the user's own code failed: say where in it
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        message = f"'{spec}' failed in {where}: {type(error).__name__}: {error}"
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
    return capture(result[0], tuple(result[1]), name=function_name)


def capture(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, name: str = "step"
) -> Graph:
    """The profiled joint graph of `step(*args, **kwargs)`; the step itself is not run.

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
        found.append(capture_joint(joint, num_fwd_outputs, static, name).graph)
        raise _CapturedError

    def refuse(*_: Any) -> Any:
        raise CaptureError(f"'{name}' needs no gradient: nothing of it is kept for a backward")

    backend = aot_autograd(
        fw_compiler=refuse, bw_compiler=refuse, inference_compiler=refuse, partition_fn=partition
    )
    reset_dynamo()

    def traced(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with as_eager():
            return backend(module, inputs)

    try:
        compiled: Any = torch.compile(step, backend=traced, fullgraph=True, dynamic=False)
        compiled(*args, **(kwargs or {}))
    except (TorchDynamoException, TypeError) as error:  # or a wrong call
        if not found:
            cause = getattr(error, "inner_exception", error)
            first = next((line for line in str(cause).splitlines() if line.strip()), repr(cause))
            raise CaptureError(f"'{name}' cannot be captured: {first.strip()}") from None
    if not found:
        raise CaptureError(f"'{name}' was not captured: it runs no PyTorch op")
    return found[0]


class _CapturedError(Exception):
    """Ends the compilation once the graph is known."""
