"""The cheapest schedule by exhaustive search, for tiny graphs: what exact planners must agree on.

Dijkstra over states (ops run for the first time, tensors live in the arena with their versions).
Memory is logical: the sum of live sizes, wherever they may lie. Ops first run in program order. Of
a version that an op overwrites there may be several buffers, up to `BUFFERS`. What is overwritten
outside the arena is read there only.
"""

import heapq
from itertools import combinations

from coop_plan.planner import Problem

BUFFERS = 3
"""Of one version, at once."""


def cheapest(problem: Problem, arena_bytes: int, *, staged: bool = False) -> float | None:
    """Least cost in µs of any schedule whose live bytes stay within the arena; None: there is none.

    Sizes are rounded up to the alignment, and so is the arena, whose last block may end early.
    `staged` allows only Checkmate's class: between two first runs, recomputes in program order, and
    of each version one buffer.
    """
    return _Search(problem, arena_bytes, staged).run()


class _Search:
    def __init__(self, problem, arena_bytes, staged):
        self.problem, self.graph = problem, problem.graph
        step = problem.alignment
        self.capacity = -(-arena_bytes // step) * step
        index = {tensor.id: t for t, tensor in enumerate(self.graph.tensors)}
        self.mutates = [{index[t] for t in op.mutates} for op in self.graph.ops]
        self.pairs = [
            [(index[a], index[b]) for a, b in op.inplace if b not in op.mutates]
            for op in self.graph.ops
        ]
        self.n = problem.op_count
        self.staged = staged
        self.overwritten = set().union(*self.mutates)

    def version(self, t, done):
        """How often the first `done` ops overwrite t."""
        return sum(t in self.mutates[o] for o in range(done))

    def in_arena(self, t):
        return not (self.problem.resident[t] or self.problem.outside[t])

    def size(self, live):
        return sum(self.problem.size[t] for t, _, _ in live)

    def without(self, live, t, version):
        """One buffer less; they are alike, and so numbered from 0."""
        return live - {(t, version, sum((t, version) == (a, b) for a, b, _ in live) - 1)}

    def beside(self, live, t, version):
        """One buffer more; the older one ends where a second one is of no use."""
        count = sum((t, version) == (a, b) for a, b, _ in live)
        several = t in self.overwritten and not self.staged
        return live | {(t, version, min(count, BUFFERS - 1 if several else 0))}

    def run(self):
        start = (0, frozenset(), -1)  # the last is the op run last, if it was run again
        heap, best, number = [(0.0, 0, start)], {start: 0.0}, 0
        while heap:
            cost, _, state = heapq.heappop(heap)
            if cost > best[state]:
                continue
            done, live, last = state
            if done == self.n and {(t, self.version(t, done), 0) for t in self.kept()} <= live:
                return cost
            for extra, following in self.moves(done, live, last):
                if cost + extra < best.get(following, float("inf")):
                    best[following] = cost + extra
                    number += 1
                    heapq.heappush(heap, (cost + extra, number, following))
        return None

    def kept(self):
        problem = self.problem
        return [t for t in range(problem.tensor_count) if problem.is_output[t] and self.in_arena(t)]

    def moves(self, done, live, last):
        for t, version in {(t, version) for t, version, _ in live}:
            yield 0.0, (done, self.without(live, t, version), last)
        for o in range(min(done + 1, self.n)):
            if o == done:
                for after in self.runs(o, done, live):
                    yield self.problem.cost[o], (done + 1, after, -1)
            elif self.graph.ops[o].recomputable and o > last:
                for after in self.runs(o, done, live):
                    yield self.problem.cost[o], (done, after, o if self.staged else -1)

    def runs(self, o, done, live):
        """The live sets after running op o, one per choice of what shares an address."""
        problem = self.problem
        for t in set(problem.op_inputs[o]):
            needed = self.version(t, o)
            there = (t, needed, 0) in live if self.in_arena(t) else self.version(t, done) == needed
            if not there:
                return
        if o < done and any(not self.in_arena(t) for t in self.mutates[o]):
            return  # overwriting it a second time would be a version too far
        made = {t for t in problem.op_outputs[o] if self.in_arena(t) or o < done}
        need = self.size(live) + problem.workspace[o] + sum(problem.size[t] for t in made)
        pairs = [
            (a, b)
            for a, b in self.pairs[o]
            if a in made and self.in_arena(b) and 0 < problem.bytes[a] <= problem.bytes[b]
        ]
        for count in range(len(pairs) + 1):
            for chosen in combinations(pairs, count):
                if len({a for a, _ in chosen}) < count or len({b for _, b in chosen}) < count:
                    continue
                if need - sum(problem.size[a] for a, _ in chosen) > self.capacity:
                    continue
                after = live
                for _, b in chosen:
                    after = self.without(after, b, self.version(b, o))
                for t in made:
                    if self.in_arena(t):
                        after = self.beside(after, t, 0)
                for t in self.mutates[o]:
                    if self.in_arena(t):
                        after = self.without(after, t, self.version(t, o))
                        after = self.beside(after, t, self.version(t, o + 1))
                yield after
