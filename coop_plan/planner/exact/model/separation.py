"""Separation of path cuts (see `planner.exact.model.paths`) by shortest paths.

Compiled, as every pair of time points is an interval, and every op matters in each.
"""

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coop_plan.planner.core.arrays import FloatTable, Ints, IntTable
from coop_plan.planner.core.jit import njit
from coop_plan.planner.exact.model.timepoint import TimePointModel

Vector = NDArray[np.float64]
Matrix = FloatTable


class RelaxedSolution(NamedTuple):
    """Values of a relaxation as matrices: time point number × op, or × tensor.

    `rerun` is Σ Y over variants, `prefetched` L and `on_host` G (no columns without transfers).
    `kept` is the share of a tensor resident after a time point. `demand` is X, or 1 for inputs of
    first runs in the segment (`first`). Reads are CSR: all variants of op v read
    `reads[reads_ptr[v]:reads_ptr[v + 1]]`.
    """

    points: Ints
    rerun: Matrix
    prefetched: Matrix
    on_host: Matrix
    kept: Matrix
    demand: Matrix
    first: Annotated[NDArray[np.bool_], 2]
    producer: Ints
    reads_ptr: Ints
    reads: Ints

    @classmethod
    def of(cls, model: TimePointModel, values: Vector) -> "RelaxedSolution":
        """Build from `values` per column of `model`."""
        program = model.program
        producer = np.array(program.problem.producer, dtype=np.int64)
        shape = len(model.points), producer.size
        rerun, kept, demand = np.zeros((shape[0], program.n)), np.zeros(shape), np.zeros(shape)
        transfers = model.transfers
        prefetched = np.zeros((shape[0], producer.size if transfers else 0))
        on_host = np.full(prefetched.shape, np.inf)
        first = np.zeros(shape, dtype=np.bool_)
        unconstrained = np.array(program.unconstrained, dtype=np.bool_)
        for k, point in enumerate(model.points):
            for v, rerun_column in model.y[k].items():
                rerun[k, program.problem.variants[v].op] += values[rerun_column]
            if transfers is not None:
                copies = (prefetched, transfers.prefetched[k]), (on_host, transfers.host_copies[k])
                for matrix, columns in copies:
                    matrix[k, list(columns)] = values[list(columns.values())]
            for t, column in model.x[k].items():
                kept[k, t] = demand[k, t] = 1.0 if column is None else values[column]
            for (_, source), column in model.z[k].items():
                kept[k, source] -= values[column]
            kept[k, unconstrained | (producer >= point)] = 1.0
            first[k, model.first_run_inputs(k)] = True
        demand[first] = 1.0
        return cls(
            np.array(model.points, dtype=np.int64),
            rerun,
            prefetched,
            on_host,
            kept,
            demand,
            first,
            producer,
            np.cumsum([0, *map(len, program.read_by_all)], dtype=np.int64),
            np.array([t for reads in program.read_by_all for t in reads], dtype=np.int64),
        )


@njit
def most_violated(
    s: RelaxedSolution, low: int, min_violation: float
) -> tuple[Vector, IntTable, Ints]:
    """Most violated cuts that begin at time point number `low`, for each later time point.

    Between two time points at most 160 paths are followed, and at most two cuts end at one op.
    Returned are the violation of each cut (above `min_violation`); rows (later time point, 1 if a
    first run needs the tensor, start of its path), with a last row that ends the last path; and the
    tensors of all paths.
    """
    count, n, tensors = s.points.size, s.rerun.shape[1], s.producer.size
    start = s.points[low]
    cuts = np.empty((64, 3), dtype=np.int64)
    amount = np.empty(64)
    path = np.empty(1024, dtype=np.int64)
    found = length = 0
    rerun = np.zeros(n)
    retained = s.kept[low].copy()  # share of a tensor kept after τ_low or prefetched since
    prefetched_since = np.zeros(tensors)  # Σ L
    obtainable = np.zeros(n)  # largest share of an op that its recomputes and inputs allow
    bottleneck = np.full(n, -1)  # the input that limits it; −1: its own recomputes
    needed = np.zeros(tensors)  # largest demand at an earlier `high`
    priority = np.empty(tensors)
    needy = np.empty(tensors, dtype=np.int64)
    ending = np.zeros((2, n), dtype=np.int64)
    for high in range(low + 1, count):
        # Invariant: `rerun`, `prefetched_since` and `retained` cover the segments low + 1 … high.
        for v in range(min(start, n)):
            rerun[v] += s.rerun[high, v]
        for t in range(s.prefetched.shape[1]):
            prefetched_since[t] += s.prefetched[high, t]
            retained[t] = s.kept[low, t] + min(prefetched_since[t], s.on_host[low, t])
        candidates = 0
        # Shortest paths, in one pass as program order is topological: obtainable[v] is the smaller
        # of Σ Y[v] and, over the inputs t of v, retained[t] + obtainable[producer of t].
        for v in range(min(start, n)):
            obtainable[v], bottleneck[v] = rerun[v], -1
            if rerun[v] == 0.0:
                continue
            for k in range(s.reads_ptr[v], s.reads_ptr[v + 1]):
                t = s.reads[k]
                share = retained[t]
                if 0 <= s.producer[t] < start:
                    share += obtainable[s.producer[t]]
                if share < obtainable[v] - 1e-9:
                    obtainable[v], bottleneck[v] = share, t
        for t in range(tensors):
            maker = s.producer[t]
            if not 0 <= maker < start or s.demand[high, t] <= needed[t]:
                continue
            # A cut with the same demand at an earlier `high` has fewer terms, so it is tighter.
            needed[t] = s.demand[high, t]
            missing = needed[t] - retained[t] - obtainable[maker]
            if missing > min_violation and high > low + 1:
                priority[candidates], needy[candidates] = -missing, t
                candidates += 1
        # Follow the bottlenecks from the most violated tensors to the op that ends each path.
        ending[:] = 0
        order = np.argsort(priority[:candidates], kind="mergesort")
        for i in order[:160]:
            begin = length
            t = needy[i]
            first = 1 if s.first[high, t] else 0
            while t >= 0:
                if length == path.size:
                    path = np.concatenate((path, path))
                path[length] = t
                length += 1
                maker = s.producer[t]
                t = bottleneck[maker] if 0 <= maker < start else -1
            ending[first, maker] += 1
            if ending[first, maker] > 2:
                length = begin
                continue
            if found + 1 == len(cuts):
                cuts = np.concatenate((cuts, cuts))
                amount = np.concatenate((amount, amount))
            amount[found] = -priority[i]
            cuts[found] = high, first, begin
            found += 1
    cuts[found] = -1, -1, length
    return amount[:found], cuts[: found + 1], path[:length]
