"""Linear program whose optimum no plan costs less, with movable residents and updates on the host.

Time points are a chain of ops p_1, ..., p_m that run on the device, each an ancestor of the next,
so that in every plan p_i first runs before p_(i+1) does. Segment 2 i - 1 is the time of the first
run of p_i, segment 2 i the time from its end (from the begin of the step, for i = 0) to the begin
of the first run of p_(i+1) (to the end of the step, for i = m). The columns (minimise the sum of
T):

    T[s]     length of segment s
    Y[t]     movable resident t has a home
    X[u]     op u runs on the host
    H[t, i]  tensor t has a buffer, or is a resident without a home, while p_i first runs
    R[o, s]  op o is recomputed in segment s
    P[t, s]  time of the prefetches of t in segment s, in units of one; O[t, s] of the first
             offload of t that the plan needs
    Z[u, s]  time in which the host computes u in segment s

A segment is as long as each engine is busy in it. Ops between two time points by data dependence
run between them, all ops run within the step. A tensor that an op reads after p_i, but that has no
buffer while p_i runs, is prefetched or recomputed between both. An overwritten resident with a home
is offloaded after its last update, and before it leaves the device. At p_i its working set and the
other tensors with buffers fit. All of this holds for every order of the ops, in any variants.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from math import fsum, inf
from typing import NamedTuple

from coop_plan.planner.core.memory_bounds import bytes_with_homes
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.timeline import Timeline
from coop_plan.planner.exact.model.milp import ROUNDING, Milp, Terms
from coop_plan.planner.exact.model.point_selection import worst_of_groups

UNITS = 1000.0
"""The cost of each op once, in the model's units of time."""


class Need(NamedTuple):
    """Tensors that an op touches in any variant, and the least bytes of them and its workspace."""

    tensors: frozenset[int]
    bytes: int


class Order:
    """Data dependences that every plan keeps, of a problem with movable residents.

    `before[op]` is the bit mask of the ops that first run before the first run of `op`. An op reads
    the version of a tensor that the op before it in program order wrote. A buffer of an older
    version may exist beside a newer one, so readers do not precede writers.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, graph = problem, problem.graph
        n = problem.op_count
        index = {tensor.id: t for t, tensor in enumerate(graph.tensors)}
        self.inputs = [set(problem.op_inputs[op]) for op in range(n)]
        self.cost = list(problem.cost)
        for variant in problem.variants[n:]:
            self.inputs[variant.op] &= set(variant.inputs)
            self.cost[variant.op] = min(self.cost[variant.op], variant.cost_us)
        self.host_us: dict[int, float] = {}
        self.host_inputs: dict[int, set[int]] = {}
        for op in problem.host_ops:
            variants = graph.ops[op].variants
            on_host = [v for v in variants if v.engine == "host" and not v.approximate]
            self.host_us[op] = min(variant.cost_us for variant in on_host)
            self.host_inputs[op] = set.intersection(
                *({index[t] for t in variant.inputs} for variant in on_host)
            )
        self.before = [0] * n
        self.parents: list[set[int]] = []
        writer = {t: p for t, p in enumerate(problem.producer) if p >= 0}
        self.written_by = [dict[int, int]() for _ in range(n)]
        once = random = -1
        for op in range(n):
            read = self.inputs[op] & self.host_inputs.get(op, self.inputs[op])
            self.written_by[op] = {t: writer[t] for t in self.inputs[op] if t in writer}
            parents = {writer[t] for t in read if t in writer}
            if graph.ops[op].rng:
                parents, random = {*parents, random}, op
            if not graph.ops[op].recomputable and op not in self.host_us:
                parents, once = {*parents, once}, op
            self.parents.append(parents - {-1, op})
            for parent in self.parents[op]:
                self.before[op] |= self.before[parent] | 1 << parent
            writer |= {index[t]: op for t in graph.ops[op].mutates}

    @cached_property
    def movable(self) -> dict[int, int]:
        """Residents that may have a home, with their bytes."""
        tensors = self.problem.graph.tensors
        return {t: x.bytes for t, x in enumerate(tensors) if x.resident and x.movable and x.bytes}

    @cached_property
    def needs(self) -> dict[int, Need]:
        """Per op its working set on the device with the movable residents that it reads."""
        slack = self.problem.alignment - 1  # the topmost block need not end at a multiple
        found = dict[int, Need]()
        bytes_ = bytes_with_homes(self.problem, self.movable)
        for variant, most in zip(self.problem.variants, bytes_, strict=True):
            held, need = self.movable.keys() & variant.inputs, most - slack
            old = found.get(variant.op, Need(frozenset(), need))
            touched = held.union(variant.reads, variant.makes, old.tensors)
            found[variant.op] = Need(frozenset(touched), min(old.bytes, need))
        return found

    def chain(self) -> list[int]:
        """The ops of the longest path (µs) that run on the device only."""
        longest, last = list(self.cost), [-1] * len(self.cost)
        for op, parents in enumerate(self.parents):
            if parents:
                last[op] = max(parents, key=longest.__getitem__)
                longest[op] += longest[last[op]]
        op = max(range(len(longest)), key=longest.__getitem__, default=-1)
        found = []
        while op >= 0:
            found.append(op)
            op = last[op]
        return [op for op in reversed(found) if op not in self.host_us]

    def points(self, count: int) -> list[int]:
        """At most `count` time points: of each stretch of the chain the op of the most bytes."""
        return worst_of_groups(self.chain(), count, key=lambda op: self.needs[op].bytes)


class HomesModel:
    """The program for one chain of time points and a budget (bytes), with finite columns."""

    def __init__(self, order: Order, budget: int, points: list[int]) -> None:
        self.order, self.problem, self.points = order, order.problem, points
        self.milp = Milp()
        self.unit_us = self.problem.base_cost_us / UNITS or 1.0
        self.last = 2 * len(points)
        self._locate()
        timeline = Timeline(self.problem.device)
        self._us = [
            [timeline.copy_us(size, to_host=to_host) / self.unit_us for size in self.problem.bytes]
            for to_host in (False, True)
        ]
        self._columns: dict[tuple[str, int, int], int] = {}
        self._reruns: list[tuple[int, int]] = []
        self._build(budget)

    def bound_us(self, bound: float) -> float:
        """Cost of a whole step for a bound in the model's units, µs."""
        return bound * self.unit_us

    def _locate(self) -> None:
        """The first and the last segment in which each op may first run."""
        n = self.problem.op_count
        self.begin, self.end = [0] * n, [self.last] * n
        before = self.order.before
        for i, point in enumerate(self.points, 1):
            for op in range(n):
                if op == point:
                    self.begin[op] = self.end[op] = 2 * i - 1
                elif before[op] >> point & 1 and op not in self._point_set:
                    self.begin[op] = 2 * i
                elif before[point] >> op & 1:
                    self.end[op] = min(self.end[op], 2 * i - 2)

    def _after(self, op: int) -> int:
        """The first segment that may begin after the first run of an op."""
        return self.begin[op] + self.begin[op] % 2

    # Columns.

    def _column(self, kind: str, t: int, s: int = 0) -> int:
        key = kind, t, s
        if key not in self._columns:
            whole = kind in "YXHR"
            upper = self._host(t) if kind == "Z" else 1.0
            self._columns[key] = self.milp.column(0.0, upper, 0.0, integer=whole)
            if kind == "R":
                self._reruns.append((t, s))
        return self._columns[key]

    def _host(self, op: int) -> float:
        return self.order.host_us[op] / self.unit_us

    def _sum(self, kind: str, t: int, first: int, last: int) -> Terms:
        step = 2 if kind == "R" else 1
        return [(self._column(kind, t, s), 1.0) for s in range(first, last + 1, step)]

    def _row(self, terms: Iterable[tuple[int, float]], lower: float) -> None:
        """The row Σ terms ≥ lower; a column may occur in several terms."""
        total = dict[int, float]()
        for column, value in terms:
            total[column] = total.get(column, 0.0) + value
        self.milp.row(list(total.items()), lower, inf)

    # Rows.

    def _build(self, budget: int) -> None:
        problem, order = self.problem, self.order
        total = sum(order.cost) / self.unit_us
        most = 2 * total + sum(map(sum, self._us)) + sum(map(self._host, order.host_us))
        self._times = [
            self.milp.column(0.0, most, 1.0, integer=False) for _ in range(self.last + 1)
        ]
        for u in order.host_us:
            self._on_host(u)
        for t in order.movable:
            self._uses(t, movable=True)
            self._write_back(t)
        for t in range(problem.tensor_count):
            if self._is_item(t):
                self._uses(t, movable=False)
        for o, s in self._reruns:  # grows
            self._inputs_of_rerun(o, s // 2)
        self._memory(budget)
        self._engines()
        if problem.host_budget is not None:
            self._row(
                (
                    (self._column("Y", t), -size / max(1, problem.host_budget))
                    for t, size in order.movable.items()
                ),
                -1.0 - ROUNDING,
            )

    def _is_item(self, t: int) -> bool:
        """True for tensors in the arena whose buffers all have one version."""
        problem = self.problem
        outside = problem.resident[t] or problem.outside[t] or t in problem.overwriters
        return problem.producer[t] >= 0 and problem.size[t] > 0 and not outside

    @cached_property
    def _users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in range(self.problem.tensor_count)]
        for op, inputs in enumerate(self.order.inputs):
            for t in inputs:
                users[t].append(op)
        return users

    def _next_uses(self, t: int, j: int) -> Iterator[tuple[int, Terms]]:
        """Segments by whose end t is read after p_j, and the column that says that it is not."""
        least, on_host = self.last + 1, list[tuple[int, int]]()
        if self.problem.is_output[t]:
            least = self.last
        for op in self._users[t]:
            if self.begin[op] >= 2 * j:
                limit = self.end[op] - self.end[op] % 2
                if op in self.order.host_us:
                    on_host.append((limit, op))
                else:
                    least = min(least, limit)
        if least <= self.last:
            yield least, []
        for limit, op in on_host:
            if limit < least:
                yield limit, [(self._column("X", op), 1.0)]

    @cached_property
    def _point_set(self) -> set[int]:
        return set(self.points)

    def _uses(self, t: int, *, movable: bool) -> None:
        """Rows of the reads of t after each time point, and after the begin of the step."""
        producer = self.problem.producer[t]
        for j in range(0 if movable else 1, len(self.points) + 1):
            if j and t in self.order.needs[self.points[j - 1]].tensors:
                continue
            if not movable and self.end[producer] > 2 * j - 2:
                continue
            uses = list(self._next_uses(t, j))
            if movable and not j:
                absent = [(self._column("Y", t), -1.0)]
                for k, not_read in uses:
                    self._row([*self._sum("P", t, 0, k), *not_read, *absent], 0.0)
                continue
            if movable:  # without a home it is there
                self._row([(self._column("H", t, j), 1.0), (self._column("Y", t), 1.0)], 1.0)
            for k, not_read in uses:
                there = (self._column("H", t, j), 1.0)
                self._available(t, j, k, [*not_read, there], 1.0, movable=movable)

    def _available(
        self, t: int, j: int, k: int, terms: Terms, least: float, *, movable: bool
    ) -> None:
        """Rows that t comes after p_j, up to segment k, or else the terms suffice."""
        if not movable:
            producer = self.problem.producer[t]
            if self.problem.graph.ops[producer].recomputable:
                terms = [*terms, *self._sum("R", producer, 2 * j, k)]
            self._row([*self._sum("O", t, self._after(producer), 2 * j - 2), *terms], least)
        self._row([*self._sum("P", t, 2 * j, k), *terms], least)

    def _inputs_of_rerun(self, o: int, i: int) -> None:
        """A run of o after p_i reads what was there at p_i, or at a time point before, or comes.

        Of the time points before, only some have a row.
        """
        again = (self._column("R", o, 2 * i), -1.0)
        for t in self.order.inputs[o]:
            movable = t in self.order.movable
            if not movable and not self._is_item(t):
                continue
            j, step = i, 1
            while j > 0 and (movable or self.end[self.problem.producer[t]] <= 2 * j - 2):
                if t not in self.order.needs[self.points[j - 1]].tensors:
                    there = (self._column("H", t, j), 1.0)
                    self._available(t, j, 2 * i, [there, again], 0.0, movable=movable)
                j, step = j - step, 2 * step

    def _write_back(self, t: int) -> None:
        """A home that the device overwrites is offloaded to after the last update."""
        if t not in self.problem.overwriters:
            return
        op, home = self.problem.overwriters[t][-1], (self._column("Y", t), -1.0)
        on_host = [(self._column("X", op), 1.0)] if op in self.order.host_us else []
        first = self._after(op)
        self._row([*self._sum("O", t, first, self.last), *on_host, home], 0.0)
        if self.problem.graph.ops[op].recomputable:
            return
        for j in range((self.end[op] + 1) // 2 + 1, len(self.points) + 1):
            if t not in self.order.needs[self.points[j - 1]].tensors:
                kept = (self._column("H", t, j), 1.0)
                self._row([*self._sum("O", t, first, 2 * j - 2), *on_host, kept, home], 0.0)

    def _on_host(self, u: int) -> None:
        """An op on the host reads homes, and a copy of each other input after it was written."""
        on_host = (self._column("X", u), -1.0)
        first = 0
        for t in self.order.host_inputs[u]:
            if t in self.order.movable:
                self._row([(self._column("Y", t), 1.0), on_host], 0.0)
            elif t in self.order.written_by[u]:
                begin = self._after(self.order.written_by[u][t])
                self._row([*self._sum("O", t, begin, self.last), on_host], 0.0)
                first = max(first, begin)
        if self._host(u):
            times = self._sum("Z", u, first, self.last)
            self._row([*times, (on_host[0], -self._host(u))], 0.0)

    def _memory(self, budget: int) -> None:
        order, movable = self.order, self.order.movable
        fixed = self.problem.fixed_bytes - sum(movable.values())
        held: list[Terms] = [[] for _ in range(len(self.points) + 1)]
        for (kind, t, j), column in self._columns.items():
            if kind == "H":
                size = movable.get(t, self.problem.size[t])
                held[j].append((column, size / budget))
        for j, point in enumerate(self.points, 1):
            room = (budget - fixed - order.needs[point].bytes) / budget
            self.milp.row(held[j], -inf, room + ROUNDING)

    def _engines(self) -> None:
        """A segment is as long as compute, each copy engine and the host are busy in it."""
        busy: list[list[Terms]] = [[[] for _ in range(self.last + 1)] for _ in range(4)]
        compute, back, out, host = busy
        spans: dict[tuple[int, int], tuple[list[float], Terms]] = {}
        for op, us in enumerate(self.order.cost):
            costs, on_host = spans.setdefault((self.begin[op], self.end[op]), ([], []))
            costs.append(us / self.unit_us)
            if op in self.order.host_us:
                on_host.append((self._column("X", op), us / self.unit_us))
        for (kind, t, s), column in self._columns.items():
            match kind:
                case "P":
                    back[s].append((column, -self._us[0][t]))
                case "O":
                    out[s].append((column, -self._us[1][t]))
                case "Z":
                    host[s].append((column, -1.0))
                case "R":
                    compute[s].append((column, -self.order.cost[t] / self.unit_us))
        for (first, last), (costs, on_host) in spans.items():
            total, parts = fsum(costs), []
            for number in range(first, last + 1, 2):
                part = self.milp.column(0.0, total, 0.0, integer=False)
                compute[number].append((part, -1.0))
                parts.append((part, 1.0))
            self._row([*parts, *on_host], total)
        for number, time in enumerate(self._times):
            for terms in (each[number] for each in busy):
                if terms:
                    self._row([(time, 1.0), *terms], 0.0)
