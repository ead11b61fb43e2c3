"""
The planning problem: one graph turned into flat lists, once, for every method.

Ops, variants and tensors are positions, not ids. Sizes are bytes rounded up to the alignment; `bytes`
keeps the exact ones (see `planner.core.lifetimes` for the one rule of both).
"""

from dataclasses import dataclass
from functools import cached_property
from math import fsum

from coop_plan.schemas import Device, Graph, InvalidInputError, Op, Outputs, Variant

MAX_ALIGNMENT = 1 << 30

Pair = tuple[int, int]
"""An output and an input that may share one address."""


def beyond_recomputation(graph: Graph, host_budget: int | None) -> list[str]:
    """
    What a graph and a budget of the host (bytes) offer: op "variants", "transfers" to it.

    Approximate variants are never chosen, so they are not offered.
    """
    links = graph.device.linked and host_budget != 0
    variants = any(not variant.approximate for op in graph.ops for variant in op.variants)
    return [*(["variants"] if variants else []), *(["transfers"] if links else [])]


@dataclass(frozen=True)
class OpVariant:
    """
    One way to run an op: its default, or another (MONeT, ICLR 2021, section 4.2).

    `inputs` and `outputs` follow the document, tensor by tensor; `reads` and `makes` are the
    distinct ones of them whose place is the arena. `cost_us` is µs, `workspace_bytes` exact.
    `inplace` lists the pairs that may share one address: inputs in the arena that the op does not
    overwrite, and outputs that are not larger; an output that leaves the arena can share when it
    is made again.
    """

    op: int
    name: str | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    cost_us: float
    workspace_bytes: int
    inplace: tuple[Pair, ...]


@dataclass(frozen=True)
class Problem:
    """
    One step's variants and storages under an alignment and an outputs rule.

    `variants` begins with the default variant of every op in program order, so that an op's number is
    also that of its default variant; variants follow. `producer[t]` is the op that makes t, and −1 for
    a tensor that is there before the step. `consumers[t]` are the ops whose default variants read t,
    `last_use[t]` the last of them in program order: the producer itself for a dead tensor,
    `op_count` for an output of the step.
    """

    graph: Graph
    alignment: int
    outputs: Outputs
    host_budget: int | None
    op_count: int
    variants: list[OpVariant]
    bytes: list[int]
    size: list[int]
    producer: list[int]
    consumers: list[tuple[int, ...]]
    last_use: list[int]
    resident: list[bool]
    outside: list[bool]
    is_output: list[bool]

    @classmethod
    def from_graph(
        cls,
        graph: Graph,
        alignment: int = 512,
        outputs: Outputs = "outside",
        host_budget: int | None = None,
    ) -> "Problem":
        """
        The problem of `graph`; `alignment` in bytes, a power of two.

        `host_budget` is the bytes that copies on the host may take, None for no limit.

        Raises:
            InvalidInputError: an alignment that is no power of two.
        """
        if alignment < 1 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
            raise InvalidInputError(
                f"alignment {alignment} is not a power of two between 1 and {MAX_ALIGNMENT}",
                "/alignment",
            )
        late = {t for op in graph.ops if op.phase != "forward" for t in op.outputs}
        outside = [
            tensor.kind == "output"
            and (outputs == "outside" or (outputs == "gradients" and tensor.id not in late))
            for tensor in graph.tensors
        ]
        return cls.with_places(graph, alignment, outputs, host_budget, outside)

    @classmethod
    def with_places(
        cls,
        graph: Graph,
        alignment: int,
        outputs: Outputs,
        host_budget: int | None,
        outside: list[bool],
    ) -> "Problem":
        """As `from_graph`, told by position which tensors leave the arena (`outside`)."""
        index = {tensor.id: position for position, tensor in enumerate(graph.tensors)}
        resident = [tensor.resident for tensor in graph.tensors]
        is_output = [tensor.kind == "output" for tensor in graph.tensors]
        in_arena = [not (r or o) for r, o in zip(resident, outside, strict=True)]
        tensor_bytes = [tensor.bytes for tensor in graph.tensors]

        def form_of(position: int, op: Op, other: Variant | None) -> OpVariant:
            form = op if other is None else other
            inputs = tuple(index[t] for t in form.inputs)
            made = tuple(index[t] for t in form.outputs)
            overwritten = {index[t] for t in op.mutates}
            pairs = [(index[a], index[b]) for a, b in form.inplace]
            return OpVariant(
                op=position,
                name=None if other is None else other.name,
                inputs=inputs,
                outputs=made,
                reads=tuple(t for t in dict.fromkeys(inputs) if in_arena[t]),
                makes=tuple(t for t in made if in_arena[t]),
                cost_us=form.cost_us,
                workspace_bytes=form.workspace_bytes,
                inplace=tuple(
                    (out, source)
                    for out, source in pairs
                    if in_arena[source]
                    and source not in overwritten
                    and 0 < tensor_bytes[out] <= tensor_bytes[source]
                ),
            )

        variants = [form_of(position, op, None) for position, op in enumerate(graph.ops)]
        variants += [
            form_of(position, op, variant)
            for position, op in enumerate(graph.ops)
            for variant in op.variants
            if not variant.approximate
        ]
        count, n = len(graph.tensors), len(graph.ops)
        producer = [-1] * count
        for made_by in variants:
            for t in made_by.outputs:
                producer[t] = made_by.op
        consumers: list[list[int]] = [[] for _ in range(count)]
        for read_by in variants[:n]:
            for t in dict.fromkeys(read_by.inputs):
                consumers[t].append(read_by.op)
        mask = alignment - 1
        return cls(
            graph=graph,
            alignment=alignment,
            outputs=outputs,
            host_budget=host_budget,
            op_count=n,
            variants=variants,
            bytes=tensor_bytes,
            size=[(count + mask) & ~mask for count in tensor_bytes],
            producer=producer,
            consumers=[tuple(ops) for ops in consumers],
            last_use=[
                n if is_output[t] else (consumers[t][-1] if consumers[t] else producer[t])
                for t in range(count)
            ],
            resident=resident,
            outside=outside,
            is_output=is_output,
        )

    # Columns of the default variants, op by op, for all who know of no others.

    @property
    def _defaults(self) -> list[OpVariant]:
        return self.variants[: self.op_count]

    @cached_property
    def op_inputs(self) -> list[tuple[int, ...]]:
        """Per op its inputs."""
        return [variant.inputs for variant in self._defaults]

    @cached_property
    def op_outputs(self) -> list[tuple[int, ...]]:
        """Per op its outputs."""
        return [variant.outputs for variant in self._defaults]

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """Per op the distinct inputs in the arena."""
        return [variant.reads for variant in self._defaults]

    @cached_property
    def makes(self) -> list[tuple[int, ...]]:
        """Per op the outputs in the arena."""
        return [variant.makes for variant in self._defaults]

    @cached_property
    def cost(self) -> list[float]:
        """Per op its cost, µs."""
        return [variant.cost_us for variant in self._defaults]

    @cached_property
    def workspace(self) -> list[int]:
        """Per op its scratch, bytes rounded up to the alignment."""
        return [self.rounded(variant.workspace_bytes) for variant in self._defaults]

    @cached_property
    def inplace(self) -> list[tuple[Pair, ...]]:
        """Per op the pairs that may share one address."""
        return [variant.inplace for variant in self._defaults]

    def rounded(self, size: int) -> int:
        """Bytes rounded up to the alignment: of a tensor, and of what may be live in an arena."""
        return -(-size // self.alignment) * self.alignment

    # What the step is and costs.

    @property
    def device(self) -> Device:
        """Where the step runs, with the bandwidths of its copy engines."""
        return self.graph.device

    @property
    def tensor_count(self) -> int:
        """Number of tensors, resident ones included."""
        return len(self.bytes)

    @cached_property
    def base_cost_us(self) -> float:
        """Every op once in its default variant, µs."""
        return fsum(self.cost)

    @cached_property
    def floor_us(self) -> float:
        """Every op once in its cheapest variant, µs: no schedule at all costs less."""
        least = list(self.cost)
        for variant in self.variants[self.op_count :]:
            least[variant.op] = min(least[variant.op], variant.cost_us)
        return fsum(least)

    @cached_property
    def beyond_recomputation(self) -> list[str]:
        """
        What is offered beside recomputation (`beyond_recomputation`).

        The bound of a model holds only where it has all of it.
        """
        return beyond_recomputation(self.graph, self.host_budget)

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

    # What may run again: one rule, from which everybody takes what they need.

    @cached_property
    def overwriters(self) -> dict[int, list[int]]:
        """By tensor the ops that overwrite it, in program order."""
        index = {tensor.id: t for t, tensor in enumerate(self.graph.tensors)}
        found: dict[int, list[int]] = {}
        for position, op in enumerate(self.graph.ops):
            for tensor_id in op.mutates:
                found.setdefault(index[tensor_id], []).append(position)
        return found

    @cached_property
    def overwritten(self) -> list[bool]:
        """
        Tensors in the arena that an op overwrites.

        All methods but the exact ones (see `planner.core.ssa`) keep them from their production
        to their last use, and never make them again.
        """
        return [
            t in self.overwriters and not (self.resident[t] or self.outside[t])
            for t in range(self.tensor_count)
        ]

    def _until(self, variant: OpVariant, *, arena: bool) -> int:
        """The first op from its own on that overwrites what it reads (`arena`: there too), or n."""
        limit = self.op_count if self.graph.ops[variant.op].recomputable else variant.op
        for t in variant.inputs:
            if arena or self.resident[t] or self.outside[t]:
                later = [p for p in self.overwriters.get(t, ()) if p >= variant.op]
                limit = min([limit, *later])
        return limit

    def until_of(self, variant: OpVariant) -> int:
        """As `until`, of any variant."""
        return self._until(variant, arena=False)

    @cached_property
    def until(self) -> list[int]:
        """
        Per op the last position before which it can run again, at most itself if it runs once.

        Beyond it something that the op reads outside the arena has been overwritten. What is
        overwritten in the arena can be made again at its old version, so this is all that every
        schedule has to keep to.
        """
        return [self.until_of(variant) for variant in self._defaults]

    def touches_overwritten(self, op: int) -> bool:
        """Whether the op reads or makes what some op overwrites in the arena."""
        return any(self.overwritten[t] for t in self.reads[op] + self.makes[op])

    @cached_property
    def evictable(self) -> list[bool]:
        """Which of the `remakeable` tensors are no outputs of the step, which most methods keep."""
        return [
            again and tensor.kind == "activation"
            for again, tensor in zip(self.remakeable, self.graph.tensors, strict=True)
        ]

    @cached_property
    def remakeable(self) -> list[bool]:
        """
        Which tensors in the arena may be dropped and made again at any time before their last use.

        That of an output is the end of the step. Not products of ops that run once, tensors that
        are overwritten, nor tensors whose recomputation may read a version that is overwritten
        before their last use. The last is taken over the whole ancestry, because an op that runs
        again may need its own inputs made again at that later time.
        """
        n = self.op_count
        deadline: list[int] = []
        for op in range(n):
            makers = (self.producer[t] for t in self.op_inputs[op])
            limits = [deadline[maker] for maker in makers if maker >= 0]
            overwritten = [
                p for t in self.op_inputs[op] for p in self.overwriters.get(t, ()) if p >= op
            ]
            deadline.append(min([n + 1, *limits, *overwritten]))
        return [
            not self.outside[t]
            and (maker := self.producer[t]) >= 0
            and self.graph.ops[maker].recomputable
            and t not in self.overwriters
            and deadline[maker] > self.last_use[t]
            for t in range(self.tensor_count)
        ]

    @cached_property
    def movable(self) -> list[bool]:
        """Which tensors may be copied to the host: those in the arena that nothing overwrites."""
        return [
            self.bytes[t] > 0
            and self.producer[t] >= 0
            and not self.outside[t]
            and (self.is_output[t] or bool(self.consumers[t]))
            and not self.overwritten[t]
            for t in range(self.tensor_count)
        ]

    def repeatable(self, tensors: list[bool]) -> list[bool]:
        """Ops that make one of these tensors and may run again anywhere after their first run."""
        return [
            self._until(self.variants[op], arena=True) == self.op_count
            and any(tensors[t] for t in self.op_outputs[op])
            for op in range(self.op_count)
        ]

    # What keeps first runs in program order, beside the data they read.

    @cached_property
    def phase(self) -> list[int]:
        """Per op its phase, as a number: first runs of one never mix with those of another."""
        numbers = {name: number for number, name in enumerate(("forward", "backward", "optimizer"))}
        return [numbers[op.phase] for op in self.graph.ops]

    @cached_property
    def chained(self) -> list[bool]:
        """
        Ops that run for the first time in program order, each after the one before it.

        Those that run once, that draw random numbers, that read or overwrite what is overwritten,
        and that make or read an output outside the arena that is read.
        """
        shared = {t for t in range(self.tensor_count) if self.outside[t] and self.consumers[t]}
        shared.update(self.overwriters)
        return [
            op.rng or not op.recomputable or any(t in shared for t in (*variant.inputs, *variant.outputs))
            for op, variant in zip(self.graph.ops, self._defaults, strict=True)
        ]
