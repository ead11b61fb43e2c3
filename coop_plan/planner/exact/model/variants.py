"""Variants of ops: the undominated ones, and problems in which each op has one variant."""

from collections.abc import Sequence
from dataclasses import dataclass

from coop_plan.planner.core.problem import OpVariant, Problem
from coop_plan.planner.core.schedule import NoScheduleError, PlacedSchedule, Schedule
from coop_plan.schemas import Op, Variant


def dominates(problem: Problem, a: OpVariant, b: OpVariant) -> bool:
    """True if `a` can replace `b` in any run at the same addresses.

    `a` costs no more, has no larger workspace, reads a subset, makes the same outputs, and allows
    every in-place pair of `b`.
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
    """Undominated variants per op, the cheapest first.

    Position n, the end of the step, reads the outputs. `reads` maps a variant to its inputs made in
    the step; `made` lists per op the tensors that all of its variants make. `until[b]` is the last
    position before which variant b can be recomputed (`Problem.until`). `last_useful[t]` is the
    last position at which residency of t can still matter. `unconstrained[t]` is True if t takes no
    arena bytes.
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
        """Build the choices of a problem."""
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
        """Outputs of the step, read at its end."""
        problem = self.problem
        return frozenset(t for t in range(problem.tensor_count) if problem.is_output[t])

    def read_by_all(self, position: int) -> frozenset[int]:
        """Tensors that the first run at a position reads in every variant."""
        if position == self.n:
            return self.outputs
        return frozenset.intersection(*(self.reads[b] for b in self.of[position]))


def fix_variants(problem: Problem, chosen: Sequence[int]) -> Problem:
    """
    The problem in which op o has only variant `chosen[o]`, with the same tensors and no transfers.

    Raises:
        NoScheduleError: the chosen variants do not make a tensor that one of them reads, or an
            output of the step.
    """
    made = {t for number in chosen for t in problem.variants[number].outputs}
    needed = {t for number in chosen for t in problem.variants[number].inputs}
    needed.update(t for t in range(problem.tensor_count) if problem.is_output[t])
    missing = [t for t in needed - made if problem.producer[t] >= 0]
    if missing:
        tensor = problem.graph.tensors[min(missing)].id
        raise NoScheduleError(f"no chosen variant makes tensor {tensor}, which is needed")
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
    """The problem without variants and in-place pairs; None if it has neither.

    Its schedules are schedules of `problem` in default variants (see `restore_variants`).
    """
    if not any(op.variants or op.inplace for op in problem.graph.ops):
        return None
    bare: dict[str, object] = {"variants": [], "inplace": []}
    return _with_ops(problem, [op.model_copy(bare) for op in problem.graph.ops])


def without_pairs(problem: Problem, max_ops: int) -> list[Problem]:
    """The problem without in-place pairs: without those whose output is smaller, and without any.

    Variants stay. A problem without such pairs is not in the list, nor is the second one for more
    than `max_ops` ops.
    """
    pairs = {pair for variant in problem.variants for pair in variant.inplace}
    smaller = {(out, into) for out, into in pairs if problem.size[out] < problem.size[into]}
    choices = [smaller] if smaller else []
    if pairs != smaller and problem.op_count <= max_ops:
        choices.append(pairs)
    return [_with_ops(problem, _leave_out(problem, each)) for each in choices]


def _leave_out(problem: Problem, pairs: set[tuple[int, int]]) -> list[Op]:
    """The ops without these in-place pairs."""
    ids = [tensor.id for tensor in problem.graph.tensors]
    left_out = {(ids[out], ids[into]) for out, into in pairs}

    def kept(form: Op | Variant) -> dict[str, object]:
        return {"inplace": [pair for pair in form.inplace if tuple(pair) not in left_out]}

    ops = []
    for op in problem.graph.ops:
        variants = [form.model_copy(kept(form)) for form in op.variants]
        ops.append(op.model_copy(kept(op) | {"variants": variants}))
    return ops


def _with_ops(problem: Problem, ops: list[Op]) -> Problem:
    graph = problem.graph.model_copy({"ops": ops})
    return Problem.from_graph(graph, problem.alignment, problem.outputs, problem.host_budget)


def restore_variants(
    problem: Problem, chosen: Sequence[int], placed: PlacedSchedule
) -> PlacedSchedule:
    """Map a placed schedule of a problem with fixed variants back to `problem`.

    Events, addresses and lifetimes stay the same, as an online method decides lifetimes itself.
    """
    old = placed.schedule
    what = old.what.copy()
    for event, variant in enumerate(old.variants):
        if variant >= 0:
            what[event] = chosen[variant]
    schedule = Schedule(problem, old.do, what, old.trace)
    return PlacedSchedule(schedule, placed.offset, placed.workspace_offset)
