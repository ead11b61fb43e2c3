"""
Lower bounds on the peak memory of every schedule: working sets, unrecomputable residents, searches.

The working set of a variant is what its run needs in the arena at once. Unrecomputable residents
are live tensors that the op at hand does not use and that cannot be recomputed. Both count bytes
rounded up to the alignment. `budget_lower_bound` searches further back in time; its bound holds in
every order of the ops and for any number of reruns. With transfers or variants only working sets
hold.
"""

from collections.abc import Iterator, Mapping
from heapq import nlargest
from itertools import accumulate
from typing import NamedTuple

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.inplace import working_set_bytes
from coop_plan.planner.core.problem import Problem, plannable_variants
from coop_plan.schemas import Op, Variant


class WorkingSets(NamedTuple):
    """Per variant its working set in bytes: in the first run of its op, and in a rerun.

    Inputs, outputs and workspace; a pair that can share one address counts once.
    """

    first: list[int]
    rerun: list[int]


class WorkingSet(NamedTuple):
    """An op and the bytes of a working set of it."""

    op: int
    bytes: int


class UnrecomputableResidents(NamedTuple):
    """An op, the bytes of its unrecomputable residents, and the largest tensor of them."""

    op: int
    bytes: int
    tensor: int


def working_sets(problem: Problem) -> WorkingSets:
    """The working sets of a problem's variants, computed once per problem."""
    found: WorkingSets | None = problem.__dict__.get("_working_sets")
    if found is None:
        found = WorkingSets(*working_set_bytes(to_arrays(problem)).tolist())
        problem.__dict__["_working_sets"] = found
    return found


def largest_working_set(problem: Problem) -> WorkingSet:
    """Lower bound on the arena of every schedule of default variants; (−1, 0) without ops.

    The op is the one whose default variant has the largest working set.
    """
    return _largest(working_sets(problem).first[: problem.op_count])


def working_set_bound(problem: Problem) -> WorkingSet:
    """Lower bound on the arena of every schedule: as above, with the smallest variant per op."""
    return _largest(_smallest_variants(problem))


def _largest(sizes: list[int]) -> WorkingSet:
    op = max(range(len(sizes)), key=sizes.__getitem__, default=-1)
    return WorkingSet(op, sizes[op] if op >= 0 else 0)


def _smallest_variants(problem: Problem) -> list[int]:
    """Per op the smallest working set of its variants."""
    first = working_sets(problem).first
    smallest = first[: problem.op_count]
    for number, variant in enumerate(problem.variants):
        smallest[variant.op] = min(smallest[variant.op], first[number])
    return smallest


def unrecomputable_residents(problem: Problem, arena_bytes: int) -> UnrecomputableResidents | None:
    """
    The op with the largest sum of working set and unrecomputable residents, if above `arena_bytes`.

    In every schedule without transfers a tensor is resident to its last use from the first op on
    after which its producer, or an op that overwrites it, cannot run again (`Problem.rerun_limit`).
    None if that op has no such residents, or if the sum fits.
    """
    n = problem.op_count
    resident_from = {t: _resident_from(problem, t) for t in range(problem.tensor_count)}
    change = [0] * (n + 1)
    for t, begin in resident_from.items():
        if begin <= problem.last_use[t]:
            change[min(begin, n)] += problem.size[t]
            change[min(problem.last_use[t] + 1, n)] -= problem.size[t]
    residents = list(accumulate(change[:n]))
    for op in range(n):
        variant = problem.variants[op]
        for t in dict.fromkeys((*variant.reads, *variant.makes)):
            if resident_from[t] <= op <= problem.last_use[t]:
                residents[op] -= problem.size[t]
    first = working_sets(problem).first
    op = max(range(n), key=lambda op: first[op] + residents[op], default=-1)
    if op < 0 or not residents[op] or first[op] + residents[op] <= arena_bytes:
        return None
    used = {*problem.variants[op].reads, *problem.variants[op].makes}
    tensors = [
        t
        for t, begin in resident_from.items()
        if t not in used and begin <= op <= problem.last_use[t]
    ]
    largest = max(tensors, key=problem.size.__getitem__)
    return UnrecomputableResidents(op, residents[op], largest)


def explain_residents(problem: Problem, residents: UnrecomputableResidents) -> str:
    """One clause for an error: the bytes, the op that cannot run again, and what prevents it."""
    graph = problem.graph
    position = min(
        _writers(problem, residents.tensor), key=lambda op: _first_without_rerun(problem, op)
    )
    writer = graph.ops[position]
    size = f"{residents.bytes} bytes that are kept for later"
    text = f"{size}: op {writer.id} ({writer.name}) cannot run again"
    if not writer.recomputable:
        return text
    in_arena = {t.id for t, yes in zip(graph.tensors, problem.overwritten, strict=True) if yes}
    read = set(writer.inputs) - in_arena
    for op in graph.ops[position:]:
        overwritten = sorted(read & set(op.mutates))
        if overwritten:
            name = next(t.name for t in graph.tensors if t.id == overwritten[0])
            tensor = f"tensor {overwritten[0]}" + (f" ({name})" if name else "")
            return f"{text} once op {op.id} ({op.name}) has overwritten {tensor}"
    return text


def _resident_from(problem: Problem, tensor: int) -> int:
    """First op at which a tensor is an unrecomputable resident; after its last use if at none."""
    outside = problem.resident[tensor] or problem.outside[tensor]
    if problem.producer[tensor] < 0 or outside or not problem.size[tensor]:
        return problem.last_use[tensor] + 1
    return min(_first_without_rerun(problem, op) for op in _writers(problem, tensor))


def _writers(problem: Problem, tensor: int) -> list[int]:
    """The producer of a tensor and the ops that overwrite it."""
    return [problem.producer[tensor], *problem.overwriters.get(tensor, ())]


def _first_without_rerun(problem: Problem, op: int) -> int:
    """The first position, after the op's own, at which the op cannot run again."""
    return max(problem.rerun_limit[op], op + 1)


def needs_with_resident_outputs(problem: Problem) -> list[int]:
    """Per op its working set and the outputs resident beside it, bytes of the arena.

    Every schedule that keeps outputs in the arena resident once they are produced needs the largest
    of them. A schedule may recompute an output instead, which rarely helps.
    """
    outputs = resident_output_bytes(problem)
    pairs = zip(_smallest_variants(problem), outputs, strict=True)
    return [working_set + resident for working_set, resident in pairs]


def resident_output_bytes(problem: Problem) -> list[int]:
    """Per op the bytes of outputs in the arena produced before it that it does not use."""
    produced, total = set[int](), 0
    found = []
    for variant in problem.variants[: problem.op_count]:
        used = {*variant.reads, *variant.makes} & produced
        found.append(total - sum(problem.size[t] for t in used))
        new = {t for t in variant.makes if problem.is_output[t]} - produced
        total += sum(problem.size[t] for t in new)
        produced |= new
    return found


def budget_lower_bound(problem: Problem, max_searched: int = 10_000) -> int:
    """Lower bound in bytes on the budget of every schedule, resident tensors included."""
    slack = problem.alignment - 1  # the topmost block need not end at a multiple
    if problem.home_candidates:
        return _bound_with_homes(problem, slack)
    return problem.fixed_bytes + max(0, arena_lower_bound(problem, max_searched) - slack)


def _bound_with_homes(problem: Problem, slack: int) -> int:
    """As `budget_lower_bound`: an op needs the movable residents that it reads, and no others.

    One that may run on the host needs none.
    """
    movable = {t: problem.bytes[t] for t in problem.home_candidates}
    least = dict[int, int]()
    for variant, bytes_ in zip(problem.variants, bytes_with_homes(problem, movable), strict=True):
        need = bytes_ - slack
        least[variant.op] = min(need, least.get(variant.op, need))
    for op in problem.host_ops:
        least[op] = 0
    fixed = problem.fixed_bytes - sum(movable.values())
    return fixed + max([0, *least.values()])


def bytes_with_homes(problem: Problem, movable: Mapping[int, int]) -> Iterator[int]:
    """Per variant its working set with the movable residents (tensor: bytes) that it reads.

    Without those whose buffer an output may take over.
    """
    graph, first = problem.graph, working_sets(problem).first
    forms: list[Op | Variant] = [*graph.ops]
    forms += [variant for _, variant in plannable_variants(graph)]
    for form, variant, bytes_ in zip(forms, problem.variants, first, strict=True):
        shared = {t for _, t in form.inplace}
        held = movable.keys() & variant.inputs
        yield bytes_ + sum(movable[t] for t in held if graph.tensors[t].id not in shared)


def arena_lower_bound(problem: Problem, max_searched: int = 10_000) -> int:
    """Lower bound on the largest sum of live bytes of every schedule, sizes rounded up.

    When an op runs, all its inputs are live. One of them was produced last; during its production
    the others were live already, next to the working set of its producer. One of the tensors live
    then was produced last, and so on: the minimum over all choices is a bound. Outputs of run-once
    ops are live from their production to the last reader, hence at every op on a path between both.
    At the end of the step all outputs are live. The search starts from at most `max_searched` ops,
    those that need most.
    """
    bound = max(0, working_set_bound(problem).bytes)
    if problem.beyond_recomputation:
        return bound
    search = _BackwardSearch(problem)
    residents = [
        run_once.difference(problem.reads[op], problem.makes[op])
        for op, run_once in enumerate(_resident_run_once(problem))
    ]
    first = working_sets(problem).first
    needed = [first[op] + search.bytes(tensors) for op, tensors in enumerate(residents)]
    bound = max([bound, *needed])
    for op in nlargest(max_searched, range(problem.op_count), key=needed.__getitem__):
        reads = frozenset(problem.reads[op])
        bound = max(bound, search.bound(reads | residents[op], bound))
        if residents[op]:  # more live tensors may exhaust the search
            bound = max(bound, search.bound(reads, bound))
    outputs = frozenset(
        t for t in range(problem.tensor_count) if problem.is_output[t] and not problem.outside[t]
    )
    bound = max(bound, search.bytes(outputs))
    return max(bound, search.bound(outputs, bound))


class _BackwardSearch:
    """Searches backwards in time from a moment at which given tensors are live together."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.working_set = [min(pair) for pair in zip(*working_sets(problem), strict=True)]
        self.reads = [frozenset(reads) for reads in problem.reads]
        self.used = [
            reads.union(makes) for reads, makes in zip(self.reads, problem.makes, strict=True)
        ]
        self.calls_left = 0

    def bytes(self, tensors: frozenset[int]) -> int:
        """The sum of their sizes."""
        return sum(self.problem.size[t] for t in tensors)

    def bound(self, live: frozenset[int], known: int) -> int:
        """Lower bound on the peak until these tensors are live together, at least `known`."""
        self.calls_left = 256
        return self._bound(live, known, 8)  # productions backwards in time

    def _bound(self, live: frozenset[int], known: int, depth: int) -> int:
        self.calls_left -= 1
        if not live or len(live) > 32 or depth == 0 or self.calls_left < 0:
            return known
        # Each choice of the op that produced the last of them, with the bytes live at its run.
        choices = sorted(
            (self.working_set[op] + self.bytes(live - self.used[op]), op)
            for op in {self.problem.producer[t] for t in live}
        )
        best = -1
        for bytes_, op in choices:
            if 0 <= best <= bytes_:
                break  # the remaining choices need no less
            before = live.difference(self.problem.makes[op]) | self.reads[op]
            found = max(bytes_, known, self._bound(before, known, depth - 1))
            best = found if best < 0 else min(best, found)
            if best <= known:
                return known
        return best


def _resident_run_once(problem: Problem) -> Iterator[frozenset[int]]:
    """Per op the outputs of run-once ops that are live during it in every schedule.

    These are produced by ancestors of the op and read by descendants of it, or are outputs of the
    step. Sets are bit masks over the tracked tensors.
    """
    tracked = [
        t
        for t in range(problem.tensor_count)
        if (producer := problem.producer[t]) >= 0
        and not problem.graph.ops[producer].recomputable
        and not problem.outside[t]
        and problem.size[t]
    ]
    tracked = nlargest(512, tracked, key=problem.size.__getitem__)
    if not tracked:
        yield from (frozenset() for _ in range(problem.op_count))
        return
    bit = {t: 1 << number for number, t in enumerate(tracked)}
    outputs = sum(bit[t] for t in tracked if problem.is_output[t])
    n = problem.op_count
    before, after = [0] * n, [0] * n  # produced by ancestors; read by the op or by descendants
    for op in range(n):
        for t in problem.op_inputs[op]:
            producer = problem.producer[t]
            if producer >= 0:
                before[op] |= before[producer] | bit.get(t, 0)
    for op in range(n - 1, -1, -1):
        for t in problem.op_inputs[op]:
            after[op] |= bit.get(t, 0)
        for t in problem.op_inputs[op]:
            if problem.producer[t] >= 0:
                after[problem.producer[t]] |= after[op]
    for op in range(n):
        both = before[op] & (after[op] | outputs)
        yield frozenset(t for t in tracked if both & bit[t]) if both else frozenset()
