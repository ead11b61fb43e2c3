"""Tracing rules under which ops keep the numerics of eager autograd.

Composite ops are traced as their C++ code. PyTorch 2.13 traces some of them as Python versions with
other numerics: interpolation reads by index, matrix products are folded by other rules, recurrent
layers lose the dropout between layers, and run without oneDNN's kernel or fail with it.

In-place ops keep the memory layout of eager. Functionalization gives each a new, dense tensor. In
eager the tensor may be part of a larger one, as the gates of a GRU are: the kernel then starts a
loop per row, and computes the last elements of each row by other instructions (`sigmoid` differs in
the last bit).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from coop_plan.runtime.torch_internals.ops import LINALG_CHECK, is_mutable
from coop_plan.runtime.torch_internals.tracing import (
    META,
    before_functionalization,
    keep_unused,
    overloads,
    python_kernels,
    restride_functional,
    run_composite,
    run_meta,
)

INTERPOLATIONS = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
)
"""Ops whose overload `vec` is composite, and computes the size of the result for another one."""

PACKETS = (
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "matmul", "softshrink", "hardshrink"),
    *("multi_margin_loss", "multilabel_margin_loss_forward", *INTERPOLATIONS),
)
"""Composite ops traced as C++. Others keep PyTorch's Python version: that of batch norm, for
example, marks the running statistics as mutated."""


@contextmanager
def as_eager() -> Iterator[None]:
    """Trace composite and in-place ops as eager runs them, on this and every other thread."""
    kernels: dict[Any, Any] = dict.fromkeys(overloads(PACKETS))
    kernels |= {op: partial(_interpolate, op) for op in overloads(INTERPOLATIONS, "vec")}
    gradients = overloads([f"{name}_backward" for name in INTERPOLATIONS], "default")
    layouts = {op: partial(_interpolated_gradient, op) for op in gradients}
    with (
        python_kernels(kernels | {_DROPOUT: _dropout}),
        python_kernels(layouts, META),
        before_functionalization(_restride_as_eager),
        keep_unused(LINALG_CHECK),
    ):
        yield


def _interpolate(
    op: Any, values: torch.Tensor, size: Sequence[Any] | None, *options: Any
) -> torch.Tensor:
    """Interpolation as its C++ code has it, in which symbolic sizes would become constants."""
    *align, scales = options
    truncated: Any = torch.sym_int
    if size is None:
        pairs = zip(values.shape[2:], scales, strict=True)
        size = [n * int(s) if int(s) == s else truncated(n * s) for n, s in pairs]
    else:
        scales = [None] * len(size)
    result: torch.Tensor = op.overloadpacket.default(values, size, *align, *scales)
    return result


def _interpolated_gradient(
    op: Any, gradient: torch.Tensor, size: Sequence[Any], of: Sequence[Any], *options: Any
) -> torch.Tensor:
    """Layout of an interpolation's gradient, for which C++ code takes no symbolic sizes.

    A trace for all sizes is compared with those at two sizes, in which C++ code makes the layout.
    """
    if all(type(n) is int for n in (*gradient.shape, *size, *of)):
        made: torch.Tensor = run_meta(op, gradient, size, of, *options)
        return made
    given, last = gradient.is_contiguous, torch.channels_last
    is_last = gradient.dim() == 4 and not given() and given(memory_format=last)
    layout = last if is_last else torch.contiguous_format
    return gradient.new_empty(of).contiguous(memory_format=layout)


_DROPOUT: Any = torch.ops.aten.dropout.default


def _dropout(values: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout with a mask of one byte an element, where its result equals eager's.

    Eager multiplies by noise / (1 - p), computed in the type of the input. The kernel with a mask
    multiplies by 1 / (1 - p), rounded once. Its noise is drawn in the order of the memory, and
    functionalization draws in that of the dimensions.
    """
    if train and 0 < p < 1 and _mask_scale_is_exact(values.dtype, p):
        return torch.native_dropout(values, p, train)[0]
    if values.is_contiguous():
        result: torch.Tensor = run_composite(_DROPOUT, values, p, train)
        return result
    order = sorted(range(values.dim()), key=lambda dim: -values.stride()[dim])
    result = run_composite(_DROPOUT, values.permute(order), p, train)
    return result.permute([order.index(dim) for dim in range(values.dim())])


def _mask_scale_is_exact(dtype: torch.dtype, p: float) -> bool:
    if dtype == torch.float32:
        return bool(np.float32(1) / np.float32(1 - p) == np.float32(1 / (1 - p)))
    return dtype == torch.float64


def _restride_as_eager(op: Any, args: Any) -> None:
    if torch.Tag.pointwise in op.tags and is_mutable(op) and args:
        restride_functional(args[0], _with_gaps)


def _with_gaps(values: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of `values` in which neighbours are adjacent only if they are with `strides`.

    Every gap is one element wide, whatever its width with `strides`.
    """
    order = sorted(range(values.dim()), key=lambda dim: -strides[dim])
    rows = values.permute(order).contiguous().unsqueeze(-1)
    steps = [*(strides[dim] for dim in order), 1]
    gaps = [
        dim
        for dim in range(1, rows.dim())
        if rows.shape[dim - 1] > 1 and steps[dim - 1] != steps[dim] * rows.shape[dim]
    ]
    padding = [side for dim in range(rows.dim())[:0:-1] for side in (0, int(dim in gaps))]
    padded = torch.constant_pad_nd(rows, padding)
    for dim in gaps:
        padded = padded.narrow(dim, 0, rows.shape[dim])
    return padded.select(-1, 0).permute([order.index(dim) for dim in range(values.dim())])
