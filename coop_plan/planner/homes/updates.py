"""Updates that may run on the host: they read a gradient's copy and overwrite residents at home."""

from collections import Counter
from dataclasses import dataclass

from coop_plan.planner.core.problem import Problem
from coop_plan.schemas import Op


@dataclass(frozen=True)
class HostUpdate:
    """A variant on the host of an op; tensors and op are ids.

    It reads the copy of `gradient`, and `residents` at their homes, of which some are
    `overwritten`.
    """

    op: int
    variant: str
    cost_us: float
    inputs: list[int]
    gradient: int
    residents: list[int]
    overwritten: list[int]


def host_updates(problem: Problem) -> list[HostUpdate]:
    """The updates of a graph that the search may run on the host, in program order.

    Each is not random and reads one gradient, which no other op reads. No other op overwrites
    its residents. It is the last op that uses those it overwrites, and of the updates on the host
    the only one.
    """
    graph = problem.graph
    index = {tensor.id: t for t, tensor in enumerate(graph.tensors)}
    updates: list[HostUpdate] = []
    for position in problem.host_ops:
        found = _update(problem, graph.ops[position], index)
        if found is not None and all(
            problem.overwriters.get(index[t], []) == [position] * (t in found.overwritten)
            for t in found.residents
        ):
            last = (problem.consumers[index[t]][-1] for t in found.overwritten)
            if all(user == position for user in last):
                updates.append(found)
    while True:  # an update that is left out may order others
        users = Counter(t for update in updates for t in update.residents)
        kept = [
            update
            for update in updates
            if len(problem.consumers[index[update.gradient]]) == 1
            and all(users[t] == 1 for t in update.overwritten)
        ]
        if len(kept) == len(updates):
            return kept
        updates = kept


def _update(problem: Problem, op: Op, index: dict[int, int]) -> HostUpdate | None:
    """The cheapest variant of an op on the host that reads one gradient and residents alone."""
    homes, found = set(problem.home_candidates), list[HostUpdate]()
    for variant in op.variants:
        residents = [t for t in dict.fromkeys(variant.inputs) if index[t] in homes]
        rest = {*variant.inputs} - {*residents}
        usable = variant.engine == "host" and not variant.approximate and len(rest) == 1
        gradient = min(rest, default=-1)
        if not usable or not problem.movable[index[gradient]] or not op.mutates or op.rng:
            continue
        if not problem.is_output[index[gradient]] and {*op.mutates} <= {*residents}:
            figures = op.id, variant.name, variant.cost_us, variant.inputs
            found.append(HostUpdate(*figures, gradient, residents, list(dict.fromkeys(op.mutates))))
    return min(found, key=lambda update: update.cost_us, default=None)
