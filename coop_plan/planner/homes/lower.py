"""Problems in which movable residents are activations that begin and end the step on the host.

A resident with a home becomes an activation. An artificial op at the start produces it, on the
host: its first copy is offloaded in no time, so each op reads a prefetched copy. If an op
overwrites the resident, an artificial op at the end reads the last version from the host, after
that version was offloaded. Versions are tensors of their own (`planner.core.ssa`), at one address.

An update on the host is no op of such a problem. An artificial op at the end reads its gradient
from the host, and the host computes from the end of the gradient's offload on.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.problem import Homes, Problem
from coop_plan.planner.core.ssa import SsaForm
from coop_plan.planner.homes.updates import HostUpdate
from coop_plan.schemas import Op


@dataclass(frozen=True)
class Lowered:
    """A graph whose `homes` (tensor ids) are activations, and its problem in SSA form.

    `updates` run on the host, in any order. `begins` and `ends` are the ids of the artificial ops;
    `begins` come first in the graph, `ends` last. `form.problem` is to be planned.
    """

    homes: frozenset[int]
    updates: Sequence[HostUpdate]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    form: SsaForm


def lowered(
    problem: Problem, homes: Collection[int], updates: Sequence[HostUpdate] = ()
) -> Lowered:
    """The problem with homes for these residents (tensor ids), in the default variants.

    `updates` are those on the host; `homes` has their residents.
    """
    graph, ops = problem.graph, ops_on_device(problem, updates)
    unused = count(1 + max(op.id for op in graph.ops))
    read = {t for op in ops for t in op.inputs}
    mutated = {t for op in ops for t in op.mutates}
    host_us = {update.gradient: update.cost_us for update in updates}
    at_home = [tensor.id for tensor in graph.tensors if tensor.id in homes and tensor.id in read]
    begins = [_artificial(next(unused), "forward", (), (t,)) for t in at_home]
    last = [*(t for t in at_home if t in mutated), *host_us]
    ends = [_artificial(next(unused), "optimizer", (t,), ()) for t in last]
    made = [*begins, *(_default(op, homes) for op in ops), *ends]
    form = SsaForm.of(_with_activations(problem, homes, made))
    versioned = form.problem
    index = {tensor.id: t for t, tensor in enumerate(graph.tensors)}
    last_ops = range(versioned.op_count - len(ends), versioned.op_count)
    found = Homes(
        copies=tuple(index[t] for t in at_home),
        returned=tuple((versioned.op_inputs[op][0], op) for op in last_ops),
        versions=tuple(pair for pairs in form.overwrites for pair in pairs),
        host_us=tuple((index[t], cost_us) for t, cost_us in host_us.items()),
    )
    form = replace(form, problem=replace(versioned, homes=found))
    artificial = tuple(op.id for op in begins), tuple(op.id for op in ends)
    return Lowered(frozenset(homes), updates, *artificial, form)


def lowered_online(problem: Problem, homes: Collection[int]) -> Lowered:
    """As `lowered`, for an online execution, which offloads each home that an op has overwritten.

    Nothing reads the last versions, and overwritten tensors stay one tensor each. Online executions
    with transfers use no in-place pairs.
    """
    graph = problem.graph
    unused = count(1 + max(op.id for op in graph.ops))
    at_home = [tensor.id for tensor in graph.tensors if tensor.id in homes]
    begins = [_artificial(next(unused), "forward", (), (t,)) for t in at_home]
    ops = [_default(op, homes).model_copy({"inplace": []}) for op in graph.ops]
    made = _with_activations(problem, homes, [*begins, *ops])
    index = {tensor.id: t for t, tensor in enumerate(graph.tensors)}
    made = replace(made, homes=Homes(copies=tuple(index[t] for t in at_home)))
    begun = tuple(op.id for op in begins)
    return Lowered(frozenset(homes), (), begun, (), SsaForm.unchanged(made))


def _with_activations(problem: Problem, homes: Collection[int], ops: list[Op]) -> Problem:
    """The problem of other ops in which these residents (tensor ids) are activations."""
    graph = problem.graph
    tensors = [t.model_copy({"kind": "activation"}) if t.id in homes else t for t in graph.tensors]
    host = problem.host_budget
    if host is not None:  # the rest is for other copies
        sizes = (problem.rounded(t.bytes) for t in graph.tensors if t.id in homes)
        host = max(1, host - sum(sizes))
    made = graph.model_copy({"tensors": tensors, "ops": ops})
    places = problem.alignment, problem.outputs, host, problem.outside
    return Problem.with_places(made, *places)


def ops_on_device(problem: Problem, updates: Iterable[HostUpdate]) -> list[Op]:
    """The ops in program order, without those of updates on the host."""
    on_host = {update.op for update in updates}
    return [op for op in problem.graph.ops if op.id not in on_host]


def streamed(
    problem: Problem, homes: Collection[int], updates: Sequence[HostUpdate] = ()
) -> Problem:
    """The problem in which an op holds the homes that it uses as workspace, without transfers.

    A schedule of it is one of `lowered` that prefetches each home before each op that reads it.
    """
    graph, unit = problem.graph, problem.rounded
    size = {tensor.id: unit(tensor.bytes) for tensor in graph.tensors if tensor.id in homes}
    ops = []
    for op in ops_on_device(problem, updates):
        held = sum(size.get(t, 0) for t in dict.fromkeys(op.inputs))
        ops.append(
            _default(op, homes).model_copy({"workspace_bytes": unit(op.workspace_bytes) + held})
        )
    tensors = [t.model_copy({"bytes": 0}) if t.id in homes else t for t in graph.tensors]
    made = graph.model_copy({"tensors": tensors, "ops": ops})
    return Problem.with_places(made, problem.alignment, problem.outputs, 0, problem.outside)


def updated_on_host(problem: Problem, updates: Iterable[HostUpdate]) -> set[int]:
    """The residents (tensor ids) of updates on the host that the device reads: parameters."""
    read = {t for op in ops_on_device(problem, updates) for t in op.inputs}
    return read.intersection(t for update in updates for t in update.residents)


def sequence_of(low: Lowered, ops: Iterable[int], once: Collection[int] = ()) -> Ints:
    """Codes of the joint search (`planner.search.makespan.sequence`) for runs of `streamed`.

    A prefetch marker precedes each op that reads a home, for each of them; only the first op that
    reads one of `once` (tensor ids).
    """
    problem, begins = low.form.problem, len(low.begins)
    copies, codes = set(problem.homes.copies), list(range(begins))
    single = {t for t in copies if problem.graph.tensors[t].id in once}
    marker = problem.op_count + 1
    for op in ops:
        fetched = [t for t in dict.fromkeys(problem.op_inputs[begins + op]) if t in copies]
        codes += [marker + t for t in fetched]
        codes.append(begins + op)
        copies.difference_update(single.intersection(fetched))
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
