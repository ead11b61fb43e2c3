"""Bernoulli draws on the CPU: ATen's, from the same generator, without its loop over single words.

ATen draws one element after the other (aten/src/ATen/native/cpu/DistributionTemplates.h) but where
MKL does it, on Intel's processors, from a generator of its own: there ATen's is called.
"""

import ctypes
import functools
import math
from pathlib import Path

import torch

from coop_plan.runtime.device.build import compiled
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.torch_internals.fakes import FakeTensor, unset_fake_temporarily
from coop_plan.runtime.torch_internals.ops import MERSENNE_TWISTER_OFFSETS

_ONE_AT_A_TIME = fork_safe_lock()
"""Steps of two threads would else draw the same: ATen's own lock is not held between two calls."""

_FEWEST = 1024
"""Elements below which to save and load the state of the generator would take longer."""


def bernoulli_(mask: torch.Tensor, p: float) -> torch.Tensor:
    """`mask.bernoulli_(p)` of a contiguous tensor of booleans; the same bits and the same state.

    Raises:
        BuildError: as `build.arena` does.
    """
    ours = mask.device.type == "cpu" and not isinstance(mask, FakeTensor)
    ours = ours and 0 <= p <= 1  # else ATen says what is wrong
    if not ours or mask.numel() < _FEWEST or not draws_as_aten():
        return mask.bernoulli_(p)
    return _drawn(mask, p)


def _drawn(mask: torch.Tensor, p: float) -> torch.Tensor:
    limit = math.ceil(p * 2**53)  # exact: a float64 has 53 bits
    with _ONE_AT_A_TIME:
        state = torch.get_rng_state()
        block, left, following = (state.data_ptr() + at for at in MERSENNE_TWISTER_OFFSETS)
        _library().coop_bernoulli(block, left, following, mask.numel(), limit, mask.data_ptr())
        torch.set_rng_state(state)
    return mask


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("bernoulli.cpp")
    library = ctypes.CDLL(str(compiled(source, "coop_plan_draws", link=())))
    library.coop_bernoulli.argtypes = (
        *[ctypes.c_void_p] * 3,
        *(ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p),
    )
    library.coop_bernoulli.restype = None
    return library


@functools.cache
def draws_as_aten() -> bool:
    """Whether both make the same of one state, and leave the same; tried once, with memory."""
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):  # a step is being traced
        torch.manual_seed(0)
        torch.rand(3)
        before = torch.get_rng_state()
        masks = [torch.empty(2001, dtype=torch.bool) for _ in range(2)]
        masks[0].bernoulli_(0.3)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        _drawn(masks[1], 0.3)
        return torch.equal(*masks) and torch.equal(torch.get_rng_state(), after)
