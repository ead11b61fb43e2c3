"""Memory of a training iteration in eager PyTorch, by what holds it."""

import msgspec

from coop_plan.runtime.offline_capture.gap import beyond, gap_for, peak
from coop_plan.schemas import Compute, Graph, Plan

PAGE = 4096


class EagerParts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at one moment of an iteration.

    Attributes:
        weights: parameters, and float32 masters of an optimizer.
        gradients: gradients of parameters.
        states: buffers of the optimizer.
        activations: other tensors of forward and backward, outputs included.
        update: temporaries of the optimizer's step.
        other: inputs, buffers of the model, and workspaces of libraries.
    """

    weights: int = 0
    gradients: int = 0
    states: int = 0
    activations: int = 0
    update: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(getattr(self, part) for part in self.__struct_fields__)

    def of_shard(self, shards: int) -> int:
        """Bytes on one of the ranks that share weights, gradients, states and update."""
        whole = self.activations + self.other
        return whole - (whole - self.total) // shards

    def plus(self, **more: int) -> "EagerParts":
        """These parts with more bytes of some."""
        changed = {part: getattr(self, part) + count for part, count in more.items()}
        return msgspec.structs.replace(self, **changed)


class EagerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks of an iteration in eager PyTorch.

    Attributes:
        step: peak of forward and backward.
        update: peak of the optimizer's step; None without an optimizer.
        update_bytes: largest temporaries of the optimizer.
        lent: those that an idle arena serves on CUDA.
        unlent_bytes: largest other temporaries, if some are lent.
        resident_bytes: those of weights, inputs and buffers that the captured graph contains.
        loading_bytes: peak while the model was built, where it was built on this device.
        dtype: dtype of most of the parameters.
        without_loss: shape of the step's first output, if none is a scalar.
    """

    step: EagerParts
    update: EagerParts | None = None
    update_bytes: int = 0
    lent: tuple[int, ...] = ()
    unlent_bytes: int = 0
    resident_bytes: int = 0
    loading_bytes: int = 0
    dtype: str = ""
    without_loss: tuple[int, ...] = ()

    @property
    def peak(self) -> EagerParts:
        """The parts at the larger peak of step and update."""
        return max(self.step, self.update or self.step, key=lambda parts: parts.total)

    @property
    def peak_bytes(self) -> int:
        """The largest peak."""
        return max(self.peak.total, self.loading_bytes)

    def shard_bytes(self, shards: int) -> int:
        """The peak on one of the ranks that share weights, gradients and states.

        It lacks the weights that are gathered for a block, and buffers of collectives.
        """
        return max(parts.of_shard(shards) for parts in (self.step, self.update or self.step))

    @property
    def updating_bytes(self) -> int:
        """Temporaries of an update in the backward, which the runtime counts in the step's budget.

        They come beside the whole budget once: the first plan knows nothing of them.
        """
        return self.update_bytes if self.update is None else 0

    def outside_step(self, *, rests: bool) -> int:
        """Bytes outside a planned step: states, other residents, temporaries of the update.

        An arena that `rests`, as on the CPU, frees its pages before the process exceeds the peak of
        the step, so it does not exist beside temporaries.
        """
        missing = self.step.weights + self.step.other - self.resident_bytes
        beside = self.unlent_bytes if self.lent else self.update_bytes
        if rests and self.update is not None:
            beside = 0
        return self.step.states + beside + max(0, missing)

    def with_plan(self, graph: Graph, made: Plan, *, rests: bool) -> int:
        """The peak of an iteration whose step has a plan with the gradients in its arena."""
        if self.update is None:
            return made.peak_bytes + self.updating_bytes + self.outside_step(rests=rests)
        apart = self.update.total - self.update.gradients
        if rests:  # whole pages of gradients stay
            updating = apart + _pages_of_gradients(graph, made)
        else:
            updating = apart - self.update.update + made.arena_bytes
            updating += self.unlent_bytes if self.lent else self.update_bytes
            updating += beyond(self.lent, made.arena_bytes - self.update.gradients)
        return max(made.peak_bytes + self.outside_step(rests=True), updating)

    def step_budget(self, graph: Graph, available: int, *, rests: bool) -> int:
        """A budget of the step by which the runtime keeps an iteration within available bytes.

        If the arena may be too small for the update's temporaries, these lie beside it. That is
        so if it lacks room for them and, as tensors are not divided, for the largest once more.
        """
        room = available - self.outside_step(rests=rests)
        if rests or self.update is None or not self.lent:
            return room
        resident = sum(tensor.bytes for tensor in graph.tensors if tensor.resident)
        enough = resident + self.update.gradients + gap_for(self.lent) + max(self.lent)
        return room if room >= enough else room - peak(self.lent)

    def figures(self) -> dict[str, int]:
        """The parts at the peak, `peak_bytes` and `loading_bytes`, for JSON."""
        parts: dict[str, int] = msgspec.to_builtins(self.peak)
        return parts | {"peak_bytes": self.peak_bytes, "loading_bytes": self.loading_bytes}


def _pages_of_gradients(graph: Graph, made: Plan) -> int:
    """Bytes of the arena's pages in which a step leaves its gradients."""
    late = {t for op in graph.ops if op.phase == "backward" for t in op.outputs}
    gradients = {t.id for t in graph.tensors if t.kind == "output" and t.id in late}
    writes = [write for step in made.steps if isinstance(step, Compute) for write in step.writes]
    places = {w.tensor: (w.offset, w.offset + w.bytes) for w in writes if w.offset is not None}
    held = end = 0
    for begin, after in sorted(places[t] for t in gradients & places.keys()):
        begin, after = max(end, begin // PAGE * PAGE), -(-after // PAGE) * PAGE
        held += max(0, after - begin)
        end = max(end, after)
    return held
