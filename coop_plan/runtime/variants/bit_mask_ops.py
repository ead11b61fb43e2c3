"""Ops of ours that make masks of bits, and read them.

A bit says whether a gradient passes: through a dropout, or a ReLU. Of eight elements in a row the
first is the lowest bit. Masks are computed and read some elements at a time.
"""

import torch

from coop_plan.runtime.capture.dropout import dropout, dropout_backward, made_in, parts
from coop_plan.runtime.capture.custom_ops import Places, define_writer

_aten = torch.ops.aten

BYTES_TO_BITS = 0x0102040810204080
"""Times eight bytes that are 0 or 1, as one number, in whose highest byte their bits then are."""

ONE_OF_EACH = 0x0101010101010101, 0x8040201008040201 - (1 << 64)
"""A byte eight times, and the bit that each of them keeps."""


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


def _dropout_bits(
    places: Places, values: torch.Tensor, p: float, train: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout`, with a mask of bits."""
    made, mask = dropout(places, values, p, train)
    bits = _bits_for(values)
    _pack(mask, bits)
    return made, bits


def _dropout_bits_backward(
    places: Places, gradient: torch.Tensor, bits: torch.Tensor, scale: float
) -> torch.Tensor:
    """`native_dropout_backward`."""
    out = made_in(places, gradient)
    for part in parts(gradient.numel()):
        mask = _unpack(bits[part.start // 8 : part.stop // 8])
        dropout_backward((out.view(-1)[part],), gradient.view(-1)[part], mask, scale)
        del mask  # before the next
    return out


def _relu_bits(places: Places, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`relu`, and what its gradient passes through, NaN as well."""
    made, bits = made_in(places, values), _bits_for(values)
    _aten.clamp_min.out(values, 0, out=made)  # the overload of `relu` makes a copy
    for part in parts(made.numel()):
        mask = made.view(-1)[part].le(0).logical_not_()
        _pack(mask, bits[part.start // 8 : part.stop // 8])
        del mask  # before the next
    return made, bits


def _relu_bits_backward(places: Places, gradient: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The gradient where a bit is set, zero elsewhere."""
    out = made_in(places, gradient)
    if out is not gradient:
        out.copy_(gradient)
    for part in parts(gradient.numel()):
        mask = _unpack(bits[part.start // 8 : part.stop // 8]).logical_not_()
        out.view(-1)[part].masked_fill_(mask, 0.0)
        del mask  # before the next
    return out


DROPOUT_BITS = define_writer(
    "(Tensor values, float p, bool train) -> (Tensor, Tensor)",
    _dropout_bits,
    (torch.Tag.nondeterministic_seeded,),
)
DROPOUT_BITS_BACKWARD = define_writer(
    "(Tensor gradient, Tensor bits, float scale) -> Tensor", _dropout_bits_backward
)
RELU_BITS = define_writer("(Tensor values) -> (Tensor, Tensor)", _relu_bits)
RELU_BITS_BACKWARD = define_writer("(Tensor gradient, Tensor bits) -> Tensor", _relu_bits_backward)
