"""A problem as flat arrays for compiled kernels; lists of lists are pointer and index arrays."""

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.problem import Problem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]

IntTable = Annotated[Ints, 2]
FloatTable = Annotated[Floats, 2]
"""Arrays of two dimensions; `planner.kernels` reads this, as kernels are compiled by dimensions."""


class Arrays(NamedTuple):
    """Flat copy of `Problem`; row i of a list is `index[pointer[i]:pointer[i + 1]]`.

    `reads`, `inputs`, `makes`, `pairs`, `shares`, `cost`, `workspace` and `scratch` have a row per
    variant. Default variants come first, so that an op's number is that of its default variant;
    `op` is the op of each variant and `ops` the number of ops. `uses` has a row per tensor: its
    consumers.

    `reads` are the distinct inputs in the arena, `inputs` all of them; `makes` are all outputs,
    those outside the arena included. `shares` are the (output, input) pairs that may share one
    address, the largest outputs first, then the smallest inputs. `pairs` are those of equal sizes
    whose input is no output of the step: the block is handed over unchanged. `size` and `workspace`
    are bytes rounded up to the alignment, `bytes` and `scratch` exact; costs are µs, flags 0 or 1.
    """

    ops: int
    op: Ints
    reads_ptr: Ints
    reads: Ints
    inputs_ptr: Ints
    inputs: Ints
    makes_ptr: Ints
    makes: Ints
    uses_ptr: Ints
    uses: Ints
    pairs_ptr: Ints
    pairs_out: Ints
    pairs_in: Ints
    shares_ptr: Ints
    shares_out: Ints
    shares_in: Ints
    size: Ints
    bytes: Ints
    cost: Floats
    workspace: Ints
    scratch: Ints
    producer: Ints
    last_use: Ints
    evictable: Flags
    overwritten: Flags
    is_output: Flags
    outside: Flags
    resident: Flags


class Program(NamedTuple):
    """The fields of `Arrays` that local searches use; compiled calls pass each as an argument."""

    ops: int
    reads_ptr: Ints
    reads: Ints
    makes_ptr: Ints
    makes: Ints
    pairs_ptr: Ints
    pairs_out: Ints
    pairs_in: Ints
    size: Ints
    cost: Floats
    workspace: Ints
    producer: Ints
    evictable: Flags
    overwritten: Flags
    outside: Flags


def to_program(arrays: Arrays) -> Program:
    """The subset of `arrays` in `Program`."""
    return Program(*(getattr(arrays, name) for name in Program._fields))


def to_arrays(problem: Problem) -> Arrays:
    """The arrays of `problem`, converted once per problem."""
    found: Arrays | None = problem.__dict__.get("_arrays")
    if found is None:
        found = problem.__dict__["_arrays"] = _convert(problem)
    return found


def _convert(problem: Problem) -> Arrays:
    variants, size = problem.variants, problem.size
    is_output, outside = problem.is_output, problem.outside
    reads_ptr, reads = _rows([variant.reads for variant in variants])
    inputs_ptr, inputs = _rows([variant.inputs for variant in variants])
    makes_ptr, makes = _rows([variant.outputs for variant in variants])
    uses_ptr, uses = _rows(problem.consumers)
    shares = [
        sorted(variant.inplace, key=lambda pair: (-size[pair[0]], pair[0], size[pair[1]]))
        if variant.inplace
        else ()
        for variant in variants
    ]
    pairs = [
        [
            (a, b)
            for a, b in variant.inplace
            if size[a] == size[b] and not is_output[b] and not outside[a]
        ]
        for variant in variants
    ]
    return Arrays(
        ops=problem.op_count,
        op=_ints(variant.op for variant in variants),
        reads_ptr=reads_ptr,
        reads=reads,
        inputs_ptr=inputs_ptr,
        inputs=inputs,
        makes_ptr=makes_ptr,
        makes=makes,
        uses_ptr=uses_ptr,
        uses=uses,
        **_pairs("pairs", pairs),
        **_pairs("shares", shares),
        size=_ints(size),
        bytes=_ints(problem.bytes),
        cost=np.array([variant.cost_us for variant in variants], dtype=np.float64),
        workspace=_ints(problem.rounded(variant.workspace_bytes) for variant in variants),
        scratch=_ints(variant.workspace_bytes for variant in variants),
        producer=_ints(problem.producer),
        last_use=_ints(problem.last_use),
        evictable=_flags(problem.evictable),
        overwritten=_flags(problem.overwritten),
        is_output=_flags(is_output),
        outside=_flags(outside),
        resident=_flags(problem.resident),
    )


def _pairs(name: str, rows: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Ints]:
    pointer, outs = _rows([[out for out, _ in row] for row in rows])
    _, sources = _rows([[source for _, source in row] for row in rows])
    return {f"{name}_ptr": pointer, f"{name}_out": outs, f"{name}_in": sources}


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _flags(values: Iterable[bool]) -> Flags:
    return np.array(list(values), dtype=np.uint8)


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    pointer = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=pointer[1:])
    return pointer, _ints(value for row in rows for value in row)
