"""Ops of ours that run in place of ATen's, with the same numbers."""

from collections.abc import Callable
from typing import Any

import torch

from coop_plan.runtime.capture.dropout import DROPOUT, DROPOUT_BACKWARD
from coop_plan.runtime.capture.custom_ops import define, name_and_arguments, slices
from coop_plan.runtime.device.bernoulli import draws_as_aten
from coop_plan.runtime.torch_internals.ops import log_softmax_backward
from coop_plan.runtime.torch_internals.tracing import below_autograd_in_grad_mode


def _lstm_layer(*args: Any) -> Any:
    """OneDNN's LSTM layer, trained without autograd around it.

    The kernel makes what its backward needs in grad mode only; no compiled forward runs in it.
    """
    with below_autograd_in_grad_mode():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def _masked_scatter_backward(
    gradient: torch.Tensor, mask: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """The gradient's elements where `mask` is set, then zeros, in `sizes`.

    ATen's makes its result out of what it selected, or of a copy with zeros behind: which of its
    allocations is the result depends on the mask. Here each element is written to its place, and
    those not selected to one more at the end.
    """
    count = torch.Size(sizes).numel()
    mask = mask.expand_as(gradient).reshape(-1)
    places = mask.long().cumsum_(0).sub_(1).masked_fill_(mask.logical_not(), count)
    places.clamp_(max=count)  # a profiled mask may select more than there is room for
    result = gradient.new_zeros(count + 1)
    return result.scatter_(0, places, gradient.reshape(-1))[:count].view(sizes)


PART_BYTES = 4 << 20
"""Of log-probabilities whose gradients are computed at once, or those of one row."""


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
    """The gradient of the logits (rows, classes) of a cross entropy, of which `output` is the log.

    `nll_loss_backward` and that of `log_softmax`, a few rows at a time; `out` may be
    `output`.
    """
    out = torch.empty_like(output) if out is None else out
    rows, classes = output.shape
    step = max(1, PART_BYTES // max(1, classes * output.element_size()))
    for part in slices(rows, step):
        between = torch.ops.aten.nll_loss_backward.default(
            gradient[part] if gradient.dim() else gradient,
            output[part],
            target[part],
            *(weight, reduction, ignore_index, total_weight),
        )
        log_softmax_backward(between, output[part], 1, output.dtype, out=out[part])
        del between  # before the next
    return out


def _define_cross_entropy_backward() -> Any:
    name = "cross_entropy_backward"
    arguments = (
        "Tensor gradient, Tensor output, Tensor target, Tensor? weight, int reduction,"
        " SymInt ignore_index, Tensor total_weight"
    )
    run = _cross_entropy_backward
    define(f"{name}.out", f"({arguments}, *, Tensor(a!) out) -> Tensor(a!)", run)
    return define(name, f"({arguments}) -> Tensor", run)


CROSS_ENTROPY_BACKWARD = _define_cross_entropy_backward()
"""What stands for two ops of a joint graph (`capture.fusing`)."""


def _in_place_of(original: Any, run: Any, key: str) -> Any:
    """An op that `run` is named after, with the arguments of `original`."""
    _, arguments = name_and_arguments(original)
    return define(run.__name__.removeprefix("_"), f"({arguments}", run, key=key)


INSTEAD: dict[Any, Any] = {
    original: _in_place_of(original, run, key)
    for original, run, key in (
        (torch.ops.aten.mkldnn_rnn_layer.default, _lstm_layer, "CPU"),
        (
            torch.ops.aten.masked_scatter_backward.default,
            _masked_scatter_backward,
            "CompositeExplicitAutograd",
        ),
    )
}
"""Ops of a joint graph, and what runs in their place."""

_ON_CPU: dict[Any, Any] = {
    torch.ops.aten.native_dropout.default: DROPOUT,
    torch.ops.aten.native_dropout_backward.default: DROPOUT_BACKWARD,
}


def instead_of(op: Any, device: Callable[[], torch.device]) -> Any:
    """What runs in place of an op of a joint graph, on the device of its results."""
    if op in _ON_CPU and device().type == "cpu":
        draws_as_aten()  # here, where its memory is no op's
        return _ON_CPU[op]
    return INSTEAD.get(op, op)


_ORIGINALS = {own: op for op, own in (INSTEAD | _ON_CPU).items()}


def original_of(op: Any) -> Any:
    """The op of a joint graph in whose place one of ours runs; a graph's ops are named after it."""
    return _ORIGINALS.get(op, op)
