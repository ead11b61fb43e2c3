"""A problem as flat arrays, for compiled kernels. Lists of lists are stored as pointer + index."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.problem import Problem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]


class Arrays(NamedTuple):
    """
    Flat copy of `Problem`; row i of a list is `index[pointer[i]:pointer[i + 1]]`.

    `reads` are distinct arena tensors; `makes` all outputs, those outside the arena included.
    Sizes are aligned bytes, costs µs, flags 0 or 1.
    """

    reads_ptr: Ints
    reads: Ints
    makes_ptr: Ints
    makes: Ints
    uses_ptr: Ints
    uses: Ints
    pairs_ptr: Ints
    pairs_out: Ints
    pairs_in: Ints
    size: Ints
    cost: Floats
    workspace: Ints
    producer: Ints
    last_use: Ints
    evictable: Ints
    is_output: Ints
    outside: Ints


def _alike(problem: Problem, op: int) -> list[tuple[int, int]]:
    """The op's in-place pairs of equal size in the arena: a kernel's block passes on as it is."""
    size, kept = problem.size, problem.is_output
    return [(a, b) for a, b in problem.first_inplace(op) if size[a] == size[b] and not kept[b]]


def to_arrays(problem: Problem) -> Arrays:
    """The arrays of `problem`."""
    reads_ptr, reads = _rows(problem.reads)
    makes_ptr, makes = _rows(problem.op_outputs)
    uses_ptr, uses = _rows(problem.consumers)
    alike = [_alike(problem, op) for op in range(problem.op_count)]
    pairs_ptr, pairs_out = _rows([[out for out, _ in pairs] for pairs in alike])
    _, pairs_in = _rows([[source for _, source in pairs] for pairs in alike])
    return Arrays(
        reads_ptr=reads_ptr,
        reads=reads,
        makes_ptr=makes_ptr,
        makes=makes,
        uses_ptr=uses_ptr,
        uses=uses,
        pairs_ptr=pairs_ptr,
        pairs_out=pairs_out,
        pairs_in=pairs_in,
        size=_ints(problem.size),
        cost=np.array(problem.cost, dtype=np.float64),
        workspace=_ints(problem.workspace),
        producer=_ints(problem.producer),
        last_use=_ints(problem.last_use),
        evictable=_ints(problem.evictable),
        is_output=_ints(problem.is_output),
        outside=_ints(problem.outside),
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    pointer = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=pointer[1:])
    return pointer, _ints(value for row in rows for value in row)
