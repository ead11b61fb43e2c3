"""Constant propagation for small fake tensors while a model is built.

A fake tensor has no values, but some modules read values when they are built: the rates of
stochastic depth, for example, are `torch.linspace(...).tolist()`. Small tensors that depend on no
parameter and no random number are computed on the CPU as well.
"""

from typing import Any

import torch

from coop_plan.runtime.torch_internals.fakes import FakeTensor, unset_fake_temporarily
from coop_plan.runtime.torch_internals.ops import (
    TENSOR_ITEM,
    is_mutable,
    storage_key,
    tree_flatten,
    tree_map,
)
from coop_plan.runtime.torch_internals.tracing import TorchDispatchMode

aten = torch.ops.aten

MAX_ELEMENTS = 4096
"""Largest number of elements of a tensor whose values are tracked."""

UNINITIALIZED = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
"""Ops whose results have no defined values."""

VALUE_READS = {TENSOR_ITEM, aten.equal.default}
"""Ops that return a Python value, and so need the values of their tensors."""


class _Constant:
    """The value of a fake tensor, stored as an attribute that is copied with the tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __deepcopy__(self, _: object) -> "_Constant":
        with unset_fake_temporarily():
            return _Constant(self.value.clone())


class ConstantValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode around a fake mode that tracks the values of small constant tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._invalidated: set[int] = set()
        """Storages of tracked values that were overwritten with unknown ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        values = [self._value(tensor) for tensor in given]
        is_constant = _is_deterministic(func) and all(value is not None for value in values)
        if is_constant and func in VALUE_READS:
            return _evaluate(func, args, kwargs, self._value)
        output = func(*args, **kwargs)
        results = [v for v in tree_flatten(output)[0] if isinstance(v, FakeTensor)]
        if is_constant and results and all(result.numel() <= MAX_ELEMENTS for result in results):
            try:
                computed = tree_flatten(_evaluate(func, args, kwargs, self._value))[0]
            except RuntimeError:  # no CPU kernel: not tracked
                computed = []
            found = [value for value in computed if isinstance(value, torch.Tensor)]
            for result, value in zip(results, found, strict=False):
                result.coop_value = _Constant(value)  # type: ignore[attr-defined]
            is_constant = bool(found)
        else:
            is_constant = False
        if not is_constant and is_mutable(func):
            self._invalidated |= {storage_key(value) for value in values if value is not None}
        return output

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tracked value of a tensor, if there is one."""
        if not isinstance(tensor, FakeTensor):  # `torch.tensor` before it becomes a fake tensor
            return (
                tensor if tensor.device.type == "cpu" and tensor.numel() <= MAX_ELEMENTS else None
            )
        constant: _Constant | None = getattr(tensor, "coop_value", None)
        return (
            None
            if constant is None or storage_key(constant.value) in self._invalidated
            else constant.value
        )


def _is_deterministic(func: Any) -> bool:
    """True if the results of an op depend on its arguments only."""
    return (
        torch.Tag.nondeterministic_seeded not in func.tags
        and func.overloadpacket not in UNINITIALIZED
    )


def _evaluate(func: Any, args: Any, kwargs: Any, value_of: Any) -> Any:
    """Run an op on the tracked values, on the CPU."""

    def on_cpu(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return value_of(argument)
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    args, kwargs = tree_map(on_cpu, (args, kwargs))
    with unset_fake_temporarily(), torch.no_grad():
        return func(*args, **kwargs)
