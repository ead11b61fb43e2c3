"""Memory of ops on this CPU that no formula tells: workspace that a forward keeps, and scratch.

Fake results of oneDNN's recurrent layers leave out the workspace that the forward keeps for the
backward. Scratch of convolutions depends on the library's choice, and other ops of the CPU have
some, too, as a mask of dropout in float32. The library that a step would use is that of this
process. So an op runs once per shape, on synthetic inputs.
"""

import os
from typing import Any

import torch

from coop_plan.runtime.capture.op_replacements import REPLACEMENTS
from coop_plan.runtime.capture.profiler import profile_op, workspace_of
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.op_profile import OpProfile
from coop_plan.runtime.torch_internals.ops import tree_flatten

MEMORY_SHARE = 0.25
"""An op runs if its inputs take at most this share of the machine's memory."""

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
    return profile_op(op, args, kwargs) if op is not None and _runs_here(args, kwargs) else None


def cpu_scratch_bytes(target: Any, args: Any, kwargs: Any) -> int | None:
    """Scratch in bytes of `target(*args, **kwargs)` on this CPU; None if it cannot be measured.

    Tensors in the arguments are fake ones.
    """
    if target.is_view or not _runs_here(args, kwargs):
        return None
    try:
        return workspace_of(target, args, kwargs)
    except CaptureError:
        return None


def _runs_here(args: Any, kwargs: Any) -> bool:
    """True if all tensors are on the CPU, and this machine has the memory for them."""
    given = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    here = bool(given) and all(value.device.type == "cpu" for value in given)
    return here and sum(value.nbytes for value in given) <= MEMORY_SHARE * memory
