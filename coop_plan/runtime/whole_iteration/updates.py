"""An optimizer's update of one parameter, as an op of the plan: its memory and its time.

The update is the optimizer's own code, called for one parameter. So numbers, schedules and options
are those of the loop in eager. Temporaries have slots in the arena. States, which the first update
allocates, are residents.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from coop_plan.runtime.capture.op_timing import slots_alone, time_op
from coop_plan.runtime.capture.profiler import SCRATCH_ALIGNMENT, summarize_events
from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.device.cuda import install_allocator
from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.op_profile import OpProfile, UpdateProfile
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals.autograd import has_gradient_hooks, has_step_pre_hooks
from coop_plan.runtime.torch_internals.fakes import real_mode
from coop_plan.runtime.torch_internals.ops import (
    elements_spanned,
    storage_key,
    storage_object,
    tree_flatten,
)
from coop_plan.runtime.whole_iteration.scaling import Scaling

MEASURED_STEPS = 8
"""Updates of a measurement; the last one's memory is planned. RAdam's takes more from step 6 on."""

GRADIENT = 0.25
"""Elements of the gradient by which an update is measured."""


class ParameterUpdate:
    """The update of `parameter`, which is in group number `group` of the optimizer.

    It runs while no other with this `lock` does. So attributes of optimizers of other authors may
    have temporaries.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: int,
        parameter: torch.Tensor,
        lock: AbstractContextManager[object],
        scaling: Scaling | None,
    ) -> None:
        self.optimizer = optimizer
        self._scaling = scaling
        self.group = group
        self.parameter = parameter
        self._lock = nullcontext() if _is_of_pytorch(optimizer) else lock

    @property
    def options(self) -> dict[str, Any]:
        """The parameter's group, as it is now."""
        group: dict[str, Any] = self.optimizer.param_groups[self.group]
        return group

    def state_storages(self) -> list[torch.UntypedStorage]:
        """The storages of the parameter's states on its device; none before they are made."""
        return storages_of(self.optimizer.state.get(self.parameter, {}), self.parameter.device)

    @property
    def place(self) -> int:
        """Place of the parameter in its group."""
        return next(i for i, p in enumerate(self.options["params"]) if p is self.parameter)

    @property
    def has_states(self) -> bool:
        """True if the optimizer has updated the parameter before, or loaded its states."""
        return bool(self.optimizer.state.get(self.parameter))

    @property
    def is_skipped(self) -> bool:
        """True if the scaler leaves it out; known once its gradient is unscaled."""
        return self._scaling is not None and self._scaling.skips(self.optimizer)

    def __call__(self, gradient: torch.Tensor) -> None:
        """Update the parameter by its gradient, which is not kept."""
        optimizer, scaling = self.optimizer, self._scaling
        given = {} if scaling is None else scaling.attributes(optimizer)
        with self._lock:
            run_update(
                optimizer, self.options, [self.parameter], [gradient], optimizer.state, given
            )


def _is_of_pytorch(optimizer: Optimizer) -> bool:
    """True if updates of an optimizer share no temporaries, and may run in two threads at once."""
    return type(optimizer).__module__.startswith("torch.optim.")


class Updates:
    """The updates of the parameters of some optimizers, one each; with a link also on the host."""

    def __init__(
        self, optimizers: Sequence[Optimizer], *, link: bool, scaling: Scaling | None
    ) -> None:
        self.profiling_bytes = 0
        """Most bytes that a measurement took."""
        self.order: Mapping[int, int] = {}
        """Places of parameters in the norm of the gradients, by `id`; else optimizers' order."""
        self._optimizers = optimizers
        self._link = link
        self._scaling = scaling
        self._lock = threading.Lock()
        self._profiles: dict[object, UpdateProfile] = {}

    def _all(self) -> Iterator[ParameterUpdate]:
        """All updates in the order of the optimizers, their groups and parameters."""
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    yield ParameterUpdate(optimizer, number, parameter, self._lock, self._scaling)

    def begin(self) -> None:
        """Begin an iteration: no parameter has a gradient.

        Raises:
            RuntimeRefusalError: a parameter has a hook, which would not run, or is in two
                optimizers, or the step of one has a hook, which would run after the updates, or
                the scaler is for another device.
        """
        for optimizer in self._optimizers:
            if has_step_pre_hooks(optimizer):
                raise RuntimeRefusalError(
                    f"a step pre-hook of {type(optimizer).__name__} would run after the updates of"
                    " train_iteration: remove it and call it before the iteration, or use"
                    " train_step"
                )
        owners: dict[torch.Tensor, Optimizer] = {}
        for update in self._all():
            parameter, shape = update.parameter, tuple(update.parameter.shape)
            if has_gradient_hooks(parameter):
                raise RuntimeRefusalError(
                    "train_iteration gives gradients to the optimizer alone, so that the hook on a"
                    f" parameter of shape {shape} would not run: remove it, or use train_step"
                )
            if owners.setdefault(parameter, update.optimizer) is not update.optimizer:
                raise RuntimeRefusalError(
                    f"a parameter of shape {shape} is in two optimizers of train_iteration: remove"
                    " it from one, or use train_step"
                )
            parameter.grad = None
        if self._scaling is not None:
            self._scaling.begin()

    def finish(self) -> None:
        """Run the optimizers' steps without gradients: hooks and schedulers count them.

        A scaler runs those that it does not skip, and updates its scale.
        """
        scaler = None if self._scaling is None else self._scaling.scaler
        with ExitStack() as steps:  # of all, if a hook raises
            if scaler is not None:
                steps.callback(scaler.update)
            for optimizer in reversed(self._optimizers):
                steps.callback(
                    optimizer.step if scaler is None else partial(scaler.step, optimizer)
                )

    def among(self, inputs: Sequence[Any]) -> dict[int, ParameterUpdate]:
        """The updates of the parameters among a graph's inputs, by position, in their order.

        Raises:
            RuntimeRefusalError: another input has memory of an updated parameter.
        """
        positions = {id(value): i for i, value in enumerate(inputs)}
        found = {}
        for update in sorted(self._all(), key=lambda one: self.order.get(id(one.parameter), 0)):
            at = positions.get(id(update.parameter))
            if at is not None and update.parameter.requires_grad:
                found[at] = update
        _refuse_shared_memory(inputs, found)
        return found

    def key(self, updates: Mapping[int, ParameterUpdate]) -> Hashable:
        """Key of updates with equal memory: parameters, their groups, options that are not 0."""
        parts, used = [], {}
        for at, update in updates.items():
            place = self._optimizers.index(update.optimizer), update.group
            parts.append((at, id(update.parameter), place))
            used[place] = _kind_of_options(update.options)
        return (*parts, *used.items())

    def profile(self, update: ParameterUpdate) -> UpdateProfile:
        """Memory and time of an update, measured on a parameter of equal layout and new states."""
        parameter, optimizer = update.parameter, update.optimizer
        options = {name: value for name, value in update.options.items() if name != "params"}
        layout = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        key = (optimizer, *layout, repr(options), torch.get_num_threads())
        if key not in self._profiles:
            with real_mode():
                self._profiles[key] = self._measured(optimizer, update.options, parameter)
        return self._profiles[key]

    def _measured(
        self, optimizer: Optimizer, group: dict[str, Any], like: torch.Tensor
    ) -> UpdateProfile:
        name = type(optimizer).__name__
        cuda = like.device.type == "cuda"
        if cuda:
            install_allocator()
        alignment = CUDA_ALIGNMENT if cuda else SCRATCH_ALIGNMENT
        parameter = torch.nn.Parameter(torch.full_like(like, 0.5, requires_grad=False))
        gradient = torch.full_like(like, GRADIENT, requires_grad=False)
        state: Any = defaultdict(dict)
        place, ext = parameter.data_ptr(), extension()
        given = {} if self._scaling is None else self._scaling.example(optimizer)

        def run() -> None:
            run_update(optimizer, group, [parameter], [gradient], state, given)

        found, kept_bytes, changes_gradient = [], [], False
        for _ in range(MEASURED_STEPS):
            ext.record_begin(cuda)
            try:
                run()
            finally:
                events = ext.record_end()
            found.append(summarize_events(events, [], [], name, alignment)[1:])
            changes_gradient |= not bool((gradient == GRADIENT).all())
            kept = storages_of([*state.values()], like.device)
            kept_bytes.append(sum(storage.nbytes() for storage in kept))
        if parameter.data_ptr() != place or storage_key(gradient) in map(storage_object, kept):
            raise RuntimeRefusalError(
                f"{name} keeps a gradient or replaces a parameter's memory: train_iteration"
                " needs an optimizer that updates parameters in place"
            )
        if max(kept_bytes) > kept_bytes[0]:
            raise RuntimeRefusalError(
                f"{name} makes states after its first update, and train_iteration plans those"
                " of the first: make all of them at once, or use train_step"
            )
        (made, first_workspace), (allocations, workspace) = found[0], found[-1]
        replaced = sum(allocation.bytes for allocation in allocations if allocation.output == -2)
        if replaced > SCRATCH_ALIGNMENT:
            raise RuntimeRefusalError(
                f"{name} replaces the memory of its states ({replaced} bytes an update):"
                " train_iteration needs an optimizer that updates states in place"
            )
        parts = tuple(storage.nbytes() for storage in kept)
        slots = slots_alone(allocations, workspace, alignment)
        states = sum(allocation.bytes for allocation in made if allocation.output == -2)
        read = 2 * like.untyped_storage().nbytes() + states
        index = like.device.index if cuda else None
        cost = time_op(run, slots, read, index).first_us
        taken = read + max(first_workspace, workspace)
        self.profiling_bytes = max(self.profiling_bytes, taken)
        return UpdateProfile(
            OpProfile(cost, (), made, first_workspace, 0),
            OpProfile(cost, (), allocations, workspace, 0),
            states,
            changes_gradient,
            parts if sum(parts) == states else (),
            host_us(run, read) if self._link and not cuda else None,
        )


def host_us(run: Callable[[], None], read: int) -> float:
    """Time of an update on the host that reads `read` bytes, µs, by a thread as in an iteration.

    A thread's temporaries come from memory that the main thread's do not.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(time_op, run, (), read, None).result().first_us


def storages_of(states: Any, device: torch.device) -> list[torch.UntypedStorage]:
    """The storages on a device of the tensors in states, each once, that are not empty."""
    values = tree_flatten(states)[0]
    tensors = (v for v in values if isinstance(v, torch.Tensor) and v.device == device)
    found = {storage_key(value): value.untyped_storage() for value in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def tensors_of(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """A parameter and the tensors of its states."""
    states = tree_flatten(optimizer.state.get(parameter, {}))[0]
    return [parameter, *(value for value in states if isinstance(value, torch.Tensor))]


def _refuse_shared_memory(inputs: Sequence[Any], updated: Mapping[int, Any]) -> None:
    """Refuse inputs with memory of an updated parameter: they would be read after its update."""
    spans = []
    for at, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.numel():
            size = elements_spanned(value) * value.element_size()
            spans.append((value.data_ptr(), value.data_ptr() + size, at))
    furthest = furthest_updated = (0, -1)
    for begin, stop, at in sorted(spans):
        end, other = furthest if at in updated else furthest_updated
        if begin < end:
            raise RuntimeRefusalError(
                f"tensors of shapes {tuple(inputs[other].shape)} and {tuple(inputs[at].shape)}"
                " share memory, and train_iteration would update one before the other is read:"
                " clone one, make them one parameter, or use train_step"
            )
        furthest = max(furthest, (stop, at))
        if at in updated:
            furthest_updated = max(furthest_updated, (stop, at))


def _kind_of_options(group: dict[str, Any]) -> Hashable:
    """Options of a group that choose the ops of an update, and so its memory.

    Of a float, whether it is 0. Learning rates and integers, which count steps, choose none.
    """
    names = [name for name in group if name not in ("params", "lr", "initial_lr")]
    return tuple((name, _kind_of(group[name])) for name in names)


def _kind_of(option: Any) -> Hashable:
    if option is None or isinstance(option, bool | str):
        return option
    if isinstance(option, float):
        return option != 0
    if isinstance(option, tuple | list):
        return tuple(map(_kind_of, option))
    return type(option).__name__


def run_update(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    state: Any,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Run the optimizer's step for some parameters of a group, with their states in `state`.

    It has these further `attributes`.
    """
    part: Any = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__, **(attributes or {}))
    part.__dict__.pop("step", None)  # a scheduler's wrapper, which counts steps
    part.state = state
    part.param_groups = [{**group, "params": parameters}]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        with torch.no_grad():
            own_step(type(optimizer))(part)
    finally:
        for parameter in parameters:
            parameter.grad = None


def own_step(kind: type[Optimizer]) -> Callable[[Any], Any]:
    """A class's step without the hooks of `Optimizer`, which belong to a whole step."""
    step: Any = kind.step
    own: Callable[[Any], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own
