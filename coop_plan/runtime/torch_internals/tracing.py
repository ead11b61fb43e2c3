"""How ops are traced.

What changes PyTorch here does so for all threads while it lasts: the tables are the process's. One
thread at a time does so; what others trace meanwhile is traced alike.
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

from coop_plan.runtime.locks import fork_safe_lock

__all__ = ["TorchDispatchMode"]


@contextmanager
def below_autograd_in_grad_mode() -> Iterator[None]:
    """Let kernels run without autograd around them, as if it were: some read the grad mode."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        yield


_patched = fork_safe_lock()

_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextmanager
def python_kernels(wanted: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """Trace each op by the given Python function, or, with None, by its C++ code.

    Assumed: PyTorch's own Python versions of composite ops are in `py_kernels` of the op, under
    `Autograd` and `CompositeImplicitAutograd`; without an entry the C++ kernel runs; what was
    looked up before is in `_dispatch_cache`.
    """
    with _patched:
        kept = {op: {key: op.py_kernels.get(key) for key in _KEYS} for op in wanted}
        try:
            for op, kernel in wanted.items():
                _set_kernels(op, dict.fromkeys(_KEYS, kernel))
            yield
        finally:
            for op, kernels in kept.items():
                _set_kernels(op, kernels)


def _set_kernels(op: Any, kernels: Mapping[Any, Any]) -> None:
    for key, kernel in kernels.items():
        if kernel is None:
            op.py_kernels.pop(key, None)
        else:
            op.py_kernels[key] = kernel
    op._dispatch_cache.clear()


def run_composite(op: Any, *args: Any) -> Any:
    """Run the C++ code of a composite op, whatever stands in its `py_kernels`."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def composite_overloads(names: Sequence[str]) -> list[Any]:
    """All overloads of those of the named ATen ops that this PyTorch has."""
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


@contextmanager
def kept_though_unused(op: OpOverload) -> Iterator[None]:
    """Trace an op without outputs where it stands, with no token from one effect to the next.

    Assumed: the registry's `effect` of an op says whether a token is handed through it, which 2.11
    does not for checks; and what is in `_side_effectful_functions` is no dead code.
    """
    holder: Any = getattr(simple_registry.singleton.find(op._schema.name), "effect", None)
    with _patched:
        kept = None if holder is None else holder.effect
        is_new = op not in _side_effectful_functions
        try:
            if holder is not None:
                holder.register(None)
            _side_effectful_functions.add(op)
            yield
        finally:
            if holder is not None:
                holder.register(kept)
            if is_new:
                _side_effectful_functions.discard(op)


@contextmanager
def before_functionalization(see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call `see(op, args)` before AOTAutograd functionalizes an op.

    Assumed: it asks `FunctionalTensorMode.__torch_dispatch__`, which it looks up at the class.
    """
    functional: Any = FunctionalTensorMode
    with _patched:
        kept = functional.__torch_dispatch__

        def dispatch(
            mode: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            see(func, args)
            return kept(mode, func, types, args, kwargs)

        functional.__torch_dispatch__ = dispatch
        try:
            yield
        finally:
            functional.__torch_dispatch__ = kept


def lay_out_functional(
    changed: Any, spread: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
) -> None:
    """Let a functional tensor stand for `spread(what it stands for, its strides)`.

    Nothing is done if it stands for a tensor of its own strides. Assumed: a `FunctionalTensor` has
    the strides of eager, and its `elem` those of the functional graph.
    """
    if not isinstance(changed, FunctionalTensor) or changed.stride() == changed.elem.stride():
        return
    trace = PythonFunctionalizeAPI()
    with trace.redispatch_to_next():
        moved = spread(trace.unwrap_tensors(changed), changed.stride())
    trace.replace(changed, moved)
    trace.commit_update(changed)
    trace.sync(changed)
