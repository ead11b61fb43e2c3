"""SSA form of a problem: each version of a tensor that ops overwrite becomes a tensor of its own.

An op that overwrites a tensor in the arena reads one version and produces the next one at the same
address (static single assignment, Cytron et al., TOPLAS 13(4), 1991). As tensors, versions can be
evicted and recomputed: the producer runs again, then the ops that overwrite its output. Unlike
other inputs, the version that is read ends with the run, so a schedule of this problem recomputes
an older version before a later read of it.
"""

from dataclasses import dataclass
from itertools import count

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.lifetimes import RUN, Trace
from coop_plan.planner.core.problem import Pair, Problem, plannable_variants
from coop_plan.planner.core.schedule import NoScheduleError, PlacedSchedule, Schedule
from coop_plan.schemas import Op, Tensor, Variant


@dataclass(frozen=True)
class SsaForm:
    """
    `problem` is `original` with versions as tensors: the same ops and plannable variants.

    It is the original itself if no tensor in the arena is overwritten. Version 0 of a tensor has
    the tensor's number; later versions follow all tensors. `overwrites[o]` are the (output, input)
    versions of op o; these outputs are the last ones of its variants, in that order.
    """

    original: Problem
    problem: Problem
    tensor: list[int]
    """Per tensor of `problem` its tensor in `original`."""
    overwrites: list[tuple[Pair, ...]]

    @classmethod
    def of(cls, problem: Problem) -> "SsaForm":
        """The SSA form of a problem."""
        if any(problem.overwritten):
            return _Renaming(problem).ssa_form()
        return cls.unchanged(problem)

    @classmethod
    def unchanged(cls, problem: Problem) -> "SsaForm":
        """The problem itself, whose overwritten tensors stay one tensor each."""
        unchanged = list(range(problem.tensor_count))
        return cls(problem, problem, unchanged, [()] * problem.op_count)

    def to_original(self, schedule: Schedule) -> Schedule:
        """A schedule of `problem` as one of `original`: versions at one address are one buffer.

        Raises:
            NoScheduleError: a version is read after it was overwritten.
        """
        if self.problem is self.original:
            return schedule
        return self._merged(schedule, self._roots(schedule))

    def of_original(self, schedule: Schedule) -> Schedule:
        """A schedule of `original` as one of `problem`: the same events.

        Raises:
            NoScheduleError: it moves an overwritten tensor.
        """
        if self.problem is self.original:
            return schedule
        return Schedule.of_events(self.problem, schedule.do, schedule.what)

    def placed_to_original(self, placed: PlacedSchedule) -> PlacedSchedule:
        """As `to_original`, with the same addresses."""
        if self.problem is self.original:
            return placed
        root = self._roots(placed.schedule)
        original = self._merged(placed.schedule, root)
        return PlacedSchedule(original, placed.offset[np.unique(root)], placed.workspace_offset)

    def _roots(self, schedule: Schedule) -> Ints:
        """Per buffer the one with version 0 at its address."""
        t = schedule.trace
        root = np.arange(t.tensor.size)
        for event, number in enumerate(schedule.variants):
            variant = self.problem.variants[number]
            op = variant.op
            if number < 0 or not self.overwrites[op]:
                continue
            reads = dict(zip(variant.inputs, schedule.reads(event), strict=True))
            end = t.writes_ptr[event + 1]
            written = t.writes[end - len(self.overwrites[op]) : end]
            for buffer, (_, version) in zip(written, self.overwrites[op], strict=True):
                if t.last[reads[version]] != event:
                    tensor = self.original.graph.tensors[self.tensor[version]].id
                    writer = self.original.graph.ops[op]
                    raise NoScheduleError(
                        f"event {t.last[reads[version]]} reads a version of tensor {tensor} that"
                        f" op {writer.id} ({writer.name}) has overwritten at event {event}"
                    )
                root[buffer] = root[reads[version]]
        return root

    def _merged(self, schedule: Schedule, root: Ints) -> Schedule:
        t = schedule.trace
        roots, buffer = np.unique(root, return_inverse=True)
        last, survives = t.last[roots], t.survives[roots]
        np.maximum.at(last, buffer, t.last)
        np.maximum.at(survives, buffer, t.survives)
        forms = self.problem.variants
        removed = [0 if v < 0 else len(self.overwrites[forms[v].op]) for v in schedule.variants]
        ends = t.writes_ptr[1:]
        stays = np.ones(t.writes.size, dtype=np.bool_)
        for end, versions in zip(ends, removed, strict=True):
            stays[end - versions : end] = False
        tensor = np.array(self.tensor, dtype=np.int64)
        what = schedule.what.copy()
        transfers = schedule.do != RUN
        what[transfers] = tensor[what[transfers]]
        trace = Trace(
            tensor=tensor[t.tensor[roots]],
            first=t.first[roots],
            last=last,
            shares=_renumbered(t.shares[roots], buffer),
            survives=survives,
            reads_ptr=t.reads_ptr,
            reads=_renumbered(t.reads, buffer),
            writes_ptr=t.writes_ptr - np.cumsum([0, *removed]),
            writes=_renumbered(t.writes[stays], buffer),
            moved=_renumbered(t.moved, buffer),
            source=_renumbered(t.source, buffer),
        )
        return Schedule(self.original, schedule.do, what, trace)


def _renumbered(old: Ints, buffer: Ints) -> Ints:
    """Buffer numbers mapped to new ones; negative entries stay."""
    return np.where(old >= 0, buffer[old], old)


class _Renaming:
    """Renames tensors to versions, op by op in program order."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tensors = list(problem.graph.tensors)
        self.tensor = list(range(problem.tensor_count))
        self.outside = list(problem.outside)
        self.latest = {self.tensors[t].id: t for t, yes in enumerate(problem.overwritten) if yes}
        """Latest version so far, by the id of an overwritten tensor."""
        used = {tensor.id for tensor in self.tensors}
        self.unused_ids = (i for i in count() if i not in used)
        self.variants: list[list[Variant]] = [[] for _ in problem.graph.ops]
        for position, variant in plannable_variants(problem.graph):
            self.variants[position].append(variant)

    def ssa_form(self) -> SsaForm:
        problem = self.problem
        renamed = [self._op(*each) for each in zip(problem.graph.ops, self.variants, strict=True)]
        graph = problem.graph.model_copy(
            update={"tensors": self.tensors, "ops": [op for op, _ in renamed]}
        )
        versioned = Problem.with_places(
            graph, problem.alignment, problem.outputs, problem.host_budget, self.outside
        )
        return SsaForm(problem, versioned, self.tensor, [pairs for _, pairs in renamed])

    def _op(self, op: Op, variants: list[Variant]) -> tuple[Op, tuple[Pair, ...]]:
        """The op on versions, and its (output, input) versions of overwritten tensors."""
        forms: list[Op | Variant] = [op, *variants]
        inputs = [[self._id(t) for t in form.inputs] for form in forms]
        shared = [
            [[out, self._id(t)] for out, t in form.inplace if t not in op.mutates] for form in forms
        ]
        pairs = []
        for t in dict.fromkeys(op.mutates):
            if t in self.latest:
                old = self.latest[t]
                self.latest[t] = new = self._new_version(old)
                pairs.append((new, old))
        ids = [[self.tensors[new].id, self.tensors[old].id] for new, old in pairs]
        changed: list[dict[str, object]] = [
            {
                "inputs": read,
                "outputs": [*form.outputs, *(new for new, _ in ids)],
                "inplace": [*same, *ids],
            }
            for form, read, same in zip(forms, inputs, shared, strict=True)
        ]
        changed[0]["mutates"] = [t for t in op.mutates if t not in self.latest]
        changed[0]["variants"] = [
            variant.model_copy(update=update)
            for variant, update in zip(variants, changed[1:], strict=True)
        ]
        return op.model_copy(update=changed[0]), tuple(pairs)

    def _id(self, tensor_id: int) -> int:
        """The id of a tensor's latest version."""
        found = self.latest.get(tensor_id)
        return tensor_id if found is None else self.tensors[found].id

    def _new_version(self, old: int) -> int:
        """Add the version after `old`; only the last version of an output is an output."""
        before: Tensor = self.tensors[old]
        self.tensors[old] = before.model_copy(update={"kind": "activation"})
        self.tensors.append(before.model_copy(update={"id": next(self.unused_ids)}))
        self.tensor.append(self.tensor[old])
        self.outside.append(False)
        return len(self.tensors) - 1
