"""Variants of max pooling that save one byte per maximum: its position in the window.

PyTorch saves an index of eight bytes. Planes are pooled in chunks, so that these are scratch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.custom_ops import chunk_slices, define_op
from coop_plan.runtime.capture.graph_builder import GETITEM, GraphBuilder
from coop_plan.runtime.capture.op_variants import VariantTable
from coop_plan.runtime.capture.profiler import fake_values, signature, synthetic_arguments
from coop_plan.runtime.op_profile import OpProfile
from coop_plan.runtime.variants.bitwise_check import bitwise_equal, cached_check
from coop_plan.runtime.variants.saved_pairs import SavedPair, add_saved_pair
from coop_plan.runtime.variants.shape_only_backward import SHAPE_ONLY_OPS

NAME = "places"

CHUNK_ELEMENTS = 1 << 17
"""Elements of the result per chunk, at least one plane."""

_aten = torch.ops.aten
_POOL: Any = _aten.max_pool2d_with_indices.default
_BACKWARD = SHAPE_ONLY_OPS[_aten.max_pool2d_with_indices_backward.default]
_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil"

Pair = list[int]


def _plane_chunks(pooled: torch.Tensor) -> Iterator[slice]:
    """Chunks of a result's planes."""
    return chunk_slices(pooled.shape[0], max(1, CHUNK_ELEMENTS // pooled[0].numel()))


def _origins(
    pooled: torch.Tensor, stride: Pair, padding: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column at which each window begins."""
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
    """`max_pool2d_with_indices`: the result of `shape`, and positions in windows."""
    result = values.new_empty(shape)
    positions = torch.empty(result.numel(), dtype=torch.uint8, device=values.device)
    given, pooled = values.view(-1, *values.shape[-2:]), result.view(-1, *shape[-2:])
    small, width = positions.view(pooled.shape), values.shape[-1]
    window, origins = (kernel, stride, padding, dilation, ceil), _origins(result, stride, padding)
    for chunk in _plane_chunks(pooled):
        column = torch.empty(pooled[chunk].shape, dtype=torch.int64, device=values.device)
        _aten.max_pool2d_with_indices.out(given[chunk], *window, out=pooled[chunk], indices=column)
        row = column.div(width, rounding_mode="floor")
        column.sub_(row, alpha=width)
        for at, origin, step in zip((row, column), origins, dilation, strict=True):
            at.sub_(origin).div_(step, rounding_mode="floor")
        small[chunk].copy_(row.mul_(kernel[1]).add_(column))
        del row, column, at  # freed before the next chunk
    return result, positions


def _pool_backward(
    gradient: torch.Tensor,
    positions: torch.Tensor,
    sizes: list[int],
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ceil: bool,
) -> torch.Tensor:
    """`max_pool2d_with_indices_backward` from positions; invalid ones are clamped to the plane."""
    out = gradient.new_empty(sizes)
    given, result = gradient.view(-1, *gradient.shape[-2:]), out.view(-1, *sizes[-2:])
    small, nothing = positions.view(given.shape), gradient.new_empty(1)
    origins, ends = _origins(gradient, stride, padding), [size - 1 for size in sizes[-2:]]
    for chunk in _plane_chunks(given):
        column = small[chunk].to(torch.int64)
        row = column.div(kernel[1], rounding_mode="floor")
        column.sub_(row, alpha=kernel[1])
        for at, origin, step, end in zip((row, column), origins, dilation, ends, strict=True):
            at.mul_(step).add_(origin).clamp_(0, end)
        column.add_(row, alpha=sizes[-1])
        del row, at
        _aten.max_pool2d_with_indices_backward.grad_input(
            given[chunk],
            nothing.expand(result[chunk].shape),
            *(kernel, stride, padding, dilation, ceil, column),
            grad_input=result[chunk],
        )
        del column  # freed before the next chunk
    return out


POOL = define_op(
    "max_pool2d_places", f"(Tensor values, int[] shape, {_WINDOW}) -> (Tensor, Tensor)", _pool
)
POOL_BACKWARD = define_op(
    "max_pool2d_places_backward",
    f"(Tensor gradient, Tensor places, int[] sizes, {_WINDOW}) -> Tensor",
    _pool_backward,
)


def add_max_pool_variants(builder: GraphBuilder, table: VariantTable) -> None:
    """Add variants of max poolings and their backwards that save positions."""
    for node in list(builder.ops):
        pair = _saved_positions(builder, node) if node.target is _POOL else None
        if pair is not None:
            add_saved_pair(builder, table, pair, _is_exact)


def _saved_positions(builder: GraphBuilder, node: fx.Node) -> SavedPair | None:
    """The pair of a pooling; None if its indices have other readers, or windows exceed 256."""
    indices = [user for user in node.users if user.target is GETITEM and user.args[1] == 1]
    readers = [user for index in indices for user in index.users]
    if not readers or any(
        reader.target is not _BACKWARD or reader.args[-1] not in indices for reader in readers
    ):
        return None
    source, result = fake_values(node.args[0]), node.meta["val"][0]
    sizes, *window = readers[0].args[1:-1]
    kernel, stride, padding, dilation = (_pair(w, window[0]) for w in window[:-1])
    contiguous = (source, result, *(fake_values(reader.args[0]) for reader in readers))
    if kernel[0] * kernel[1] > 256 or not all(v.is_contiguous() for v in contiguous):
        return None
    if not result.numel() or any(reader.args[1:-1] != readers[0].args[1:-1] for reader in readers):
        return None
    windows = kernel, stride, padding, dilation, window[-1]

    def reader_args(reader: fx.Node, positions: Any) -> tuple[Any, ...]:
        return reader.args[0], positions, sizes, *windows

    replaced = dict.fromkeys(readers, builder.storages[node][1])
    args = node.args[0], [*result.shape], *windows
    saved_bytes = result.numel()
    return SavedPair(
        *(NAME, node, POOL, args, POOL_BACKWARD, reader_args, replaced, saved_bytes), inplace=False
    )


def _pair(given: Any, kernel: Any) -> Pair:
    """Both dimensions of a window parameter; an empty stride is the kernel."""
    sizes = [given] if isinstance(given, int) else [*given]
    return _pair(kernel, kernel) if not sizes else sizes * (2 // len(sizes))


def _is_exact(pair: SavedPair, _: OpProfile, backward: Mapping[fx.Node, OpProfile]) -> bool:
    """Check of both variants on synthetic inputs: bitwise equal results."""
    args = fake_values(pair.args)
    sizes = [*args[0].shape]

    def run_check() -> bool:
        (values, *rest_args), _ = synthetic_arguments(POOL, args, {})
        flat, window = values.view(-1), rest_args[1:]
        # Ties within a window, -inf and NaN.
        flat.copy_(torch.arange(flat.numel(), device=flat.device).mul_(7).remainder_(5))
        flat[::11] = float("nan")
        flat[: flat.numel() // 4] = float("-inf")
        expected_result, indices = _POOL(values, *window)
        result, positions = POOL(values, *rest_args)
        gradient = torch.linspace(-9, 9, result.numel(), device=result.device).to(result.dtype)
        gradient = gradient.view(result.shape)
        expected = _BACKWARD(gradient, sizes, *window, indices)
        return bitwise_equal(result, expected_result) and bitwise_equal(
            POOL_BACKWARD(gradient, positions, sizes, *window), expected
        )

    return cached_check("alike of places", signature(POOL, args, {}), bool, run_check)
