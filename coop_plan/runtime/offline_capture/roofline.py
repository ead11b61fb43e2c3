"""Roofline cost model of ops on an absent device (Williams et al., CACM 2009).

    time = max(launch, operations / (peak of the type x share of the class), bytes / bandwidth)

*Operations* are those of PyTorch's counter (`torch.utils.flop_counter`): matrix products,
convolutions and fused attention with their backwards. Other ops have bytes only. *Bytes* are one
read of each input and one write of each new output. A broadcast element is read once, and a gather
reads only the elements it returns. float32 products run in tf32 where PyTorch allows it,
convolutions by default. A fused region has as many launches as kernels, as Inductor's scheduler
finds them for the device. It moves each input and result once, and tensors between kernels twice.

*Workspace* follows documented formulas. Flash attention's backward has a float32 accumulator and
one float32 per row (flash-attention 2, `mha_bwd`), and the gradients of all heads if heads share
keys. Efficient attention's backward has one float32 per row. cuBLAS has a resident workspace of
fixed size. A fused region has the tensors between its kernels. An op that consists of others costs
what they cost, and has the tensors between them. All other ops have none: that of a
convolution depends on cuDNN's choice. On the CPU workspace is measured (`library_memory.py`).
"""

import dataclasses
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from coop_plan.runtime.capture.custom_ops import COMPOSED_KERNELS
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.fused.compiled import MODELLED
from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.runtime.offline_capture.library_memory import cpu_scratch_bytes, library_profile
from coop_plan.runtime.op_profile import Allocation, OpProfile, Output
from coop_plan.runtime.torch_internals.fakes import FakeTensor
from coop_plan.runtime.torch_internals.ops import (
    EFFICIENT_BACKWARD,
    FLASH_BACKWARD,
    FLASH_BACKWARD_ON_CPU,
    FLASH_ON_CPU,
    OpOverload,
    storage_key,
    tree_flatten,
)
from coop_plan.runtime.torch_internals.tracing import TorchDispatchMode

aten = torch.ops.aten

CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select, aten.select_scatter}
"""Ops that read only the returned elements of their first input."""

ATTENTION = "scaled_dot_product"


def _attention_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    count: Any = sdpa_flop_count
    return int(count(query.shape, key.shape, value.shape))


def _attention_backward_on_cpu(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    count: Any = sdpa_backward_flop_count
    return int(count(gradient.shape, query.shape, key.shape, value.shape))


FLOP_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    FLASH_ON_CPU: _attention_on_cpu,
    FLASH_BACKWARD_ON_CPU: _attention_backward_on_cpu,
}
"""Operation counts by op: PyTorch's, and those of the CPU attention kernels, which it lacks."""


class Roofline:
    """Profiles of ops on `spec`, from fake tensors alone."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.uses_matmul = False

    @property
    def resident_bytes(self) -> int:
        """Memory that libraries hold for the ops profiled so far: cuBLAS's workspace."""
        on_cuda = self.spec.kind == "cuda"
        return self.spec.matmul_workspace_bytes if on_cuda and self.uses_matmul else 0

    def device_document(self) -> dict[str, Any]:
        """The device entry of the graph document."""
        spec = self.spec
        return {
            "kind": spec.kind,
            "name": f"{spec.name} (roofline; workspaces of attention only)",
            "memory_bytes": spec.memory_bytes,
            "h2d_bytes_per_s": spec.link_bytes_per_s,
            "d2h_bytes_per_s": spec.link_bytes_per_s,
        }

    def profile(self, target: OpOverload, args: Any, kwargs: Any, result: Any) -> OpProfile:
        """The profile of `target(*args, **kwargs)`, which returns `result`; all tensors are fake.

        Raises:
            CaptureError: a shape that depends on data, or a sparse result.
        """
        on_cpu = self.spec.kind == "cpu"
        if known := library_profile(target, args, kwargs) if on_cpu else None:
            work = work_of(target, args, kwargs, result)
            return dataclasses.replace(known, cost_us=self.cost_us(work))
        inner = self._inner_ops(target, args) if target in COMPOSED_KERNELS else None
        inputs = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        outputs = _outputs(target, inputs, tree_flatten(result)[0])
        results = tree_flatten(result)[0]
        allocations = tuple(
            Allocation(output.bytes, position, 0)
            for position, output in enumerate(outputs)
            if output is not None
            and output.alias < 0
            and output.duplicate_of < 0
            and output.bytes
            and results[position].device.type == self.spec.kind
        )
        made = sum(output.bytes for output in outputs if output is not None and output.alias < 0)
        region = MODELLED.get(target)
        if inner is not None:
            workspace = max(0, inner.peak_bytes - made)
        elif region is not None:
            workspace = region.scratch_bytes
        else:
            workspace = workspace_bytes(self.spec.kind, target, args, kwargs)
        if workspace:
            allocations = (Allocation(workspace, -1, 0), *allocations)
        if not made:
            return OpProfile(0.0, outputs, allocations, workspace, 0)
        if inner is not None:
            cost = inner.cost_us
        elif region is None:
            cost = self.cost_us(work_of(target, args, kwargs, result))
        else:
            work = OpWork("memory", 0, region.moved_bytes, results[0].dtype)
            cost = max(self.cost_us(work), self.spec.launch_us * region.kernels)
        return OpProfile(cost, outputs, allocations, workspace, 0)

    def _inner_ops(self, target: OpOverload, args: Sequence[Any]) -> "InnerOps":
        """Time and memory of the ops that an op consists of, which run on fake tensors."""
        inner = InnerOps(self)
        fake = next(value for value in args if isinstance(value, FakeTensor))
        with torch.no_grad(), fake.fake_mode, inner:
            COMPOSED_KERNELS[target](*args)
        return inner

    def cost_us(self, work: "OpWork") -> float:
        """Time of an op's work, µs."""
        spec = self.spec
        seconds = work.bytes / (spec.bytes_per_s * spec.memory_share)
        if work.kind != "memory":
            share = getattr(spec, f"{work.kind}_share")
            peak = self._peak(work.dtype, work.kind == "convolution")
            seconds = max(seconds, work.operations / (peak * share))
            self.uses_matmul |= work.kind == "matmul"
        return max(spec.launch_us, seconds * 1e6)

    def _peak(self, dtype: torch.dtype, convolution: bool) -> float:
        name = str(dtype).removeprefix("torch.")
        if name == "float32" and self.spec.kind == "cuda":
            backends = torch.backends
            allowed = backends.cudnn.allow_tf32 if convolution else backends.cuda.matmul.allow_tf32
            name = "tf32" if allowed and "tf32" in self.spec.flops else name
        return self.spec.flops.get(name, self.spec.flops["float32"])


class InnerOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that adds up the times of ops, and counts the memory that they allocate."""

    def __init__(self, model: Roofline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.cost_us = 0.0
        self.peak_bytes = 0
        self._live: dict[Hashable, tuple[int, weakref.ref[Any]]] = {}
        self.live_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage_key(v) for v in tree_flatten((args, kwargs))[0] if _is_tensor(v)}
        made = [v for v in tree_flatten(result)[0] if _is_tensor(v)]
        for value in made:
            if storage_key(value) not in given:
                self._count(value)
        if made and not func.is_view:
            self.cost_us += self.model.cost_us(work_of(func, args, kwargs, result))
        return result

    def _count(self, value: torch.Tensor) -> None:
        storage, key = value.untyped_storage(), storage_key(value)
        size = storage.nbytes()

        def freed(_: object) -> None:
            del self._live[key]
            self.live_bytes -= size

        self._live[key] = size, weakref.ref(storage, freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class OpWork(NamedTuple):
    """Work of an op: its class, operations, bytes to read and write, and dtype."""

    kind: Literal["matmul", "convolution", "attention", "memory"]
    operations: int
    bytes: int
    dtype: torch.dtype


def work_of(target: OpOverload, args: Any, kwargs: Any, result: Any) -> OpWork:
    """The work of `target(*args, **kwargs)`, which returns `result`."""
    packet = target.overloadpacket
    inputs = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
    results = [v for v in tree_flatten(result)[0] if isinstance(v, torch.Tensor)]
    read = {storage_key(value) for value in inputs}
    fresh = {storage_key(v): v for v in results if storage_key(v) not in read}
    made = sum(value.untyped_storage().nbytes() for value in fresh.values())
    moved = made + sum(_distinct_bytes(value) for value in inputs)
    if packet in GATHERS:
        moved = 2 * made + sum(_distinct_bytes(value) for value in inputs[1:])
    dtype = (inputs or results)[0].dtype
    formula = FLOP_FORMULAS.get(packet)
    if formula is None:
        return OpWork("memory", 0, moved, dtype)
    kind: Literal["matmul", "convolution", "attention"] = "matmul"
    if packet in CONVOLUTIONS:
        kind = "convolution"
    elif ATTENTION in str(packet):
        kind = "attention"
    return OpWork(kind, int(formula(*args, **kwargs, out_val=result)), moved, dtype)


def _distinct_bytes(value: torch.Tensor) -> int:
    """Bytes of a tensor's distinct elements; a broadcast one counts once."""
    count = 1
    for length, stride in zip(value.shape, value.stride(), strict=True):
        count *= length if stride else 1
    return count * value.element_size()


def _outputs(
    target: OpOverload, inputs: list[torch.Tensor], results: list[Any]
) -> tuple[Output | None, ...]:
    sources = {storage_key(value): i for i, value in reversed(list(enumerate(inputs)))}
    owner: dict[int, int] = {}
    outputs: list[Output | None] = []
    for position, value in enumerate(results):
        if not isinstance(value, torch.Tensor):
            outputs.append(None)
            continue
        if value.layout is not torch.strided:
            raise CaptureError(f"{target} returns a sparse tensor, which an arena cannot hold")
        if not isinstance(value, FakeTensor) or not all(isinstance(n, int) for n in value.shape):
            raise CaptureError.out_of_data(target, "a shape")
        key = storage_key(value)
        layout = str(value.dtype), tuple(value.shape), value.stride(), int(value.storage_offset())
        size = value.untyped_storage().nbytes()
        if key in sources:
            outputs.append(Output(0, sources[key], -1, *layout))
        else:
            outputs.append(Output(size, -1, owner.get(key, -1), *layout))
            owner.setdefault(key, position)
    return tuple(outputs)


def workspace_bytes(kind: str, target: OpOverload, args: Any, kwargs: Any) -> int:
    """Scratch of an op on a "cpu" or "cuda" device, in bytes.

    It is measured, or that of the formulas of the module's docstring.
    """
    measured = cpu_scratch_bytes(target, args, kwargs) if kind == "cpu" else None
    if measured is not None:
        return measured
    packet = target.overloadpacket
    if packet is not FLASH_BACKWARD and packet is not EFFICIENT_BACKWARD:
        return 0
    query, key = args[1], args[2]
    batch, heads, rows, width = map(int, query.shape)
    row_sums = 4 * batch * heads * _round_up(rows, 128)
    if packet is EFFICIENT_BACKWARD:
        return row_sums
    grouped = 0
    if key.shape[1] != heads:
        grouped = 2 * batch * heads * int(key.shape[2]) * width * int(query.element_size())
    return row_sums * (1 + _round_up(width, 32 if width <= 128 else 64)) + grouped


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
