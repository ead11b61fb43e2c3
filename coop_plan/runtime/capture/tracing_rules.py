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
from typing import Any

import numpy as np
import torch

from coop_plan.runtime.torch_internals.ops import LINALG_CHECK, is_mutable
from coop_plan.runtime.torch_internals.tracing import (
    before_functionalization,
    composite_overloads,
    keep_unused,
    python_kernels,
    restride_functional,
    run_composite,
)

PACKETS = (
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "matmul", "softshrink", "hardshrink"),
    *("multi_margin_loss", "multilabel_margin_loss_forward"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
)
"""Composite ops traced as C++. Others keep PyTorch's Python version: that of batch norm, for
example, marks the running statistics as mutated."""


@contextmanager
def as_eager() -> Iterator[None]:
    """Trace composite and in-place ops as eager runs them, on this and every other thread."""
    kernels: dict[Any, Any] = dict.fromkeys(composite_overloads(PACKETS))
    with (
        python_kernels(kernels | {_DROPOUT: _dropout}),
        before_functionalization(_restride_as_eager),
        keep_unused(LINALG_CHECK),
    ):
        yield


_DROPOUT: Any = torch.ops.aten.dropout.default


def _dropout(values: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout with a mask of one byte an element, where its result equals eager's.

    Eager multiplies by noise / (1 - p), computed in the type of the input. The kernel with a mask
    multiplies by 1 / (1 - p), rounded once.
    """
    if train and 0 < p < 1 and _mask_scale_is_exact(values.dtype, p):
        return torch.native_dropout(values, p, train)[0]
    result: torch.Tensor = run_composite(_DROPOUT, values, p, train)
    return result


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
