"""Composite ops traced as the C++ code that eager autograd runs.

For tracing, PyTorch 2.13 replaces a few of them with Python versions of its own, and these compute
other numbers: interpolation reads by index, matrix products are folded by other rules, recurrent
layers lose the dropout between their layers and do without oneDNN's kernel, or fail with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from coop_plan.runtime.capture.inplace_rules import with_gaps
from coop_plan.runtime.torch_internals.ops import LINALG_CHECK
from coop_plan.runtime.torch_internals.tracing import (
    composite_overloads,
    kept_though_unused,
    python_kernels,
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
"""The ops that are traced as C++; the Python version of batch norm has to stay, for example: it
says that the running statistics change."""


@contextmanager
def as_eager() -> Iterator[None]:
    """Trace composite and in-place ops as eager runs them, on this and every other thread."""
    kernels: dict[Any, Any] = dict.fromkeys(composite_overloads(PACKETS))
    with (
        python_kernels(kernels | {_DROPOUT: _dropout}),
        with_gaps(),
        kept_though_unused(LINALG_CHECK),
    ):
        yield


_DROPOUT: Any = torch.ops.aten.dropout.default


def _dropout(values: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that keeps a mask of one byte an element, where that gives eager's numbers.

    Eager multiplies by noise / (1 - p), computed in the type of the input; the mask's kernel by
    1 / (1 - p), rounded once.
    """
    if train and 0 < p < 1 and _rounds_alike(values.dtype, p):
        return torch.native_dropout(values, p, train)[0]
    kept: torch.Tensor = run_composite(_DROPOUT, values, p, train)
    return kept


def _rounds_alike(dtype: torch.dtype, p: float) -> bool:
    if dtype == torch.float32:
        return bool(np.float32(1) / np.float32(1 - p) == np.float32(1 / (1 - p)))
    return dtype == torch.float64
