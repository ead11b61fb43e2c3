"""Problems without some choices: with one variant an op, or without variants or in-place pairs."""

from collections.abc import Sequence

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, PlacedSchedule, Schedule
from coop_plan.schemas import Op, Variant


def fix_variants(problem: Problem, chosen: Sequence[int]) -> Problem:
    """
    The problem in which op o has only variant `chosen[o]`, with the same tensors.

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
    fields = ("inputs", "outputs", "cost_us", "workspace_bytes", "inplace")
    ops = []
    for op, number in zip(problem.graph.ops, chosen, strict=True):
        name = problem.variants[number].name
        form = next((v for v in op.variants if v.name == name), op)
        ops.append(op.model_copy({name: getattr(form, name) for name in fields} | {"variants": []}))
    return _with_ops(problem, ops)


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
