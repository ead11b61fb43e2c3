"""An optimizer's update of one parameter, as an op of the plan: its memory and its time.

The update is the optimizer's own code, called for one parameter. So numbers, schedules and options
are those of the loop in eager. Temporaries have slots in the arena. States, which the first update
allocates, are residents.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from coop_plan.runtime.capture.op_timing import slots_alone, time_op
from coop_plan.runtime.capture.profiler import SCRATCH_ALIGNMENT, summarize_events
from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.op_profile import OpProfile, UpdateProfile
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals.autograd import has_gradient_hooks
from coop_plan.runtime.torch_internals.fakes import real_mode
from coop_plan.runtime.torch_internals.ops import storage_key, tree_flatten

TRIAL_SHAPE = (4, 4)
"""Shape of the parameters by which an optimizer is tried."""

TRIAL_STEPS = 3

GRADIENT = 0.25
"""Elements of the gradient by which an update is measured."""


class ParameterUpdate:
    """The update of `parameter`, which is in group `group` of the optimizer."""

    def __init__(self, optimizer: Optimizer, group: int, parameter: torch.Tensor) -> None:
        self._optimizer = optimizer
        self.group = group
        self.parameter = parameter

    @property
    def has_states(self) -> bool:
        """True if the optimizer has updated the parameter before, or loaded its states."""
        return bool(self._optimizer.state.get(self.parameter))

    def __call__(self, gradient: torch.Tensor) -> None:
        """Update the parameter by its gradient, which is not kept."""
        group = self._optimizer.param_groups[self.group]
        _update(self._optimizer, group, [self.parameter], [gradient], self._optimizer.state)


class Updates:
    """The updates of an optimizer's parameters, one each."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.profiling_bytes = 0
        """Most bytes that a measurement took."""
        self._optimizer = optimizer
        self._tried: set[tuple[object, ...]] = set()
        self._profiles: dict[object, UpdateProfile] = {}

    @property
    def name(self) -> str:
        """The optimizer's class, for messages."""
        return type(self._optimizer).__name__

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The optimizer's parameters, in its order."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def begin(self) -> None:
        """Begin an iteration: no parameter has a gradient.

        Raises:
            RuntimeRefusalError: a parameter has a hook, which would not run.
        """
        for parameter in self.parameters:
            if has_gradient_hooks(parameter):
                raise RuntimeRefusalError(
                    "train_iteration gives gradients to the optimizer alone, so that the hook on a"
                    f" parameter of shape {tuple(parameter.shape)} would not run: remove it, or use"
                    " train_step"
                )
            parameter.grad = None

    def finish(self) -> None:
        """Run the optimizer's step without gradients: its hooks and schedulers count it."""
        self._optimizer.step()

    def by_parameter(self) -> dict[int, ParameterUpdate]:
        """The update of each parameter, by its `id`.

        Raises:
            RuntimeRefusalError: the optimizer cannot update one parameter at a time.
        """
        found = {}
        for number, group in enumerate(self._optimizer.param_groups):
            self._try(group)
            for parameter in group["params"]:
                found[id(parameter)] = ParameterUpdate(self._optimizer, number, parameter)
        return found

    def profile(self, update: ParameterUpdate) -> UpdateProfile:
        """Memory and time of an update, measured on a parameter of equal layout and new states."""
        parameter, group = update.parameter, self._optimizer.param_groups[update.group]
        options = {name: value for name, value in group.items() if name != "params"}
        layout = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        key = (*layout, repr(options), torch.get_num_threads())
        if key not in self._profiles:
            with real_mode():
                self._profiles[key] = self._measured(group, parameter)
        return self._profiles[key]

    def _measured(self, group: dict[str, Any], like: torch.Tensor) -> UpdateProfile:
        cuda = like.device.type == "cuda"
        alignment = CUDA_ALIGNMENT if cuda else SCRATCH_ALIGNMENT
        parameter = torch.nn.Parameter(torch.full_like(like, 0.5, requires_grad=False))
        gradient = torch.full_like(like, GRADIENT, requires_grad=False)
        state: Any = defaultdict(dict)
        place, ext = parameter.data_ptr(), extension()

        def run() -> None:
            _update(self._optimizer, group, [parameter], [gradient], state)

        found, changes_gradient = [], False
        for _ in range(TRIAL_STEPS):
            ext.record_begin(cuda)
            try:
                run()
            finally:
                events = ext.record_end()
            found.append(summarize_events(events, [], [], self.name, alignment)[1:])
            changes_gradient |= not bool((gradient == GRADIENT).all())
        kept = [v for v in tree_flatten([*state.values()])[0] if isinstance(v, torch.Tensor)]
        if parameter.data_ptr() != place or storage_key(gradient) in map(storage_key, kept):
            raise RuntimeRefusalError(
                f"{self.name} keeps a gradient or replaces a parameter's memory: train_iteration"
                " needs an optimizer that updates parameters in place"
            )
        (made, first_workspace), (allocations, workspace) = found[0], found[-1]
        slots = slots_alone(allocations, workspace, alignment)
        cost = time_op(run, slots, like.device.index if cuda else None)
        states = sum(allocation.bytes for allocation in made if allocation.output == -2)
        taken = 2 * like.untyped_storage().nbytes() + states + max(first_workspace, workspace)
        self.profiling_bytes = max(self.profiling_bytes, taken)
        return UpdateProfile(
            OpProfile(cost, (), made, first_workspace, 0),
            OpProfile(cost, (), allocations, workspace, 0),
            states,
            changes_gradient,
        )

    def _try(self, group: dict[str, Any]) -> None:
        """Check on small parameters that updates one by one equal those of all together."""
        options = {name: value for name, value in group.items() if name != "params"}
        kinds = {(p.dtype, p.device) for p in group["params"]}
        for dtype, device in kinds:
            key = (repr(options), dtype, device)
            if key in self._tried:
                continue
            together, apart = (self._trial(group, dtype, device, one) for one in (False, True))
            if not all(map(torch.equal, together, apart)):
                raise RuntimeRefusalError(
                    f"{self.name} updates a parameter by the others' gradients, too:"
                    " train_iteration needs an optimizer whose updates are independent; use"
                    " train_step"
                )
            self._tried.add(key)

    def _trial(
        self, group: dict[str, Any], dtype: torch.dtype, device: torch.device, one_by_one: bool
    ) -> list[torch.Tensor]:
        numbers = torch.arange(16, device=device).reshape(TRIAL_SHAPE).div(16).to(dtype)
        parameters = [torch.nn.Parameter(numbers + shift) for shift in (0.5, 1.0)]
        state: Any = defaultdict(dict)
        try:
            for step in range(TRIAL_STEPS):
                gradients = [(numbers - shift) * (step + 1) for shift in (0.25, 2.0)]
                pairs = [*zip(parameters, gradients, strict=True)]
                for part in [[pair] for pair in pairs] if one_by_one else [pairs]:
                    given, own = [p for p, _ in part], [g for _, g in part]
                    _update(self._optimizer, group, given, own, state)
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = str(error).strip().splitlines()[:1]
            raise RuntimeRefusalError(
                f"{self.name} cannot update one parameter at a time, as train_iteration needs"
                f" ({type(error).__name__}: {''.join(reason)}): use train_step"
            ) from None
        return [parameter.detach() for parameter in parameters]


def _update(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    state: Any,
) -> None:
    """Run the optimizer's step for some parameters of a group, with their states in `state`."""
    part: Any = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)  # a scheduler's wrapper, which counts steps
    part.state = state
    part.param_groups = [{**group, "params": parameters}]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        with torch.no_grad():
            _own_step(type(optimizer))(part)
    finally:
        for parameter in parameters:
            parameter.grad = None


def _own_step(kind: type[Optimizer]) -> Callable[[Any], Any]:
    """A class's step without the hooks of `Optimizer`, which belong to a whole step."""
    step: Any = kind.step
    own: Callable[[Any], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own
