"""Peak model of a joint graph that Inductor compiles: bytes of forward and backward by saved set.

A *saved set* are the values that the forward passes to the backward. It decides both graphs: the
backward computes everything else that it reads again, once, just before its first use (PyTorch's
`reordering_to_mimic_autograd_engine`). The model counts the bytes of both in that order. Each is a
row of *segments*: an op of a library, or the fusible ops between two of them. A value that a
fusible op makes has memory only if another segment reads it, or if it is saved or returned.

Not counted: the inputs of the joint graph, which exist before the step.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import GETITEM, is_view
from coop_plan.runtime.fused.ops import bytes_of, is_fusible, storage_of
from coop_plan.runtime.offline_capture.roofline import work_of
from coop_plan.runtime.torch_internals.joint_graphs import is_tangent
from coop_plan.runtime.torch_internals.ops import OpOverload, is_mutable
from coop_plan.runtime.torch_internals.partitioner import (
    draws_from_seed,
    is_kept_by_rule,
    is_static_input,
)

RANDOM = torch.Tag.nondeterministic_seeded

OPERATIONS_A_BYTE = {"cpu": 8}
"""Floating-point operations of a product in the time of a byte of memory traffic, by device."""

OPERATIONS_A_BYTE_ELSEWHERE = 150

SavedSet = frozenset[int]
"""Positions of the saved nodes in the joint graph, without inputs of the graph."""


@dataclass(frozen=True)
class Simulation:
    """A step with a saved set.

    Attributes:
        live: bytes in each segment of the forward, then of the backward.
        boundary: number of segments of the forward.
        cost: of the recomputation, in bytes of memory traffic of equal time.
        recomputed: positions of the nodes that the backward computes again.
        first_use: segment of the backward that first reads each saved value, by position.
    """

    live: np.ndarray
    boundary: int
    cost: int
    recomputed: tuple[int, ...]
    first_use: dict[int, int]
    made_at: dict[int, int]

    @cached_property
    def peak(self) -> int:
        """Most bytes in a segment."""
        return int(self.live.max(initial=0))


class JointModel:
    """A joint graph as lists by position; see the module."""

    def __init__(self, graph: fx.Graph, results: int) -> None:
        """`results` is the number of outputs of the forward."""
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        at = {node: i for i, node in enumerate(self.nodes)}
        self.reads = [tuple(at[arg] for arg in node.all_input_nodes) for node in self.nodes]
        self.owner = [at.get(storage_of(node), i) for i, node in enumerate(self.nodes)]
        self.size = [bytes_of(node) for node in self.nodes]
        self.is_input = [node.op in ("placeholder", "get_attr") for node in self.nodes]
        self.is_static = [
            self.is_input[i] and (node.op == "get_attr" or is_static_input(node))
            for i, node in enumerate(self.nodes)
        ]
        self.free = [_costs_nothing(node) for node in self.nodes]
        self.fused = [is_fusible(node) or draws_from_seed(node) for node in self.nodes]
        for i, node in enumerate(self.nodes):
            if isinstance(node.meta.get("val"), tuple | list):
                self.size[i] = 0  # its elements have the bytes
        self.in_backward = [False] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            self.in_backward[i] = is_tangent(node) or any(
                self.in_backward[j] for j in self.reads[i]
            )
        self.recomputable = [_may_be_recomputed(node) for node in self.nodes]
        self.cost = [0 if self.in_backward[i] else self._cost(i) for i in range(len(self.nodes))]
        self.tangent_bytes = sum(self.size[i] for i, n in enumerate(self.nodes) if is_tangent(n))
        returned = next(iter(reversed(graph.nodes))).args[0]
        places = [at[value] if isinstance(value, fx.Node) else None for value in returned]
        self.results = tuple(i for i in places[:results] if i is not None)
        self.gradients = tuple(i for i in places[results:] if i is not None)
        self.start = next(
            (i for i, node in enumerate(self.nodes) if any(map(is_tangent, node.all_input_nodes))),
            len(self.nodes),
        )

    def _cost(self, i: int) -> int:
        node = self.nodes[i]
        if self.is_input[i] or self.free[i]:
            return 0
        if self.fused[i] or not isinstance(node.target, OpOverload):
            return self.size[i]
        values = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda a: a.meta.get("val") if isinstance(a, fx.Node) else a
        )
        work = work_of(node.target, *values, node.meta["val"])
        device = getattr(node.meta["val"], "device", None)
        per_byte = OPERATIONS_A_BYTE.get(
            "cpu" if device is None else device.type, OPERATIONS_A_BYTE_ELSEWHERE
        )
        return work.operations // per_byte + work.bytes

    def positions(self, saved: Iterable[fx.Node]) -> SavedSet:
        """The saved set of these nodes of the graph; values that the backward needs are added."""
        at = {node: i for i, node in enumerate(self.nodes)}
        return self.completed(at[node] for node in saved if node in at)

    def completed(self, saved: Iterable[int]) -> SavedSet:
        """A saved set that a backward can run with, and of which it reads every value.

        Values that cannot be recomputed are added where the backward needs them.
        """
        kept = {i for i in saved if not self.is_input[i] and not self.in_backward[i]}
        used: set[int] = set()
        seen: set[int] = set()
        open_nodes = list(self.gradients)
        while open_nodes:
            i = open_nodes.pop()
            if i in seen or self.is_input[i]:
                continue
            seen.add(i)
            is_saved = i in kept or not self.recomputable[i]
            if is_saved and not self.in_backward[i] and (self.size[i] or self.recomputable[i]):
                used.add(i)
                continue
            open_nodes += self.reads[i]
        return frozenset(used)

    def recomputed(self, saved: SavedSet, needed: Iterable[int]) -> set[int]:
        """Nodes of the forward that are computed again to get `needed` from a saved set."""
        seen: set[int] = set()
        open_nodes = list(needed)
        while open_nodes:
            i = open_nodes.pop()
            if i in seen or self.is_input[i] or i in saved:
                continue
            seen.add(i)
            open_nodes += self.reads[i]
        return seen

    def simulate(self, saved: SavedSet) -> Simulation:
        """The bytes of a step with a saved set."""
        forward = sorted(self.recomputed(frozenset(), (*self.results, *saved)))
        needed = self.recomputed(saved, self.gradients)
        order = self._backward_order(saved, needed)
        made_at: dict[int, int] = {}
        ahead, _, made_at = self._live(forward, (), (*self.results, *saved))
        behind, first, _ = self._live(order, saved, self.gradients)
        behind += self._held_bytes(saved)
        again = tuple(i for i in order if not self.in_backward[i])
        cost = sum(self.cost[i] for i in again)
        return Simulation(np.concatenate([ahead, behind]), len(ahead), cost, again, first, made_at)

    def _held_bytes(self, saved: SavedSet) -> int:
        """Bytes during the whole backward: outputs that are not saved, gradients of outputs."""
        storages = {self.owner[i] for i in self.results} - {self.owner[i] for i in saved}
        return self.tangent_bytes + sum(self.size[i] for i in storages if not self.is_static[i])

    def _backward_order(self, saved: SavedSet, needed: set[int]) -> list[int]:
        order: list[int] = []
        placed = set(saved)
        for i in sorted(needed):
            if i < self.start or i in placed:
                continue
            missing = {i}
            open_nodes = [i]
            while open_nodes:
                for j in self.reads[open_nodes.pop()]:
                    if j not in missing and j not in placed and not self.is_input[j]:
                        missing.add(j)
                        open_nodes.append(j)
            order += sorted(missing)
            placed |= missing
        rest = sorted(needed - placed)
        return order + rest

    def _live(
        self, order: list[int], given: Collection[int], kept: Collection[int]
    ) -> tuple[np.ndarray, dict[int, int], dict[int, int]]:
        """Bytes by segment of ops in this order, and the first segment that reads each storage.

        `given` are freed after their last use, `kept` are not freed. The last result is the
        segment that makes each storage.
        """
        segment, was_fused = 0, True
        birth: dict[int, int] = {self.owner[i]: 0 for i in given}
        inside: set[int] = set()
        death: dict[int, int] = dict(birth)
        first: dict[int, int] = {}
        for i in order:
            if not self.free[i]:
                if not self.fused[i] or not was_fused:
                    segment += 1
                was_fused = self.fused[i]
            owner = self.owner[i]
            if owner not in birth:
                birth[owner] = death[owner] = segment
                if self.fused[owner]:
                    inside.add(owner)
            for j in self.reads[i]:
                read = self.owner[j]
                if not self.free[i]:
                    first.setdefault(read, segment)
                    death[read] = max(death.get(read, 0), segment)
        for i in kept:
            death[self.owner[i]] = segment
            inside.discard(self.owner[i])
        change = np.zeros(segment + 2, np.int64)
        for owner, begin in birth.items():
            if self.is_static[owner] or (owner in inside and begin == death[owner]):
                continue
            change[begin] += self.size[owner]
            change[death[owner] + 1] -= self.size[owner]
        return np.cumsum(change)[:-1], first, birth


def _costs_nothing(node: fx.Node) -> bool:
    return node.op != "call_function" or node.target is GETITEM or is_view(node)


def _may_be_recomputed(node: fx.Node) -> bool:
    if node.target is GETITEM:
        return _may_be_recomputed(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload) or is_kept_by_rule(node):
        return False
    return not is_mutable(node.target) and RANDOM not in node.target.tags
