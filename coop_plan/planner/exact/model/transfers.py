"""
Transfers in the time-point model: what is on the host, and what the copy engines have time for.

The model of `planner.exact.model.timepoint` says what is resident at time points τ_k and what runs
again in the segments between them. Here are its columns and rows for plans that also move tensors
to the host and back, on the timeline of `planner.core.timeline`:

    L[k, d]   a copy of d from the host is waited for in segment k, and d can be read from then on
    A[k, d]   d is arriving while τ_k runs: its bytes are taken, the copy is not waited for yet
    C[k, d]   how many copies of d to the host were waited for by the end of τ_k
    G[k, d]   the host still has a copy of d then (only where the host's bytes are limited)
    W[k]      µs that compute waits in segment k
    V[k]      µs of the copies that are arriving at the end of τ_k that are over by then
    U[k]      the same of copies to the host that are not waited for by then

A copy that begins in segment k is no column of its own: it is A[k] − A[k−1] + L[k].

Why the optimum is a bound. Take any plan that the verifier accepts and that first runs every op in
program order, in its default variant. An *episode* of a tensor is a longest stretch of steps over
which at least one buffer of it is live. Within an episode the tensor can be read from its first run
or the first wait for a copy from the host on, whichever is first; until then it is arriving. A step
that reads the tensor comes after that moment, and an episode without such a moment is of no use and
left out. So let X[k, d] be 1 where τ_k runs in the later part of an episode and A[k, d] where it
runs in the earlier one: as many bytes are taken at least. An episode that begins with a copy and
becomes readable by a wait gives one copy that begins and is waited for within it (L[k, d] at its
wait); those of different episodes are different copies. If the whole of that happens within a
segment in which the tensor could be read before, or is computed again, it is left out, as the model
has the tensor in that segment anyway. In-place pairs end an episode or save nothing.

Where an episode begins with a copy, no buffer was live before it. So a copy to the host was waited
for before, or else its buffer could not have ended. C counts those waits, but for those at which
the tensor could be read only because it had come back in the same segment: then a copy on the host
is older. Every row holds for these values:

- what is read in segment k could be read at τ_{k−1}, or can be since: by a run, or by a wait for
  what the host had at τ_{k−1}, as in the segment itself no copy was made of what could not be read;
- what begins to arrive has a copy on the host, and what is copied there can be read;
- segment k takes its first runs, its recomputes and W[k]. The copies of an engine are disjoint in
  time, those waited for in segment k are over when τ_k begins, as it is the last step of its
  segment, and what is over by the end of τ_k began before it, in the order of the steps: it is
  waited for by then, or arriving. A copy to the host begins after the first run of what makes it.

The objective, what runs again and what compute waits for, is the makespan less the base cost. It
is no more with fewer bytes or shorter copies, so both may be cut off (`LONGEST_COPY`).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coop_plan.planner.exact.model.milp import INFINITY, Terms

if TYPE_CHECKING:
    from coop_plan.planner.exact.model.timepoint import TimePointModel

ROUNDING = 1e-9
"""Relative slack of rows of the host's memory (see `planner.exact.model.timepoint`)."""

LONGEST_COPY = 10.0
"""In base costs: what takes longer counts as so long, far from a solver's tolerances."""


@dataclass
class Transfers:
    """The columns of transfers in a model; by segment, tensor → column."""

    model: "TimePointModel"
    prefetched: list[dict[int, int]] = field(default_factory=list)
    """L."""
    arriving: list[dict[int, int]] = field(default_factory=list)
    """A."""
    offloaded: list[dict[int, int]] = field(default_factory=list)
    """C."""
    on_host: list[dict[int, int]] = field(default_factory=list)
    """G; empty where the host's bytes are not limited."""
    stall: list[int] = field(default_factory=list)
    """W, in units of the model's cost."""
    early_work: list[tuple[int, int]] = field(default_factory=list)
    """V and U, in units of the model's cost."""

    def __post_init__(self) -> None:
        host_link, unit = self.model.program.host_link, self.model.cost_unit
        assert host_link is not None
        longest = LONGEST_COPY * max(self.model.program.problem.base_cost_us, unit)
        self.to_host = [min(us, longest) / unit for us in host_link.to_host_us]
        self.to_device = [min(us, longest) / unit for us in host_link.to_device_us]
        self.host_capacity = host_link.host_capacity

    def variables(self, k: int) -> None:
        """The columns of segment k; those of X and Y are there already."""
        model = self.model
        program, milp = model.program, model.milp
        point, start = model.points[k], model.start(k)
        before = model.x[k - 1] if k else {}
        last_useful = program.last_useful
        # [Variable] L[k, d] for what was made before the segment and is read in it or later.
        self.prefetched.append({t: milp.binary() for t in before if self._may_transfer(t, start)})
        # [Variable] A[k, d], unless τ_k reads it.
        self.arriving.append(
            {
                t: milp.column(0.0, 1.0, 0.0, integer=False)
                for t in self.prefetched[k]
                if last_useful[t] > point and model.x[k].get(t) is not None
            }
        )
        # [Variable] C[k, d] for what is there before τ_k, once a segment at most.
        earlier = self.offloaded[k - 1] if k else {}
        made = [t for t in model.x[k] if t not in earlier and self._may_transfer(t, start)]
        upper = 1.0 if self.host_capacity is None else float(k + 1)
        self.offloaded.append(
            {
                t: milp.column(0.0, upper, 0.0, integer=False)
                for t in [*earlier, *made]
                if self._may_transfer(t, start)
            }
        )
        limited = self.offloaded[k] if self.host_capacity is not None else {}
        self.on_host.append({t: milp.column(0.0, 1.0, 0.0, integer=False) for t in limited})

    def _may_transfer(self, t: int, start: int) -> bool:
        """Whether it may help that t, which lies in the arena, comes back after this position."""
        program = self.model.program
        return program.problem.size[t] > 0 and program.last_useful[t] > start

    def awaited(self, k: int, t: int) -> Terms:
        """Whether a copy of t from the host is waited for in segment k."""
        column = self.prefetched[k].get(t)
        return [] if column is None else [(column, 1.0)]

    def prefetch_columns(self, low: int, high: int, t: int, *, copied: bool) -> list[int]:
        """
        Columns of which t cannot be back in segments low + 1 … high without one of them.

        If `copied`, the one that says that the host had it before; none if it cannot be back.
        """
        columns = [
            by_tensor[t] for by_tensor in self.prefetched[low + 1 : high + 1] if t in by_tensor
        ]
        return (
            [self.host_copies[low][t]]
            if copied and columns and t in self.host_copies[low]
            else columns
        )

    @property
    def host_copies(self) -> list[dict[int, int]]:
        """Whether the host has a copy at the end of a segment: G, or else C."""
        return self.offloaded if self.host_capacity is None else self.on_host

    def _column(self, columns: list[dict[int, int]], k: int, t: int, value: float) -> Terms:
        found = columns[k].get(t) if k >= 0 else None
        return [] if found is None else [(found, value)]

    def _started_copies(self, k: int, t: int) -> Terms:
        """How many copies of t from the host begin in segment k."""
        return [
            *self._column(self.arriving, k, t, 1.0),
            *self._column(self.arriving, k - 1, t, -1.0),
            *self._column(self.prefetched, k, t, 1.0),
        ]

    def rows(self, k: int) -> None:
        """The rows of segment k."""
        self._copy_rows(k)
        self._host_memory(k)
        self._copy_engines(k)

    def _copy_rows(self, k: int) -> None:
        model, milp = self.model, self.model.milp
        for t in self.prefetched[k]:
            started = self._started_copies(k, t)
            # [Constraint] what is waited for was begun: A[k] − A[k−1] + L[k] ≥ 0.
            if len(started) > 1:
                milp.row(started, 0.0, INFINITY)
            # [Constraint] what begins was on the host: ≤ C[k], or G[k−1] + C[k] − C[k−1].
            if self.host_capacity is None:
                available = self._column(self.offloaded, k, t, -1.0)
            else:
                available = [
                    *self._column(self.on_host, k - 1, t, -1.0),
                    *self._column(self.offloaded, k, t, -1.0),
                    *self._column(self.offloaded, k - 1, t, 1.0),
                ]
            milp.row([*started, *available], -INFINITY, 0.0)
            # [Constraint] none of it without a copy: A[k] ≤ G[k], L[k] ≤ G[k−1].
            for at, column in (k, self.arriving[k].get(t)), (k - 1, self.prefetched[k][t]):
                if column is not None:
                    available = self._column(self.host_copies, at, t, -1.0)
                    milp.row([(column, 1.0), *available], -INFINITY, 0.0)
        for t in self.offloaded[k]:
            started = [
                *self._column(self.offloaded, k, t, 1.0),
                *self._column(self.offloaded, k - 1, t, -1.0),
            ]
            # [Constraint] C[k] ≥ C[k−1].
            if len(started) > 1:
                milp.row(started, 0.0, INFINITY)
            # [Constraint] what is copied to the host is there: C[k] − C[k−1] ≤ kept + Y.
            constant, terms = model.kept(k, t)
            terms = [*terms, *model.recomputed(k, t)]
            milp.row([*started, *((c, -value) for c, value in terms)], -INFINITY, constant)

    def _host_memory(self, k: int) -> None:
        """[Constraint] Σ bytes of G[k, d] ≤ the host's; G[k] ≤ G[k−1] + C[k] − C[k−1]."""
        milp, size = self.model.milp, self.model.program.problem.size
        for t in self.on_host[k]:
            terms = [
                *self._column(self.on_host, k, t, 1.0),
                *self._column(self.on_host, k - 1, t, -1.0),
                *self._column(self.offloaded, k, t, -1.0),
                *self._column(self.offloaded, k - 1, t, 1.0),
            ]
            milp.row(terms, -INFINITY, 0.0)
        if self.on_host[k]:
            assert self.host_capacity is not None
            load = [(c, size[t] / self.host_capacity) for t, c in self.on_host[k].items()]
            milp.row(load, -INFINITY, 1.0 + ROUNDING)

    def _copy_engines(self, k: int) -> None:
        """[Constraint] what an engine does in segment k takes no longer than the segment."""
        model, milp = self.model, self.model.milp
        program = model.program
        cost = [*program.problem.cost, 0.0]
        point, start = model.points[k], model.start(k)
        least = sum(cost[op] for op in range(start + 1, point + 1)) / model.cost_unit
        last = cost[point] / model.cost_unit
        upper = sum(
            2 * (self.to_host[t] + self.to_device[t])
            for t in {*self.offloaded[k], *self.prefetched[k]}
        )
        self.stall.append(milp.column(0.0, upper, 1.0, integer=False))
        prefetch_done = milp.column(0.0, upper, 0.0, integer=False)
        offload_done = milp.column(0.0, upper, 0.0, integer=False)
        self.early_work.append((prefetch_done, offload_done))
        segment = [(self.stall[k], -1.0)]
        segment += [(c, -cost[v] / model.cost_unit) for v, c in model.y[k].items() if cost[v]]
        # [Constraint] V[k] ≤ Σ µs of what is arriving.
        arriving = [(c, -self.to_device[t]) for t, c in self.arriving[k].items()]
        milp.row([(prefetch_done, 1.0), *arriving], -INFINITY, 0.0)
        awaited: list[tuple[int, Terms]] = [
            (prefetch_done, [(c, self.to_device[t]) for t, c in self.prefetched[k].items()]),
            (
                offload_done,
                [
                    (column, value * self.to_host[t])
                    for t in self.offloaded[k]
                    for column, value in [
                        *self._column(self.offloaded, k, t, 1.0),
                        *self._column(self.offloaded, k - 1, t, -1.0),
                    ]
                ],
            ),
        ]
        for engine, (column, work) in enumerate(awaited):
            earlier = [(self.early_work[k - 1][engine], -1.0)] if k else []
            # [Constraint] what is waited for is over when τ_k begins.
            milp.row([*work, *earlier, *segment], -INFINITY, least - last)
            # [Constraint] with what goes on beyond it, when τ_k ends.
            milp.row([*work, (column, 1.0), *earlier, *segment], -INFINITY, least)

    def finish(self) -> None:
        """[Constraint] U[k] ≤ Σ µs of copies to the host, of what is made by then, still to end."""
        model, milp = self.model, self.model.milp
        producer = model.program.problem.producer
        last: dict[int, int] = {}
        for columns in self.offloaded:
            last |= columns
        for k, (_, offload_done) in enumerate(self.early_work):
            terms: dict[int, float] = {offload_done: 1.0}
            for t, column in last.items():
                if producer[t] < model.points[k]:
                    terms[column] = terms.get(column, 0.0) - self.to_host[t]
                    done = self.offloaded[k].get(t, column)
                    terms[done] = terms.get(done, 0.0) + self.to_host[t]
            milp.row([(c, value) for c, value in terms.items() if value], -INFINITY, 0.0)
