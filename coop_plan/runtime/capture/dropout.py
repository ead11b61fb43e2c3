"""Dropout on the CPU, in parts: ATen's numbers, without its conversions of whole masks."""

from collections.abc import Iterator

import torch

from coop_plan.runtime.capture.custom_ops import Places, define_writer, slices
from coop_plan.runtime.device.bernoulli import bernoulli_

_aten = torch.ops.aten

PART_ELEMENTS = 1 << 17
"""Of a tensor that are computed at once, unless these were more than a few dozen parts."""


def parts(count: int) -> Iterator[slice]:
    """Of whole bytes of bits each, but for the last."""
    return slices(count, max(PART_ELEMENTS, -(-count // 512) * 8))


def made_in(places: Places, values: torch.Tensor) -> torch.Tensor:
    """Where the first result is written: in its place, or in a tensor like `values`."""
    return torch.empty_like(values) if not places or places[0] is None else places[0]


def _written(places: Places, whole: torch.Tensor) -> torch.Tensor:
    return whole if not places or places[0] is None else places[0].copy_(whole)


def _masked(places: Places, values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """`values` * `mask` * `scale`, all in the order of their elements."""
    made = made_in(places, values)
    flat = values.view(-1), mask.view(-1), made.view(-1)
    for part in parts(values.numel()):
        given, kept, result = (tensor[part] for tensor in flat)
        torch.mul(given, kept, out=result).mul_(scale)
    return made


def dropout(
    places: Places, values: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout`: the result, and a mask of booleans (aten/src/ATen/native/Dropout.cpp)."""
    if train is False or not values.numel() or not _in_parts(values):
        whole, mask = _aten.native_dropout.default(values, p, train)
        return _written(places, values.clone() if whole is values else whole), mask
    mask = bernoulli_(torch.empty_like(values, dtype=torch.bool), 1.0 - p)
    return _masked(places, values, mask, 1.0 / (1.0 - p) if p < 1 else 0.0), mask


def dropout_backward(
    places: Places, gradient: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """`native_dropout_backward`."""
    if gradient.shape != mask.shape or not mask.is_contiguous() or not _in_parts(gradient):
        return _written(places, _aten.native_dropout_backward.default(gradient, mask, scale))
    return _masked(places, gradient, mask, scale)


def _in_parts(values: torch.Tensor) -> bool:
    """Whether parts are ATen's numbers: of fewer bits it rounds the scale as well."""
    exact = values.dtype in (torch.float32, torch.float64)
    return exact and not values.is_cuda and values.is_contiguous()


DROPOUT = define_writer(
    "(Tensor values, float p, bool? train) -> (Tensor, Tensor)",
    dropout,
    (torch.Tag.nondeterministic_seeded,),
)
DROPOUT_BACKWARD = define_writer(
    "(Tensor gradient, Tensor mask, float scale) -> Tensor", dropout_backward
)
