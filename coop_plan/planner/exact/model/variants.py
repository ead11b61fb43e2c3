"""The variants of a problem that are worth anything, and what a relaxed model may assume of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from coop_plan.planner.core.problem import OpVariant, Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule


def dominates(problem: Problem, a: OpVariant, b: OpVariant) -> bool:
    """
    Whether `a` can stand in for `b` in any run: no dearer, no larger, and it needs nothing more.

    The plan keeps every address: what `a` reads and makes is what `b` reads and makes, or less of
    the former, and whatever shared an address in place still may.
    """
    return (
        a.cost_us <= b.cost_us
        and problem.rounded(a.workspace_bytes) <= problem.rounded(b.workspace_bytes)
        and set(a.inputs) <= set(b.inputs)
        and set(a.outputs) == set(b.outputs)
        and set(a.inplace) >= set(b.inplace)
    )


@dataclass(frozen=True)
class VariantChoices:
    """
    Per op the variants that no other one of it dominates, the cheapest first.

    Position n, the end of the step, reads the outputs. `reads` are by variant the tensors that it
    reads and that the step makes, `made` the tensors by op that every one of its variants makes.
    `until[b]` is the last position before which variant b can run again (`Problem.until`). `useful[t]`
    is the last position at which having tensor t can still matter. `always[t]` says that t takes no
    room in the arena.
    """

    problem: Problem
    n: int
    of: list[tuple[int, ...]]
    reads: dict[int, frozenset[int]]
    made: list[frozenset[int]]
    until: dict[int, int]
    last_useful: list[int]
    unconstrained: list[bool]

    @classmethod
    def of_problem(cls, problem: Problem) -> "VariantChoices":
        """Those of a problem."""
        n, variants = problem.op_count, problem.variants
        by_op: list[list[int]] = [[] for _ in range(n)]
        for number in sorted(range(len(variants)), key=lambda b: (variants[b].cost_us, b)):
            variant = variants[number]
            rivals = by_op[variant.op]
            if not any(dominates(problem, variants[r], variant) for r in rivals):
                rivals[:] = [r for r in rivals if not dominates(problem, variant, variants[r])]
                rivals.append(number)
        of = [tuple(rivals) for rivals in by_op]
        listed = [b for rivals in of for b in rivals]
        reads = {
            b: frozenset(t for t in variants[b].inputs if problem.producer[t] >= 0) for b in listed
        }
        made = [frozenset.intersection(*(frozenset(variants[b].outputs) for b in r)) for r in of]
        until = {b: problem.until_of(variants[b]) for b in listed}
        unconstrained = [
            size == 0 or problem.outside[t] or problem.resident[t]
            for t, size in enumerate(problem.size)
        ]
        last_useful = list(problem.producer)
        for t in range(problem.tensor_count):
            if problem.is_output[t]:
                last_useful[t] = n
        for op in range(n - 1, -1, -1):
            last = max((last_useful[t] for b in of[op] for t in variants[b].outputs), default=op)
            for b in of[op]:
                for t in reads[b]:
                    last_useful[t] = max(last_useful[t], max(op, min(last, until[b])))
        return cls(problem, n, of, reads, made, until, last_useful, unconstrained)

    @property
    def outputs(self) -> frozenset[int]:
        """What the end of the step reads."""
        problem = self.problem
        return frozenset(t for t in range(problem.tensor_count) if problem.is_output[t])

    def read_by_all(self, position: int) -> frozenset[int]:
        """The tensors that the first run at a position reads in whichever variant."""
        if position == self.n:
            return self.outputs
        return frozenset.intersection(*(self.reads[b] for b in self.of[position]))


def fix_variants(problem: Problem, chosen: Sequence[int]) -> Problem:
    """
    The problem with variant `chosen[o]` as the only one of op o, with the same tensors and no host.

    Every variant must find what it reads: the variant chosen of its maker makes it.
    """
    ops = []
    for op, number in zip(problem.graph.ops, chosen, strict=True):
        name = problem.variants[number].name
        form = next((v for v in op.variants if v.name == name), op)
        ops.append(
            op.model_copy(
                update={
                    "inputs": form.inputs,
                    "outputs": form.outputs,
                    "cost_us": form.cost_us,
                    "workspace_bytes": form.workspace_bytes,
                    "inplace": form.inplace,
                    "variants": [],
                }
            )
        )
    graph = problem.graph.model_copy(update={"ops": ops})
    return Problem.from_graph(graph, problem.alignment, problem.outputs, host_budget=0)


def without_variants(problem: Problem) -> Problem | None:
    """
    The problem without variants and in-place pairs, with the same tensors; None if there are none.

    What is a schedule of it is one of `problem` (`carried_back`, by each op's default variant).
    """
    if not any(op.variants or op.inplace for op in problem.graph.ops):
        return None
    bare: dict[str, object] = {"variants": [], "inplace": []}
    ops = [op.model_copy(update=bare) for op in problem.graph.ops]
    graph = problem.graph.model_copy(update={"ops": ops})
    return Problem.from_graph(graph, problem.alignment, problem.outputs, problem.host_budget)


def restore_variants(
    problem: Problem, chosen: Sequence[int], placed: PlacedSchedule
) -> PlacedSchedule:
    """
    A placed schedule of the restricted problem as one of `problem`: same events, same places.

    The lifetimes, too: an online method has decided for itself what ends when.
    """
    old = placed.schedule
    what = old.what.copy()
    for event, variant in enumerate(old.variants):
        if variant >= 0:
            what[event] = chosen[variant]
    schedule = Schedule(problem, old.do, what, old.trace)
    return PlacedSchedule(schedule, placed.offset, placed.workspace_offset)
