"""Overrides of PyTorch's tables that decide how ops are traced.

The tables belong to the process, so an override affects all threads. A lock admits one thread at a
time; traces of other threads see the same overrides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._library import simple_registry
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    PythonFunctionalizeAPI,
)
from torch.fx.node import _side_effectful_functions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from coop_plan.runtime.locks import fork_safe_lock

__all__ = ["TorchDispatchMode", "without_modes"]


@contextmanager
def below_autograd_with_grad_mode() -> Iterator[None]:
    """Run kernels below autograd with grad mode on, which some of them read."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        yield


patch_lock = fork_safe_lock()
"""Lock of a thread that overrides PyTorch's tables."""

_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
META = (torch._C.DispatchKey.Meta,)


@contextmanager
def python_kernels(
    kernels_by_op: Mapping[Any, Callable[..., Any] | None], keys: Sequence[Any] = _KEYS
) -> Iterator[None]:
    """Trace each op by the given Python function, or, with None, by its C++ code.

    With `META` as keys the function makes only the layout of the result.

    Assumed: `py_kernels` of an op has PyTorch's Python versions of composite ops, under `Autograd`
    and `CompositeImplicitAutograd`; without an entry the C++ kernel runs; `_dispatch_cache` holds
    earlier lookups.
    """
    with patch_lock:
        saved = {op: {key: op.py_kernels.get(key) for key in keys} for op in kernels_by_op}
        try:
            for op, kernel in kernels_by_op.items():
                _set_kernels(op, dict.fromkeys(keys, kernel))
            yield
        finally:
            for op, kernels in saved.items():
                _set_kernels(op, kernels)


def _set_kernels(op: Any, kernels: Mapping[Any, Any]) -> None:
    for key, kernel in kernels.items():
        if kernel is None:
            op.py_kernels.pop(key, None)
        else:
            op.py_kernels[key] = kernel
    op._dispatch_cache.clear()


def run_composite(op: Any, *args: Any) -> Any:
    """Run the C++ code of a composite op, regardless of its `py_kernels`."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def run_meta(op: Any, *args: Any) -> Any:
    """Run the C++ code that makes the layout of a result, regardless of `py_kernels`."""
    return op._op_dk(META[0], *args)


def overloads(names: Sequence[str], only: str | None = None) -> list[Any]:
    """All overloads of the named ATen ops that exist in this PyTorch, or `only` one of each."""
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    pairs = [(packet, name) for packet in packets for name in packet.overloads()]
    return [getattr(packet, name) for packet, name in pairs if only in (None, name)]


@contextmanager
def keep_unused(op: OpOverload) -> Iterator[None]:
    """Keep an op without outputs in traces, in program order and without an effect token.

    Assumed: an op's `effect` in the registry decides whether it gets a token (in 2.11 checks get
    none); dead-code elimination keeps ops in `_side_effectful_functions`.
    """
    holder: Any = getattr(simple_registry.singleton.find(op._schema.name), "effect", None)
    with patch_lock:
        saved = None if holder is None else holder.effect
        is_new = op not in _side_effectful_functions
        try:
            if holder is not None:
                holder.register(None)
            _side_effectful_functions.add(op)
            yield
        finally:
            if holder is not None:
                holder.register(saved)
            if is_new:
                _side_effectful_functions.discard(op)


@contextmanager
def before_functionalization(see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call `see(op, args)` before AOTAutograd functionalizes an op.

    Assumed: it calls `FunctionalTensorMode.__torch_dispatch__`, looked up on the class.
    """
    functional: Any = FunctionalTensorMode
    with patch_lock:
        saved = functional.__torch_dispatch__

        def dispatch(
            mode: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            see(func, args)
            return saved(mode, func, types, args, kwargs)

        functional.__torch_dispatch__ = dispatch
        try:
            yield
        finally:
            functional.__torch_dispatch__ = saved


def restride_functional(
    tensor: Any, restride: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
) -> None:
    """Replace the value of a functional tensor by `restride(value, strides in eager)`.

    Nothing is done if the strides are equal. Assumed: a `FunctionalTensor` has the strides of
    eager, and its `elem` those of the functional graph.
    """
    if not isinstance(tensor, FunctionalTensor) or tensor.stride() == tensor.elem.stride():
        return
    trace = PythonFunctionalizeAPI()
    with trace.redispatch_to_next():
        moved = restride(trace.unwrap_tensors(tensor), tensor.stride())
    trace.replace(tensor, moved)
    trace.commit_update(tensor)
    trace.sync(tensor)
