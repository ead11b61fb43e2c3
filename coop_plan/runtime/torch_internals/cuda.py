"""Symbols of PyTorch's CUDA library."""

import ctypes
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

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


def address_on_device(address: int) -> int | None:
    """Address at which the current device's kernels read pinned memory; None if they cannot."""
    found = ctypes.c_void_p()
    ask = ctypes.CDLL(str(CUDA_LIBRARY)).cudaHostGetDevicePointer
    failed: int = ask(ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
    return None if failed else found.value


def keep_busy(cycles: int) -> None:
    """Occupy the current stream for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def end_capture(graph: torch.cuda.CUDAGraph, device: int, pool: tuple[int, int]) -> None:
    """End the capture of a graph into a memory pool; the pool of one that failed is released.

    Assumed: `capture_end` raises before it ends the allocations to the pool, which the allocator
    then takes for a capture under way: `empty_cache` fails (aten/src/ATen/cuda/CUDAGraph.cpp).

    Raises:
        RuntimeError: the capture failed.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
        raise


class HostWaits:
    """Context that notes the file and line of the first op that makes the host wait, if any.

    Assumed: PyTorch's synchronization debug mode warns of such an op at the line of its call.
    """

    def __init__(self) -> None:
        self.found: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._warnings = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            mode = torch.cuda.get_sync_debug_mode()
            stack.callback(torch.cuda.set_sync_debug_mode, mode)
            torch.cuda.set_sync_debug_mode("warn")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()
        for warning in self._warnings or ():
            message = str(warning.message)
            if "called a synchronizing CUDA operation" in message:
                self.found = self.found or (warning.filename, warning.lineno)
            elif "Synchronization debug mode" not in message:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
