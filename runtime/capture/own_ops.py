"""Ops of ours that run in place of ATen's, with the same numbers."""

from typing import Any

import torch

from coop_plan.runtime.torch_internals import below_autograd_in_grad_mode, schema_text

_library: Any = torch.library.Library("coop_plan", "DEF")  # type: ignore[no-untyped-call]


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


def _in_place_of(original: Any, run: Any, key: str) -> Any:
    """An op that `run` is named after, with the arguments of `original`."""
    name = run.__name__.removeprefix("_")
    _, parenthesis, arguments = schema_text(original).partition("(")
    _library.define(name + parenthesis + arguments)
    _library.impl(name, run, key)
    return getattr(torch.ops.coop_plan, name).default


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
