"""Ops of ours that make masks of bits, and read them.

A bit says whether a gradient passes: through a dropout, or a ReLU. Of eight elements in a row the
first is the lowest bit. Masks are computed and read some elements at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from coop_plan.runtime.capture.library import define
from coop_plan.runtime.torch_internals import OpOverload

_aten = torch.ops.aten

Places = Sequence[torch.Tensor | None]

BYTES_TO_BITS = 0x0102040810204080
"""Times eight bytes that are 0 or 1, as one number, in whose highest byte their bits then are."""

ONE_OF_EACH = 0x0101010101010101, 0x8040201008040201 - (1 << 64)
"""A byte eight times, and the bit that each of them keeps."""

PART_ELEMENTS = 1 << 18
"""Of a tensor that are computed at once, unless these were more than a few dozen parts."""


def _parts(count: int) -> Iterator[slice]:
    step = max(PART_ELEMENTS, -(-count // 512) * 8)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _pack(mask: torch.Tensor, bits: torch.Tensor) -> None:
    """Overwrites `mask`, of whole bytes of bits."""
    whole = mask.view(-1).view(torch.int64)
    bits.copy_(whole.mul_(BYTES_TO_BITS).bitwise_right_shift_(56))


def _unpack(bits: torch.Tensor) -> torch.Tensor:
    spread = bits.to(torch.int64)
    spread.mul_(ONE_OF_EACH[0]).bitwise_and_(ONE_OF_EACH[1])
    return spread.view(torch.uint8).clamp_(max=1).view(torch.bool)


def _bits_for(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.numel() // 8, dtype=torch.uint8, device=values.device)


def _made(places: Places, values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values) if not places or places[0] is None else places[0]


def _dropout_bits(
    places: Places, values: torch.Tensor, p: float, train: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout`, on the CPU without the copies of the whole that ATen's makes."""
    if values.is_cuda or not train or values.dtype not in (torch.float32, torch.float64):
        # Of fewer bits ATen's rounds the scale as well, which no op of ours would.
        whole, mask = _aten.native_dropout.default(values, p, train)
        made = whole if not places or places[0] is None else places[0].copy_(whole)
    else:
        mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1.0 - p)
        made, scale = _made(places, values), 1.0 / (1.0 - p) if p < 1 else 0.0
        for part in _parts(values.numel()):
            piece = values.view(-1)[part].mul(mask.view(-1)[part]).mul_(scale)
            made.view(-1)[part].copy_(piece)
            del piece  # before the next
    bits = _bits_for(values)
    _pack(mask, bits)
    return made, bits


def _dropout_bits_backward(
    places: Places, gradient: torch.Tensor, bits: torch.Tensor, scale: float
) -> torch.Tensor:
    """`native_dropout_backward`."""
    out = _made(places, gradient)
    for part in _parts(gradient.numel()):
        mask = _unpack(bits[part.start // 8 : part.stop // 8])
        made = _aten.native_dropout_backward.default(gradient.view(-1)[part], mask, scale)
        out.view(-1)[part].copy_(made)
        del mask, made  # before the next
    return out


def _relu_bits(places: Places, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`relu`, and what its gradient passes through, NaN as well."""
    made, bits = _made(places, values), _bits_for(values)
    _aten.clamp_min.out(values, 0, out=made)  # the overload of `relu` makes a copy
    for part in _parts(made.numel()):
        mask = made.view(-1)[part].le(0).logical_not_()
        _pack(mask, bits[part.start // 8 : part.stop // 8])
        del mask  # before the next
    return made, bits


def _relu_bits_backward(places: Places, gradient: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The gradient where a bit is set, zero elsewhere."""
    out = _made(places, gradient)
    if out is not gradient:
        out.copy_(gradient)
    for part in _parts(gradient.numel()):
        mask = _unpack(bits[part.start // 8 : part.stop // 8]).logical_not_()
        out.view(-1)[part].masked_fill_(mask, 0.0)
        del mask  # before the next
    return out


def _define(schema: str, run: Callable[..., Any], *tags: torch.Tag) -> OpOverload:
    name = run.__name__.removeprefix("_")
    op = define(name, schema, lambda *args: run((), *args), tags=tags)
    WRITERS[op] = run
    return op


WRITERS: dict[OpOverload, Callable[..., Any]] = {}
"""What writes results into places, which it is given first."""

DROPOUT_BITS = _define(
    "(Tensor values, float p, bool train) -> (Tensor, Tensor)",
    _dropout_bits,
    torch.Tag.nondeterministic_seeded,
)
DROPOUT_BITS_BACKWARD = _define(
    "(Tensor gradient, Tensor bits, float scale) -> Tensor", _dropout_bits_backward
)
RELU_BITS = _define("(Tensor values) -> (Tensor, Tensor)", _relu_bits)
RELU_BITS_BACKWARD = _define("(Tensor gradient, Tensor bits) -> Tensor", _relu_bits_backward)
