"""Symbols of PyTorch's CUDA library."""

import ctypes
from pathlib import Path

import torch

CUDA_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"

CUDA_ALLOCATOR = "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
"""`c10::cuda::CUDACachingAllocator::allocator`, a pointer to the allocator that PyTorch uses."""


def cuda_allocator() -> int | None:
    """The address of PyTorch's CUDA allocator, or None if it is not initialized.

    Raises:
        OSError, ValueError: no such library, or no such symbol in it.
    """
    return ctypes.c_void_p.in_dll(ctypes.CDLL(str(CUDA_LIBRARY)), CUDA_ALLOCATOR).value


def cuda_function(name: str) -> int:
    """The address of a function of the CUDA runtime that PyTorch uses.

    Assumed: libc10_cuda is linked to the CUDA runtime, so that dlsym finds its symbols there.

    Raises:
        OSError, AttributeError: no such library, or no such symbol.
    """
    function = getattr(ctypes.CDLL(str(CUDA_LIBRARY)), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def keep_busy(cycles: int) -> None:
    """Occupy the current stream for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
