"""The variants of a problem that are worth anything, and what a relaxed model may assume of them."""

from dataclasses import dataclass

from coop_plan.planner.core.problem import OpVariant, Problem


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
class Choices:
    """
    Per op the variants that no other one of it dominates, the cheapest first.

    Position n, the end of the step, reads the outputs. `reads` are by variant the tensors that it
    reads and that the step makes, `made` the tensors by op that every one of its variants makes.
    `until[b]` is the last position before which variant b can run again (`Problem.rerun_limit`). `useful[t]`
    is the last position at which having tensor t can still matter. `always[t]` says that t takes no
    room in the arena.
    """

    problem: Problem
    n: int
    of: list[tuple[int, ...]]
    reads: dict[int, frozenset[int]]
    made: list[frozenset[int]]
    until: dict[int, int]
    useful: list[int]
    always: list[bool]

    @classmethod
    def of_problem(cls, problem: Problem) -> "Choices":
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
        until = {b: problem.rerun_limit_of(variants[b]) for b in listed}
        always = [
            size == 0 or problem.outside[t] or problem.resident[t]
            for t, size in enumerate(problem.size)
        ]
        useful = list(problem.producer)
        for t in range(problem.tensor_count):
            if problem.is_output[t]:
                useful[t] = n
        for op in range(n - 1, -1, -1):
            last = max((useful[t] for b in of[op] for t in variants[b].outputs), default=op)
            for b in of[op]:
                for t in reads[b]:
                    useful[t] = max(useful[t], max(op, min(last, until[b])))
        return cls(problem, n, of, reads, made, until, useful, always)

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
