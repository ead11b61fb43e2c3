"""Fake tensors, and models of fake tensors on an absent device."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.utils import preserve_rng_state
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "unset_fake_temporarily",
]


@contextmanager
def real_mode() -> Iterator[None]:
    """Run ops on real tensors during a trace: no fake mode, no autocast, no gradients.

    The states of the generators are restored at the end. Without the Python dispatcher, which a
    trace enables, an op takes as long as in a step: some µs less for each op that it calls.
    """
    with (
        unset_fake_temporarily(),
        no_python_dispatcher(),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        preserve_rng_state(),
    ):
        yield


def fake_over(storage: torch.UntypedStorage, like: "Layout", mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of a mode, over a storage of the `meta` device."""
    with unset_fake_temporarily(), torch.no_grad():
        whole = torch.empty(0, dtype=like.dtype, device="meta")
        made = whole.set_(storage, like.offset, like.shape, like.stride)
        made = torch._conj(made) if like.is_conj else made
        made = torch._neg_view(made) if like.is_neg else made
        return FakeTensor(mode, made, like.device)


def meta_storage(size: int) -> torch.UntypedStorage:
    """A storage without memory."""
    with unset_fake_temporarily():
        return torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()


class Layout(NamedTuple):
    """Type and geometry of a fake tensor, without its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(value: torch.Tensor) -> "Layout":
        """The layout of a tensor."""
        return Layout(
            *(value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset())),
            *(value.device, value.is_conj(), value.is_neg()),
        )


DEVICE_CALLS = (
    "set_device",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
)
"""Functions of `torch.cuda` that act on a device and return nothing."""

MEMORY_COUNTERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)
"""Functions of `torch.cuda` that return bytes of PyTorch's allocator."""


class Idle:
    """A stream or an event of the pretended device, which never has work to do."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        """All work is done."""
        return True

    def elapsed_time(self, _: "Idle") -> float:
        """Milliseconds to another event."""
        return 0.0

    def record_event(self, event: "Idle | None" = None) -> "Idle":
        """The event, or a new one."""
        return event or Idle()

    def _nothing(self, *_: object) -> None:
        pass

    record = wait = synchronize = wait_event = wait_stream = _nothing


def pretend_cuda(name: str, memory_bytes: int) -> None:
    """Make `torch.cuda` report one device without a driver (`offline_capture/fake_device.py`).

    Programs read its name and memory, `torch.nn.DataParallel` also its multiprocessors: one, since
    the number is unknown and no other device is compared with it. The compute capability is 8.0,
    for which attention is chosen (`fake_cuda_device.cpp`). All memory is free.

    Assumed: factories of CUDA tensors call `torch.cuda._lazy_init`, which raises in CPU builds;
    autocast is disabled unless `torch.cuda.is_available()`; a fake mode with `avoid_device_init`
    keeps its constants off devices.
    """
    mode: Any = FakeTensorMode
    mode.avoid_device_init = True
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    has = SimpleNamespace(
        name=name, total_memory=memory_bytes, multi_processor_count=1, major=8, minor=0
    )
    cuda.get_device_capability = lambda device=None: (has.major, has.minor)
    cuda.mem_get_info = lambda device=None: (memory_bytes, memory_bytes)
    for function in DEVICE_CALLS:
        setattr(cuda, function, lambda *_, **__: None)
    for function in ("_exchange_device", "_maybe_exchange_device"):  # of `torch.cuda.device`
        setattr(cuda, function, lambda _: 0)
    for function in ("Stream", "Event", "stream", "current_stream", "default_stream"):
        setattr(cuda, function, Idle)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *_: None
    for function in MEMORY_COUNTERS:
        setattr(cuda, function, lambda device=None: 0)
    cuda.get_device_properties = lambda device=None: has
    cuda.get_device_name = lambda device=None: name
    cuda.get_rng_state = lambda device="cuda": (
        torch.get_rng_state()
    )  # Dynamo saves it around a trace
    cuda.set_rng_state = lambda state, device="cuda": None
    cudnn: Any = torch.backends.cudnn
    cudnn.is_acceptable = lambda tensor: False  # it would warn at each recurrent layer


@contextmanager
def copyable_fakes() -> Iterator[None]:
    """Let `copy.deepcopy` copy fake parameters, as `torch.nn.Transformer` does for its layers.

    Assumed: a fake tensor is copied with its attributes, including its mode (torch/_tensor.py:158);
    tensors of two modes cannot be mixed.
    """
    mode: Any = FakeTensorMode
    mode.__deepcopy__ = lambda self, _: self
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        del mode.__deepcopy__


@contextmanager
def legacy_constructors_on(device: torch.device) -> Iterator[None]:
    """Let the legacy constructor `torch.Tensor(3, 4)` respect the default `device`.

    Assumed: `torch.Tensor` is a Python class that inherits `__new__`, which ignores the default
    device.
    """
    tensor: Any = torch.Tensor
    original = tensor.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        return made.to(device) if cls is tensor else made

    tensor.__new__ = new
    try:
        yield
    finally:
        tensor.__new__ = original


@contextmanager
def skip_truncated_normal() -> Iterator[None]:
    """Let `torch.nn.init.trunc_normal_` skip fake parameters.

    It samples until all values are within bounds, and so reads them. Assumed: it calls
    `_no_grad_trunc_normal_` of its module.
    """
    init: Any = torch.nn.init
    original = init._no_grad_trunc_normal_

    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


@contextmanager
def convertible_modules() -> Iterator[None]:
    """Let `module.to(...)` work on fake parameters.

    `torch.nn.Module._apply` swaps the contents of fake tensors, which fails for tensors with other
    references, such as the fake mode's. Here each parameter is replaced; modules that share one
    share the new one.
    """
    made: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}

    def converted(given: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if id(given) not in made:
            with torch.no_grad():
                value = fn(given)
            new = torch.nn.Parameter(value, given.requires_grad)
            made[id(given)] = given, cast("Any", given) if value is given else new
        return made[id(given)][1]

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, given in self._parameters.items():
            if given is not None:
                self._parameters[name] = converted(given, fn)
        for name, given in self._buffers.items():
            if given is not None:
                self._buffers[name] = fn(given)
        return self

    module: Any = torch.nn.Module
    original, module._apply = module._apply, _apply
    try:
        yield
    finally:
        module._apply = original
