"""Ops on CUDA whose results may differ between two runs on the same inputs.

They add by atomic operations, or write to one place twice, in no fixed order. A recomputed result
that differs in a bit may lead other ops to choose other rows, as a router of experts does. So such
an op runs once, and whatever reads its result again reads the same bits. PyTorch lists its own;
those of a library are found when they are profiled, if two runs differ.
"""

import re
from collections.abc import Sequence

import torch
from torch import fx

from coop_plan.runtime.torch_internals.ops import OpOverload, has_no_memory

NONDETERMINISTIC = re.compile(
    r"""(?x)
    (_unsafe_)?index_put | index_(add|copy|reduce) | put
    | scatter(_add|_reduce)? | _?segment_reduce(_backward)?
    | cumsum | histc | kthvalue | (nan)?median
    | nll_loss2d_forward | _ctc_loss_backward | _embedding_bag(_dense)?_backward
    | max_unpool[23]d | max_pool[23]d_with_indices_backward | avg_pool3d_backward
    | _adaptive_avg_pool[23]d_backward | (adaptive|fractional)_max_pool[23]d_backward
    | (reflection|replication)_pad[123]d_backward
    | _?upsample_(bi|tri)?(linear|cubic)[123]d(_aa)?_backward
    | grid_sampler_[23]d_backward
    | _(scaled_dot_product_)?(flash|efficient)_attention_backward
    """
)
"""Names of ATen ops that `torch.use_deterministic_algorithms` lists for CUDA, and of attention.

Convolutions are left out: cuDNN selects the same algorithm each time (`without_cudnn_benchmark`).
"""


def checksums(results: Sequence[object]) -> list[float]:
    """Sums of the bytes in the storages of an op's floating-point results.

    Others may have places that the op does not write, as seeds that are not used.
    """
    tensors = (v for v in results if isinstance(v, torch.Tensor) and not has_no_memory(v))
    return [
        torch.empty(0, dtype=torch.uint8, device=value.device)
        .set_(storage := value.untyped_storage(), 0, (storage.nbytes(),), (1,))
        .sum(dtype=torch.int64)
        .item()
        for value in tensors
        if value.is_floating_point()
    ]


def may_differ(node: fx.Node, device: torch.device) -> bool:
    """True if a second run of an op on `device` is known to return other bits at times."""
    target = node.target
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if name == "cumsum":
        return bool(node.meta["val"].dtype.is_floating_point)
    if name == "scatter" and overload == "value":
        return False  # the same value at each place
    return NONDETERMINISTIC.fullmatch(name) is not None
