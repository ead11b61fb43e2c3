"""Memory of ops that only their library knows: oneDNN's layers and convolutions on the CPU.

Fake results of recurrent layers leave out the workspace that the forward keeps for the backward.
No formula of it, or of the scratch, is documented. The library that a step would use is that of
this process. So an op runs once per shape, on synthetic inputs.
"""

from typing import Any

import torch

from coop_plan.runtime.capture.op_replacements import REPLACEMENTS
from coop_plan.runtime.capture.profiler import profile_op
from coop_plan.runtime.op_profile import OpProfile

_forward = torch.ops.aten.mkldnn_rnn_layer.default
_measured = {
    _forward: REPLACEMENTS[_forward],
    REPLACEMENTS[_forward]: REPLACEMENTS[_forward],
} | {
    op: op
    for op in (
        torch.ops.aten.mkldnn_rnn_layer_backward.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
    )
}
"""Op that is measured, by op; the replacement of the forward keeps its workspace in any mode."""


def library_profile(target: Any, args: Any, kwargs: Any) -> OpProfile | None:
    """The profile of `target(*args, **kwargs)` on this CPU, if only its library knows its memory.

    Tensors in the arguments are fake ones.
    """
    op = _measured.get(target)
    on_cpu = all(value.device.type == "cpu" for value in args if isinstance(value, torch.Tensor))
    return profile_op(op, args, kwargs) if op is not None and on_cpu else None
