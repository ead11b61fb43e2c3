"""Vectorized Bernoulli sampling on the CPU, bitwise equal to ATen's and from its generator.

ATen samples element by element (aten/src/ATen/native/cpu/DistributionTemplates.h). On Intel
processors it calls MKL, which has a generator of its own; ATen's op runs there.
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

_GENERATOR_LOCK = fork_safe_lock()
"""Lock from reading to writing the generator's state; else two threads sample equal numbers."""

_MIN_ELEMENTS = 1024
"""Below this number of elements, reading and writing the generator's state costs more."""


def bernoulli_(mask: torch.Tensor, p: float) -> torch.Tensor:
    """`mask.bernoulli_(p)` of a contiguous boolean tensor: equal bits and generator state.

    Raises:
        BuildError: as `build.arena` does.
    """
    supported = mask.device.type == "cpu" and not isinstance(mask, FakeTensor)
    supported = supported and 0 <= p <= 1  # ATen raises otherwise
    if not supported or mask.numel() < _MIN_ELEMENTS or not matches_aten():
        return mask.bernoulli_(p)
    return _sample(mask, p)


def _sample(mask: torch.Tensor, p: float) -> torch.Tensor:
    limit = math.ceil(p * 2**53)  # exact: a float64 has 53 bits
    with _GENERATOR_LOCK:
        state = torch.get_rng_state()
        block, left, following = (state.data_ptr() + at for at in MERSENNE_TWISTER_OFFSETS)
        _library().coop_bernoulli(block, left, following, mask.numel(), limit, mask.data_ptr())
        torch.set_rng_state(state)
    return mask


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("bernoulli.cpp")
    library = ctypes.CDLL(str(compiled(source, "coop_plan_bernoulli", link=())))
    library.coop_bernoulli.argtypes = (
        *[ctypes.c_void_p] * 3,
        *(ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p),
    )
    library.coop_bernoulli.restype = None
    return library


@functools.cache
def matches_aten() -> bool:
    """True if ATen and `_sample` agree in bits and final state; checked once, on real tensors."""
    with (
        unset_fake_temporarily(),
        torch.random.fork_rng(devices=[]),
    ):  # the caller may be tracing a step
        torch.manual_seed(0)
        torch.rand(3)
        before = torch.get_rng_state()
        masks = [torch.empty(2001, dtype=torch.bool) for _ in range(2)]
        masks[0].bernoulli_(0.3)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        _sample(masks[1], 0.3)
        return torch.equal(*masks) and torch.equal(torch.get_rng_state(), after)
