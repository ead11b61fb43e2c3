"""Results of ops in the place of an input that dies: which may, as tried.

Where nothing reads an input any more, the result of a pointwise op can lie where it lay, and both
together take the bytes of one; so can a softmax, whose rows are read before they are written. Such
an op is run in place, or by the overload that is given what to write to. It has a pair [result,
input] only if that takes the op's scratch and nothing else, and on stand-in data its result in the
input's place is the same to the bit as the op's own.
"""

from collections.abc import Sequence
from typing import Any

import torch

from coop_plan.runtime.capture.op_profile import Allocation, OpProfile, Output
from coop_plan.runtime.capture.custom_ops import WRITERS
from coop_plan.runtime.capture.op_replacements import CROSS_ENTROPY_BACKWARD
from coop_plan.runtime.variants.chunked_ops import PART_OPS
from coop_plan.runtime.capture.profiler import (
    SCRATCH_ALIGNMENT,
    digest,
    signature,
    stand_in_arguments,
)
from coop_plan.runtime.variants.bitwise_check import same_bits, tried
from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals.ops import (
    SOFTMAXES,
    OpOverload,
    inplace_overload,
    out_overload,
    tree_flatten,
    tree_unflatten,
)

ROW_BY_ROW = SOFTMAXES | {CROSS_ENTROPY_BACKWARD}
"""Ops that are not pointwise and may be tried, too: each row depends on itself alone."""


def overwritable(target: OpOverload, args: Any, kwargs: Any, facts: OpProfile) -> list[int]:
    """
    The tensor arguments, by position among them in flattened order, that the result may overwrite.

    Tensors in the arguments are fake ones; `facts` is the op's profile.
    """
    alone = len(facts.outputs) == 1 and sum(not a.output for a in facts.allocations) == 1
    alone = alone and facts.allocated <= {0, -1}
    may = torch.Tag.pointwise in target.tags or target in ROW_BY_ROW
    may = (may and bool(out_overload(target) or inplace_overload(target))) or target in WRITERS
    if not may or not alone:
        return []
    fakes = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
    positions = [i for i, value in enumerate(fakes) if lies_alike(value, facts.outputs[0])]
    if not positions:
        return []

    def attempt() -> list[int]:
        given = stand_in_arguments(target, args, kwargs)
        return [i for i in positions if _same_in_place(target, given, i, facts)]

    return tried("overwrites", signature(target, args, kwargs), list[int], attempt)


def lies_alike(value: torch.Tensor, output: Output | None) -> bool:
    """Whether a tensor is a whole storage, laid out as a result."""
    if output is None:
        return False
    mine = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
    same = mine == (output.dtype, output.shape, output.stride, output.offset)
    plain = not (value.is_conj() or value.is_neg())
    return same and plain and value.untyped_storage().nbytes() == output.bytes > 0


def _same_in_place(
    target: OpOverload, given: tuple[Any, Any], position: int, facts: OpProfile
) -> bool:
    try:
        made, taken = written_over(target, given, {0: position})
    except RuntimeError:  # it refuses to overwrite what it reads
        return False
    return taken == facts.allocated_beside({0}) and same_bits(
        made[0], target(*given[0], **given[1])
    )


def written_over(
    target: OpOverload, given: tuple[Any, Any], over: dict[int, int]
) -> tuple[list[Any], tuple[Allocation, ...]]:
    """
    The results of an op, each one of `over` in the place of that tensor argument, and what it took.

    Both are positions; what is overwritten are copies.
    """
    flat, spec = tree_flatten(given)
    tensors = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    places: list[torch.Tensor | None] = [None] * (max(over) + 1)
    for result, position in over.items():
        at = tensors[position]
        flat[at] = torch.empty_like(flat[at]).copy_(flat[at])
        places[result] = flat[at]
    args, kwargs = tree_unflatten(flat, spec)
    cpu = flat[tensors[0]].device.type == "cpu"
    ext = extension()
    ext.record_begin(not cpu)
    try:
        made = tree_flatten(write_over(target, places, *args, **kwargs))[0]
    finally:
        events = ext.record_end()
    inputs = [flat[i] for i in tensors]
    alignment = SCRATCH_ALIGNMENT if cpu else CUDA_ALIGNMENT
    _, taken, _ = digest(events, inputs, made, target, alignment)
    return made, taken


def write_over(
    target: OpOverload, places: Sequence[torch.Tensor | None], *args: Any, **kwargs: Any
) -> Any:
    """`target(*args, **kwargs)`; results that have one of `places`, an argument, lie there."""
    own = WRITERS.get(target) or (PART_OPS[target].run if target in PART_OPS else None)
    with torch.no_grad():
        if own is not None:
            return own(places, *args, **kwargs)
        inplace = inplace_overload(target) if args and places[0] is args[0] else None
        if inplace is not None:  # an overload for a result may be one that copies it there
            return inplace(*args, **kwargs)
        found = out_overload(target)
        assert found is not None
        overload, name = found
        return overload(*args, **kwargs, **{name: places[0]})
