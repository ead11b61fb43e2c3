"""Memory of a training iteration in eager PyTorch, by what holds it."""

import msgspec

from coop_plan.runtime.execute.gap import arena_for_loans, beyond, gap_for, peak
from coop_plan.schemas import Compute, Graph, Plan, Tensor

ALIGNMENT = {"cuda": 512, "cpu": 64}
"""Multiple to which the allocators of PyTorch round a size."""

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
        accumulates: the step is that of a later micro-batch, with its gradients outside the arena.
        padding_bytes: those that then share pages with gradients on a CPU.
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
    accumulates: bool = False
    padding_bytes: int = 0
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

    def updating_bytes(self, *, rests: bool) -> int:
        """Temporaries of an update in the backward that the runtime counts in the step's budget.

        On a CPU they come beside the whole budget once: the first plan knows nothing of them. On
        CUDA, where the runtime does not observe them, they always do.
        """
        return self.update_bytes if rests and self.update is None else 0

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

    def with_plan(
        self,
        graph: Graph,
        made: Plan,
        *,
        rests: bool,
        budget: int | None = None,
        scattered: bool = False,
    ) -> int:
        """The peak of an iteration whose step has a plan with the gradients in its arena.

        The runtime is given `budget` bytes for the step, by default those of `step_bytes`. With
        `scattered` gradients these are anywhere in an arena that rests, as in a plan at other
        costs; otherwise where this plan has them.
        """
        if self.update is None:
            return (
                made.peak_bytes + self.updating_bytes(rests=rests) + self.outside_step(rests=rests)
            )
        inside = 0 if self.accumulates else self.update.gradients
        apart = self.update.total - inside
        if rests:  # whole pages of gradients stay
            held = most_pages(graph) if scattered else _pages_of_gradients(graph, made)
            updating = apart + self.padding_bytes + held
            return max(made.peak_bytes + self.outside_step(rests=True), updating)
        if budget is None:
            budget = self.step_bytes(graph, made, rests=rests)
        arena = self._arena_bytes(graph, made, budget)
        beside = self.unlent_bytes if self.lent else self.update_bytes
        beside += beyond(self.lent, arena - inside)
        stepping = made.peak_bytes - made.arena_bytes + self.outside_step(rests=True)
        return arena + max(stepping, apart - self.update.update + beside)

    def step_bytes(self, graph: Graph, made: Plan, *, rests: bool) -> int:
        """The budget, at least the plan's, with which an iteration by it takes the fewest bytes.

        An arena with a little more than the plan's bytes may save the update's temporaries.
        """
        least = made.budget_bytes + self.updating_bytes(rests=rests)
        if rests or self.update is None or not self.lent:
            return least
        inside = 0 if self.accumulates else self.update.gradients
        filled = made.peak_bytes - made.arena_bytes + inside + gap_for(self.lent)
        return min(
            (least, max(least, filled)),
            key=lambda budget: self.with_plan(graph, made, rests=rests, budget=budget),
        )

    def _arena_bytes(self, graph: Graph, made: Plan, budget: int) -> int:
        """Bytes that the runtime allocates for the arena of a plan on CUDA, within a budget."""
        room = budget - (made.peak_bytes - made.arena_bytes)
        return max(made.arena_bytes, min(room, arena_for_loans(_gradient_bytes(graph))))

    def step_budget(self, graph: Graph, available: int, *, rests: bool) -> int:
        """A budget of the step by which the runtime keeps an iteration within available bytes.

        If the arena may be too small for the update's temporaries, these lie beside it. That is
        so if the budget lacks room for them, or if the runtime does not reserve that and there is
        no room for the largest once more, as tensors are not divided.
        """
        room = available - self.outside_step(rests=rests)
        if rests or self.update is None or not self.lent:
            return room
        resident = sum(tensor.bytes for tensor in graph.tensors if tensor.resident)
        arena = self.update.gradients + gap_for(self.lent)
        enough = resident + arena
        if arena_for_loans(_gradient_bytes(graph)) < arena:
            enough += max(self.lent)
        return room if room >= enough else room - peak(self.lent)

    def figures(self) -> dict[str, int]:
        """The parts at the peak, `peak_bytes` and `loading_bytes`, for JSON."""
        parts: dict[str, int] = msgspec.to_builtins(self.peak)
        return parts | {"peak_bytes": self.peak_bytes, "loading_bytes": self.loading_bytes}


def held_padding(kind: str, count: int) -> int:
    """Bytes that share pages with so many gradients of an earlier arena, which stay on a CPU."""
    return 2 * PAGE * count if kind == "cpu" else 0


def _gradients(graph: Graph) -> list[Tensor]:
    late = {t for op in graph.ops if op.phase == "backward" for t in op.outputs}
    return [t for t in graph.tensors if t.kind == "output" and t.id in late]


def _gradient_bytes(graph: Graph) -> list[int]:
    """Bytes of the gradients on CUDA."""
    return [
        -(-tensor.bytes // ALIGNMENT["cuda"]) * ALIGNMENT["cuda"] for tensor in _gradients(graph)
    ]


def most_pages(graph: Graph) -> int:
    """Bytes of the pages in which gradients lie at most, wherever they are aligned in an arena."""
    latest = PAGE - ALIGNMENT["cpu"]  # the last offset in a page
    return sum(-(-(latest + t.bytes) // PAGE) * PAGE for t in _gradients(graph) if t.bytes)


def _pages_of_gradients(graph: Graph, made: Plan) -> int:
    """Bytes of the arena's pages in which a step leaves its gradients."""
    gradients = {tensor.id for tensor in _gradients(graph)}
    writes = [write for step in made.steps if isinstance(step, Compute) for write in step.writes]
    places = {w.tensor: (w.offset, w.offset + w.bytes) for w in writes if w.offset is not None}
    held = end = 0
    for begin, after in sorted(places[t] for t in gradients & places.keys()):
        begin, after = max(end, begin // PAGE * PAGE), -(-after // PAGE) * PAGE
        held += max(0, after - begin)
        end = max(end, after)
    return held
