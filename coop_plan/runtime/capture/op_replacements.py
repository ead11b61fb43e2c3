"""Custom ops that replace ATen ops of a joint graph, with bitwise equal results."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from coop_plan.runtime.capture.custom_ops import (
    OutTensors,
    chunk_slices,
    define_op,
    define_out_op,
    name_and_schema,
)
from coop_plan.runtime.device.bernoulli import bernoulli_, matches_aten
from coop_plan.runtime.torch_internals.ops import log_softmax_backward
from coop_plan.runtime.torch_internals.tracing import below_autograd_with_grad_mode

_aten = torch.ops.aten


def _lstm_layer(*args: Any) -> Any:
    """OneDNN's LSTM layer in grad mode, without autograd.

    The kernel saves the tensors of its backward in grad mode only, and compiled forwards run
    without it.
    """
    with below_autograd_with_grad_mode():
        return _aten.mkldnn_rnn_layer.default(*args)


def _masked_scatter_backward(
    gradient: torch.Tensor, mask: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """The gradient's elements where `mask` is set, then zeros, in `sizes`.

    ATen returns the selected elements, or a zero-padded copy of them: the mask decides which
    allocation is the result. Here each element is scattered to its position, and an element that is
    not selected to one extra position at the end.
    """
    count = torch.Size(sizes).numel()
    mask = mask.expand_as(gradient).reshape(-1)
    positions = mask.long().cumsum_(0).sub_(1).masked_fill_(mask.logical_not(), count)
    positions.clamp_(max=count)  # a synthetic mask may select more than `count`
    result = gradient.new_zeros(count + 1)
    return result.scatter_(0, positions, gradient.reshape(-1))[:count].view(sizes)


CHUNK_BYTES = 4 << 20
"""Bytes of log-probabilities per chunk of a cross entropy's backward, at least one row."""


def _cross_entropy_backward(
    gradient: torch.Tensor,
    output: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of a cross entropy's logits (rows, classes); `output` is their log-softmax.

    It runs `nll_loss_backward` and the backward of `log_softmax` on a few rows at a time. `out` may
    be `output`.
    """
    out = torch.empty_like(output) if out is None else out
    rows, classes = output.shape
    step = max(1, CHUNK_BYTES // max(1, classes * output.element_size()))
    for chunk in chunk_slices(rows, step):
        nll_gradient = _aten.nll_loss_backward.default(
            gradient[chunk] if gradient.dim() else gradient,
            output[chunk],
            target[chunk],
            *(weight, reduction, ignore_index, total_weight),
        )
        log_softmax_backward(nll_gradient, output[chunk], 1, output.dtype, out=out[chunk])
        del nll_gradient  # freed before the next chunk
    return out


def _define_cross_entropy_backward() -> Any:
    name = "cross_entropy_backward"
    arguments = (
        "Tensor gradient, Tensor output, Tensor target, Tensor? weight, int reduction,"
        " SymInt ignore_index, Tensor total_weight"
    )
    run = _cross_entropy_backward
    define_op(f"{name}.out", f"({arguments}, *, Tensor(a!) out) -> Tensor(a!)", run)
    return define_op(name, f"({arguments}) -> Tensor", run)


CROSS_ENTROPY_BACKWARD = _define_cross_entropy_backward()
"""Fusion of two ops of a joint graph (`variants.fused_cross_entropy`)."""

CHUNK_ELEMENTS = 1 << 17
"""Elements per chunk of a dropout; larger for tensors that would have more than 64 chunks."""


def byte_aligned_chunks(count: int) -> Iterator[slice]:
    """Chunks of `count` elements whose bits fill whole bytes, except for the last."""
    return chunk_slices(count, max(CHUNK_ELEMENTS, -(-count // 512) * 8))


def out_or_empty_like(outs: OutTensors, values: torch.Tensor) -> torch.Tensor:
    """The first tensor of `outs`, or an empty tensor like `values` if there is none."""
    return torch.empty_like(values) if not outs or outs[0] is None else outs[0]


def _copy_to_out(outs: OutTensors, whole: torch.Tensor) -> torch.Tensor:
    return whole if not outs or outs[0] is None else outs[0].copy_(whole)


def _apply_mask(
    outs: OutTensors, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """`values` * `mask` * `scale`; all tensors are contiguous."""
    result = out_or_empty_like(outs, values)
    flat = values.view(-1), mask.view(-1), result.view(-1)
    for chunk in byte_aligned_chunks(values.numel()):
        given, kept, written = (tensor[chunk] for tensor in flat)
        torch.mul(given, kept, out=written).mul_(scale)
    return result


def dropout(
    outs: OutTensors, values: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout` in chunks, without ATen's float copy of the mask.

    Returns the result and a boolean mask (aten/src/ATen/native/Dropout.cpp).
    """
    if train is False or not values.numel() or not _is_chunkable(values):
        whole, mask = _aten.native_dropout.default(values, p, train)
        return _copy_to_out(outs, values.clone() if whole is values else whole), mask
    mask = bernoulli_(torch.empty_like(values, dtype=torch.bool), 1.0 - p)
    return _apply_mask(outs, values, mask, 1.0 / (1.0 - p) if p < 1 else 0.0), mask


def dropout_backward(
    outs: OutTensors, gradient: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """`native_dropout_backward` in chunks."""
    if gradient.shape != mask.shape or not mask.is_contiguous() or not _is_chunkable(gradient):
        return _copy_to_out(outs, _aten.native_dropout_backward.default(gradient, mask, scale))
    return _apply_mask(outs, gradient, mask, scale)


def _is_chunkable(values: torch.Tensor) -> bool:
    """True if chunks have ATen's numerics; with fewer bits ATen rounds the scale, too."""
    exact = values.dtype in (torch.float32, torch.float64)
    return exact and not values.is_cuda and values.is_contiguous()


DROPOUT = define_out_op(
    "(Tensor values, float p, bool? train) -> (Tensor, Tensor)",
    dropout,
    (torch.Tag.nondeterministic_seeded,),
)
DROPOUT_BACKWARD = define_out_op(
    "(Tensor gradient, Tensor mask, float scale) -> Tensor", dropout_backward
)


def _define_replacement(original: Any, run: Any, key: str) -> Any:
    """An op named after `run`, with the schema of `original`."""
    _, arguments = name_and_schema(original)
    return define_op(run.__name__.removeprefix("_"), f"({arguments}", run, key=key)


REPLACEMENTS: dict[Any, Any] = {
    original: _define_replacement(original, run, key)
    for original, run, key in (
        (_aten.mkldnn_rnn_layer.default, _lstm_layer, "CPU"),
        (
            _aten.masked_scatter_backward.default,
            _masked_scatter_backward,
            "CompositeExplicitAutograd",
        ),
    )
}
"""ATen ops of a joint graph, and the custom ops that replace them."""

_CPU_REPLACEMENTS: dict[Any, Any] = {
    _aten.native_dropout.default: DROPOUT,
    _aten.native_dropout_backward.default: DROPOUT_BACKWARD,
}


def replacement_of(op: Any, device: Callable[[], torch.device]) -> Any:
    """The op that runs for `op` if its results are on `device()`; `op` itself by default."""
    if op in _CPU_REPLACEMENTS and device().type == "cpu":
        matches_aten()  # allocates: here, outside the profile of any op
        return _CPU_REPLACEMENTS[op]
    return REPLACEMENTS.get(op, op)


_ORIGINALS = {own: op for op, own in (REPLACEMENTS | _CPU_REPLACEMENTS).items()}


def original_of(op: Any) -> Any:
    """The ATen op that a custom op replaces; ops of a graph document are named after it."""
    return _ORIGINALS.get(op, op)
