"""Convex clusters: sets of ops that can run as one op without a cycle through the others."""

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from coop_plan.runtime.fused.ops import bytes_of, producer_of, storage_of

SHARE_OF_LARGEST = 50
"""Ops that read one tensor are merged if it has at least 1/50 of the largest result's bytes."""

TIMES_LARGEST = 2
"""Most times the largest working set of an op that a producer and a consumer may have as one."""


def clusters_of(
    ops: Sequence[fx.Node],
    before: Mapping[fx.Node, Iterable[fx.Node]],
    half_of: Mapping[fx.Node, object],
) -> list[list[fx.Node]]:
    """Clusters of two or more ops, each in program order.

    Producers are merged with consumers, then ops that read the same large tensor. Two clusters stay
    apart if inputs of the earlier one would wait for the other, and with more bytes than its
    results and the largest result of an op have: of a long sum, each term would wait for the last.
    They also stay apart if their working set were larger than `TIMES_LARGEST` times any op's, or
    than any op's if they only read the same tensor: a region is run as a whole.

    Args:
        ops: all ops of a graph, in program order.
        before: by op, those that run before it.
        half_of: by op that may be in a cluster, the half of the step that the cluster is in.
    """
    largest = max(map(bytes_of, ops), default=0)
    found = _Clusters(ops, before, largest)
    most_working = max((found.working_set(op) for op in ops), default=0)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for op in ops:
        for read in dict.fromkeys(storage_of(argument) for argument in op.all_input_nodes):
            maker = producer_of(read)
            if op not in half_of:
                continue
            if maker in half_of and half_of[maker] == half_of[op]:
                found.merge(maker, op, TIMES_LARGEST * most_working)
            if bytes_of(read) * SHARE_OF_LARGEST >= largest:
                readers.setdefault(read, []).append(op)
    for siblings in readers.values():
        for half in dict.fromkeys(half_of[op] for op in siblings):
            first, *others = (op for op in siblings if half_of[op] == half)
            for op in others:
                found.merge(first, op, most_working)
    return [sorted(members) for members in found.members.values() if len(members) > 1]


def parts_of(
    members: Sequence[fx.Node], ops: Sequence[fx.Node], limit: int
) -> list[Sequence[fx.Node]]:
    """Parts of a cluster of some of `ops` that read and make at most `limit` bytes each.

    A part is cut in two, in program order, where the larger half has the fewest bytes. One that
    each cut makes larger, as by a float32 copy of narrower tensors, stays beyond the limit. At a
    limit of 0 all are single ops, which have no scratch of a region.
    """
    if not limit:
        return [[op] for op in members]
    working_set, found = _Values(ops).working_set, list[Sequence[fx.Node]]()

    def add(part: Sequence[fx.Node], size: int) -> None:
        cuts = []
        if size > limit:
            for i in range(1, len(part)):
                sizes = working_set({*part[:i]}), working_set({*part[i:]})
                cuts.append((max(sizes), sum(sizes), i, sizes))
        if not cuts or min(cuts)[0] > size:
            found.append(part)
            return
        *_, i, sizes = min(cuts)
        add(part[:i], sizes[0])
        add(part[i:], sizes[1])

    add(members, working_set({*members}))
    return found


class _Values:
    """The storages that the ops of a graph read and make."""

    def __init__(self, ops: Sequence[fx.Node]) -> None:
        self._ops = {*ops}
        self.reads = {op: {storage_of(argument) for argument in op.all_input_nodes} for op in ops}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self._made: dict[fx.Node, list[fx.Node]] = {}
        results = next(iter(reversed(ops[0].graph.nodes))).all_input_nodes if ops else ()
        self.returned = {storage_of(value) for value in results}
        for op in ops:
            for read in self.reads[op]:
                self.readers.setdefault(read, []).append(op)
        for value in dict.fromkeys((*self.readers, *self.returned)):
            self._made.setdefault(producer_of(value), []).append(value)

    def working_set(self, inside: set[fx.Node]) -> int:
        """Bytes that some ops read and make if they are one."""
        return sum(map(bytes_of, self.arguments(inside) | self.results(inside)))

    def arguments(self, inside: set[fx.Node]) -> set[fx.Node]:
        """Results of other ops that some ops read."""
        read = {value for op in inside for value in self.reads[op]}
        return {v for v in read if (maker := producer_of(v)) in self._ops and maker not in inside}

    def results(self, inside: set[fx.Node]) -> set[fx.Node]:
        """Values that some ops make and others read, or the graph returns."""
        made = {value for op in inside for value in self._made.get(op, ())}
        return {v for v in made if v in self.returned or not inside.issuperset(self.readers[v])}


class _Clusters:
    """Clusters of ops, by number, in a topological order that merges keep up to date.

    The order is changed between two merged clusters alone (D. J. Pearce and P. H. J. Kelly, "A
    Dynamic Topological Sort Algorithm for Directed Acyclic Graphs", JEA 11, 2006).
    """

    def __init__(
        self,
        ops: Sequence[fx.Node],
        before: Mapping[fx.Node, Iterable[fx.Node]],
        most_waiting: int,
    ) -> None:
        self._most_waiting = most_waiting
        self._of = {op: i for i, op in enumerate(ops)}
        self.members = {i: [op] for i, op in enumerate(ops)}
        self._order = list(self.members)
        self._rank = list(self.members)
        self._outputs: dict[int, set[int]] = {i: set() for i in self.members}
        self._inputs: dict[int, set[int]] = {i: set() for i in self.members}
        self._values = _Values(ops)
        for op in ops:
            for other in before[op]:
                self._outputs[self._of[other]].add(self._of[op])
                self._inputs[self._of[op]].add(self._of[other])

    def merge(self, one: fx.Node, other: fx.Node, most_working: int) -> None:
        """Merge the clusters of two ops, unless a path from one to the other leaves both.

        They also stay apart if too many bytes would wait, or be read and made (`clusters_of`).
        """
        a, b = sorted((self._of[one], self._of[other]), key=self._rank.__getitem__)
        begin, end = self._rank[a], self._rank[b]
        after, stack = {a}, [a]  # a, and what follows it before b
        while stack:
            new = {c for c in self._outputs[stack.pop()] if self._rank[c] < end} - after
            after |= new
            stack += new
        if a == b or not after.isdisjoint(self._inputs[b] - {a}):
            return
        if self._waiting_bytes(a, b) > self._most_waiting:
            return
        if self.working_set(one, other) > most_working:
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

    def working_set(self, *ops: fx.Node) -> int:
        """Bytes that the clusters of some ops read and make if they are one."""
        inside = {op for c in {self._of[op] for op in ops} for op in self.members[c]}
        return self._values.working_set(inside)

    def _waiting_bytes(self, a: int, b: int) -> int:
        """Bytes that live longer if cluster `a` runs with the later `b`, less those that do not.

        The former are inputs of `a` that all others read before `b`, the latter the results of `a`.
        """
        if all(self._rank[c] <= self._rank[a] for c in self._inputs[b]):
            return 0  # b can run when a does
        inside, end = set(self.members[a]), self._rank[b]
        waiting = [v for v in self._values.arguments(inside) if self._end(v) < end]
        return sum(map(bytes_of, waiting)) - sum(map(bytes_of, self._values.results(inside)))

    def _end(self, value: fx.Node) -> int:
        """Rank of the last reader of a value; the number of ops if it is returned."""
        if value in self._values.returned:
            return len(self._rank)
        return max(self._rank[self._of[op]] for op in self._values.readers[value])
