"""State of PyTorch's default generators, saved so that a random op can be recomputed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class DrawingGraph:
    """CUDA graph of a half, and the states of the device's default generator that it draws from.

    PyTorch adds the offset that a state has at a replay to those of its draws in the capture. So
    first runs draw from a state that is set to the generator's at each replay, and each recomputed
    run from one of its own, set to that of the op's first run. `recomputed` are the ops of these
    runs, in order; `offsets` has those of first runs in this half that are recomputed, from its
    begin. PyTorch leaves the states of a capture that fails in it: none is the generator's own.
    """

    def __init__(
        self, device: int | None, recomputed: Sequence[int], offsets: Mapping[int, int]
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._default = torch.cuda.default_generators[device or 0]
        self._first = self._default.clone_state()
        self._recomputed, self._offsets = recomputed, offsets
        self._again = [self._default.clone_state() for _ in recomputed]
        self._runs = iter(self._again)
        for state in (self._first, *self._again):
            self._graph.register_generator_state(state)

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Context in which a capture into the graph has begun; it must end within."""
        before = self._default.graphsafe_get_state()
        self.resume()
        try:
            # PyTorch runs the two halves on two threads: only this one's calls are checked.
            self._graph.capture_begin(capture_error_mode="thread_local")
            yield self._graph
        finally:
            self._default.graphsafe_set_state(before)

    def recompute(self) -> None:
        """Draw from the state of the next recomputed run, until `resume`."""
        self._default.graphsafe_set_state(next(self._runs))

    def resume(self) -> None:
        """Draw from the state of first runs."""
        self._default.graphsafe_set_state(self._first)

    def replay(self, states: dict[int, tuple[int, int]]) -> None:
        """Replay the graph; `states` of first runs, by op, get those of this half."""
        default, first = CudaGenerator(self._default), CudaGenerator(self._first)
        seed, begin = default.state()
        states |= {op: (seed, begin + offset) for op, offset in self._offsets.items()}
        first.set((seed, begin))
        for op, state in zip(self._recomputed, self._again, strict=True):
            CudaGenerator(state).set(states[op])
        self._graph.replay()
        default.set(first.state())


def default_generator(device: torch.device) -> Generator:
    """The generator that random ops on `device` draw from."""
    if device.type == "cuda":
        return CudaGenerator(torch.cuda.default_generators[device.index])
    return CpuGenerator()
