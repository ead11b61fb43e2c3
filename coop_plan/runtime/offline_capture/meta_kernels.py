"""Meta kernels of CUDA's fused GRU cell, which PyTorch lacks.

The shapes are those of aten/src/ATen/native/cuda/RNN.cu, torch 2.13.
"""

from functools import cache
from typing import Any

import torch

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


@cache
def register_gru_cells() -> Any:
    """Register the meta kernels for the rest of the process; the cache keeps the library alive."""
    library: Any = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell", _cell)
    library.impl("_thnn_fused_gru_cell_backward", _cell_backward)
    return library
