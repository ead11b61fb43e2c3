"""CUDA graph of a half whose random ops draw as they do without a graph."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from coop_plan.runtime.execute.rng_state import CudaGenerator
from coop_plan.runtime.torch_internals.cuda import end_capture


class DrawingGraph:
    """CUDA graph of a half, and the states of the device's default generator that it draws from.

    PyTorch adds the offset that a state has at a replay to those of its draws in the capture. So
    first runs draw from a state that is set to the generator's at each replay, and each recomputed
    run from one of its own, set to that of the op's first run. `recomputed` are the ops of these
    runs, in order; `offsets` has those of first runs in this half that are recomputed, from its
    begin. Some versions of PyTorch leave the states of a capture that fails in it: none is the
    generator's own.
    """

    def __init__(self, device: int, recomputed: Sequence[int], offsets: Mapping[int, int]) -> None:
        self._graph, self._device = torch.cuda.CUDAGraph(), device
        self._default = torch.cuda.default_generators[device]
        self._first = self._default.clone_state()
        self._recomputed, self._offsets = recomputed, offsets
        self._again = [self._default.clone_state() for _ in recomputed]
        self._runs = iter(self._again)
        for state in (self._first, *self._again):
            self._graph.register_generator_state(state)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context that is captured.

        Raises:
            RuntimeError: PyTorch's, if the device refuses what was asked of it.
        """
        before, pool = self._default.graphsafe_get_state(), torch.cuda.graph_pool_handle()
        self.resume()
        try:
            # PyTorch runs the two halves on two threads: only this one's calls are checked.
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):
                    end_capture(self._graph, self._device, pool)
                raise
            end_capture(self._graph, self._device, pool)
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
