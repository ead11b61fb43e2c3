"""The planning problem of all methods: one graph as flat lists.

Ops, variants and tensors are positions, not ids. Sizes are bytes rounded up to the alignment;
`bytes` has the exact ones (see `planner.core.lifetimes` for the rule of both).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum
from typing import NamedTuple

import msgspec

from coop_plan.planner.core.timeline import base_cost_us
from coop_plan.schemas import Device, Graph, InvalidInputError, Op, Outputs, Variant

Pair = tuple[int, int]
"""An output and an input that may share one address."""


def check_alignment(alignment: int) -> None:
    """Raise `InvalidInputError` unless the alignment (bytes) is a power of two up to a gibibyte."""
    most = 1 << 30
    if alignment < 1 or alignment & (alignment - 1) or alignment > most:
        message = f"alignment {alignment} is not a power of two between 1 and {most}"
        raise InvalidInputError(message, "/alignment")


def plannable_variants(graph: Graph) -> Iterator[tuple[int, Variant]]:
    """The variants that a plan can choose, other than defaults, each with the position of its op.

    Left out are approximate ones, those on the host (`planner.homes`), ones that do not read a
    tensor that their op overwrites, and ones that read a tensor that no default or plannable
    variant makes.
    """
    if not any(op.variants for op in graph.ops):
        return
    made = {tensor.id for tensor in graph.tensors if tensor.resident}
    for position, op in enumerate(graph.ops):
        made.update(op.outputs)
        for variant in op.variants:
            inputs = set(variant.inputs)
            usable = not variant.approximate and variant.engine == "device"
            if usable and inputs.issuperset(op.mutates) and inputs <= made:
                made.update(variant.outputs)
                yield position, variant


def beyond_recomputation(graph: Graph, host_budget: int | None) -> list[str]:
    """Choices other than recomputation that a graph and a host budget (bytes) offer.

    "variants" of ops, if any is plannable; "transfers" to the host.
    """
    links = graph.device.linked and host_budget != 0
    variants = next(plannable_variants(graph), None) is not None
    return [*(["variants"] if variants else []), *(["transfers"] if links else [])]


class OpVariant(msgspec.Struct, frozen=True, gc=False):
    """An implementation of an op: its default variant, or another (MONeT, ICLR 2021, section 4.2).

    `inputs` and `outputs` follow the document, tensor by tensor; `reads` and `makes` are the
    distinct ones of them in the arena. `cost_us` is that of `Device.run_us`, `workspace_bytes`
    exact. `inplace` lists the (output, input) pairs that may share one address: inputs in the arena
    that the op does not overwrite, and outputs that are not larger. An output outside the arena can
    share when it is recomputed.
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


class Homes(NamedTuple):
    """Tensors of a problem that begin or end the step on the host (`planner.homes.lower`).

    `copies` are produced on the host: their first copy is offloaded in no time and has no reader.
    `returned` are (tensor, op): the op reads a copy that was offloaded and prefetched, the latter
    in no time. `versions` are (output, input): the input has no use after the op that makes the
    output, and is not offloaded, unless it is one of `copies`. `host_us` are (tensor, µs): the time
    that the host computes once the tensor is offloaded.
    """

    copies: tuple[int, ...] = ()
    returned: tuple[Pair, ...] = ()
    versions: tuple[Pair, ...] = ()
    host_us: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Problem:
    """One step's variants and tensors under an alignment and an outputs rule.

    `variants` begins with the default variant of every op in program order, so that an op's number
    is also that of its default variant; all others follow. `producer[t]` is the op that produces t,
    −1 for a tensor that exists before the step. `consumers[t]` are the ops whose default variants
    read t, `last_use[t]` the last of them in program order: the producer itself for a dead tensor,
    `op_count` for an output of the step. `host_budget` is bytes, None for no limit.
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
    homes: Homes = field(default_factory=Homes)

    @classmethod
    def from_graph(
        cls,
        graph: Graph,
        alignment: int = 512,
        outputs: Outputs = "outside",
        host_budget: int | None = None,
    ) -> "Problem":
        """The problem of `graph`; `alignment` in bytes, a power of two.

        `host_budget` limits the bytes of copies on the host, None for no limit.

        Raises:
            InvalidInputError: as `check_alignment`.
        """
        check_alignment(alignment)
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
        """As `from_graph`; `outside` flags the tensors allocated outside the arena, by position."""
        index = {tensor.id: position for position, tensor in enumerate(graph.tensors)}
        resident = [tensor.resident for tensor in graph.tensors]
        is_output = [tensor.kind == "output" for tensor in graph.tensors]
        in_arena = [not (r or o) for r, o in zip(resident, outside, strict=True)]
        tensor_bytes = [tensor.bytes for tensor in graph.tensors]

        def to_variant(position: int, op: Op, variant: Variant | None) -> OpVariant:
            source = op if variant is None else variant
            inputs = tuple([index[t] for t in source.inputs])
            outputs_ = tuple([index[t] for t in source.outputs])
            overwritten = {index[t] for t in op.mutates}
            pairs = ((index[a], index[b]) for a, b in source.inplace)
            return OpVariant(
                op=position,
                name=None if variant is None else variant.name,
                inputs=inputs,
                outputs=outputs_,
                reads=tuple([t for t in dict.fromkeys(inputs) if in_arena[t]]),
                makes=tuple([t for t in outputs_ if in_arena[t]]),
                cost_us=graph.device.run_us(source.cost_us),
                workspace_bytes=source.workspace_bytes,
                inplace=tuple(
                    [
                        (a, b)
                        for a, b in pairs
                        if in_arena[b]
                        and b not in overwritten
                        and 0 < tensor_bytes[a] <= tensor_bytes[b]
                    ]
                ),
            )

        variants = [to_variant(position, op, None) for position, op in enumerate(graph.ops)]
        variants += [
            to_variant(position, graph.ops[position], variant)
            for position, variant in plannable_variants(graph)
        ]
        count, n = len(graph.tensors), len(graph.ops)
        producer = [-1] * count
        for variant in variants:
            for t in variant.outputs:
                producer[t] = variant.op
        consumers: list[list[int]] = [[] for _ in range(count)]
        for variant in variants[:n]:
            for t in dict.fromkeys(variant.inputs):
                consumers[t].append(variant.op)
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

    # Columns of the default variants, op by op, for methods without variants.

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
        """Bytes rounded up to the alignment: of a tensor, or the capacity of an arena."""
        return -(-size // self.alignment) * self.alignment

    # Device, costs and fixed memory.

    @property
    def device(self) -> Device:
        """Device of the step, with the bandwidths of its copy engines."""
        return self.graph.device

    @property
    def tensor_count(self) -> int:
        """Number of tensors, resident ones included."""
        return len(self.bytes)

    @cached_property
    def base_cost_us(self) -> float:
        """Makespan of every op once, in program order and in its default variant, µs."""
        return base_cost_us(self.graph)

    @cached_property
    def work_us(self) -> float:
        """Cost of every op once in its default variant, µs; no such schedule has less."""
        return fsum(self.cost)

    @cached_property
    def cheapest(self) -> list[float]:
        """Per op the cost of its cheapest variant, µs."""
        cheapest = list(self.cost)
        for variant in self.variants[self.op_count :]:
            cheapest[variant.op] = min(cheapest[variant.op], variant.cost_us)
        return cheapest

    @cached_property
    def floor_us(self) -> float:
        """Lower bound on the cost of every schedule, µs.

        Each op runs once in its cheapest variant, after the first one's launch ahead of the device.
        """
        return fsum([*self.cheapest, self.device.launch_ahead_us * any(self.cheapest)])

    @cached_property
    def beyond_recomputation(self) -> list[str]:
        """Choices other than recomputation (see the function `beyond_recomputation`).

        A bound proved by a model without them does not hold for schedules that use them.
        """
        return beyond_recomputation(self.graph, self.host_budget)

    @cached_property
    def home_candidates(self) -> list[int]:
        """Movable residents that a plan may keep on the host between their uses."""
        if "transfers" not in self.beyond_recomputation:
            return []
        tensors = self.graph.tensors
        return [
            t
            for t, ops in enumerate(self.consumers)
            if ops and self.resident[t] and tensors[t].movable and self.bytes[t]
        ]

    @cached_property
    def host_ops(self) -> list[int]:
        """Ops with a variant on the host, which a plan may choose if their residents have homes."""
        if not self.home_candidates:
            return []
        return [
            position
            for position, op in enumerate(self.graph.ops)
            if any(variant.engine == "host" and not variant.approximate for variant in op.variants)
        ]

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of the tensors that exist before the step."""
        return sum(b for b, r in zip(self.bytes, self.resident, strict=True) if r)

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes of the outputs that are allocated outside the arena."""
        return sum(b for b, o in zip(self.bytes, self.outside, strict=True) if o)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the budget that are not the arena's: resident tensors, outputs outside."""
        return self.resident_bytes + self.outside_bytes

    # Ops that may run again and tensors that may be recomputed: one rule for all methods.

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
        """Flags of tensors in the arena that an op overwrites.

        Every method but the exact ones (see `planner.core.ssa`) keeps them resident from their
        production to their last use, and never recomputes them.
        """
        return [
            t in self.overwriters and not (self.resident[t] or self.outside[t])
            for t in range(self.tensor_count)
        ]

    def _rerun_limit(self, variant: OpVariant, *, arena: bool) -> int:
        """The first op, from the variant's own on, that overwrites an input of it; n if none does.

        Inputs in the arena count with `arena` only. A run-once op has its own position.
        """
        limit = self.op_count if self.graph.ops[variant.op].recomputable else variant.op
        for t in variant.inputs:
            if arena or self.resident[t] or self.outside[t]:
                later = [p for p in self.overwriters.get(t, ()) if p >= variant.op]
                limit = min([limit, *later])
        return limit

    def rerun_limit_of(self, variant: OpVariant) -> int:
        """As `rerun_limit`, of any variant."""
        return self._rerun_limit(variant, arena=False)

    @cached_property
    def rerun_limit(self) -> list[int]:
        """Per op the last position before which it can run again, its own at most if it runs once.

        After it an input of the op outside the arena has been overwritten. Tensors overwritten in
        the arena can be recomputed at their old version, so this limit binds every schedule and no
        other one does.
        """
        return [self.rerun_limit_of(variant) for variant in self._defaults]

    def touches_overwritten(self, op: int) -> bool:
        """True if the op reads or produces a tensor that some op overwrites in the arena."""
        return any(self.overwritten[t] for t in self.reads[op] + self.makes[op])

    @cached_property
    def evictable(self) -> list[bool]:
        """Flags of the `rematerializable` activations; most methods never evict outputs."""
        return [
            allowed and tensor.kind == "activation"
            for allowed, tensor in zip(self.rematerializable, self.graph.tensors, strict=True)
        ]

    @cached_property
    def rematerializable(self) -> list[bool]:
        """Flags of tensors in the arena that may be evicted and recomputed until their last use.

        The last use of an output is the end of the step. Excluded are outputs of run-once ops,
        overwritten tensors, and tensors whose recomputation may read a version that is overwritten
        before their last use. The latter is decided over the whole ancestry, because a rerun may
        need its own inputs recomputed at that later time.
        """
        n = self.op_count
        deadline: list[int] = []
        for op in range(n):
            producers = (self.producer[t] for t in self.op_inputs[op])
            limits = [deadline[producer] for producer in producers if producer >= 0]
            overwritten = [
                p for t in self.op_inputs[op] for p in self.overwriters.get(t, ()) if p >= op
            ]
            deadline.append(min([n + 1, *limits, *overwritten]))
        return [
            not self.outside[t]
            and (producer := self.producer[t]) >= 0
            and self.graph.ops[producer].recomputable
            and t not in self.overwriters
            and deadline[producer] > self.last_use[t]
            for t in range(self.tensor_count)
        ]

    @cached_property
    def movable(self) -> list[bool]:
        """Flags of tensors that may be offloaded: in the arena, used, never overwritten."""
        return [
            self.bytes[t] > 0
            and self.producer[t] >= 0
            and not self.outside[t]
            and (self.is_output[t] or bool(self.consumers[t]))
            and not self.overwritten[t]
            for t in range(self.tensor_count)
        ]

    def rerunnable(self, tensors: list[bool]) -> list[bool]:
        """Flags of ops that produce a flagged tensor and may run again at any later position."""
        return [
            self._rerun_limit(self.variants[op], arena=True) == self.op_count
            and any(tensors[t] for t in self.op_outputs[op])
            for op in range(self.op_count)
        ]

    @cached_property
    def omitted_outputs(self) -> dict[int, list[int]]:
        """By output of the step that a variant of its op does not make: the variants that do."""
        omitted = {
            t
            for variant in self.variants[self.op_count :]
            for t in self.op_outputs[variant.op]
            if self.is_output[t] and t not in variant.outputs
        }
        found: dict[int, list[int]] = {t: [] for t in sorted(omitted)}
        for number, variant in enumerate(self.variants if omitted else ()):
            for t in omitted.intersection(variant.outputs):
                found[t].append(number)
        return found

    # Constraints on the order of first runs, other than data dependences.

    @cached_property
    def phase(self) -> list[int]:
        """Per op its phase as a number; first runs of different phases never interleave."""
        numbers = {name: number for number, name in enumerate(("forward", "backward", "optimizer"))}
        return [numbers[op.phase] for op in self.graph.ops]

    @cached_property
    def chained(self) -> list[bool]:
        """Flags of ops whose first runs stay in program order among each other.

        Run-once ops, random ops, ops that use an overwritten tensor, and ops that use an output
        outside the arena which some op reads.
        """
        shared = {t for t in range(self.tensor_count) if self.outside[t] and self.consumers[t]}
        shared.update(self.overwriters)
        return [
            op.rng
            or not op.recomputable
            or any(t in shared for t in (*variant.inputs, *variant.outputs))
            for op, variant in zip(self.graph.ops, self._defaults, strict=True)
        ]
