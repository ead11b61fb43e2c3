"""Transfers in the time-point model: host copies, and the time of the copy engines.

The model of `planner.exact.model.timepoint` knows residents at time points τ_k and recomputes in
the segments between them. These are its columns for offloads and prefetches, on the timeline of
`planner.core.timeline`:

    L[k, d]   a prefetch of d is waited for in segment k, and d can be read from then on
    A[k, d]   d is arriving while τ_k runs: its bytes are taken, its prefetch not yet waited for
    C[k, d]   number of offloads of d waited for by the end of τ_k
    G[k, d]   the host still has a copy of d then (only with a host budget)
    W[k]      µs that compute stalls in segment k
    V[k]      µs of prefetches arriving at the end of τ_k that are already transferred
    U[k]      µs of offloads not waited for by the end of τ_k that are already transferred

A prefetch that begins in segment k has no column of its own: it is A[k] − A[k−1] + L[k].

Why the optimum is a bound. Take any plan that the verifier accepts, with first runs in program
order and in the variants of the program. An *episode* of a tensor is a maximal stretch of steps
over which at least one of its buffers is live. Within an episode the tensor is readable from its
first run or from the first wait for a prefetch, whichever comes first; until then it is arriving. A
step that reads the tensor follows that moment; an episode without it is useless and ignored. So let
X[k, d] be 1 if τ_k runs in the readable part of an episode, and A[k, d] if it runs in the arriving
part: at least these bytes are taken. An episode that begins with a prefetch and becomes readable by
a wait gives one prefetch that begins and is waited for within it (L[k, d] at its wait). Prefetches
of different episodes are different. An episode that lies within one segment is ignored if the
tensor was readable before in that segment or is recomputed there: the model has the tensor in that
segment anyway. In-place pairs end an episode or save nothing.

An episode that begins with a prefetch has no live buffer before it. So an offload was waited for
earlier, as otherwise its buffer could not have ended. C counts those waits, except waits at which
the tensor was readable only by a prefetch of the same segment: then an older host copy exists.
Every row holds for these values:

- a tensor read in segment k was readable at τ_{k−1}, or became so by a run or by a wait for a copy
  that the host had at τ_{k−1}: an unreadable tensor is not offloaded within the segment;
- a tensor that begins to arrive has a host copy, and a tensor being offloaded is readable;
- segment k takes its first runs, its recomputes and W[k]. Transfers of an engine are disjoint in
  time. Those waited for in segment k end before τ_k begins, as τ_k is the last step of its segment.
  Those that end with τ_k began before it, in step order: each is waited for by then, or arriving.
  An offload begins after the first run of its producer.

The objective, recompute cost plus stalls, is the makespan less the base cost. It does not grow with
fewer bytes or shorter transfers, so both may be capped.
"""

from dataclasses import dataclass, field
from math import inf

from coop_plan.planner.exact.model.milp import ROUNDING, Terms
from coop_plan.planner.exact.model.segments import Segments


@dataclass
class Transfers:
    """Columns of transfers in a model: per segment, tensor → column."""

    model: Segments
    prefetched: list[dict[int, int]] = field(default_factory=list)
    """L: prefetches waited for."""
    arriving: list[dict[int, int]] = field(default_factory=list)
    """A: tensors arriving."""
    offloaded: list[dict[int, int]] = field(default_factory=list)
    """C: offloads waited for."""
    on_host: list[dict[int, int]] = field(default_factory=list)
    """G: host copies; empty without a host budget."""
    stall: list[int] = field(default_factory=list)
    """W: stalls, in the model's cost units."""
    early_work: list[tuple[int, int]] = field(default_factory=list)
    """(V, U): transfers done early, in the model's cost units."""

    def __post_init__(self) -> None:
        host_link, unit = self.model.program.host_link, self.model.cost_unit
        assert host_link is not None
        # Capped at ten base costs, to stay within solver tolerances.
        longest = 10.0 * max(self.model.program.problem.base_cost_us, unit)
        self.to_host = [min(us, longest) / unit for us in host_link.to_host_us]
        self.to_device = [min(us, longest) / unit for us in host_link.to_device_us]
        self.host_capacity = host_link.host_capacity

    def variables(self, k: int) -> None:
        """Add L, A, C and G of segment k, after X and Y."""
        model = self.model
        program, milp = model.program, model.milp
        point, start = model.points[k], model.start(k)
        before = model.x[k - 1] if k else {}
        last_useful = program.last_useful
        # [Variable] L[k, d] for tensors made before the segment and read in it or later.
        self.prefetched.append({t: milp.binary() for t in before if self._may_transfer(t, start)})
        # [Variable] A[k, d], unless τ_k reads it.
        self.arriving.append(
            {
                t: milp.column(0.0, 1.0, 0.0, integer=False)
                for t in self.prefetched[k]
                if last_useful[t] > point and model.x[k].get(t) is not None
            }
        )
        # [Variable] C[k, d] for tensors made before τ_k; grows by at most one a segment.
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
        """True if a prefetch of t after position `start` can be of use."""
        program = self.model.program
        return program.problem.size[t] > 0 and program.last_useful[t] > start

    def awaited(self, k: int, t: int) -> Terms:
        """Terms of: a prefetch of t is waited for in segment k."""
        column = self.prefetched[k].get(t)
        return [] if column is None else [(column, 1.0)]

    def prefetch_columns(self, low: int, high: int, t: int, *, copied: bool) -> list[int]:
        """Columns of which one is nonzero if t is prefetched in segments low + 1 … high.

        If `copied`, the column of the host copy at the end of segment `low` instead; empty if there
        is no prefetch.
        """
        found = [columns[t] for columns in self.prefetched[low + 1 : high + 1] if t in columns]
        on_host = self.host_copies[low]
        return [on_host[t]] if copied and found and t in on_host else found

    @property
    def host_copies(self) -> list[dict[int, int]]:
        """G, or C without a host budget: the host has a copy at the end of a segment."""
        return self.offloaded if self.host_capacity is None else self.on_host

    def _column(self, columns: list[dict[int, int]], k: int, t: int, value: float) -> Terms:
        found = columns[k].get(t) if k >= 0 else None
        return [] if found is None else [(found, value)]

    def _new_offloads(self, k: int, t: int, sign: float = 1.0) -> Terms:
        """C[k, t] − C[k−1, t]."""
        before = self._column(self.offloaded, k - 1, t, -sign)
        return [*self._column(self.offloaded, k, t, sign), *before]

    def _new_prefetches(self, k: int, t: int) -> Terms:
        """Prefetches of t that begin in segment k: A[k, t] − A[k−1, t] + L[k, t]."""
        return [
            *self._column(self.arriving, k, t, 1.0),
            *self._column(self.arriving, k - 1, t, -1.0),
            *self._column(self.prefetched, k, t, 1.0),
        ]

    def rows(self, k: int) -> None:
        """Add the rows of segment k."""
        self._copy_rows(k)
        self._host_memory(k)
        self._copy_engines(k)

    def _copy_rows(self, k: int) -> None:
        model, milp = self.model, self.model.milp
        for t in self.prefetched[k]:
            started = self._new_prefetches(k, t)
            # [Constraint] prefetches begin before they are waited for: A[k] − A[k−1] + L[k] ≥ 0.
            if len(started) > 1:
                milp.row(started, 0.0, inf)
            # [Constraint] a prefetch needs a host copy: ≤ C[k], or with a host budget ≤ G[k−1] +
            # C[k] − C[k−1].
            if self.host_capacity is None:
                available = self._column(self.offloaded, k, t, -1.0)
            else:
                kept = self._column(self.on_host, k - 1, t, -1.0)
                available = [*kept, *self._new_offloads(k, t, -1.0)]
            milp.row([*started, *available], -inf, 0.0)
            # [Constraint] A[k] ≤ G[k], L[k] ≤ G[k−1] (C without a host budget).
            for at, column in (k, self.arriving[k].get(t)), (k - 1, self.prefetched[k][t]):
                if column is not None:
                    available = self._column(self.host_copies, at, t, -1.0)
                    milp.row([(column, 1.0), *available], -inf, 0.0)
        for t in self.offloaded[k]:
            started = self._new_offloads(k, t)
            # [Constraint] C[k] ≥ C[k−1].
            if len(started) > 1:
                milp.row(started, 0.0, inf)
            # [Constraint] an offloaded tensor is readable: C[k] − C[k−1] ≤ kept + Y.
            constant, terms = model.kept(k, t)
            terms = [*terms, *model.recomputed(k, t)]
            milp.row([*started, *((c, -value) for c, value in terms)], -inf, constant)

    def _host_memory(self, k: int) -> None:
        """[Constraint] Σ bytes of G[k, d] ≤ host budget; G[k] ≤ G[k−1] + C[k] − C[k−1]."""
        milp, size = self.model.milp, self.model.program.problem.size
        for t in self.on_host[k]:
            terms = [
                *self._column(self.on_host, k, t, 1.0),
                *self._column(self.on_host, k - 1, t, -1.0),
                *self._new_offloads(k, t, -1.0),
            ]
            milp.row(terms, -inf, 0.0)
        if self.on_host[k]:
            assert self.host_capacity is not None
            load = [(c, size[t] / self.host_capacity) for t, c in self.on_host[k].items()]
            milp.row(load, -inf, 1.0 + ROUNDING)

    def _copy_engines(self, k: int) -> None:
        """[Constraint] the work of a copy engine in segment k takes no longer than the segment."""
        model, milp = self.model, self.model.milp
        first = model.program.choices[model.start(k) + 1 : model.points[k]]
        last = model.program.choices[model.points[k] : model.points[k] + 1]
        upper = sum(
            2 * (self.to_host[t] + self.to_device[t])
            for t in {*self.offloaded[k], *self.prefetched[k]}
        )
        self.stall.append(milp.column(0.0, upper, 1.0, integer=False))
        prefetch_done = milp.column(0.0, upper, 0.0, integer=False)
        offload_done = milp.column(0.0, upper, 0.0, integer=False)
        self.early_work.append((prefetch_done, offload_done))
        segment = [(self.stall[k], -1.0)]
        segment += [(c, -model.cost(v)) for v, c in model.y[k].items() if model.cost(v)]
        before, chosen = self._first_run_time(first)
        at, chosen_last = self._first_run_time(last)
        segment += chosen
        # [Constraint] V[k] ≤ Σ µs of arriving prefetches.
        arriving = [(c, -self.to_device[t]) for t, c in self.arriving[k].items()]
        milp.row([(prefetch_done, 1.0), *arriving], -inf, 0.0)
        prefetches = [(c, self.to_device[t]) for t, c in self.prefetched[k].items()]
        offloads = [
            (column, value * self.to_host[t])
            for t in self.offloaded[k]
            for column, value in self._new_offloads(k, t)
        ]
        awaited = (prefetch_done, prefetches), (offload_done, offloads)
        for engine, (column, work) in enumerate(awaited):
            earlier = [(self.early_work[k - 1][engine], -1.0)] if k else []
            # [Constraint] transfers waited for end before τ_k begins.
            milp.row([*work, *earlier, *segment], -inf, before)
            # [Constraint] with V[k] or U[k], the engine's work ends with τ_k.
            ended = [*work, (column, 1.0), *earlier, *segment, *chosen_last]
            milp.row(ended, -inf, before + at)

    def _first_run_time(self, ops: list[tuple[int, ...]]) -> tuple[float, Terms]:
        """Time of first runs of ops, given by their variants: a constant less the terms' sum."""
        model = self.model
        alone = sum(model.cost(v[0]) for v in ops if len(v) == 1)
        return alone, [(model.f[v], -model.cost(v)) for vs in ops if len(vs) > 1 for v in vs]

    def finish(self) -> None:
        """[Constraint] U[k] ≤ Σ µs of offloads, of tensors made by then, that are waited for after
        τ_k.
        """
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
            milp.row([(c, value) for c, value in terms.items() if value], -inf, 0.0)
