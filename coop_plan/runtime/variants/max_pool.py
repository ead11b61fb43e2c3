"""Variants of max-pooling that keep a byte of each maximum: its place in the window, not its number.

Some planes are pooled at a time, so that PyTorch's numbers, of eight bytes, are scratch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.variants.registry import Offers
from coop_plan.runtime.capture.graph_builder import GETITEM, GraphBuilder
from coop_plan.runtime.capture.op_profile import OpProfile
from coop_plan.runtime.variants.saved_pairs import Keeping, offer_keeping
from coop_plan.runtime.capture.custom_ops import define, slices
from coop_plan.runtime.capture.profiler import fakes, signature, stand_in_arguments
from coop_plan.runtime.variants.shape_only_backward import OF_SIZE
from coop_plan.runtime.variants.bitwise_check import same_bits, tried

NAME = "places"

ELEMENTS = 1 << 17
"""Of results that are computed at once, unless one plane has more."""

_aten = torch.ops.aten
_POOL: Any = _aten.max_pool2d_with_indices.default
_BACKWARD = OF_SIZE[_aten.max_pool2d_with_indices_backward.default]
_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil"

Pair = list[int]


def _planes(pooled: torch.Tensor) -> Iterator[slice]:
    """Of a result as planes, those that are computed at once."""
    return slices(pooled.shape[0], max(1, ELEMENTS // pooled[0].numel()))


def _origins(
    pooled: torch.Tensor, stride: Pair, padding: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where windows begin: rows, and columns."""
    rows, columns = (
        torch.arange(n, device=pooled.device).mul_(s).sub_(p)
        for n, s, p in zip(pooled.shape[-2:], stride, padding, strict=True)
    )
    return rows.view(-1, 1), columns


def _pool(
    values: torch.Tensor,
    shape: list[int],
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ceil: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`max_pool2d_with_indices`: the result, of a shape, and places in windows."""
    made = values.new_empty(shape)
    places = torch.empty(made.numel(), dtype=torch.uint8, device=values.device)
    given, pooled = values.view(-1, *values.shape[-2:]), made.view(-1, *shape[-2:])
    small, width = places.view(pooled.shape), values.shape[-1]
    window, origins = (kernel, stride, padding, dilation, ceil), _origins(made, stride, padding)
    for part in _planes(pooled):
        column = torch.empty(pooled[part].shape, dtype=torch.int64, device=values.device)
        _aten.max_pool2d_with_indices.out(given[part], *window, out=pooled[part], indices=column)
        row = column.div(width, rounding_mode="floor")
        column.sub_(row, alpha=width)
        for at, origin, step in zip((row, column), origins, dilation, strict=True):
            at.sub_(origin).div_(step, rounding_mode="floor")
        small[part].copy_(row.mul_(kernel[1]).add_(column))
        del row, column, at  # before the next
    return made, places


def _pool_backward(
    gradient: torch.Tensor,
    places: torch.Tensor,
    sizes: list[int],
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ceil: bool,
) -> torch.Tensor:
    """`max_pool2d_with_indices_backward`; places in no window count as the nearest element's."""
    out = gradient.new_empty(sizes)
    given, made = gradient.view(-1, *gradient.shape[-2:]), out.view(-1, *sizes[-2:])
    small, nothing = places.view(given.shape), gradient.new_empty(1)
    origins, ends = _origins(gradient, stride, padding), [size - 1 for size in sizes[-2:]]
    for part in _planes(given):
        column = small[part].to(torch.int64)
        row = column.div(kernel[1], rounding_mode="floor")
        column.sub_(row, alpha=kernel[1])
        for at, origin, step, end in zip((row, column), origins, dilation, ends, strict=True):
            at.mul_(step).add_(origin).clamp_(0, end)
        column.add_(row, alpha=sizes[-1])
        del row, at
        _aten.max_pool2d_with_indices_backward.grad_input(
            given[part],
            nothing.expand(made[part].shape),
            *(kernel, stride, padding, dilation, ceil, column),
            grad_input=made[part],
        )
        del column  # before the next
    return out


POOL = define(
    "max_pool2d_places", f"(Tensor values, int[] shape, {_WINDOW}) -> (Tensor, Tensor)", _pool
)
POOL_BACKWARD = define(
    "max_pool2d_places_backward",
    f"(Tensor gradient, Tensor places, int[] sizes, {_WINDOW}) -> Tensor",
    _pool_backward,
)


def offer_places(builder: GraphBuilder, offers: Offers) -> None:
    """Give max-poolings in the builder's graph, and their gradients, variants that keep places."""
    for node in list(builder.ops):
        keeping = _keeping(builder, node) if node.target is _POOL else None
        if keeping is not None:
            offer_keeping(builder, offers, keeping, _same)


def _keeping(builder: GraphBuilder, node: fx.Node) -> Keeping | None:
    """What a pooling would keep; None where its numbers are read elsewhere, or too many."""
    numbers = [user for user in node.users if user.target is GETITEM and user.args[1] == 1]
    readers = [user for number in numbers for user in number.users]
    if not readers or any(
        reader.target is not _BACKWARD or reader.args[-1] not in numbers for reader in readers
    ):
        return None
    source, made = fakes(node.args[0]), node.meta["val"][0]
    sizes, *window = readers[0].args[1:-1]
    kernel, stride, padding, dilation = (_pair(w, window[0]) for w in window[:-1])
    contiguous = (source, made, *(fakes(reader.args[0]) for reader in readers))
    if kernel[0] * kernel[1] > 256 or not all(v.is_contiguous() for v in contiguous):
        return None
    if not made.numel() or any(reader.args[1:-1] != readers[0].args[1:-1] for reader in readers):
        return None
    windows = kernel, stride, padding, dilation, window[-1]

    def given(reader: fx.Node, places: Any) -> tuple[Any, ...]:
        return reader.args[0], places, sizes, *windows

    kept = dict.fromkeys(readers, builder.storages[node][1])
    args = node.args[0], [*made.shape], *windows
    return Keeping(NAME, node, POOL, args, POOL_BACKWARD, given, kept, made.numel(), inplace=False)


def _pair(given: Any, kernel: Any) -> Pair:
    """Both numbers; of a stride that is left out, the kernel's."""
    numbers = [given] if isinstance(given, int) else [*given]
    return _pair(kernel, kernel) if not numbers else numbers * (2 // len(numbers))


def _same(keeping: Keeping, _: OpProfile, backward: Mapping[fx.Node, OpProfile]) -> bool:
    """Whether both variants return the same, as tried."""
    args = fakes(keeping.args)
    sizes = [*args[0].shape]

    def attempt() -> bool:
        (values, *others), _ = stand_in_arguments(POOL, args, {})
        flat, window = values.view(-1), others[1:]
        # Equal numbers in a window, the least and none among them.
        flat.copy_(torch.arange(flat.numel(), device=flat.device).mul_(7).remainder_(5))
        flat[::11] = float("nan")
        flat[: flat.numel() // 4] = float("-inf")
        theirs, numbers = _POOL(values, *window)
        ours, places = POOL(values, *others)
        gradient = torch.linspace(-9, 9, ours.numel(), device=ours.device).to(ours.dtype)
        gradient = gradient.view(ours.shape)
        expected = _BACKWARD(gradient, sizes, *window, numbers)
        return same_bits(ours, theirs) and same_bits(
            POOL_BACKWARD(gradient, places, sizes, *window), expected
        )

    return tried("alike of places", signature(POOL, args, {}), bool, attempt)
