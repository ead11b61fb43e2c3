"""Convex clusters: sets of ops that can run as one op without a cycle through the others."""

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from coop_plan.runtime.fused.ops import bytes_of, producer_of, storage_of

SHARE_OF_LARGEST = 50
"""Ops that read one tensor are merged if it has at least 1/50 of the largest result's bytes."""


def clusters_of(
    ops: Sequence[fx.Node],
    before: Mapping[fx.Node, Iterable[fx.Node]],
    half_of: Mapping[fx.Node, object],
) -> list[list[fx.Node]]:
    """Clusters of two or more ops, each in program order.

    Producers are merged with consumers, then ops that read the same large tensor.

    Args:
        ops: all ops of a graph, in program order.
        before: by op, those that run before it.
        half_of: by op that may be in a cluster, the half of the step that the cluster is in.
    """
    found = _Clusters(ops, before)
    largest = max(map(bytes_of, ops), default=0)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for op in ops:
        for read in dict.fromkeys(storage_of(argument) for argument in op.all_input_nodes):
            maker = producer_of(read)
            if op not in half_of:
                continue
            if maker in half_of and half_of[maker] == half_of[op]:
                found.merge(maker, op)
            if bytes_of(read) * SHARE_OF_LARGEST >= largest:
                readers.setdefault(read, []).append(op)
    for siblings in readers.values():
        for half in dict.fromkeys(half_of[op] for op in siblings):
            first, *others = (op for op in siblings if half_of[op] == half)
            for op in others:
                found.merge(first, op)
    return [sorted(members) for members in found.members.values() if len(members) > 1]


class _Clusters:
    """Clusters of ops, by number, in a topological order that merges keep up to date.

    The order is changed between two merged clusters alone (D. J. Pearce and P. H. J. Kelly, "A
    Dynamic Topological Sort Algorithm for Directed Acyclic Graphs", JEA 11, 2006).
    """

    def __init__(self, ops: Sequence[fx.Node], before: Mapping[fx.Node, Iterable[fx.Node]]) -> None:
        self._of = {op: i for i, op in enumerate(ops)}
        self.members = {i: [op] for i, op in enumerate(ops)}
        self._order = list(self.members)
        self._rank = list(self.members)
        self._outputs: dict[int, set[int]] = {i: set() for i in self.members}
        self._inputs: dict[int, set[int]] = {i: set() for i in self.members}
        for op in ops:
            for other in before[op]:
                self._outputs[self._of[other]].add(self._of[op])
                self._inputs[self._of[op]].add(self._of[other])

    def merge(self, one: fx.Node, other: fx.Node) -> None:
        """Merge the clusters of two ops, unless a path from one to the other leaves both."""
        a, b = sorted((self._of[one], self._of[other]), key=self._rank.__getitem__)
        begin, end = self._rank[a], self._rank[b]
        after, stack = {a}, [a]  # a, and what follows it before b
        while stack:
            new = {c for c in self._outputs[stack.pop()] if self._rank[c] < end} - after
            after |= new
            stack += new
        if a == b or not after.isdisjoint(self._inputs[b] - {a}):
            return
        between = self._order[begin + 1 : end]
        order = [c for c in between if c not in after]
        order += [a, *(c for c in between if c in after), b]  # b is empty now
        self._order[begin : end + 1] = order
        for rank, c in enumerate(order, start=begin):
            self._rank[c] = rank
        for op in self.members[b]:
            self._of[op] = a
        self.members[a] += self.members.pop(b)
        for edges, back in ((self._outputs, self._inputs), (self._inputs, self._outputs)):
            for c in edges.pop(b):
                back[c].discard(b)
                if c != a:
                    edges[a].add(c)
                    back[c].add(a)
