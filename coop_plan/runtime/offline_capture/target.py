"""Capture of a step that a user names as `package.module:function`."""

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from coop_plan.planner import PlanOptions
from coop_plan.runtime.capture.diagnostics import explain_failure, user_location
from coop_plan.runtime.capture.joint_graph import Captured, capture_joint
from coop_plan.runtime.capture.tracing_rules import as_eager
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.execute.first_plan import ChunkedGraph
from coop_plan.runtime.execute.launch_times import measure_launches
from coop_plan.runtime.fused.compiled import compiled_ops, modelled_ops
from coop_plan.runtime.fused.regions import fuse_regions
from coop_plan.runtime.fused.split import split_regions
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment, under
from coop_plan.runtime.kernels import GraphKind, Kernels
from coop_plan.runtime.offline_capture.iteration import capture_iteration, with_updates
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.runtime.offline_capture.optimizer_state import with_optimizer_state
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.options import check_fused
from coop_plan.runtime.torch_internals.dynamo import (
    TorchDynamoException,
    allow_output_capturing_hooks,
    compile_whole_models,
    ignore_once_loggers,
    reset_dynamo,
    suppress_duplicate_reports,
)
from coop_plan.runtime.torch_internals.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from coop_plan.runtime.torch_internals.joint_graphs import aot_autograd, copy_of
from coop_plan.runtime.variants.linear_cross_entropy import chunk_heads, heads_of
from coop_plan.runtime.variants.passes import VARIANT_PASSES
from coop_plan.schemas import Graph, InvalidInputError, Outputs

SIZES = ("batch", "length")
"""Arguments of a user's function that options set."""


def capture_target(
    spec: str,
    batch: int | None = None,
    optimizer: OptimizerSpec | None = None,
    *,
    variants: bool = False,
    kernels: Kernels = "eager",
) -> Graph:
    """The profiled graph of the step that `package.module:function` describes.

    Raises:
        InvalidInputError: no such module or function, or not such a result.
        CaptureError: the step cannot be captured.
    """
    step, args = load_target(spec, batch)
    name = spec.rpartition(":")[2]
    made = graphs_of(
        step, args, name=name, optimizer=optimizer, variants=variants, kernels=[kernels]
    )
    return made[kernels]


def load_target(
    spec: str, batch: int | None = None, length: int | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Call `package.module:function`; returns its step and the step's example arguments.

    The function takes no arguments, or those named `batch` and `length` that are given. It returns
    a callable and its example arguments, a tuple or list; the callable returns a loss, or several
    tensors that need gradients.

    Raises:
        InvalidInputError: no such module or function, not such a result, or no such argument.
    """
    module_name, colon, function_name = spec.partition(":")
    if not colon or not module_name or not function_name:
        raise InvalidInputError(f"'{spec}' is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
        if not callable(function):
            raise InvalidInputError(f"module '{module_name}' has no function '{function_name}'")
        sizes = zip(SIZES, (batch, length), strict=True)
        kwargs = {name: size for name, size in sizes if size is not None}
        for name in kwargs:
            if name not in inspect.signature(function).parameters:
                raise InvalidInputError(
                    f"'{spec}' takes no argument '{name}', which --{name} sets: declare it as"
                    f" {function_name}({name}=...)"
                )
        _check_call(spec, function, kwargs)
        result = function(**kwargs)
    except InvalidInputError:
        raise
    except SystemExit as error:
        message = f"'{spec}' ended in {_user_location(error)}: SystemExit: {error}"
        raise InvalidInputError(message) from None
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"no module named '{error.name}' (from '{spec}')") from None
    except Exception as error:
        raise user_failure(spec, error) from error
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


def user_failure(spec: str, error: Exception) -> InvalidInputError:
    """The error for an exception of the user's code, with its line."""
    message = f"'{spec}' failed in {_user_location(error)}: {type(error).__name__}: {error}"
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        message = (
            f"'{spec}' reads a tensor's value in {_user_location(error)} ({error.func}), and"
            " without the device no values are computed: use Python numbers, or capture without"
            " --device"
        )
    elif "process group" in str(error) or "torch.distributed" in str(error):
        message += (
            "; a capture is of one process: leave out DDP and FSDP. Of N shards each holds 1/N of"
            " the weights, gradients and states, whole activations, and the gathered weights of a"
            " block"
        )
    return InvalidInputError(message)


def _check_call(spec: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        message = f"'{spec}' cannot be called: {error}"
        parameters = inspect.signature(function).parameters
        if wanted := [f"--{name} N" for name in SIZES if name in parameters and name not in kwargs]:
            message += f" ({' '.join(wanted)})"
        raise InvalidInputError(message) from None


def _user_location(error: BaseException) -> str:
    """File and line of the user's last frame, and of the library that it calls."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return user_location([(frame.filename, frame.lineno) for frame in frames])


def capture(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Graph:
    """The profiled joint graph of a step over eager's kernels, with options of `graphs_of`."""
    return graphs_of(step, args, kwargs, **options)["eager"]


def graphs_of(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    name: str = "step",
    model: Roofline | None = None,
    optimizer: OptimizerSpec | None = None,
    *,
    variants: bool = False,
    environment: Callable[[Captured], MemoryEnvironment] | None = None,
    kernels: Sequence[Kernels] = ("eager",),
    split: Outputs | None = None,
    chunks: bool = False,
    iteration: bool = False,
) -> dict[GraphKind, Graph]:
    """The profiled joint graphs of `step(*args, **kwargs)` by `kernels`; the step is not run.

    With a cost `model` all tensors are fake ones. The state of an `optimizer` is a resident tensor
    (`optimizer_state`). `variants` adds variants of ops, if there is no `model`. `environment`
    is of the captured step: none without it. With `split` a graph has those regions split that need
    more than any op with eager's kernels, where plans have these `outputs` in the arena. With
    `chunks` a graph has the heads in chunks, if no other op needs as much memory as their logits;
    it is that of the smallest chunks, unchecked.
    Graphs of an `iteration` have the updates of the `optimizer` as ops; this needs a `model`.

    Raises:
        CaptureError: a graph break, nothing that needs a gradient, or an op that cannot be planned.
        OptionsError: this version of PyTorch has no fused kernels.
    """
    if "fused" in kernels:
        check_fused()
    found: dict[GraphKind, Captured] = {}
    ops_of = compiled_ops if model is None else modelled_ops

    def partition(
        joint: fx.GraphModule,
        _: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **__: Any,
    ) -> Any:
        static = static_lifetime_input_indices or ()
        ways = VARIANT_PASSES if variants and model is None else None

        def prepared(module: fx.GraphModule) -> fx.GraphModule:
            if not iteration:
                return module
            assert optimizer is not None and model is not None
            return with_updates(module, num_fwd_outputs, static, optimizer, model)

        def capture_as(module: fx.GraphModule, fuse: Any = None) -> Captured:
            if iteration:
                assert optimizer is not None and model is not None
                results = num_fwd_outputs + optimizer.clip_norm
                return capture_iteration(module, results, static, name, model)
            return capture_joint(
                *(module, num_fwd_outputs, static, name, model, ways, fuse),
                launches=measure_launches,
            )

        def in_chunks() -> Captured | None:
            other = copy_of(joint)
            return capture_as(prepared(other)) if chunk_heads(other, checked=False) else None

        def over_regions(limits: Mapping[int, int]) -> Captured:
            fuse = partial(fuse_regions, ops_of=ops_of, limits=limits)
            return capture_as(prepared(copy_of(joint)), fuse)

        for kind in kernels:
            module = prepared(copy_of(joint))
            heads = heads_of(module) if chunks and kind == "eager" else []
            found[kind] = over_regions({}) if kind == "fused" else capture_as(module)
            graph = ChunkedGraph.of(found[kind], heads, in_chunks)
            if graph is not None and graph.may_lower_min:
                chunked = graph.capture()
                if chunked is not None:
                    found["chunked"] = chunked
        if split is not None and {"eager", "fused"} <= found.keys():
            options = PlanOptions.given("min", {"outputs": split})
            other = split_regions(found["fused"], found["eager"], options, over_regions)
            if other is not None:
                found["split"] = other
        raise _CapturedError

    def refuse(*_: Any) -> Any:
        raise CaptureError(
            "the step needs no gradient: return a loss of parameters or arguments that require one"
        )

    backend = aot_autograd(
        fw_compiler=refuse, bw_compiler=refuse, inference_compiler=refuse, partition_fn=partition
    )
    ignore_once_loggers()
    allow_output_capturing_hooks()
    reset_dynamo()

    def traced(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with as_eager():
            return backend(module, inputs)

    restore = compile_whole_models()
    try:
        compiled: Any = torch.compile(step, backend=traced, fullgraph=True, dynamic=False)
        with suppress_duplicate_reports():
            compiled(*args, **(kwargs or {}))
    except (TorchDynamoException, TypeError) as error:  # TypeError: wrong arguments
        if len(found) < len(kernels):
            raise CaptureError(f"'{name}' cannot be captured: {explain_failure(error)}") from None
    finally:
        restore()
    if not found:
        raise CaptureError(f"'{name}' was not captured: it runs no PyTorch op on tensors")
    made: dict[GraphKind, Graph] = {}
    for kind, captured in found.items():
        if environment is not None:
            captured = under(captured, environment(captured))
        beside = None if iteration else optimizer
        made[kind] = with_optimizer_state(captured, beside) if beside else captured.graph
    return made


class _CapturedError(Exception):
    """Ends the compilation once the graph is known."""
