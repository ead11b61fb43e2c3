"""Problem as seen by the exact models: availability of tensors and recomputability of ops.

Everything here relaxes what the verifier accepts (see `planner.verifier`), restricted to schedules
whose first runs are in program order, in the variants of the program. So a bound proved on it holds
for all of those. A tensor that ops overwrite in the arena is one tensor per SSA version (see
`planner.core.ssa`).
"""

from dataclasses import dataclass

from coop_plan.planner.core.problem import OpVariant, Pair, Problem
from coop_plan.planner.core.ssa import SsaForm


@dataclass(frozen=True)
class HostLink:
    """Transfer times per tensor (µs, to the host and to the device) and the host budget.

    `host_capacity` is in bytes, rounded up to the alignment; None for no limit.
    """

    to_host_us: list[float]
    to_device_us: list[float]
    host_capacity: int | None

    @classmethod
    def of(cls, problem: Problem) -> "HostLink | None":
        """Returns the link of a problem, None without transfers."""
        device, limit = problem.device, problem.host_budget
        if "transfers" not in problem.beyond_recomputation:
            return None
        to_host, to_device = (
            [device.copy_latency_us + size / speed * 1e6 for size in problem.bytes]
            for speed in (device.d2h_bytes_per_s, device.h2d_bytes_per_s)
        )
        capacity = None if limit is None else problem.rounded(limit)
        return cls(to_host, to_device, capacity)


def dominates(problem: Problem, a: OpVariant, b: OpVariant) -> bool:
    """True if `a` can replace `b` in any run at the same addresses.

    `a` costs no more, has no larger workspace, reads a subset, makes the same outputs, and allows
    every in-place pair of `b`.
    """
    return (
        a.cost_us <= b.cost_us
        and problem.rounded(a.workspace_bytes) <= problem.rounded(b.workspace_bytes)
        and set(a.inputs) <= set(b.inputs)
        and set(a.outputs) == set(b.outputs)
        and set(a.inplace) >= set(b.inplace)
    )


def _undominated(problem: Problem) -> list[tuple[int, ...]]:
    """Per op its undominated variants, the cheapest first."""
    variants = problem.variants
    by_op: list[list[int]] = [[] for _ in range(problem.op_count)]
    for v in sorted(range(len(variants)), key=lambda v: (variants[v].cost_us, v)):
        rivals = by_op[variants[v].op]
        if not any(dominates(problem, variants[r], variants[v]) for r in rivals):
            rivals[:] = [r for r in rivals if not dominates(problem, variants[v], variants[r])]
            rivals.append(v)
    return [tuple(rivals) for rivals in by_op]


@dataclass(frozen=True)
class Program:
    """Positions 0 to n − 1 are the ops; position n is the end of the step, which reads the outputs.

    Tensors are those of `problem`, the problem of `versions`. `choices` lists per op its variants,
    the cheapest first: the undominated ones, or the default one only. Lists by variant have entries
    for all variants of `problem`, so that an op's number is that of its default variant.

    `reads` and `makes` list, by variant, tensors in the arena, and tensors outside it that not
    every variant of their producer makes. `read_by_all` lists by position the reads of all variants
    of a first run; `made` by op the outputs of all its variants. Tensors in `unconstrained` take no
    arena bytes and are never overwritten: once made they stay resident.

    `until[v]` is the last position before which variant v can be recomputed: later, an input
    outside the arena has been overwritten. It is at most the op for an op that runs once, which
    includes ops that overwrite a tensor made once. `overwrites[o]` lists (made, read) versions;
    each run of o ends the version read. `last_useful[t]` is the last position at which residency of
    t can still matter; `useful[v]` is the largest of the outputs of v, `optional[v]` of those that
    not every variant makes. `host_link` is None without transfers. Sizes are bytes, rounded up to
    the alignment.
    """

    versions: SsaForm
    problem: Problem
    n: int
    choices: list[tuple[int, ...]]
    reads: list[tuple[int, ...]]
    makes: list[tuple[int, ...]]
    read_by_all: list[tuple[int, ...]]
    made: list[frozenset[int]]
    unconstrained: list[bool]
    overwrites: list[tuple[Pair, ...]]
    until: list[int]
    last_useful: list[int]
    useful: list[int]
    optional: list[int]
    host_link: HostLink | None

    @classmethod
    def of(cls, problem: Problem, *, variants: bool = False) -> "Program":
        """Build the program of `problem`, with all undominated variants or default ones only."""
        return cls.of_versions(SsaForm.of(problem), variants=variants)

    @classmethod
    def of_versions(cls, versions: SsaForm, *, variants: bool) -> "Program":
        """As `of`, of an SSA form."""
        problem = versions.problem
        n, producer = problem.op_count, problem.producer
        choices: list[tuple[int, ...]] = (
            _undominated(problem) if variants else [(op,) for op in range(n)]
        )
        made = [
            frozenset.intersection(*(frozenset(problem.variants[v].outputs) for v in numbers))
            for numbers in choices
        ]
        tracked = [
            maker >= 0 and not (problem.outside[t] and t in made[maker])
            for t, maker in enumerate(producer)
        ]
        reads, makes = (
            [tuple(t for t in dict.fromkeys(tensors) if tracked[t]) for tensors in lists]
            for lists in (
                [variant.inputs for variant in problem.variants],
                [variant.outputs for variant in problem.variants],
            )
        )
        common = [
            tuple(t for t in reads[v[0]] if all(t in reads[other] for other in v[1:]))
            for v in choices
        ]
        outputs = [t for t, yes in enumerate(problem.is_output) if yes and tracked[t]]
        host_link = HostLink.of(problem)
        until = [problem.rerun_limit_of(variant) for variant in problem.variants]
        if host_link is None:  # else the host may have a copy
            for op, pairs in enumerate(versions.overwrites):
                makers = (producer[t] for _, t in pairs)
                if any(max(until[v] for v in choices[maker]) <= maker for maker in makers):
                    for v in choices[op]:
                        until[v] = min(until[v], op)
        last_useful = list(producer)
        for t in outputs:
            last_useful[t] = n
        for op in range(n - 1, -1, -1):
            last = max((last_useful[t] for v in choices[op] for t in makes[v]), default=op)
            for v in choices[op]:
                for t in reads[v]:
                    last_useful[t] = max(last_useful[t], op, min(last, until[v]))
        useful, optional = (
            [
                max((last_useful[t] for t in makes[v] if every or t not in made[b.op]), default=-1)
                for v, b in enumerate(problem.variants)
            ]
            for every in (True, False)
        )
        versioned = {t for pairs in versions.overwrites for pair in pairs for t in pair}
        unconstrained = [
            (size == 0 and t not in versioned) or problem.outside[t] or problem.resident[t]
            for t, size in enumerate(problem.size)
        ]
        return cls(
            versions,
            problem,
            n,
            choices,
            reads,
            makes,
            [*common, tuple(outputs)],
            made,
            unconstrained,
            versions.overwrites,
            until,
            last_useful,
            useful,
            optional,
            host_link,
        )

    def runs_once(self, op: int) -> bool:
        """True if the op cannot be recomputed."""
        return max(self.until[v] for v in self.choices[op]) <= op

    def inplace_pairs(self, variant: int) -> list[Pair]:
        """(output, input) pairs that may share one address in the first run of an op."""
        problem = self.problem
        return [pair for pair in problem.variants[variant].inplace if not problem.outside[pair[0]]]

    def output_bytes(self, variant: int) -> int:
        """Arena bytes of a variant's workspace and of the outputs of a first run."""
        form = self.problem.variants[variant]
        size = self.problem.size
        return self.problem.rounded(form.workspace_bytes) + sum(size[t] for t in form.makes)

    def run_bytes(self, variant: int) -> int:
        """Arena bytes of a first run in a variant, without in-place sharing."""
        reads = self.problem.variants[variant].reads
        return self.output_bytes(variant) + sum(self.problem.size[t] for t in reads)

    def working_set(self, position: int) -> int:
        """Arena bytes of the first run in the smallest variant, without in-place sharing."""
        if position < self.n:
            return min(map(self.run_bytes, self.choices[position]))
        outputs = self.read_by_all[position]
        return sum(self.problem.size[t] for t in outputs if not self.problem.outside[t])
