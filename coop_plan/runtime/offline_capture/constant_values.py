"""What small tensors hold that follow from numbers alone, while a model is built of fake ones.

A fake tensor has no values, and modules ask for some when they are built: the rates of stochastic
depth, say, are `torch.linspace(...).tolist()`. Where no parameter and no random number went in,
the few elements are computed beside the fake ones.
"""

from typing import Any

import torch

from coop_plan.runtime.torch_internals.fakes import FakeTensor, unset_fake_temporarily
from coop_plan.runtime.torch_internals.ops import (
    TO_NUMBER,
    is_mutable,
    storage_key,
    tree_flatten,
    tree_map,
)
from coop_plan.runtime.torch_internals.tracing import TorchDispatchMode

aten = torch.ops.aten

MOST = 4096
"""Elements of a tensor, above which its values are not followed."""

UNSET = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""They leave values open."""

ASKS = {TO_NUMBER, aten.equal.default}
"""Ops that return a value, of tensors whose values must be known."""


class _Kept:
    """A value of a fake tensor, among the attributes that go along when that is copied."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __deepcopy__(self, _: object) -> "_Kept":
        with unset_fake_temporarily():
            return _Kept(self.value.clone())


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a fake mode: small tensors keep what they hold, as long as it is known."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lost: set[int] = set()
        """Storages of kept values into which something unknown was written."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        values = [self._value(tensor) for tensor in given]
        known = _follows(func) and all(value is not None for value in values)
        if known and func in ASKS:
            return _computed(func, args, kwargs, self._value)
        made = func(*args, **kwargs)
        results = [v for v in tree_flatten(made)[0] if isinstance(v, FakeTensor)]
        if known and results and all(result.numel() <= MOST for result in results):
            try:
                kept = tree_flatten(_computed(func, args, kwargs, self._value))[0]
            except RuntimeError:  # not on the CPU; then it is not known
                kept = []
            found = [value for value in kept if isinstance(value, torch.Tensor)]
            for result, value in zip(results, found, strict=False):
                result.coop_value = _Kept(value)  # type: ignore[attr-defined]
            known = bool(found)
        else:
            known = False
        if not known and is_mutable(func):
            self._lost |= {storage_key(value) for value in values if value is not None}
        return made

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What it holds, if that is known."""
        if not isinstance(tensor, FakeTensor):  # `torch.tensor` on its way to be a fake one
            return tensor if tensor.device.type == "cpu" and tensor.numel() <= MOST else None
        kept: _Kept | None = getattr(tensor, "coop_value", None)
        return None if kept is None or storage_key(kept.value) in self._lost else kept.value


def _follows(func: Any) -> bool:
    """Whether the results of an op follow from its arguments."""
    return torch.Tag.nondeterministic_seeded not in func.tags and func.overloadpacket not in UNSET


def _computed(func: Any, args: Any, kwargs: Any, value_of: Any) -> Any:
    """The op on the values, which are on the CPU."""

    def here(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return value_of(argument)
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    args, kwargs = tree_map(here, (args, kwargs))
    with unset_fake_temporarily(), torch.no_grad():
        return func(*args, **kwargs)
