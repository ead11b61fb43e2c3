"""Problem as seen by the exact models: availability of tensors and recomputability of ops.

Everything here relaxes what the verifier accepts (see `planner.verifier`), restricted to schedules
whose first runs are in program order and in default variants. So a bound proved on it holds for all
of those. A tensor that ops overwrite in the arena is one tensor per SSA version (see
`planner.core.ssa`).
"""

from dataclasses import dataclass

from coop_plan.planner.core.memory_bounds import working_sets
from coop_plan.planner.core.problem import Pair, Problem
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


@dataclass(frozen=True)
class Program:
    """Positions 0 to n − 1 are the ops; position n is the end of the step, which reads the outputs.

    Tensors are those of `problem`, the problem of `versions`. `reads` and `makes` list tensors in
    the arena. Tensors in `unconstrained` have 0 bytes and are never overwritten: once made they
    stay resident.

    `until[o]` is the last position before which op o can be recomputed: later, an input outside the
    arena has been overwritten. It is at most o for an op that runs once, which includes ops that
    overwrite a tensor made once. `overwrites[o]` lists (made, read) versions; each run of o ends
    the version read. `last_useful[t]` is the last position at which residency of t can still
    matter. `inplace_pairs[o]` lists (output, input) pairs that may share one address in the first
    run of o. `rerun_bytes[o]` are outputs that a recompute of o writes in the arena although its
    first run wrote them outside. `host_link` is None without transfers. Sizes are bytes, rounded up
    to the alignment.
    """

    versions: SsaForm
    problem: Problem
    n: int
    reads: list[tuple[int, ...]]
    makes: list[tuple[int, ...]]
    unconstrained: list[bool]
    overwrites: list[tuple[Pair, ...]]
    until: list[int]
    last_useful: list[int]
    inplace_pairs: list[tuple[Pair, ...]]
    rerun_bytes: list[int]
    host_link: HostLink | None

    @classmethod
    def of(cls, problem: Problem) -> "Program":
        """Build the program of `problem`."""
        versions = SsaForm.of(problem)
        problem = versions.problem
        n = problem.op_count
        kept = [t for t in range(problem.tensor_count) if problem.is_output[t]]
        reads = [*problem.reads, tuple(t for t in kept if not problem.outside[t])]
        makes = [*problem.makes, ()]
        host_link = HostLink.of(problem)
        until = [*problem.rerun_limit, n]
        if host_link is None:  # else the host may have a copy
            for op, pairs in enumerate(versions.overwrites):
                if any(until[maker] <= maker for maker in (problem.producer[t] for _, t in pairs)):
                    until[op] = min(until[op], op)
        last_useful = [problem.producer[t] for t in range(problem.tensor_count)]
        for position in range(n, -1, -1):
            last = max((last_useful[t] for t in makes[position]), default=position)
            last = max(position, min(last, until[position]))
            for t in reads[position]:
                last_useful[t] = max(last_useful[t], last)
        shared = [
            tuple(pair for pair in problem.inplace[op] if not problem.outside[pair[0]])
            for op in range(n)
        ]
        again = [
            sum(problem.size[t] for t in outputs if problem.outside[t])
            for outputs in problem.op_outputs
        ]
        versioned = {t for pairs in versions.overwrites for pair in pairs for t in pair}
        return cls(
            versions,
            problem,
            n,
            reads,
            makes,
            [size == 0 and t not in versioned for t, size in enumerate(problem.size)],
            versions.overwrites,
            until,
            last_useful,
            [*shared, ()],
            [*again, 0],
            host_link,
        )

    def runs_once(self, op: int) -> bool:
        """True if the op cannot be recomputed."""
        return self.until[op] <= op

    def workspace(self, op: int) -> int:
        """Workspace bytes of the op; 0 at the end of the step."""
        return self.problem.workspace[op] if op < self.n else 0

    def working_set(self, op: int) -> int:
        """Arena bytes of the op's first run, without in-place sharing."""
        size = self.problem.size
        return self.workspace(op) + sum(size[t] for t in {*self.reads[op], *self.makes[op]})

    def rerun_working_set(self, op: int) -> int:
        """Arena bytes of a recompute of the op, with in-place sharing."""
        return working_sets(self.problem).rerun[op]
