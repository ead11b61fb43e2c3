"""oneDNN's LSTM layer as an op that trains without autograd around it."""

from typing import Any

import torch

_layer = torch.ops.aten.mkldnn_rnn_layer.default
_library: Any = torch.library.Library("coop_plan", "DEF")  # type: ignore[no-untyped-call]
_library.define(str(_layer._schema).replace("aten::mkldnn_rnn_layer", "lstm_layer"))


def _lstm_layer(*args: Any) -> Any:
    # The kernel makes what its backward needs in grad mode only; no compiled forward runs in it.
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return _layer(*args)


_library.impl("lstm_layer", _lstm_layer, "CPU")

TRAINED: dict[Any, Any] = {_layer: torch.ops.coop_plan.lstm_layer.default}
"""Ops of a joint graph, and what runs in their place."""
