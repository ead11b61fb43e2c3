"""Profiler of single ops on real tensors: their time, and every allocation they make.

Each op runs once to warm up and once with its allocations recorded, and is then timed. Ops of equal
signature are measured once per machine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import fx

from coop_plan.planner.placement import place
from coop_plan.runtime.cache.profiles import session
from coop_plan.runtime.capture.cost_scaling import current_costs
from coop_plan.runtime.capture.custom_ops import BOXED_KERNELS
from coop_plan.runtime.capture.nondeterminism import checksums
from coop_plan.runtime.capture.op_timing import slots_alone, time_op
from coop_plan.runtime.capture.sized_numbers import plain
from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.distributed.sharing import made_once
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.op_profile import Allocation, OpProfile, Output
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals.fakes import real_mode
from coop_plan.runtime.torch_internals.ops import (
    SEEDS_ON_CPU,
    OpOverload,
    argument_names,
    has_no_memory,
    is_mutable,
    negative_view,
    storage_key,
    tree_flatten,
    tree_map,
)

MEASURE_SECONDS = 30.0
"""Time that a rank waits for a profile that another rank measures."""

SCRATCH_ALIGNMENT = 64

RANDOM_PERIOD = 32749
"""Period of synthetic values; a prime, so that rows of matrices differ.

Processors predict the branches of a kernel on values of a short one, as of 4093.
"""

PERSISTENT_NAMESPACES = ("aten", "prims", "coop_plan")
"""Namespaces whose ops change only with the version; others are measured by every process."""

PERSISTENT_TYPES = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose `repr` is equal in every process."""


_profiles: dict[object, OpProfile] = {}
_workspaces: dict[object, int] = {}
_measured = 0
_largest = 0, ""


def measured_ops() -> int:
    """Number of ops that this process has measured."""
    return _measured


def largest_measurement() -> tuple[int, str]:
    """Most bytes that a measurement since the last call took, and its op.

    They are the op's synthetic inputs, its results and its workspace.
    """
    global _largest
    found, _largest = _largest, (0, "")
    return found


def profile_op(target: Callable[..., Any], args: Any, kwargs: Any, op: str = "") -> OpProfile:
    """The profile of `target(*args, **kwargs)`; tensors in the arguments are fake ones.

    `op` is its name in a function that may have been captured at other sizes, too.

    Raises:
        CaptureError: dynamic shapes, or an op that does not run on synthetic inputs.
    """
    key = signature(target, args, kwargs)
    costs, size = current_costs(), _bytes_read(args, kwargs)
    found = _cached(key)
    if found is None and key in costs.estimates:
        return costs.estimates[key]
    if found is None:
        expected = costs.estimate(op, size)
        measure = partial(_measure_synthetic, target, args, kwargs, expected)
        if expected is not None:
            costs.estimates[key] = found = measure()
            return found
        found = _measured_once(key, measure)
        _store(key, found)
    costs.record(op, size, found.cost_us)
    return found


def workspace_of(target: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """Most bytes of scratch of an op beyond its results, on synthetic inputs.

    Tensors in the arguments are fake ones.

    Raises:
        CaptureError: dynamic shapes, or an op that does not run on synthetic inputs.
    """
    key = signature(target, args, kwargs)
    if key not in _workspaces:
        with real_mode():
            given, named = synthetic_arguments(target, args, kwargs)
            on_cuda = _cuda_device(tree_flatten((given, named))[0]) is not None
            _, events, in_workers = _record(partial(target, *given, **named), on_cuda)
        _workspaces[key] = _most_scratch(events) + in_workers
    return _workspaces[key]


def _record(run: Callable[[], Any], on_cuda: bool) -> tuple[Any, list[tuple[int, int, int]], int]:
    """Result of an op, its (is allocation, pointer, bytes) in order, and bytes of other threads."""
    ext = extension()
    worker_bytes = []
    for _ in range(2):  # the minimum counts: other threads may allocate meanwhile
        result = None
        ext.record_begin(on_cuda)
        try:
            result = run()
        finally:
            events = ext.record_end()
        worker_bytes.append(ext.workers_peak())
        if not worker_bytes[-1]:
            break
    return result, events, min(worker_bytes)


def _most_scratch(events: list[tuple[int, int, int]]) -> int:
    """Peak of an op's allocations above those that it leaves, from its events (`_record`)."""
    alive: dict[int, int] = {}
    now = peak = 0
    for is_allocation, pointer, size in events:
        if is_allocation:
            alive[pointer] = size
            now += size
            peak = max(peak, now)
        else:
            now -= alive.pop(pointer, 0)
    return peak - now


def fake_values(arguments: Any) -> Any:
    """A node's arguments with the fake values of the nodes among them."""

    def value(given: Any) -> Any:
        return given.meta["val"] if isinstance(given, fx.Node) else plain(given)

    return fx.node.map_aggregate(arguments, value)


def _cached(key: tuple[object, ...]) -> OpProfile | None:
    if key not in _profiles:
        cache, name = session(), persistent_key(key)
        found = None if cache is None or name is None else _parse(cache.get(name))
        if found is None:
            return None
        _profiles[key] = found
    return _profiles[key]


def _store(key: tuple[object, ...], made: OpProfile) -> None:
    _profiles[key] = made
    cache, name = session(), persistent_key(key)
    if cache is not None and name is not None:
        cache.put(name, msgspec.json.encode(made).decode())


def _measured_once(key: tuple[object, ...], measure: Callable[[], OpProfile]) -> OpProfile:
    """A profile that one rank of the job measures, if it counts for all of them."""
    cache, name = session(), persistent_key(key)
    if cache is None or name is None:
        return measure()
    made: OpProfile = made_once(
        f"profile/{cache.key_of(name)}",
        measure,
        pack=msgspec.json.encode,
        unpack=lambda record: _parse(record.decode()),
        seconds=MEASURE_SECONDS,
    )
    return made


def _bytes_read(args: Any, kwargs: Any) -> int:
    flat = tree_flatten((args, kwargs))[0]
    return sum(v.numel() * v.element_size() for v in flat if isinstance(v, torch.Tensor))


def _measure_synthetic(
    target: Callable[..., Any], args: Any, kwargs: Any, cost_us: float | None
) -> OpProfile:
    global _measured, _largest
    with real_mode():
        made = _measure(target, *synthetic_arguments(target, args, kwargs), cost_us)
    _measured += 1
    taken = sum(_storage_bytes(value) for value in tree_flatten((args, kwargs))[0])
    taken += sum(allocation.bytes for allocation in made.allocations if allocation.output != -1)
    taken += made.workspace_bytes + made.worker_bytes
    _largest = max(_largest, (taken, str(target)))
    return made


def _storage_bytes(value: object) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


def _parse(record: str | None) -> OpProfile | None:
    if record is None:
        return None
    try:
        return msgspec.json.decode(record, type=OpProfile)
    except msgspec.DecodeError:
        return None  # damaged: measured again and replaced


def persistent_key(key: tuple[object, ...]) -> str | None:
    """The signature as text, or None if another process might use this text for another op."""
    target, *rest = key
    if not isinstance(target, OpOverload) or target.namespace not in PERSISTENT_NAMESPACES:
        return None
    types = [p[0] for p in rest if isinstance(p, tuple) and isinstance(p[0], type)]
    if any(value_type not in PERSISTENT_TYPES for value_type in types):
        return None
    text = f"{target} {rest!r}"
    return None if " at 0x" in text else text


def signature(target: object, args: Any, kwargs: Any) -> tuple[object, ...]:
    """Cache key of an op and its arguments; tensors in the arguments are fake ones."""
    flat, spec = tree_flatten((args, kwargs))
    parts: list[object] = [target, str(spec), torch.get_num_threads()]
    owners: dict[int, int] = {}
    for position, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            if not all(isinstance(size, int) for size in value.shape):
                raise CaptureError(
                    f"{target} has dynamic shapes, which cannot be planned: compile with"
                    " dynamic=False"
                )
            storage = value.untyped_storage().nbytes()
            offset = value.storage_offset()
            parts.append((tuple(value.shape), value.stride(), offset, storage, value.dtype))
            parts.append((str(value.device), value.is_conj(), value.is_neg()))
            owner = owners.setdefault(storage_key(value), position)
            if owner != position:
                parts.append(("storage of", owner))
        else:
            parts.append((type(value), repr(value)))
    return tuple(parts)


def synthetic_arguments(target: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Synthetic arguments that the op accepts: fake tensors are replaced by filled ones.

    Raises:
        CaptureError: the op fails on all fillings.
    """
    totals = sorted(
        {total for value in tree_flatten((args, kwargs))[0] for total in _possible_totals(value)}
    )
    fillings = ((None, 0), (False, 0), (True, 0), (None, 1), *((n, n) for n in totals))
    for truth, number in fillings:
        given = named = None  # those of an earlier filling are freed before
        given, named = _synthesize((args, kwargs), truth, number)
        given = _with_forward_state(target, given)
        _divide_into_groups(target, given, named)
        _spread_indices(target, given, named)
        try:
            target(*given, **named)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]  # text: an error keeps the frames of all callers
        else:
            return given, named
    raise CaptureError(f"{target} cannot be profiled on synthetic inputs: {reason}")


def _possible_totals(value: object) -> tuple[int, ...]:
    """Totals that masks and lengths among the arguments may need: `h[mask] = rows`."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape[:1])
    return (value,) if type(value) is int and value > 1 else ()


def _with_forward_state(target: Callable[..., Any], given: Any) -> Any:
    """Replace arguments that a backward accepts only from its forward; it crashes on others.

    Efficient attention with dropout keeps its seed and offset on the CPU, unlike its fake result,
    and its backward reads them there.
    """
    if target is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return (*given[:22], _rnn_workspace(given))
    if isinstance(target, OpOverload) and target in SEEDS_ON_CPU:
        at = map(argument_names(target).index, ("philox_seed", "philox_offset"))
        read = {i: given[i].cpu() for i in at}
        return tuple(read.get(i, value) for i, value in enumerate(given))
    return given


def _divide_into_groups(target: Callable[..., Any], given: Any, named: Any) -> None:
    """Set the group ends `offs` of a grouped product (experts) so that groups are equally long.

    Zeros would leave every group empty, and the op without work. Groups divide the rows of the
    first matrix, or its columns if both are matrices, or the columns of the second alone.
    """
    names = argument_names(target) if isinstance(target, OpOverload) else []
    offs = (dict(zip(names, given, strict=False)) | named).get("offs")
    if offs is None or "offs" in names[:2]:
        return
    first, second = given[:2]
    dims = [
        value.dim() if isinstance(value, torch.Tensor) else 0 for value in (first, second, offs)
    ]
    match dims:
        case 2, 3, 1:
            groups, total = len(second), len(first)
        case 3, 2, 1:
            groups, total = len(first), second.shape[1]
        case 2, 2, 1:
            groups, total = len(offs), first.shape[1]
        case _:
            return
    if len(offs) == groups > 0 and not offs.is_floating_point():
        offs.copy_(torch.arange(1, groups + 1) * total // groups)


def _spread_indices(target: Callable[..., Any], given: Any, named: Any) -> None:
    """Set indices so that they choose rows all over what they index.

    Zeros would always choose the first row, which stays in the caches.
    """
    names = argument_names(target) if isinstance(target, OpOverload) else []
    match dict(zip(names, given, strict=False)) | named:
        case {"num_weights": int(rows), "indices": torch.Tensor() as index}:
            indexed = [(rows, index)]
        case {"weight": torch.Tensor() as table, "indices": torch.Tensor() as index}:
            indexed = [(len(table), index)]
        case {"self": torch.Tensor() as of, "dim": int(dim), "index": torch.Tensor() as index}:
            indexed = [(of.shape[dim], index)] if of.dim() else []
        case {"self": torch.Tensor() as of, "indices": list(several)}:
            indexed = [*zip(of.shape, several, strict=False)]
        case _:
            return
    if all(index is None or index.dtype in (torch.int32, torch.int64) for _, index in indexed):
        for rows, index in indexed:
            if index is not None and rows:
                count = index.untyped_storage().nbytes() // index.element_size()
                flat = index.as_strided((count,), (1,), 0)  # it may be expanded
                torch.arange(count, out=flat).mul_(RANDOM_PERIOD).remainder_(rows)


def _rnn_workspace(args: Any) -> torch.Tensor:
    """The workspace of oneDNN's forward; its backward crashes on any other tensor."""
    reverse, mode, hidden, layers, biases, train, both_ways, sizes, batch_first = args[13:22]
    workspace: torch.Tensor = torch.ops.coop_plan.lstm_layer.default(
        *args[:7], reverse, sizes, mode, hidden, layers, biases, both_ways, batch_first, train
    )[3]
    return workspace


def _synthesize(tree: Any, truth: bool | int | None, number: int) -> Any:
    """Replace fake tensors by filled ones: booleans with `truth`, integers with `number`.

    An integer `truth` sets the first `truth` booleans to True, None the first half: masks of real
    steps have long runs, and kernels that branch take several times as long on random ones.
    `number` 0 is a valid index for every size, 1 is one if indices begin at 1. A larger `number` is
    a sum: the first integer gets it, the others are 0. Views of one storage stay views of one.
    """
    flats: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def make(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = storage_key(value), value.dtype
        if key not in flats:
            flats[key] = filled(value)
        made = flats[key].as_strided(value.shape, value.stride(), value.storage_offset())
        made = made.conj() if value.is_conj() else made
        return negative_view(made) if value.is_neg() else made

    def filled(value: torch.Tensor) -> torch.Tensor:
        count = value.untyped_storage().nbytes() // value.element_size()
        flat = torch.empty(count, dtype=value.dtype, device=value.device)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            _fill_random(flat) if value.dtype.is_floating_point else flat.fill_(0.5)
        elif value.dtype == torch.bool:
            if isinstance(truth, bool):
                flat.fill_(truth)
            else:
                flat.fill_(False)[: count // 2 if truth is None else truth] = True
        elif number > 1:
            flat.fill_(0)[:1] = number
        else:
            flat.fill_(number)
        return flat

    return tree_map(make, tree)


def _fill_random(flat: torch.Tensor) -> None:
    """Fill with random numbers in [0.05, 1]: no NaN, and no denormals that slow a kernel down.

    Only the first `RANDOM_PERIOD` are sampled, then copied: sampling is ten times slower.
    """
    have = min(RANDOM_PERIOD, flat.numel())
    flat[:have].uniform_(0.05, 1.0)
    while have < flat.numel():
        more = min(have, flat.numel() - have)
        flat[have : have + more].copy_(flat[:more])
        have += more


def _measure(
    target: Callable[..., Any], args: Any, kwargs: Any, cost_us: float | None = None
) -> OpProfile:
    """Profile an op on real arguments; its time is not measured if `cost_us` is given."""
    flat = tree_flatten((args, kwargs))[0]
    inputs = [v for v in flat if isinstance(v, torch.Tensor)]
    device = _cuda_device(flat)
    alignment = SCRATCH_ALIGNMENT if device is None else CUDA_ALIGNMENT
    result, events, in_workers = _record(partial(target, *args, **kwargs), device is not None)
    results = tree_flatten(result)[0]
    outputs, allocations, workspace = summarize_events(events, inputs, results, target, alignment)
    first = None if device is None or _is_update(target) else checksums(results)
    del result, results  # a second run has their memory
    differs = first is not None and checksums(tree_flatten(target(*args, **kwargs))[0]) != first
    first_us = 0.0
    if cost_us is None:
        kernel = BOXED_KERNELS.get(target) if isinstance(target, OpOverload) else None
        run = partial(target, *args, **kwargs) if kernel is None else lambda: kernel([*args[0]])
        slots = slots_alone(allocations, workspace, alignment)
        first_us, cost_us = time_op(run, slots, _bytes_read(args, kwargs), device)
    return OpProfile(cost_us, outputs, allocations, workspace, in_workers, differs, first_us)


def _is_update(target: object) -> bool:
    """True if an op overwrites its arguments: its second run has others."""
    return isinstance(target, OpOverload) and is_mutable(target)


def _cuda_device(values: list[Any]) -> int | None:
    """Index of the CUDA device among these arguments; None: the op runs on the CPU."""
    devices = (v.device if isinstance(v, torch.Tensor) else v for v in values)
    for device in devices:
        if isinstance(device, torch.device) and device.type == "cuda":
            return torch.cuda.current_device() if device.index is None else device.index
    return None


def summarize_events(
    events: list[tuple[int, int, int]],
    inputs: list[torch.Tensor],
    results: list[Any],
    target: object,
    alignment: int,
) -> tuple[tuple[Output | None, ...], tuple[Allocation, ...], int]:
    """Outputs, ordered allocations and workspace size of an op, from its recorded events.

    `events` are (is allocation, pointer, bytes). Scratch is placed in the workspace by liveness.
    """
    sources = {t.untyped_storage().data_ptr(): i for i, t in reversed(list(enumerate(inputs)))}
    owner: dict[int, int] = {}
    outputs: list[Output | None] = []
    for position, value in enumerate(results):
        if value is None or isinstance(value, (int, float)):  # numbers are constants of the trace
            outputs.append(None)
            continue
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"{target} returns a {type(value).__name__}, which a planned step cannot return"
            )
        if value.layout is not torch.strided:
            raise CaptureError(
                f"{target} returns a sparse tensor, which an arena cannot hold: nn.Embedding and"
                " nn.EmbeddingBag have dense gradients with sparse=False"
            )
        # Zeros that autograd makes have no memory.
        pointer = 0 if has_no_memory(value) else value.untyped_storage().data_ptr()
        start = int(value.storage_offset())
        layout = str(value.dtype), tuple(value.shape), value.stride(), start
        size = value.untyped_storage().nbytes()
        if pointer and pointer in sources:
            outputs.append(Output(0, sources[pointer], -1, *layout))
        elif pointer and pointer in owner:
            made = Output(size, -1, owner[pointer], *layout)
            if replace(made, duplicate_of=-1) != outputs[made.duplicate_of]:
                raise CaptureError(f"{target} returns two views of one new tensor")
            outputs.append(made)
        else:
            outputs.append(Output(size, -1, -1, *layout))
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
            alignment=alignment,
        )
        workspace = placed.peak
        offsets.update(zip(scratch, placed.offsets.tolist(), strict=True))
    allocations = []
    for i, size in enumerate(sizes):
        if not size:
            continue  # an allocation of 0 bytes takes no slot
        output = -1 if spans[i][1] >= 0 else owner.get(pointers[i], -2)
        allocations.append(Allocation(size, output, offsets[i]))
    return tuple(outputs), tuple(allocations), workspace
