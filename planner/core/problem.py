"""
The planning problem: one graph turned into flat lists, once, for every method.

Ops and tensors are positions in the graph's lists, not ids. Sizes are bytes rounded up to the
alignment; `bytes` keeps the exact ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from coop_plan.schemas import Graph, InvalidInputError, Outputs

MAX_ALIGNMENT = 1 << 30


@dataclass(frozen=True)
class Problem:
    """
    One step's ops and storages under an alignment and an outputs rule.

    `op_inputs` and `op_outputs` follow the graph, position by position; `reads` and `makes` hold
    the distinct tensors of them that live in the arena. `last_use[t]` is the last op that reads t
    in program order: the producer itself for a dead tensor, `len(ops)` for an output of the step.
    `evictable[t]` says whether t may be dropped and recomputed at any time before its last use.
    `inplace[o]` lists the (output, input) pairs that may share one address: inputs in the arena,
    and outputs that are not larger; an output that leaves the arena can share when made again.
    """

    graph: Graph
    alignment: int
    outputs: Outputs
    op_inputs: list[tuple[int, ...]]
    op_outputs: list[tuple[int, ...]]
    reads: list[tuple[int, ...]]
    makes: list[tuple[int, ...]]
    cost: list[float]
    workspace: list[int]
    inplace: list[tuple[tuple[int, int], ...]]
    bytes: list[int]
    size: list[int]
    producer: list[int]
    consumers: list[tuple[int, ...]]
    last_use: list[int]
    resident: list[bool]
    outside: list[bool]
    is_output: list[bool]
    evictable: list[bool]

    @classmethod
    def from_graph(
        cls, graph: Graph, alignment: int = 512, outputs: Outputs = "outside"
    ) -> "Problem":
        """
        The problem of `graph`; `alignment` in bytes, a power of two.

        Raises:
            InvalidInputError: an alignment that is no power of two.
        """
        if alignment < 1 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
            raise InvalidInputError(
                f"alignment {alignment} is not a power of two between 1 and {MAX_ALIGNMENT}",
                "/alignment",
            )
        index = {tensor.id: position for position, tensor in enumerate(graph.tensors)}
        resident = [tensor.resident for tensor in graph.tensors]
        is_output = [tensor.kind == "output" for tensor in graph.tensors]
        late = {t for op in graph.ops if op.phase != "forward" for t in op.outputs}
        outside = [
            tensor.kind == "output"
            and (outputs == "outside" or (outputs == "gradients" and tensor.id not in late))
            for tensor in graph.tensors
        ]
        op_inputs = [tuple(index[t] for t in op.inputs) for op in graph.ops]
        op_outputs = [tuple(index[t] for t in op.outputs) for op in graph.ops]
        in_arena = [not (r or o) for r, o in zip(resident, outside, strict=True)]
        reads = [tuple(t for t in dict.fromkeys(ts) if in_arena[t]) for ts in op_inputs]
        makes = [tuple(t for t in ts if in_arena[t]) for ts in op_outputs]
        count, n = len(graph.tensors), len(graph.ops)
        producer = [-1] * count
        for op, tensors in enumerate(op_outputs):
            for t in tensors:
                producer[t] = op
        consumers: list[list[int]] = [[] for _ in range(count)]
        for op, tensors in enumerate(op_inputs):
            for t in dict.fromkeys(tensors):
                consumers[t].append(op)
        last_use = [
            n if is_output[t] else (consumers[t][-1] if consumers[t] else producer[t])
            for t in range(count)
        ]
        mask = alignment - 1
        tensor_bytes = [tensor.bytes for tensor in graph.tensors]
        size = [(count + mask) & ~mask for count in tensor_bytes]
        return cls(
            graph=graph,
            alignment=alignment,
            outputs=outputs,
            op_inputs=op_inputs,
            op_outputs=op_outputs,
            reads=reads,
            makes=makes,
            cost=[op.cost_us for op in graph.ops],
            workspace=[(op.workspace_bytes + mask) & ~mask for op in graph.ops],
            inplace=[
                tuple(
                    (index[out], index[source])
                    for out, source in op.inplace
                    if in_arena[index[source]]
                    and source not in op.mutates
                    and 0 < tensor_bytes[index[out]] <= tensor_bytes[index[source]]
                )
                for op in graph.ops
            ],
            bytes=tensor_bytes,
            size=size,
            producer=producer,
            consumers=[tuple(ops) for ops in consumers],
            last_use=last_use,
            resident=resident,
            outside=outside,
            is_output=is_output,
            evictable=_evictable(graph, index, producer, last_use),
        )

    @property
    def op_count(self) -> int:
        """Number of ops."""
        return len(self.op_inputs)

    @property
    def tensor_count(self) -> int:
        """Number of tensors, resident ones included."""
        return len(self.bytes)

    @cached_property
    def base_cost_us(self) -> float:
        """Every op once, in µs."""
        return sum(self.cost)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that are there before the step."""
        return sum(b for b, r in zip(self.bytes, self.resident, strict=True) if r)

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes of the outputs that are allocated outside the arena."""
        return sum(b for b, o in zip(self.bytes, self.outside, strict=True) if o)

    @property
    def fixed_bytes(self) -> int:
        """What counts against the budget beside the arena."""
        return self.resident_bytes + self.outside_bytes

    def working_set(self, op: int) -> int:
        """Arena bytes that op `op` needs at least: inputs, outputs, workspace, in-place shared."""
        need = self.workspace[op] + sum(self.size[t] for t in self.reads[op] + self.makes[op])
        pairs = self.in_place(self.first_inplace(op))
        return need - sum(self.size[out] for out, _ in pairs)

    def first_inplace(self, op: int) -> list[tuple[int, int]]:
        """The in-place pairs that the first run of the op may use: outputs in the arena."""
        return [pair for pair in self.inplace[op] if not self.outside[pair[0]]]

    def in_place(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """
        Of the in-place `pairs` of an op, those to use, each tensor once: they save the most bytes.

        Larger outputs first, moving earlier ones to other inputs where they can (outputs that can
        be matched at once form a transversal matroid, so that greedy is best).
        """
        sources: dict[int, list[int]] = {}
        for out, source in pairs:
            sources.setdefault(out, []).append(source)
        user: dict[int, int] = {}  # input → output that takes it over

        def match(out: int, tried: set[int]) -> bool:
            for source in sources[out]:
                if source not in tried:
                    tried.add(source)
                    if source not in user or match(user[source], tried):
                        user[source] = out
                        return True
            return False

        for out in sorted(sources, key=lambda out: -self.size[out]):
            match(out, set())
        return tuple((out, source) for source, out in user.items())

    @cached_property
    def largest_working_set(self) -> tuple[int, int]:
        """The op whose working set is the largest, and that many bytes: a bound on any arena."""
        if not self.op_count:
            return -1, 0
        op = max(range(self.op_count), key=self.working_set)
        return op, self.working_set(op)


def _evictable(
    graph: Graph, index: dict[int, int], producer: list[int], last_use: list[int]
) -> list[bool]:
    """
    Which tensors may be dropped and recomputed until their last use.

    Not evictable: outputs of the step, products of ops that run once, tensors that are overwritten
    in place, and tensors whose recomputation may read a version that is overwritten before their
    last use. The last is taken over the whole ancestry, because a recomputed op may need its own
    inputs recomputed at that later time.
    """
    n = len(graph.ops)
    overwritten: dict[int, list[int]] = {}
    for position, op in enumerate(graph.ops):
        for t in op.mutates:
            overwritten.setdefault(index[t], []).append(position)
    # deadline[o]: from this position on, op o cannot be repeated as it was.
    deadline = [n + 1] * n
    for position, op in enumerate(graph.ops):
        limit = n + 1
        for tensor_id in op.inputs:
            t = index[tensor_id]
            for mutator in overwritten.get(t, ()):
                if mutator >= position:
                    limit = min(limit, mutator)
                    break
            if producer[t] >= 0:
                limit = min(limit, deadline[producer[t]])
        deadline[position] = limit
    return [
        tensor.kind == "activation"
        and producer[t] >= 0
        and graph.ops[producer[t]].recomputable
        and t not in overwritten
        and deadline[producer[t]] > last_use[t]
        for t, tensor in enumerate(graph.tensors)
    ]
