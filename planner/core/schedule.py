"""A schedule before it is a plan: which op runs when, on which buffers."""

from dataclasses import dataclass, field

from coop_plan.planner.core.problem import Problem

OUTSIDE = -1
"""Marks a read or a write that does not touch the arena."""


@dataclass
class Schedule:
    """
    Compute events in order, and the buffers they read and write.

    Events and buffers are numbered from 0. `reads[e]` and `writes[e]` follow the op's inputs and
    outputs; `OUTSIDE` stands for resident tensors and outputs outside the arena. Buffer b holds
    tensor `tensor[b]`, is written by event `first[b]` and ends after event `last[b]`. `shares[b]`
    is the buffer whose address b takes over in place, or -1. `offset` (bytes) and
    `workspace_offset` are filled by the method or by placement; None means not placed yet.
    """

    problem: Problem
    ops: list[int] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    writes: list[tuple[int, ...]] = field(default_factory=list)
    tensor: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    offset: list[int] | None = None
    workspace_offset: list[int] | None = None

    def __post_init__(self) -> None:
        self._current: dict[int, int] = {}
        self._written_outside: set[int] = set()
        self.survivors: frozenset[int] = frozenset()

    @property
    def cost_us(self) -> float:
        """Sum of the costs of all events, in µs."""
        return sum(self.problem.cost[op] for op in self.ops)

    def holds(self, tensor: int) -> bool:
        """Whether the tensor has a live buffer now."""
        return tensor in self._current

    def leaves(self, tensor: int) -> bool:
        """Whether the next production of the tensor goes outside the arena."""
        return self.problem.outside[tensor] and tensor not in self._written_outside

    def run(self, op: int, inplace: tuple[tuple[int, int], ...] = ()) -> list[int]:
        """
        Append a compute of `op` on the live buffers; returns the buffers made, in output order.

        `inplace` lists (output, input) pairs that share one address: the input's buffer ends here.
        A materialization that replaces a live one of the same tensor (a sibling output that was
        still there when its op was recomputed) ends at this event; the older stays.
        """
        event = len(self.ops)
        problem = self.problem
        self.ops.append(op)
        reads = tuple(
            OUTSIDE if problem.resident[t] or t in self._written_outside else self._current[t]
            for t in problem.op_inputs[op]
        )
        self.reads.append(reads)
        for buffer in reads:
            if buffer != OUTSIDE:
                self.last[buffer] = event
        taken = dict(inplace)
        made: list[int] = []
        for t in problem.op_outputs[op]:
            if self.leaves(t):
                self._written_outside.add(t)
                made.append(OUTSIDE)
                continue
            source = taken.get(t)
            buffer = len(self.tensor)
            self.tensor.append(t)
            self.first.append(event)
            self.last.append(event)
            self.shares.append(-1 if source is None else self._current.pop(source))
            made.append(buffer)
            if t not in self._current and t not in self._written_outside:
                self._current[t] = buffer
        self.writes.append(tuple(made))
        return made

    def drop(self, tensor: int, *, at_last_touch: bool = False) -> int:
        """
        End the tensor's live buffer after the last event so far; returns the buffer.

        With `at_last_touch` it ends after the last event that wrote or read it, which may be
        earlier: nobody missed it in between.
        """
        buffer = self._current.pop(tensor)
        if not at_last_touch:
            self.last[buffer] = len(self.ops) - 1
        return buffer

    def finish(self) -> None:
        """Close the schedule: outputs in the arena survive, all else that is live ends."""
        for buffer in self._current.values():
            self.last[buffer] = len(self.ops) - 1
        self.survivors = frozenset(
            buffer for t, buffer in self._current.items() if self.problem.is_output[t]
        )
