"""Check of an optimizer on small parameters: its step against its updates one by one.

`train_iteration` updates each parameter alone, then calls the step without gradients. The check
does so on copies of the optimizer's groups and attributes, and compares all that a step may change.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.torch_internals.ops import tree_flatten, tree_map
from coop_plan.runtime.torch_internals.optimizers import CHECKED_ONCE
from coop_plan.runtime.whole_iteration.updates import own_step, run_update

SHAPE = (4, 4)
"""Shape of the parameters; each group has two of each dtype and device.

One element is 0, which shows the smallest update.
"""

STEPS = 3

SMALL = 2.0**-14
"""Scale of every other gradient: so small that an optimizer's epsilon counts."""


def independence_key(optimizer: Optimizer) -> Hashable:
    """Key of optimizers for which one check is enough."""
    return optimizer, *(
        (repr(_options(group)), tuple(map(repr, _kinds(group)))) for group in optimizer.param_groups
    )


def check_independent(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Check that the optimizer's step, with attributes `given`, equals its updates one by one.

    Raises:
        RuntimeRefusalError: it does not, or the optimizer wraps another.
    """
    name = type(optimizer).__name__
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise RuntimeRefusalError(
            f"{name} wraps an optimizer, whose updates train_iteration cannot call alone: pass the"
            " wrapped optimizer, or use train_step"
        )
    try:
        same = _equal(*(_after_steps(optimizer, given, alone) for alone in (False, True)))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        reason = "".join(str(error).strip().splitlines()[:1])
        raise RuntimeRefusalError(
            f"{name} cannot update one parameter at a time, as train_iteration needs"
            f" ({type(error).__name__}: {reason}): use train_step"
        ) from None
    if not same:
        raise RuntimeRefusalError(
            f"{name} updates a parameter by the others' gradients, too, or counts its steps where"
            " all parameters share the count, or has one epsilon for several dtypes (Adafactor"
            " without `eps[0]`, which needs a group for each dtype): train_iteration needs an"
            " optimizer whose updates are independent; use train_step"
        )


def _after_steps(optimizer: Optimizer, given: Mapping[str, Any], one_by_one: bool) -> list[Any]:
    """Parameters, states, options and attributes after some steps."""
    part: Any = object.__new__(type(optimizer))
    own = {k: v for k, v in vars(optimizer).items() if k not in ("step", "state", "param_groups")}
    part.__dict__.update(_copied(own), **given)
    part.state = defaultdict(dict)
    part.param_groups = [
        {**_copied(_options(group)), "params": _parameters(group, number)}
        for number, group in enumerate(optimizer.param_groups)
    ]
    for group in part.param_groups:
        if "lr" in group and group["lr"] == 0:  # of a warm-up, at which all updates are equal
            group["lr"] = 1.0
    for step in range(STEPS):
        for group in part.param_groups:
            for number, parameter in enumerate(group["params"]):
                made = (parameter.detach() - 0.25 * number - 0.125) * (step + 1)
                made *= SMALL if number % 2 else 1.0
                if one_by_one:
                    run_update(part, group, [parameter], [made], part.state)
                else:
                    parameter.grad = made
        with torch.no_grad():
            own_step(type(part))(part)
        for group in part.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    others = ("state", "param_groups", CHECKED_ONCE)
    attributes = {k: v for k, v in vars(part).items() if k not in others}
    parameters = [p for group in part.param_groups for p in group["params"]]
    shared = [value for key, value in part.state.items() if not isinstance(key, torch.Tensor)]
    states = [part.state.get(parameter, {}) for parameter in parameters]
    return [parameters, states, shared, attributes, [*map(_options, part.param_groups)]]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _kinds(group: dict[str, Any]) -> list[tuple[torch.dtype, torch.device]]:
    return [*dict.fromkeys((p.dtype, p.device) for p in group["params"])]


def _parameters(group: dict[str, Any], number: int) -> list[torch.nn.Parameter]:
    made = []
    for dtype, device in _kinds(group):
        numbers = torch.arange(16, device=device).reshape(SHAPE).div(16).to(dtype)
        made += [torch.nn.Parameter(numbers * (number + shift)) for shift in (0.5, 1.0)]
    return made


def _copied(value: Any) -> Any:
    """Containers with copies of their tensors; parameters and other objects are shared."""

    def copied(leaf: Any) -> Any:
        plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)
        return leaf.clone() if plain else leaf

    return tree_map(copied, value)


def _equal(first: Any, second: Any) -> bool:
    """True if trees are equal, tensors to the bit (of which float16's may be no numbers)."""
    (ours, tree), (theirs, other) = tree_flatten(first), tree_flatten(second)
    return tree == other and all(map(_same, ours, theirs))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        is_same_kind = (first.dtype, first.shape) == (second.dtype, second.shape)
        return is_same_kind and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    return first is second or bool(first == second)
