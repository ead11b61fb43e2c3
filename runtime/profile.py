"""Measures ops one by one, on real tensors: time, and every allocation they make.

Each op runs once to warm up, once with its allocations recorded, and then several times with the
same allocations served from memory that was touched before, as they will be in the arena: the time
then has no page faults in it. Ops of equal signature are measured once per process.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import preserve_rng_state
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_map

from planner.placement import place
from runtime.arena import SERVED_OUTSIDE, Arena
from runtime.build import arena as extension
from runtime.errors import CaptureError

MIN_REPEATS = 5
MAX_REPEATS = 25
REPEAT_US = 4_000.0
"""An op is repeated until this much time is spent on it, within the two counts above."""

SCRATCH_ALIGNMENT = 64


@dataclass(frozen=True)
class Output:
    """One tensor an op returns: the storage it made, or the input it is a view of.

    `bytes` is the size of the allocation made for it, 0 for a view; `alias` is the position, among
    the op's tensor arguments in flattened order, of the input whose storage it shares, or -1.
    """

    bytes: int
    alias: int


@dataclass(frozen=True)
class Allocation:
    """One allocation of an op: for output `output`, or scratch (-1) at `offset` in the workspace.

    An allocation that neither belongs to an output nor is freed within the op has `output` -2: it
    is served by PyTorch's allocator.
    """

    bytes: int
    output: int
    offset: int


@dataclass(frozen=True)
class OpProfile:
    """Facts about one op. `outputs` follows the flattened result; None stands for no tensor."""

    cost_us: float
    outputs: tuple[Output | None, ...]
    allocations: tuple[Allocation, ...]
    workspace_bytes: int


_profiles: dict[object, OpProfile] = {}


def profile(target: Callable[..., Any], args: Any, kwargs: Any) -> OpProfile:
    """The profile of `target(*args, **kwargs)`; tensors in the arguments are fake ones.

    Raises:
        CaptureError: dynamic shapes, or an op that does not run on stand-in data.
    """
    key = _signature(target, args, kwargs)
    found = _profiles.get(key)
    if found is None:
        with _real_world():
            found = _measure(target, *_stand_in((args, kwargs)))
        _profiles[key] = found
    return found


def _real_world() -> AbstractContextManager[None]:
    stack = ExitStack()
    stack.enter_context(unset_fake_temporarily())
    stack.enter_context(torch.no_grad())
    stack.enter_context(preserve_rng_state())
    return stack  # type: ignore[return-value]


def _signature(target: object, args: Any, kwargs: Any) -> object:
    flat, spec = tree_flatten((args, kwargs))
    parts: list[object] = [target, str(spec), torch.get_num_threads()]
    for value in flat:
        if isinstance(value, torch.Tensor):
            if not all(isinstance(size, int) for size in value.shape):
                raise CaptureError(
                    f"{target} has dynamic shapes, which cannot be planned: compile with"
                    " dynamic=False"
                )
            storage = value.untyped_storage().nbytes()
            offset = value.storage_offset()
            parts.append((tuple(value.shape), value.stride(), offset, storage, value.dtype))
            parts.append(str(value.device))
        else:
            parts.append((type(value), repr(value)))
    return tuple(parts)


def _stand_in(tree: Any) -> Any:
    def make(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        count = value.untyped_storage().nbytes() // value.element_size()
        flat = torch.empty(count, dtype=value.dtype, device=value.device)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            # Positive and away from zero: no NaN and no denormals to slow a kernel down.
            flat.uniform_(0.05, 1.0) if value.dtype.is_floating_point else flat.fill_(0.5)
        elif value.dtype == torch.bool:
            flat.bernoulli_(0.5)
        else:
            flat.zero_()  # an index that is in range whatever it indexes
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())

    return tree_map(make, tree)


def _measure(target: Callable[..., Any], args: Any, kwargs: Any) -> OpProfile:
    ext = extension()
    try:
        target(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise CaptureError(f"{target} cannot be profiled on its own: {first}") from error
    inputs = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
    ext.record_begin()
    result = target(*args, **kwargs)
    events = ext.record_end()
    outputs, allocations, workspace = _digest(events, inputs, tree_flatten(result)[0], target)
    del result
    slots = _scratch_slots(allocations)
    size = max((offset + need for need, offset in slots), default=0)
    arena = Arena(size, [slots], [False])
    times: list[float] = []
    while len(times) < MIN_REPEATS or (sum(times) < REPEAT_US and len(times) < MAX_REPEATS):
        arena.begin(fresh=False)
        try:
            arena.enter(0)
            began = time.perf_counter_ns()
            result = target(*args, **kwargs)
            times.append((time.perf_counter_ns() - began) / 1e3)
        finally:
            arena.leave()
        del result
    return OpProfile(statistics.median(times[1:]), outputs, allocations, workspace)


def _scratch_slots(allocations: tuple[Allocation, ...]) -> list[tuple[int, int]]:
    """Every allocation at an address of its own: for timing only."""
    slots, end = [], 0
    for allocation in allocations:
        if allocation.output == -2:
            slots.append((allocation.bytes, SERVED_OUTSIDE))
            continue
        slots.append((allocation.bytes, end))
        end += -(-allocation.bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return slots


def _digest(
    events: list[tuple[int, int, int]],
    inputs: list[torch.Tensor],
    results: list[Any],
    target: object,
) -> tuple[tuple[Output | None, ...], tuple[Allocation, ...], int]:
    """Turn recorded events into outputs, ordered allocations and a laid-out workspace."""
    sources = {t.untyped_storage().data_ptr(): i for i, t in reversed(list(enumerate(inputs)))}
    owner: dict[int, int] = {}
    outputs: list[Output | None] = []
    for position, value in enumerate(results):
        if value is None:
            outputs.append(None)
            continue
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"{target} returns a {type(value).__name__}, which a planned step cannot hold"
            )
        pointer = value.untyped_storage().data_ptr()
        if pointer and pointer in sources:
            outputs.append(Output(0, sources[pointer]))
        else:
            outputs.append(Output(value.untyped_storage().nbytes(), -1))
            if pointer:
                owner[pointer] = position
    alive: dict[int, int] = {}
    sizes: list[int] = []
    spans: list[list[int]] = []
    pointers: list[int] = []
    for moment, (is_alloc, pointer, size) in enumerate(events):
        if is_alloc:
            alive[pointer] = len(sizes)
            sizes.append(size)
            pointers.append(pointer)
            spans.append([moment, -1])
        elif pointer in alive:
            spans[alive.pop(pointer)][1] = moment
    scratch = [i for i, span in enumerate(spans) if span[1] >= 0]
    offsets = dict.fromkeys(range(len(sizes)), 0)
    workspace = 0
    if scratch:
        placed = place(
            np.array([spans[i][0] for i in scratch]),
            np.array([spans[i][1] for i in scratch]),
            np.array([sizes[i] for i in scratch]),
            alignment=SCRATCH_ALIGNMENT,
        )
        workspace = placed.peak
        offsets.update(zip(scratch, placed.offsets.tolist(), strict=True))
    allocations = []
    for i, size in enumerate(sizes):
        if not size:
            continue  # nothing is allocated for no bytes
        output = -1 if spans[i][1] >= 0 else owner.get(pointers[i], -2)
        allocations.append(Allocation(size, output, offsets[i]))
    return tuple(outputs), tuple(allocations), workspace
