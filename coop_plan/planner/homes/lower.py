"""Problems in which movable residents are activations that begin and end the step on the host.

A resident with a home becomes an activation. An artificial op at the start produces it, on the
host: its first copy is offloaded in no time, so each op reads a prefetched copy. If an op
overwrites the resident, an artificial op at the end reads the last version from the host, after
that version was offloaded. Versions are tensors of their own (`planner.core.ssa`), at one address.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.problem import Homes, Problem
from coop_plan.planner.core.ssa import SsaForm
from coop_plan.schemas import Op


@dataclass(frozen=True)
class Lowered:
    """A graph whose `homes` (tensor ids) are activations, and its problem in SSA form.

    `begins` and `ends` are the ids of the artificial ops; `begins` come first in the graph, `ends`
    last. `form.problem` is to be planned.
    """

    homes: frozenset[int]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    form: SsaForm


def lowered(problem: Problem, homes: Collection[int]) -> Lowered:
    """The problem with homes for these residents (tensor ids), in the default variants."""
    graph = problem.graph
    unused = count(1 + max(op.id for op in graph.ops))
    mutated = {t for op in graph.ops for t in op.mutates}
    at_home = [tensor.id for tensor in graph.tensors if tensor.id in homes]
    begins = [_artificial(next(unused), "forward", (), (t,)) for t in at_home]
    last = [t for t in at_home if t in mutated]
    ends = [_artificial(next(unused), "optimizer", (t,), ()) for t in last]
    made = graph.model_copy(
        {
            "tensors": [
                tensor.model_copy({"kind": "activation"}) if tensor.id in homes else tensor
                for tensor in graph.tensors
            ],
            "ops": [*begins, *(_default(op, homes) for op in graph.ops), *ends],
        }
    )
    host = problem.host_budget
    if host is not None:  # the rest is for other copies
        sizes = (problem.rounded(t.bytes) for t in graph.tensors if t.id in homes)
        host = max(1, host - sum(sizes))
    places = problem.alignment, problem.outputs, host, problem.outside
    form = SsaForm.of(Problem.with_places(made, *places))
    versioned = form.problem
    index = {tensor.id: t for t, tensor in enumerate(graph.tensors)}
    last_ops = range(versioned.op_count - len(ends), versioned.op_count)
    found = Homes(
        copies=tuple(index[t] for t in at_home),
        returned=tuple((versioned.op_inputs[op][0], op) for op in last_ops),
        versions=tuple(pair for pairs in form.overwrites for pair in pairs),
    )
    form = replace(form, problem=replace(versioned, homes=found))
    return Lowered(
        frozenset(homes), tuple(op.id for op in begins), tuple(op.id for op in ends), form
    )


def streamed(problem: Problem, homes: Collection[int]) -> Problem:
    """The problem in which an op holds the homes that it uses as workspace, without transfers.

    A schedule of it is one of `lowered` that prefetches each home before each op that reads it.
    """
    graph, unit = problem.graph, problem.rounded
    size = {tensor.id: unit(tensor.bytes) for tensor in graph.tensors if tensor.id in homes}
    ops = []
    for op in graph.ops:
        held = sum(size.get(t, 0) for t in dict.fromkeys(op.inputs))
        ops.append(
            _default(op, homes).model_copy({"workspace_bytes": unit(op.workspace_bytes) + held})
        )
    tensors = [t.model_copy({"bytes": 0}) if t.id in homes else t for t in graph.tensors]
    made = graph.model_copy({"tensors": tensors, "ops": ops})
    return Problem.with_places(made, problem.alignment, problem.outputs, 0, problem.outside)


def sequence_of(low: Lowered, ops: Iterable[int]) -> Ints:
    """Codes of the joint search (`planner.search.makespan.sequence`) for runs of `streamed`.

    A prefetch marker precedes each op that reads a home, for each of them.
    """
    problem, begins = low.form.problem, len(low.begins)
    copies, codes = set(problem.homes.copies), list(range(begins))
    marker = problem.op_count + 1
    for op in ops:
        codes += [marker + t for t in dict.fromkeys(problem.op_inputs[begins + op]) if t in copies]
        codes.append(begins + op)
    for t, end in problem.homes.returned:
        codes += [marker + t, end]
    return np.array(codes, dtype=np.int64)


def _artificial(number: int, phase: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
    return Op(
        id=number,
        name="home",
        phase=phase,  # type: ignore[arg-type]
        inputs=list(inputs),
        outputs=list(outputs),
        cost_us=0.0,
        recomputable=False,
    )


def _default(op: Op, homes: Collection[int]) -> Op:
    """The op in its default variant; it runs once if it overwrites a home."""
    once = any(t in homes for t in op.mutates)
    return op.model_copy({"variants": [], "recomputable": op.recomputable and not once})
