"""Dropout on the CPU, in parts: ATen's numbers, without its conversions of whole masks."""

from collections.abc import Iterator

import torch

from coop_plan.runtime.capture.library import Places, define_writer
from coop_plan.runtime.device.draws import bernoulli_

_aten = torch.ops.aten

PART_ELEMENTS = 1 << 17
"""Of a tensor that are computed at once, unless these were more than a few dozen parts."""


def parts(count: int) -> Iterator[slice]:
    """Of whole bytes of bits each, but for the last."""
    step = max(PART_ELEMENTS, -(-count // 512) * 8)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def made_in(places: Places, values: torch.Tensor) -> torch.Tensor:
    """Where the first result is written: in its place, or in a tensor like `values`."""
    return torch.empty_like(values) if not places or places[0] is None else places[0]


def dropout(
    places: Places, values: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout`: the result, and a mask of booleans (aten/src/ATen/native/Dropout.cpp)."""
    parted = not values.is_cuda and train is not False and values.is_contiguous()
    if not parted or values.dtype not in (torch.float32, torch.float64) or not values.numel():
        # Of fewer bits ATen's rounds the scale as well, which no op of ours would.
        whole, mask = _aten.native_dropout.default(values, p, train)
        if whole is values:
            whole = values.clone()
        return whole if not places or places[0] is None else places[0].copy_(whole), mask
    mask = bernoulli_(torch.empty_like(values, dtype=torch.bool), 1.0 - p)
    made, scale = made_in(places, values), 1.0 / (1.0 - p) if p < 1 else 0.0
    flat = values.view(-1), mask.view(-1), made.view(-1)
    for part in parts(values.numel()):
        given, kept, result = (tensor[part] for tensor in flat)
        torch.mul(given, kept, out=result).mul_(scale)
    return made, mask


def dropout_backward(
    places: Places, gradient: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """`native_dropout_backward`."""
    alike = gradient.is_contiguous() and mask.is_contiguous() and gradient.shape == mask.shape
    if gradient.is_cuda or not alike or gradient.dtype not in (torch.float32, torch.float64):
        whole: torch.Tensor = _aten.native_dropout_backward.default(gradient, mask, scale)
        return whole if not places or places[0] is None else places[0].copy_(whole)
    made = made_in(places, gradient)
    flat = gradient.view(-1), mask.view(-1), made.view(-1)
    for part in parts(gradient.numel()):
        given, kept, result = (tensor[part] for tensor in flat)
        torch.mul(given, kept, out=result).mul_(scale)
    return made


DROPOUT = define_writer(
    "(Tensor values, float p, bool? train) -> (Tensor, Tensor)",
    dropout,
    (torch.Tag.nondeterministic_seeded,),
)
DROPOUT_BACKWARD = define_writer(
    "(Tensor gradient, Tensor mask, float scale) -> Tensor", dropout_backward
)
