"""All that the runtime takes from the inside of PyTorch, each with what it assumes of it.

No other file of the runtime names anything private of PyTorch. Its test holds each assumption
against the installed version, and every other file against this rule. Files and lines named below
are those of 2.13.0.

Two assumptions are in C++. `device/arena.cpp`: an allocator given to `c10::SetCPUAllocator` with
priority 1 serves all memory of tensors on the CPU, by `allocate` or by `raw_allocate`.
`device/allocator_hook.h`: PyTorch's CUDA allocator is an `at::Allocator` with a virtual table of the
Itanium ABI, and asks for the memory of tensors by its entry `allocate`.
"""

import logging

import torch

log = logging.getLogger("coop-plan")


SUPPORTED = ((2, 11), (2, 14))
"""From this version of PyTorch on, up to but without that one: the range that tests have run on."""


def warn_of_version() -> None:
    """Say in the log if this PyTorch is none that the runtime was tested with."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    oldest, beyond = SUPPORTED
    if not oldest <= (major, minor) < beyond:
        log.warning(
            "PyTorch %s was not tested with coop-plan: versions from %d.%d on, below %d.%d, were",
            *(torch.__version__, *oldest, *beyond),
        )
