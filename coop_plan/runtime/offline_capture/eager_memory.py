"""Memory of a training iteration in eager PyTorch, counted on fake tensors.

The user's step, its backward and the optimizer's step run op by op without memory. Each storage is
counted from the op that returns it until it is freed, which Python and autograd decide as they do
on a device. So checkpoints, hooks and tensors that autograd saves count as in eager. Memory within
an op is that of `roofline.py`.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.offline_capture.eager_parts import (
    ALIGNMENT,
    EagerMemory,
    EagerParts,
    held_padding,
)
from coop_plan.runtime.offline_capture.library_memory import library_profile
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.runtime.offline_capture.optimizers import Update
from coop_plan.runtime.offline_capture.roofline import workspace_bytes
from coop_plan.runtime.torch_internals.ops import storage_key, tree_flatten
from coop_plan.runtime.torch_internals.tracing import TorchDispatchMode


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that logs when storages on a device are allocated and freed.

    `part` is the part of `EagerParts` to which new storages count. `mark` changes that of a tensor.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = "other"
        self.parameters: dict[int, torch.nn.Parameter] = {}
        """Parameters that ops of a step have read, by `id`."""
        self.kind = kind
        self.moment_of_update = 0
        """The moment before the second step of the latest optimizer, which has all states."""
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._part_of: list[str] = []
        self._bytes_of: list[int] = []
        self._lends = False
        self._lent: set[int] = set()
        self._changes: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor):
                self._count(value)
                if self.part == "activations" and isinstance(value, torch.nn.Parameter):
                    self.parameters.setdefault(id(value), value)
        known = library_profile(func, args, kwargs) if self.kind == "cpu" else None
        result = func(*args, **kwargs)
        for position, value in enumerate(tree_flatten(result)[0]):
            if isinstance(value, torch.Tensor):
                output = known and known.outputs[position]
                self._count(value, output.bytes if output else 0)
        scratch = known.workspace_bytes if known else workspace_bytes(self.kind, func, args, kwargs)
        if scratch:
            number = self._born(scratch)
            self._changes.append((number, -scratch))
        return result

    def mark(self, tensors: Iterable[Any], part: str) -> None:
        """Count the storages of these tensors to a part, from their allocation on."""
        for value in tensors:
            if isinstance(value, torch.Tensor) and (number := self._count(value)) is not None:
                self._part_of[number] = part

    def moment(self) -> int:
        """The present moment: a position in the log."""
        return len(self._changes)

    def peak(self, begin: int, end: int) -> EagerParts:
        """The parts at the first peak between two moments."""
        live = dict.fromkeys(EagerParts.__struct_fields__, 0)
        total, best, found = 0, -1, EagerParts()
        for position in range(end + 1):
            if position >= begin and total > best:
                best, found = total, EagerParts(**live)
            if position < end:
                number, change = self._changes[position]
                live[self._part_of[number]] += change
                total += change
        return found

    def largest(self, part: str, *, lent: bool = True) -> int:
        """The largest bytes of a part at any moment, with or without the `lent` ones."""
        sizes = (
            change
            for number, change in self._changes
            if self._part_of[number] == part and (lent or number not in self._lent)
        )
        return max(itertools.accumulate(sizes), default=0)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Context of allocations that an idle arena serves on CUDA (`runtime/execute/loans.py`)."""
        self._lends = self.kind == "cuda"
        try:
            yield
        finally:
            self._lends = False

    def lent(self, begin: int) -> tuple[int, ...]:
        """Allocations and frees of borrowed temporaries since a moment."""
        given: dict[int, int] = {}
        found = []
        for number, change in self._changes[begin:]:
            if number in given:
                found.append(-1 - given[number])
            elif number in self._lent and self._part_of[number] == "update":
                given[number] = len(given)
                found.append(change)
        return tuple(found)

    def bytes_of(self, tensors: Iterable[Any]) -> int:
        """Bytes of the storages of these tensors on the device."""
        numbers = {self._count(value) for value in tensors if isinstance(value, torch.Tensor)}
        return sum(self._bytes_of[number] for number in numbers if number is not None)

    def _count(self, value: torch.Tensor, least: int = 0) -> int | None:
        """The number of a tensor's storage on the device; a new one is logged.

        A fake storage may be smaller than the real one, which has `least` bytes.
        """
        if value.device.type != self.kind or value.layout is not torch.strided:
            return None
        key = storage_key(value)
        if key in self._live:
            return self._live[key][0]
        storage = value.untyped_storage()
        unit = ALIGNMENT[self.kind]
        number = self._born(-(-max(storage.nbytes(), least) // unit) * unit)

        def died(_: object) -> None:
            del self._live[key]
            self._changes.append((number, -self._bytes_of[number]))

        self._live[key] = number, weakref.ref(storage, died)
        return number

    def _born(self, size: int) -> int:
        number = len(self._bytes_of)
        self._bytes_of.append(size)
        if self._lends:
            self._lent.add(number)
        self._part_of.append(self.part)
        self._changes.append((number, size))
        return number


def count_eager(
    log: StorageLog,
    step: Callable[..., Any],
    args: Sequence[Any],
    optimizer: OptimizerSpec | None,
    library_bytes: int = 0,
    *,
    accumulates: bool = False,
) -> EagerMemory:
    """Memory of an iteration of `step(*args)`, whose model was built under `log`.

    Parameters have no gradients before and after. `library_bytes` are held by libraries. If it
    `accumulates`, the step is that of a later micro-batch, which adds to gradients. Losses live
    until the optimizer's step ends, as in a loop that has them in a variable.

    Raises:
        CaptureError: the step reads values of tensors, which fake ones lack, or needs no gradient.
        InvalidInputError: the optimizer has no such update.
    """
    built = log.moment()
    with log:
        log.mark(tree_flatten(list(args))[0], "other")
    losses: list[torch.Tensor] = []
    for _ in range(2 if accumulates else 1):
        losses.clear()
        began = log.moment()
        losses, shape = _run(log, step, args)
        ended = log.moment()
        parameters = list(log.parameters.values())
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        log.mark(parameters, "weights")
        log.mark([parameter.grad for parameter in trained], "gradients")
    update_parts = None
    lent: tuple[int, ...] = ()
    if optimizer is None or not trained:
        step_parts = log.peak(began, ended)
    elif optimizer.update == "backward":
        losses.clear()
        step_parts = _update_in_backward(log, optimizer, trained, lambda: _run(log, step, args))
    else:
        update = _updated(log, optimizer, trained)
        lent = log.lent(log.moment_of_update)
        update_parts = log.peak(ended, log.moment())
        losses.clear()
        kept = {"states": log.bytes_of(update.states), "weights": log.bytes_of(update.masters)}
        step_parts = log.peak(began, ended).plus(**kept)
    for parameter in parameters:
        parameter.grad = None
    return EagerMemory(
        step=step_parts.plus(other=library_bytes),
        update=update_parts and update_parts.plus(other=library_bytes),
        update_bytes=log.largest("update"),
        unlent_bytes=log.largest("update", lent=False),
        lent=lent,
        accumulates=accumulates,
        padding_bytes=held_padding(log.kind, len(trained)) if accumulates else 0,
        # On a GPU most models are built on the host, so their building counts on the CPU alone.
        loading_bytes=log.peak(0, built).total if log.kind == "cpu" else 0,
        dtype=_dtype(parameters),
        without_loss=shape,
    )


def _updated(log: StorageLog, spec: OptimizerSpec, trained: list[Any]) -> Update:
    """The optimizer after two steps: the first makes its states, the second finds all of them."""
    log.part = "update"
    with log:
        update = Update(spec, trained)
        log.mark(update.masters, "weights")
        update.step(log.lending)
        log.mark(update.states, "states")
        log.moment_of_update = log.moment()
        update.step(log.lending)
    return update


def _update_in_backward(
    log: StorageLog, spec: OptimizerSpec, trained: list[Any], run: Callable[[], object]
) -> EagerParts:
    """The peak if each parameter is updated, and its gradient freed, as soon as that exists."""
    for parameter in trained:
        update = _updated(log, spec, [parameter])

        def complete(parameter: Any, update: Update = update) -> None:
            log.mark([parameter.grad], "gradients")
            part, log.part = log.part, "update"
            update.step()
            parameter.grad = None
            log.part = part

        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(complete)
    began = log.moment()
    run()
    return log.peak(began, log.moment())


def _dtype(parameters: Sequence[torch.Tensor]) -> str:
    """Name of the dtype that most elements have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in parameters:
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return str(max(counts, key=lambda dtype: counts[dtype], default="")).removeprefix("torch.")


def _run(
    log: StorageLog, step: Callable[..., Any], args: Sequence[Any]
) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Forward and backward, of losses if there are any: these, or the first output's shape."""
    log.part = "activations"
    with log:
        outputs = [
            value
            for value in tree_flatten(step(*args))[0]
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        if not outputs:
            raise CaptureError(
                "the step needs no gradient: return a loss of parameters or arguments that require"
                " one"
            )
        losses = [value for value in outputs if value.numel() == 1]
        outputs = losses or outputs
        torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
    return losses, () if losses else tuple(outputs[0].shape)
