"""In-place ops traced so that they run through memory as eager's do.

Functionalization makes a new, dense tensor of each of them. What eager changes may be a part of a
larger tensor, as the gates of a GRU are: its kernel begins a new loop at every row, and computes
the last elements of each by other instructions than the rest (`sigmoid` differs in the last bit).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from coop_plan.runtime.torch_internals.ops import is_mutable
from coop_plan.runtime.torch_internals.tracing import before_functionalization, lay_out_functional


def with_gaps() -> AbstractContextManager[None]:
    """Give what an in-place op changes the gaps between rows that it has in eager, before it runs.

    As long as it lasts, on every thread.
    """
    return before_functionalization(_lay_out_as_eager)


def _lay_out_as_eager(op: Any, args: Any) -> None:
    if torch.Tag.pointwise in op.tags and is_mutable(op) and args:
        lay_out_functional(args[0], _spread)


def _spread(values: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Copy `values` to where two elements follow each other only if they do with `strides`.

    One element is left out at each gap, however wide it is there.
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
