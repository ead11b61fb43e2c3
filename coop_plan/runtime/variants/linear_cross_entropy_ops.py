"""Ops that run a product with the classes, its cross entropy and their gradients in chunks.

The logits are a matrix of (rows, classes): `hidden` (rows, width) times `matrix` (width, classes),
plus a `bias` of the classes. A chunk of them is computed again wherever it is needed:

- the loss, and the gradient of `hidden`, for some rows at a time;
- the gradients of `matrix` and `bias` for some classes at a time. A sum over rows in chunks would
  have other bits. What the softmax of some classes needs of the others are two numbers a row.

The loss may read some rows alone, as where the last token of each text has no target: `kept` is
empty, or the rows of a text, the first one read, and their number.

Each chunk runs the kernels of the ops that these replace, so that bits are equal wherever a product
of a chunk has the bits of the whole product. `linear_cross_entropy` checks that.
"""

from collections.abc import Sequence
from typing import Any

import torch

from coop_plan.runtime.capture.custom_ops import COMPOSED_KERNELS, chunk_slices, define_op
from coop_plan.runtime.torch_internals.ops import log_softmax_backward

_aten = torch.ops.aten

_IGNORED = -100
"""Target of rows that are ignored, among targets of one class."""


def _logits(
    hidden: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Logits of some rows, or of some classes, in the dtype of the softmax."""
    product = hidden @ matrix if bias is None else torch.addmm(bias, hidden, matrix)
    return product.to(dtype)


def _one_class(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Targets among one class, in which the same rows are ignored."""
    return torch.where(target == ignore_index, _IGNORED, 0)


def _of_loss(values: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
    """The rows that the loss reads."""
    if not kept:
        return values
    period, start, length = kept
    texts = values.reshape(-1, period, *values.shape[1:])
    return texts[:, start : start + length].flatten(0, 1)


def _of_all(values: torch.Tensor, kept: Sequence[int], other: int) -> torch.Tensor:
    """All rows, from those that the loss reads; others are `other`."""
    if not kept:
        return values
    period, start, length = kept
    texts = values.reshape(-1, length, *values.shape[1:])
    result = values.new_full((len(texts), period, *values.shape[1:]), other)
    result[:, start : start + length] = texts
    return result.flatten(0, 1)


def _zero_others(gradient: torch.Tensor, kept: Sequence[int], first: int) -> None:
    """Zero the gradients of the logits in rows that the loss does not read, from row `first`."""
    if kept:
        period, start, length = kept
        at = torch.arange(first, first + len(gradient), device=gradient.device) % period
        gradient[(at < start) | (at >= start + length)] = 0


def _loss(
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    kept: Sequence[int],
    dtype: torch.dtype,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of `nll_loss_forward`, then the largest logit and log-sum-exp above it of each row.

    The latter two are of `dtype`; `rows` are those of a chunk.
    """
    largest, log_sum, chosen = (hidden.new_empty((len(hidden), 1), dtype=dtype) for _ in range(3))
    targets = _of_all(target, kept, ignore_index)
    for chunk in chunk_slices(len(hidden), rows):
        logits = _logits(hidden[chunk], matrix, bias, dtype)
        torch.amax(logits, 1, keepdim=True, out=largest[chunk])
        logits = torch.log_softmax(logits, 1)
        # The largest of x - largest - log_sum is 0 - log_sum.
        torch.amax(logits, 1, keepdim=True, out=log_sum[chunk])
        losses, _ = _aten.nll_loss_forward.default(logits, targets[chunk], None, 0, ignore_index)
        torch.neg(losses, out=chosen[chunk].squeeze(1))
        del logits, losses  # freed before the next chunk
    loss, total = _aten.nll_loss_forward.default(
        *(_of_loss(chosen, kept), _one_class(target, ignore_index), None, reduction, _IGNORED)
    )
    return loss, total, largest, log_sum.neg_()


def _input_gradient(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    kept: Sequence[int],
    total: torch.Tensor,
    dtype: torch.dtype,
    rows: int,
) -> torch.Tensor:
    """The gradient of `hidden`, from that of the loss; `rows` are those of a chunk."""
    result = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    targets = _of_all(target, kept, ignore_index)
    gradients = _of_all(gradient, kept, 0) if gradient.dim() else gradient
    for chunk in chunk_slices(len(hidden), rows):
        logits = torch.log_softmax(_logits(hidden[chunk], matrix, bias, dtype), 1)
        own = gradients[chunk] if gradients.dim() else gradients
        nll_gradient = _aten.nll_loss_backward.default(
            *(own, logits, targets[chunk], None, reduction, ignore_index, total)
        )
        log_softmax_backward(nll_gradient, logits, 1, dtype, out=logits)
        del nll_gradient
        _zero_others(logits, kept, chunk.start)
        torch.mm(logits.to(hidden.dtype), matrix.t(), out=result[chunk])
        del logits  # freed before the next chunk
    return result


def _weight_gradient(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    kept: Sequence[int],
    total: torch.Tensor,
    largest: torch.Tensor,
    log_sum: torch.Tensor,
    dtype: torch.dtype,
    classes: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the transposed `matrix` (classes, width) and of `bias` (1, classes).

    `largest` and `log_sum` are results of the loss; `classes` are those of a chunk.
    """
    count = matrix.shape[1]
    result = torch.empty((count, len(matrix)), dtype=matrix.dtype, device=matrix.device)
    sums = None if bias is None else bias.new_empty((1, count))
    one_class = _of_loss(largest, kept), _one_class(target, ignore_index), None
    chosen = _aten.nll_loss_backward.default(gradient, *one_class, reduction, _IGNORED, total)
    chosen, targets = _of_all(chosen, kept, 0), _of_all(target, kept, ignore_index)
    for chunk in chunk_slices(count, classes):
        own = None if bias is None else bias[chunk]
        logits = _logits(hidden, matrix[:, chunk], own, dtype)
        # One column more has the gradient of targets outside the chunk: the kernel of the softmax
        # sums the gradients of a row, of which one is not zero.
        size = chunk.stop - chunk.start
        wide = logits.new_zeros((len(hidden), size + 1))
        torch.sub(logits, largest, out=wide[:, :size]).sub_(log_sum)
        del logits
        inside = (targets >= chunk.start) & (targets < chunk.stop)
        column = torch.where(inside, targets - chunk.start, size).unsqueeze(1)
        nll_gradient = torch.zeros_like(wide).scatter_(1, column, chosen)
        log_softmax_backward(nll_gradient, wide, 1, dtype, out=wide)
        del nll_gradient, inside, column
        _zero_others(wide, kept, 0)
        logits_gradient = wide[:, :size].to(hidden.dtype, memory_format=torch.contiguous_format)
        del wide
        torch.mm(logits_gradient.t(), hidden, out=result[chunk])
        if sums is not None:
            torch.sum(logits_gradient, (0,), keepdim=True, out=sums[:, chunk])
        del logits_gradient  # freed before the next chunk
    return result, sums


def run_whole(
    gradient: torch.Tensor, arguments: Sequence[Any], dtype: torch.dtype
) -> tuple[Any, ...]:
    """Loss and total weight, then the gradients, by the ops that those in chunks replace.

    `arguments` are those that all ops in chunks have, in their order.
    """
    hidden, matrix, bias, target, reduction, ignore_index, kept = arguments
    logits = _of_loss(_logits(hidden, matrix, bias, dtype), kept)
    logits = torch.log_softmax(logits, 1)
    options = None, reduction, ignore_index
    loss, total = _aten.nll_loss_forward.default(logits, target, *options)
    nll_gradient = _aten.nll_loss_backward.default(gradient, logits, target, *options, total)
    log_softmax_backward(nll_gradient, logits, 1, dtype, out=logits)
    del nll_gradient
    logits = _of_all(logits, kept, 0).to(hidden.dtype)
    by_bias = None if bias is None else logits.sum((0,), keepdim=True)
    return loss, total, logits @ matrix.t(), logits.t() @ hidden, by_bias


def _define(name: str, arguments: str, results: str, run: Any) -> Any:
    op = define_op(f"linear_cross_entropy{name}", f"({arguments}) -> {results}", run)
    COMPOSED_KERNELS[op] = run
    return op


_HEAD = (
    "Tensor hidden, Tensor matrix, Tensor? bias, Tensor target, int reduction, int ignore_index,"
    " int[] kept"
)

LOSS = _define(
    "", f"{_HEAD}, ScalarType dtype, int rows", "(Tensor, Tensor, Tensor, Tensor)", _loss
)
INPUT_GRADIENT = _define(
    "_input_gradient",
    f"Tensor gradient, {_HEAD}, Tensor total, ScalarType dtype, int rows",
    "Tensor",
    _input_gradient,
)
WEIGHT_GRADIENT = _define(
    "_weight_gradient",
    f"Tensor gradient, {_HEAD}, Tensor total, Tensor largest, Tensor log_sum, ScalarType dtype,"
    " int classes",
    "(Tensor, Tensor?)",
    _weight_gradient,
)
