"""
Versions: a step in which every version of a tensor that ops overwrite is a tensor of its own.

An op that overwrites a tensor in the arena reads one version and makes the next one at the same
address. As tensors of their own, versions can be dropped and made again as all others can: the
producer runs again, and then whoever overwrites what it made (static single assignment, Cytron et
al., TOPLAS 13(4), 1991). One thing is particular: the version that is read ends with the run. Who
orders runs of this problem makes an older version again before it is read after that.
"""

from dataclasses import dataclass
from itertools import count

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.lifetimes import Trace
from coop_plan.planner.core.problem import Pair, Problem
from coop_plan.planner.core.schedule import NoScheduleError, PlacedSchedule, Schedule
from coop_plan.schemas import Op, Tensor


@dataclass(frozen=True)
class Versions:
    """
    `problem` is `original` with versions as tensors: the same ops, in their default variants only.

    Where nothing in the arena is overwritten it is the original itself. Version 0 of a tensor has
    the tensor's number; the others follow all tensors. `overwrites[o]` are the (made, read)
    versions of op o; those made are the last of its outputs, in that order.
    """

    original: Problem
    problem: Problem
    tensor: list[int]
    """By version the tensor of `original`."""
    overwrites: list[tuple[Pair, ...]]

    @classmethod
    def of(cls, problem: Problem) -> "Versions":
        """The versions of a problem."""
        if any(problem.overwritten):
            return _Renaming(problem).versions()
        unchanged = list(range(problem.tensor_count))
        return cls(problem, problem, unchanged, [()] * problem.op_count)

    def restored(self, schedule: Schedule) -> Schedule:
        """
        A schedule of `problem` as one of `original`: versions in one place are one buffer.

        Raises:
            NoScheduleError: a version is still read after it was overwritten.
        """
        if self.problem is self.original:
            return schedule
        return self._merged(schedule, self._roots(schedule))

    def placed(self, placed: PlacedSchedule) -> PlacedSchedule:
        """As `restored`, with the same addresses."""
        if self.problem is self.original:
            return placed
        root = self._roots(placed.schedule)
        restored = self._merged(placed.schedule, root)
        return PlacedSchedule(restored, placed.offset[np.unique(root)], placed.workspace_offset)

    def _roots(self, schedule: Schedule) -> Ints:
        """Per buffer the one with version 0 in its place."""
        t = schedule.trace
        root = np.arange(t.tensor.size)
        for event, op in enumerate(schedule.variants):
            if op < 0 or not self.overwrites[op]:
                continue
            reads = dict(zip(self.problem.op_inputs[op], schedule.reads(event), strict=True))
            end = t.writes_ptr[event + 1]
            made = t.writes[end - len(self.overwrites[op]) : end]
            for buffer, (_, version) in zip(made, self.overwrites[op], strict=True):
                if t.last[reads[version]] != event:
                    raise NoScheduleError("a version is read after it was overwritten")
                root[buffer] = root[reads[version]]
        return root

    def _merged(self, schedule: Schedule, root: Ints) -> Schedule:
        t = schedule.trace
        kept, buffer = np.unique(root, return_inverse=True)
        last, survives = t.last[kept], t.survives[kept]
        np.maximum.at(last, buffer, t.last)
        np.maximum.at(survives, buffer, t.survives)
        fewer = [0 if op < 0 else len(self.overwrites[op]) for op in schedule.variants]
        ends = t.writes_ptr[1:]
        stays = np.ones(t.writes.size, dtype=np.bool_)
        for end, versions in zip(ends, fewer, strict=True):
            stays[end - versions : end] = False
        trace = Trace(
            tensor=np.array(self.tensor, dtype=np.int64)[t.tensor[kept]],
            first=t.first[kept],
            last=last,
            shares=_renumbered(t.shares[kept], buffer),
            survives=survives,
            reads_ptr=t.reads_ptr,
            reads=_renumbered(t.reads, buffer),
            writes_ptr=t.writes_ptr - np.cumsum([0, *fewer]),
            writes=_renumbered(t.writes[stays], buffer),
            moved=_renumbered(t.moved, buffer),
            source=_renumbered(t.source, buffer),
        )
        return Schedule(self.original, schedule.do, schedule.what, trace)


def _renumbered(old: Ints, buffer: Ints) -> Ints:
    """Numbers of buffers as new ones; what is negative stands for none."""
    return np.where(old >= 0, buffer[old], old)


class _Renaming:
    """Walks over the ops, naming versions."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tensors = list(problem.graph.tensors)
        self.tensor = list(range(problem.tensor_count))
        self.outside = list(problem.outside)
        self.now = {self.tensors[t].id: t for t, yes in enumerate(problem.overwritten) if yes}
        """By id of an overwritten tensor its latest version so far."""
        known = {tensor.id for tensor in self.tensors}
        self.unused = (i for i in count() if i not in known)

    def versions(self) -> Versions:
        problem = self.problem
        named = [self._op(op) for op in problem.graph.ops]
        graph = problem.graph.model_copy(
            update={"tensors": self.tensors, "ops": [op for op, _ in named]}
        )
        versioned = Problem.with_places(
            graph, problem.alignment, problem.outputs, problem.host_budget, self.outside
        )
        return Versions(problem, versioned, self.tensor, [pairs for _, pairs in named])

    def _op(self, op: Op) -> tuple[Op, tuple[Pair, ...]]:
        """The op among versions, and the (made, read) ones of what it overwrites."""
        inputs = [self._id(t) for t in op.inputs]
        shared = [[out, self._id(t)] for out, t in op.inplace if t not in op.mutates]
        pairs = []
        for t in dict.fromkeys(op.mutates):
            if t in self.now:
                old = self.now[t]
                self.now[t] = made = self._next(old)
                pairs.append((made, old))
        ids = [[self.tensors[made].id, self.tensors[old].id] for made, old in pairs]
        changed = {
            "inputs": inputs,
            "outputs": [*op.outputs, *(made for made, _ in ids)],
            "mutates": [t for t in op.mutates if t not in self.now],
            "inplace": [*shared, *ids],
            "variants": [],
        }
        return op.model_copy(update=changed), tuple(pairs)

    def _id(self, tensor_id: int) -> int:
        """The id of a tensor's latest version."""
        found = self.now.get(tensor_id)
        return tensor_id if found is None else self.tensors[found].id

    def _next(self, old: int) -> int:
        """A new version; only the last one of an output is an output."""
        before: Tensor = self.tensors[old]
        self.tensors[old] = before.model_copy(update={"kind": "activation"})
        self.tensors.append(before.model_copy(update={"id": next(self.unused)}))
        self.tensor.append(self.tensor[old])
        self.outside.append(False)
        return len(self.tensors) - 1
