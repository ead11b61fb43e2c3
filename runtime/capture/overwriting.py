"""Results of ops in the place of an input that dies: which may, as tried.

Where nothing reads an input any more, the result of a pointwise op can lie where it lay, and both
together take the bytes of one; so can a softmax, whose rows are read before they are written. Such
an op is run by the overload that is given what to write to. It has a pair [result, input] only if
that overload takes the op's scratch and nothing else, and on stand-in data its result in the
input's place is the same to the bit as the op's own.
"""

import contextlib
from typing import Any

import msgspec
import torch

from coop_plan.runtime.cache.profiles import session
from coop_plan.runtime.capture.facts import OpProfile
from coop_plan.runtime.capture.own_ops import CROSS_ENTROPY_BACKWARD
from coop_plan.runtime.capture.profile import (
    SCRATCH_ALIGNMENT,
    digest,
    lasting,
    signature,
    stand_in_arguments,
)
from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals import (
    SOFTMAXES,
    OpOverload,
    out_overload,
    real_world,
    tree_flatten,
    tree_unflatten,
)

ROW_BY_ROW = SOFTMAXES | {CROSS_ENTROPY_BACKWARD}
"""Ops that are not pointwise and may be tried, too: each row depends on itself alone."""

_found: dict[object, list[int]] = {}


def overwritable(target: OpOverload, args: Any, kwargs: Any, facts: OpProfile) -> list[int]:
    """
    The tensor arguments, by position among them in flattened order, that the result may overwrite.

    Tensors in the arguments are fake ones; `facts` is the op's profile. What was found is kept with
    the profiles.
    """
    alone = len(facts.outputs) == 1 and len(facts.allocations) == len(facts.scratch) + 1
    alone = alone and facts.allocated <= {0, -1}
    may = torch.Tag.pointwise in target.tags or target in ROW_BY_ROW
    if not may or not alone or out_overload(target) is None:
        return []
    fakes = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
    positions = [i for i, value in enumerate(fakes) if _lies_alike(value, facts)]
    if not positions:
        return []
    key = ("overwrites", *signature(target, args, kwargs))
    found = _found.get(key)
    if found is not None:
        return found
    name = lasting(key[1:])
    cache = None if name is None else session()
    record = None if cache is None else cache.get(f"overwrites {name}")
    if record is not None:
        with contextlib.suppress(msgspec.MsgspecError):  # damaged: what is tried now replaces it
            found = msgspec.json.decode(record, type=list[int])
    if found is None:
        with real_world():
            given = stand_in_arguments(target, args, kwargs)
            found = [i for i in positions if _same_in_place(target, given, i, facts)]
        if cache is not None:
            cache.put(f"overwrites {name}", msgspec.json.encode(found).decode())
    _found[key] = found
    return found


def _lies_alike(value: torch.Tensor, facts: OpProfile) -> bool:
    """Whether a tensor is a whole storage, laid out as the op's one result."""
    output = facts.outputs[0]
    assert output is not None
    mine = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
    same = mine == (output.dtype, output.shape, output.stride, output.offset)
    plain = not (value.is_conj() or value.is_neg())
    return same and plain and value.untyped_storage().nbytes() == output.bytes > 0


def _same_in_place(
    target: OpOverload, given: tuple[Any, Any], position: int, facts: OpProfile
) -> bool:
    expected = target(*given[0], **given[1])
    flat, spec = tree_flatten(given)
    at = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)][position]
    flat[at] = torch.empty_like(flat[at]).copy_(flat[at])
    args, kwargs = tree_unflatten(flat, spec)
    ext, device = extension(), flat[at].device
    ext.record_begin(device.type != "cpu")
    try:
        made = write_over(target, flat[at], *args, **kwargs)
    except RuntimeError:  # it refuses to overwrite what it reads
        return False
    finally:
        events = ext.record_end()
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    alignment = SCRATCH_ALIGNMENT if device.type == "cpu" else CUDA_ALIGNMENT
    _, taken, _ = digest(events, tensors, [made], target, alignment)
    return taken == facts.scratch and _bits(made).equal(_bits(expected))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def write_over(target: OpOverload, place: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`target(*args, **kwargs)`, written over `place`, one of the arguments."""
    found = out_overload(target)
    assert found is not None
    overload, name = found
    with torch.no_grad():
        made: torch.Tensor = overload(*args, **kwargs, **{name: place})
    return made
