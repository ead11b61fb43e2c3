"""Access to PyTorch internals; each function states its assumptions.

No other file of the runtime names private parts of PyTorch. A test checks this rule, and each
assumption against the installed version. Files and lines cited below are those of 2.13.0.

Two assumptions are in C++. `device/arena.cpp`: an allocator given to `c10::SetCPUAllocator` with
priority 1 serves all memory of tensors on the CPU, by `allocate` or by `raw_allocate`.
`device/allocator_hook.h`: PyTorch's CUDA allocator is an `at::Allocator` with a virtual table of
the Itanium ABI, and allocates tensors by its entry `allocate`.

Names that 2.14 made public replace nothing as long as 2.13 is supported, since both ways would
stay. `torch.autograd.graph.node_creation_hook` calls Python for every node, where `recorded_nodes`
reads a counter. The hooks of `torch.cuda.graphs` tell the end of a graph, after which a block of
`device.cuda` could be freed. `torch.cuda.memory._annotate_tensor` labels allocations of PyTorch's
allocator alone, of which an arena is one.
"""

import logging

import torch

log = logging.getLogger("coop-plan")


SUPPORTED = ((2, 11), (2, 16))
"""Tested versions of PyTorch: from the first one, up to but not including the second."""


FUSED_SINCE = (2, 13)
"""First version whose Inductor was seen to round the results of all ops as eager does."""


def version() -> tuple[int, int]:
    """Major and minor version of PyTorch."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return major, minor


def warn_of_version() -> None:
    """Log a warning if the runtime was not tested with this version of PyTorch."""
    oldest, beyond = SUPPORTED
    if not oldest <= version() < beyond:
        log.warning(
            "PyTorch %s was not tested with coop-plan; tested versions: %d.%d to below %d.%d",
            *(torch.__version__, *oldest, *beyond),
        )
