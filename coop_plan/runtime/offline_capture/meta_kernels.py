"""Meta kernels that PyTorch lacks: CUDA's fused GRU cell, grouped products in all dtypes.

The shapes are those of aten/src/ATen/native/cuda/RNN.cu and GroupedMMUtils.h, torch 2.13.
"""

from functools import cache
from typing import Any

import torch

ROW_BYTES = 16
"""Multiple of the bytes of a row of a grouped product."""

WORKSPACE = 5
"""Workspace per row, in multiples of the hidden size."""


def _cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.empty_like(hx, memory_format=torch.contiguous_format)
    return made, hx.new_empty(hx.shape[0], hx.shape[1] * WORKSPACE)


def _cell_backward(
    gradient: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    rows, gates = workspace.shape[0], workspace.shape[1] // WORKSPACE * 3
    made = [workspace.new_empty(rows, gates) for _ in range(2)]
    biases = [workspace.new_empty(gates) if has_bias else None for _ in range(2)]
    return *made, torch.empty_like(gradient), *biases


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A product per group of rows, columns or matrices; rows are padded to 16 bytes.

    The kernels take float32 and float16 as well; PyTorch's meta kernel takes bfloat16 alone.
    """
    groups = [len(offs)] if offs is not None and a.ndim == b.ndim == 2 else []
    groups = [len(a)] if a.ndim == b.ndim == 3 else groups
    dtype = out_dtype or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    multiple = ROW_BYTES // dtype.itemsize
    stride = -(-columns // multiple) * multiple
    strides = [rows * stride] * len(groups) + [stride, 1]
    return a.new_empty_strided([*groups, rows, columns], strides, dtype=dtype)


@cache
def register_meta_kernels() -> Any:
    """Register the meta kernels for the rest of the process; the cache keeps the library alive."""
    library: Any = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    library.impl("_grouped_mm", _grouped_product, allow_override=True)
    library.impl("_thnn_fused_gru_cell", _cell)
    library.impl("_thnn_fused_gru_cell_backward", _cell_backward)
    return library
