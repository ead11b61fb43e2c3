"""Schemas of ops, and storages of tensors."""

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from coop_plan.runtime.torch_internals.fakes import unset_fake_temporarily

__all__ = ["OpOverload", "tree_flatten", "tree_map", "tree_unflatten"]


MERSENNE_TWISTER_OFFSETS = (24, 8, 16)
"""Byte offsets in the state of the CPU generator: the 624 words, `left`, and `next`.

Assumed: the state begins as `CPUGeneratorImplStateLegacy` does (ATen/CPUGeneratorImpl.cpp): a seed
of 64 bits, `left` and `seeded` of 32, `next` of 64, the words, each in 64.
"""


def norm_order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Positions of tensors in the order in which `torch.nn.utils.get_total_norm` adds their norms.

    It groups them by device and dtype, in no order of its own.
    """
    with unset_fake_temporarily():
        empty: list[torch.Tensor | None] = [
            torch.empty(0, dtype=one.dtype, device=one.device) for one in tensors
        ]
        groups = _group_tensors_by_device_and_dtype([empty], with_indices=True)
    return [at for _, positions in groups.values() for at in positions]


def tensor_versions(values: Sequence[object]) -> list[int]:
    """Autograd's version counters; 0 for inference tensors, which have none, and other objects.

    Tensors that share a storage may share it.
    """
    try:
        return [*map(_version, values)]  # without a Python call each
    except (AttributeError, RuntimeError):
        return [_version(value) if _has_version(value) else 0 for value in values]


_version: Callable[[object], int] = operator.attrgetter("_version")


def _has_version(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


def storage_expiry(tensor: torch.Tensor) -> Callable[[], bool]:
    """A function that returns True once the tensor's storage is freed.

    The tensor object itself does not tell: autograd passes its storage to other tensors.
    """
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    is_expired: Callable[[], bool] = reference.expired
    return is_expired


def storage_reference(tensor: torch.Tensor) -> Callable[[], torch.UntypedStorage | None]:
    """A function that returns the tensor's storage, or None once it is freed."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return lambda: torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def is_shared(storages: Sequence[torch.UntypedStorage], i: int) -> bool:
    """True if something besides this sequence has storage `i`: a tensor, or Python code itself.

    Assumed: a storage has one Python object while that is alive.
    """
    used = torch._C._storage_Use_Count(storages[i]._cdata)
    return bool(used > 1) or sys.getrefcount(storages[i]) > 2


def storage_object(storage: torch.UntypedStorage) -> int:
    """The address of the storage's C++ object, a `c10::StorageImpl`."""
    address: int = storage._cdata
    return address


def c_function(target: Any) -> Any:
    """The C function that an op's `__call__` calls, which has no Python frame; others unchanged.

    Assumed: `OpOverload.__call__` is a Python method that may call `_op` for all arguments.
    """
    return target._op if type(target) is OpOverload else target


def elements_spanned(value: torch.Tensor) -> int:
    """Elements of its storage from a tensor's first to its last; 0 if it has none."""
    steps = zip(value.shape, value.stride(), strict=True)
    return value.numel() and 1 + sum((n - 1) * step for n, step in steps)


def is_mutable(op: OpOverload) -> bool:
    """True if an op mutates an argument, by its schema."""
    return bool(op._schema.is_mutable)


def is_view_op(target: object) -> bool:
    """True if an op returns one view of an argument, by its schema."""
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def out_overload(op: OpOverload) -> tuple[OpOverload, str] | None:
    """The out overload of an op with one result, and the name of its out argument.

    None if no overload has the same other arguments.
    """
    signature = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        found = getattr(packet, name)
        written = [a.name for a in found._schema.arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in found._schema.arguments if not a.is_out]
        if len(written) == 1 and others == signature:
            return found, written[0]
    return None


def inplace_overload(op: OpOverload) -> OpOverload | None:
    """The in-place overload of a functional op, which overwrites its first argument, or None."""
    signature = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = getattr(torch.ops.aten, op._schema.name.partition("::")[2] + "_", None)
    found = None if packet is None else getattr(packet, op._overloadname, None)
    if op.namespace != "aten" or found is None:
        return None
    same = [(a.name, str(a.type)) for a in found._schema.arguments] == signature
    return found if same and len(found._schema.returns) == 1 else None


def argument_names(op: OpOverload) -> list[str]:
    """The names of an op's arguments, in order."""
    return [argument.name for argument in op._schema.arguments]


def return_count(op: OpOverload) -> int:
    """Number of results of an op, by its schema."""
    return len(op._schema.returns)


def schema_text(op: OpOverload) -> str:
    """The schema of an op as `torch.library` takes it, namespace included."""
    return str(op._schema)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the negative bit set, such as `imag` of a conjugate."""
    return torch._neg_view(tensor)


def has_no_memory(tensor: torch.Tensor) -> bool:
    """True if a tensor is one of autograd's zero tensors, which have no memory."""
    return tensor._is_zerotensor()


FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
EFFICIENT_BACKWARD: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""Attention's backwards on CUDA, whose arguments are the gradient, query, key, value, ..."""

SEEDS_ON_CPU = (EFFICIENT_BACKWARD.default, torch.ops.aten._efficient_attention_backward.default)
"""Backwards that dereference `philox_seed` and `philox_offset` outside a capture.

Assumed: aten/native/transformers/cuda/attention_backward.cu, where there is dropout.
"""

FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_ON_CPU: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD_ON_CPU: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


LINALG_CHECK: Any = torch.ops.aten._linalg_check_errors.default
"""Op that raises the errors of `torch.linalg`, such as for a singular matrix."""


TENSOR_ITEM: Any = torch.ops.aten._local_scalar_dense.default
"""The op of `tensor.item()`."""

TO_COPY: Any = torch.ops.aten._to_copy.default
"""The op of `tensor.to()` that copies: a cast, or to another device or layout."""

LOG_SOFTMAX: Any = torch.ops.aten._log_softmax.default

LOG_SOFTMAX_BACKWARD: Any = torch.ops.aten._log_softmax_backward_data.default
"""The gradient of `log_softmax`, also within `cross_entropy`."""

UNTAGGED_VIEWS: frozenset[Any] = frozenset(
    {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}
)
"""Ops that return a view, also if their schema does not say so. `view` may become `reshape`."""

BATCH_NORMS: dict[Any, tuple[int | None, int]] = {
    torch.ops.aten._native_batch_norm_legit_functional.default: (5, 3),
    torch.ops.aten._batch_norm_with_update_functional.default: (None, 4),
}
"""Batch norms: position of the flag for training, None if it is set; the first new statistic."""

BATCH_NORM_BACKWARDS: frozenset[Any] = frozenset(
    {torch.ops.aten.native_batch_norm_backward.default, torch.ops.aten.batch_norm_backward.default}
)

SOFTMAX_OPS: frozenset[Any] = frozenset(
    {
        torch.ops.aten._softmax.default,
        LOG_SOFTMAX,
        torch.ops.aten._softmax_backward_data.default,
        LOG_SOFTMAX_BACKWARD,
    }
)
"""Ops whose result depends, in each row, on that row alone."""

CPU_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
"""The fused kernels of `scaled_dot_product_attention` on the CPU."""


def log_softmax_backward(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype, *, out: torch.Tensor
) -> None:
    """`LOG_SOFTMAX_BACKWARD`, written into `out`, which may be `output`."""
    torch.ops.aten._log_softmax_backward_data.out(gradient, output, dim, dtype, out=out)
