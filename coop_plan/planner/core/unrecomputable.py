"""What an op finds in the arena beside its working set, because it cannot be made again."""

from itertools import accumulate
from typing import NamedTuple

from coop_plan.planner.core.working_sets import needs
from coop_plan.planner.core.problem import Problem


class Held(NamedTuple):
    """An op, the arena bytes kept through it that it does not use, and the largest tensor there."""

    op: int
    bytes: int
    tensor: int


def most_held(problem: Problem, arena_bytes: int) -> Held | None:
    """
    The op that needs most together with what is kept through it, if that is beyond `arena_bytes`.

    A tensor is kept from the op on beyond which its maker, or one that overwrites it, cannot run
    again (`Problem.until`) to its last use, in every schedule without transfers. None where nothing
    is kept, or where it fits.
    """
    n = problem.op_count
    kept = {t: _kept_from(problem, t) for t in range(problem.tensor_count)}
    change = [0] * (n + 1)
    for t, begin in kept.items():
        if begin <= problem.last_use[t]:
            change[min(begin, n)] += problem.size[t]
            change[min(problem.last_use[t] + 1, n)] -= problem.size[t]
    beside = list(accumulate(change[:n]))
    for op in range(n):
        variant = problem.variants[op]
        for t in dict.fromkeys((*variant.reads, *variant.makes)):
            if kept[t] <= op <= problem.last_use[t]:
                beside[op] -= problem.size[t]
    first = needs(problem).first
    op = max(range(n), key=lambda op: first[op] + beside[op], default=-1)
    if op < 0 or not beside[op] or first[op] + beside[op] <= arena_bytes:
        return None
    own = {*problem.variants[op].reads, *problem.variants[op].makes}
    there = [t for t in kept if t not in own and kept[t] <= op <= problem.last_use[t]]
    return Held(op, beside[op], max(there, key=problem.size.__getitem__))


def least_with_outputs(problem: Problem) -> int:
    """
    Arena bytes that the step needs if outputs in the arena stay there once they are made.

    A schedule may make one again instead, which is hardly ever of use.
    """
    first = needs(problem).first
    least = first[: problem.op_count]
    for number, variant in enumerate(problem.variants):
        least[variant.op] = min(least[variant.op], first[number])
    held = outputs_held(problem)
    return max((need + beside for need, beside in zip(least, held, strict=True)), default=0)


def outputs_held(problem: Problem) -> list[int]:
    """Per op the arena bytes of outputs made before that it neither reads nor makes."""
    made, total = set[int](), 0
    found = []
    for variant in problem.variants[: problem.op_count]:
        found.append(total - sum(problem.size[t] for t in {*variant.reads, *variant.makes} & made))
        ends = {t for t in variant.makes if problem.is_output[t]} - made
        total += sum(problem.size[t] for t in ends)
        made |= ends
    return found


def reason(problem: Problem, held: Held) -> str:
    """Why the largest tensor is kept: what a writer of it reads is overwritten, or it runs once."""
    graph = problem.graph
    position = min(_writers(problem, held.tensor), key=lambda op: _lost_from(problem, op))
    writer = graph.ops[position]
    size = f"{held.bytes} bytes that are kept for later"
    what = f"{size}: op {writer.id} ({writer.name}) cannot run again"
    if not writer.recomputable:
        return what
    in_arena = {t.id for t, yes in zip(graph.tensors, problem.overwritten, strict=True) if yes}
    read = set(writer.inputs) - in_arena
    for op in graph.ops[position:]:
        overwritten = sorted(read & set(op.mutates))
        if overwritten:
            name = next(t.name for t in graph.tensors if t.id == overwritten[0])
            tensor = f"tensor {overwritten[0]}" + (f" ({name})" if name else "")
            return f"{what} once op {op.id} ({op.name}) has overwritten {tensor}"
    return what


def _kept_from(problem: Problem, tensor: int) -> int:
    """The first op through which a tensor is kept until its last use; beyond it if none is."""
    outside = problem.resident[tensor] or problem.outside[tensor]
    if problem.producer[tensor] < 0 or outside or not problem.size[tensor]:
        return problem.last_use[tensor] + 1
    return min(_lost_from(problem, op) for op in _writers(problem, tensor))


def _writers(problem: Problem, tensor: int) -> list[int]:
    """The op that makes a tensor, and those that overwrite it."""
    return [problem.producer[tensor], *problem.overwriters.get(tensor, ())]


def _lost_from(problem: Problem, op: int) -> int:
    """The first op from which on it cannot run again."""
    return max(problem.until[op], op + 1)
