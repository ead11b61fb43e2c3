"""State of PyTorch's default generators, saved so that a random op can be recomputed."""

from typing import Any, Protocol

import torch


class Generator(Protocol):
    """The default generator of a device."""

    def state(self) -> Any:
        """The current state, for `set`."""

    def set(self, state: Any) -> None:
        """Restore a state."""


class CpuGenerator:
    """Saves the whole state: `capture.joint_graph.GENERATOR_BYTES`."""

    def state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


class CudaGenerator:
    """Saves seed and Philox offset: two numbers, without synchronization."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state(self) -> tuple[int, int]:
        return self._generator.initial_seed(), self._generator.get_offset()

    def set(self, state: tuple[int, int]) -> None:
        seed, offset = state
        if self._generator.initial_seed() != seed:
            self._generator.manual_seed(seed)
        self._generator.set_offset(offset)


def default_generator(device: torch.device) -> Generator:
    """The generator that random ops on `device` draw from."""
    if device.type == "cuda":
        return CudaGenerator(torch.cuda.default_generators[device.index])
    return CpuGenerator()
