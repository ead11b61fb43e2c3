"""
A problem as the exact models see it: what is available when, and what can be computed again.

Everything here is a superset of what the verifier accepts (see `planner.verifier`), restricted to
schedules that compute every op for the first time in program order, in its default variant. So what
a model proves on it holds for all of those. What an op overwrites in the arena is one tensor per
version (see `planner.core.ssa`).
"""

from dataclasses import dataclass

from coop_plan.planner.core.memory_bounds import working_sets
from coop_plan.planner.core.problem import Pair, Problem
from coop_plan.planner.core.ssa import SsaForm


@dataclass(frozen=True)
class Links:
    """
    What may be moved to the host and back, and how fast.

    µs per tensor of a copy to the host and of one back, and the bytes that copies may take there,
    rounded up as in the arena; None for no limit.
    """

    to_host_us: list[float]
    to_device_us: list[float]
    host_capacity: int | None

    @classmethod
    def of(cls, problem: Problem) -> "Links | None":
        """Those of a problem, None where nothing can be moved."""
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
    """
    Positions 0 to n − 1 are the ops; position n is the end of the step, which reads the outputs.

    `problem` is that of `versions`, whose tensors are meant throughout. `reads` and `makes` hold
    tensors that live in the arena. Tensors in `always` are not limited by memory once they are
    made: they have 0 bytes, and nothing overwrites them.

    `until[o]` is the last position before which op o can be computed again: beyond it something
    that o reads outside the arena has been overwritten; it is at most o for an op that runs once,
    also because what it overwrites is made once. `overwrites[o]` are the (made, read) versions of
    what it overwrites in the arena: the latter end with each run. `useful[t]` is the last position
    at which having tensor t can still matter. `pairs[o]` lists the (output, input) pairs that may
    share one address in the first run of o. `rerun_bytes[o]` is what a recompute of o writes in the
    arena although its first run wrote it outside. `links` are None where nothing can be moved to
    the host. All sizes are bytes, rounded up to the alignment.
    """

    versions: SsaForm
    problem: Problem
    n: int
    reads: list[tuple[int, ...]]
    makes: list[tuple[int, ...]]
    always: list[bool]
    overwrites: list[tuple[Pair, ...]]
    until: list[int]
    useful: list[int]
    pairs: list[tuple[Pair, ...]]
    rerun_bytes: list[int]
    links: Links | None

    @classmethod
    def of(cls, problem: Problem) -> "Program":
        """The program of `problem`."""
        versions = SsaForm.of(problem)
        problem = versions.problem
        n = problem.op_count
        kept = [t for t in range(problem.tensor_count) if problem.is_output[t]]
        reads = [*problem.reads, tuple(t for t in kept if not problem.outside[t])]
        makes = [*problem.makes, ()]
        links = Links.of(problem)
        until = [*problem.rerun_limit, n]
        if links is None:  # else the host may have a copy
            for op, pairs in enumerate(versions.overwrites):
                if any(until[maker] <= maker for maker in (problem.producer[t] for _, t in pairs)):
                    until[op] = min(until[op], op)
        useful = [problem.producer[t] for t in range(problem.tensor_count)]
        for position in range(n, -1, -1):
            last = max((useful[t] for t in makes[position]), default=position)
            last = max(position, min(last, until[position]))
            for t in reads[position]:
                useful[t] = max(useful[t], last)
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
            useful,
            [*shared, ()],
            [*again, 0],
            links,
        )

    def once(self, op: int) -> bool:
        """Whether the op must run once."""
        return self.until[op] <= op

    def workspace(self, op: int) -> int:
        """Scratch bytes of the op; the end of the step needs none."""
        return self.problem.workspace[op] if op < self.n else 0

    def touched(self, op: int) -> int:
        """Arena bytes that the op's first run needs at once, nothing shared in place."""
        size = self.problem.size
        return self.workspace(op) + sum(size[t] for t in {*self.reads[op], *self.makes[op]})

    def rerun_need(self, op: int) -> int:
        """Arena bytes that a recompute of the op needs at least, in-place pairs shared."""
        return working_sets(self.problem).rerun[op]
