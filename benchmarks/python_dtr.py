"""
DTR in plain Python, the reference for planning time.

Memory is a byte count without addresses, as in the simulator published with the paper; the
heuristic is e* / (bytes × staleness) with union-find components (Kirisame et al., Dynamic Tensor
Rematerialization, ICLR 2021, section 4.1 and appendix C). Not a planning method of ours.
"""

from coop_plan.planner.core.problem import Problem


class PythonDtr:
    """One run of a problem within `budget` bytes; `run` returns the cost in µs."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        count = problem.tensor_count
        self.live: dict[int, None] = {}
        self.pins = [0] * count
        self.last = [0.0] * count
        self.used, self.clock = 0, 0.0
        self.parent = list(range(count))
        self.total = [0.0] * count
        self.evicted = [False] * count
        near: list[set[int]] = [set() for _ in range(count)]
        for op in range(problem.op_count):
            for made in problem.makes[op]:
                for read in problem.reads[op]:
                    near[made].add(read)
                    near[read].add(made)
        self.near = [tuple(ts) for ts in near]

    def run(self) -> float:
        problem = self.problem
        for op in range(problem.op_count):
            self.compute(op)
            for t in (*problem.reads[op], *problem.makes[op]):
                if problem.last_use[t] <= op and t in self.live and problem.evictable[t]:
                    self.evict(t)
        return self.clock

    def compute(self, op: int) -> None:
        problem = self.problem
        for t in problem.reads[op]:
            self.pins[t] += 1
        for t in problem.reads[op]:
            if t not in self.live:
                self.compute(problem.producer[t])
        need = problem.workspace[op] + sum(
            problem.size[t] for t in problem.makes[op] if t not in self.live
        )
        while self.used + need > self.budget:
            self.evict(min((t for t in self.live if self.may_evict(t)), key=self.cost))
        self.clock += problem.cost[op]
        for t in problem.makes[op]:
            if t not in self.live:
                self.live[t] = None
                self.used += problem.size[t]
                if self.evicted[t]:
                    root = self.root(t)
                    self.total[root] = max(0.0, self.total[root] - problem.cost[op])
                    self.evicted[t] = False
            self.last[t] = self.clock
        for t in problem.reads[op]:
            self.pins[t] -= 1
            self.last[t] = self.clock

    def may_evict(self, t: int) -> bool:
        return not self.pins[t] and self.problem.evictable[t] and self.problem.size[t] > 0

    def cost(self, t: int) -> float:
        total = self.problem.cost[self.problem.producer[t]]
        roots = {self.root(other) for other in self.near[t] if self.evicted[other]}
        total += sum(self.total[root] for root in roots)
        return total / (self.problem.size[t] * max(self.clock - self.last[t], 1e-3))

    def evict(self, t: int) -> None:
        del self.live[t]
        self.used -= self.problem.size[t]
        self.evicted[t] = True
        self.parent[t] = t
        self.total[t] = self.problem.cost[self.problem.producer[t]]
        for other in self.near[t]:
            if self.evicted[other]:
                root, joined = self.root(t), self.root(other)
                if root != joined:
                    self.parent[joined] = root
                    self.total[root] += self.total[joined]

    def root(self, t: int) -> int:
        while self.parent[t] != t:
            self.parent[t] = self.parent[self.parent[t]]
            t = self.parent[t]
        return t
