"""In-place outputs: results that may overwrite an input that dies at the op.

Pointwise ops can overwrite an input, and so can a softmax, which reads each row before it writes
it. The op runs by its in-place or its out overload. An in-place pair [result, input] is added only
if the op then allocates its scratch and nothing else, and if the result on synthetic inputs is
bitwise equal to the op's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from coop_plan.runtime.capture.custom_ops import OUT_KERNELS
from coop_plan.runtime.capture.op_replacements import CROSS_ENTROPY_BACKWARD
from coop_plan.runtime.capture.profiler import (
    SCRATCH_ALIGNMENT,
    signature,
    summarize_events,
    synthetic_arguments,
)
from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.op_profile import Allocation, OpProfile, Output
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals.ops import (
    SOFTMAX_OPS,
    OpOverload,
    inplace_overload,
    out_overload,
    tree_flatten,
    tree_unflatten,
)
from coop_plan.runtime.variants.bitwise_check import bitwise_equal, cached_check
from coop_plan.runtime.variants.chunked_ops import CHUNKED_KERNELS

ROWWISE = SOFTMAX_OPS | {CROSS_ENTROPY_BACKWARD}
"""Candidates that are not pointwise: each row of the result depends on that row alone."""


def overwritable_arguments(
    target: OpOverload, args: Any, kwargs: Any, profile: OpProfile
) -> list[int]:
    """Positions of the tensor arguments, in flattened order, that the result may overwrite.

    Tensors in the arguments are fake ones.
    """
    has_overload = bool(out_overload(target) or inplace_overload(target))
    elementwise = torch.Tag.pointwise in target.tags or target in ROWWISE
    if target not in OUT_KERNELS and not (elementwise and has_overload):
        return []
    result_allocations = sum(not a.output for a in profile.allocations)
    if len(profile.outputs) != 1 or result_allocations != 1:
        return []
    if not profile.allocated_outputs <= {0, -1}:
        return []
    tensors = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
    positions = [i for i, value in enumerate(tensors) if has_layout(value, profile.outputs[0])]
    if not positions:
        return []

    def run_check() -> list[int]:
        arguments = synthetic_arguments(target, args, kwargs)
        return [i for i in positions if _is_exact_in_place(target, arguments, i, profile)]

    return cached_check("overwrites", signature(target, args, kwargs), list[int], run_check)


def has_layout(value: torch.Tensor, output: Output | None) -> bool:
    """True if a tensor covers its storage, with the layout of `output`."""
    if output is None:
        return False
    mine = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
    same = mine == (output.dtype, output.shape, output.stride, output.offset)
    plain = not (value.is_conj() or value.is_neg())
    return same and plain and value.untyped_storage().nbytes() == output.bytes > 0


def _is_exact_in_place(
    target: OpOverload, arguments: tuple[Any, Any], position: int, profile: OpProfile
) -> bool:
    try:
        results, allocations = run_into_copies(target, arguments, {0: position})
    except RuntimeError:  # the op refuses to overwrite an input
        return False
    return allocations == profile.allocations_except({0}) and bitwise_equal(
        results[0], target(*arguments[0], **arguments[1])
    )


def run_into_copies(
    target: OpOverload, arguments: tuple[Any, Any], targets: dict[int, int]
) -> tuple[list[Any], tuple[Allocation, ...]]:
    """Run an op with results written into copies of its arguments.

    `targets` maps positions of results to positions of tensor arguments. Returns the results and
    the op's allocations.
    """
    flat, spec = tree_flatten(arguments)
    tensors = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    outs: list[torch.Tensor | None] = [None] * (max(targets) + 1)
    for result, position in targets.items():
        at = tensors[position]
        flat[at] = torch.empty_like(flat[at]).copy_(flat[at])
        outs[result] = flat[at]
    args, kwargs = tree_unflatten(flat, spec)
    cpu = flat[tensors[0]].device.type == "cpu"
    ext = extension()
    function, args, kwargs = into(target, outs, args, kwargs)
    ext.record_begin(not cpu)
    try:
        with torch.no_grad():
            results = tree_flatten(function(*args, **kwargs))[0]
    finally:
        events = ext.record_end()
    inputs = [flat[i] for i in tensors]
    alignment = SCRATCH_ALIGNMENT if cpu else CUDA_ALIGNMENT
    _, allocations, _ = summarize_events(events, inputs, results, target, alignment)
    return results, allocations


def into(
    target: OpOverload, outs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call that writes the i-th result of a call into its argument `outs[i]`.

    The arguments are tensors, or nodes of a graph.
    """
    if target in OUT_KERNELS:
        return OUT_KERNELS[target], (outs, *args), kwargs
    if target in CHUNKED_KERNELS:
        return CHUNKED_KERNELS[target].run, (outs, *args), kwargs
    inplace = inplace_overload(target) if args and outs[0] is args[0] else None
    if inplace is not None:  # an out overload may compute elsewhere and copy
        return inplace, args, kwargs
    found = out_overload(target)
    assert found is not None
    overload, name = found
    return overload, args, {**kwargs, name: outs[0]}
