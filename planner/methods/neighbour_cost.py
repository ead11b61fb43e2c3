"""
What evicting a tensor would cost, DTR's e*: its own cost and its evicted neighbours'.

Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021, section 4.1 and appendix C.2: evicted
tensors that depend on each other form components, kept approximately in a union-find whose sums
are merged on eviction and reduced, without splitting, when a tensor is computed again.
"""

from planner.problem import Problem


class NeighbourCost:
    """Component costs over the evicted tensors of one run; µs."""

    def __init__(self, problem: Problem) -> None:
        self._cost = [problem.cost[p] if p >= 0 else 0.0 for p in problem.producer]
        neighbours: list[dict[int, None]] = [{} for _ in range(problem.tensor_count)]
        for op in range(problem.op_count):
            for made in problem.makes[op]:
                for read in problem.reads[op]:
                    neighbours[made][read] = None
                    neighbours[read][made] = None
        self._neighbours = [tuple(found) for found in neighbours]
        # A fresh node per eviction keeps a recomputed tensor out of the component it left.
        self._node = [-1] * problem.tensor_count
        self._parent: list[int] = []
        self._sum: list[float] = []

    def evicted(self, tensor: int) -> None:
        """The tensor has left the arena: join its evicted neighbours' components."""
        node = len(self._parent)
        self._node[tensor] = node
        self._parent.append(node)
        self._sum.append(self._cost[tensor])
        for other in self._neighbours[tensor]:
            if self._node[other] >= 0:
                root, joined = self._root(node), self._root(self._node[other])
                if root != joined:
                    self._parent[joined] = root
                    self._sum[root] += self._sum[joined]

    def computed(self, tensor: int) -> None:
        """The tensor is in the arena again: take its cost out of its component."""
        node = self._node[tensor]
        if node >= 0:
            root = self._root(node)
            self._sum[root] = max(0.0, self._sum[root] - self._cost[tensor])
            self._node[tensor] = -1

    def of(self, tensor: int) -> float:
        """The tensor's cost and that of every evicted component next to it."""
        total = self._cost[tensor]
        node = self._node
        roots: list[int] = []
        for other in self._neighbours[tensor]:
            if node[other] >= 0:
                root = self._root(node[other])
                if root not in roots:
                    roots.append(root)
                    total += self._sum[root]
        return total

    def _root(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node
