"""Tensors without memory, and models on a device that is not there."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
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
def real_world() -> Iterator[None]:
    """Run ops on real tensors while a graph is traced: no fake mode, no autocast, no gradients.

    The generators stand where they stood when it ends.
    """
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        preserve_rng_state(),
    ):
        yield


def believe_in_cuda(name: str, memory_bytes: int) -> None:
    """Let Python's side of CUDA not ask for a device (`runtime/offline_capture/fake_device.py`).

    Scripts ask what it is called and has, `torch.nn.DataParallel` for its multiprocessors, too: it
    says one, as how many is not known, and there is no other device to compare it with.

    Assumed: what makes a tensor on CUDA calls `torch.cuda._lazy_init`, which refuses in builds
    without CUDA; autocast does nothing unless `torch.cuda.is_available()`, as other modules do;
    a fake mode that avoids devices keeps its constants off them (`avoid_device_init`).
    """
    mode: Any = FakeTensorMode
    mode.avoid_device_init = True
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    has = SimpleNamespace(name=name, total_memory=memory_bytes, multi_processor_count=1)
    cuda.get_device_properties = lambda device=None: has
    cuda.get_device_name = lambda device=None: name
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()  # around what is traced
    cuda.set_rng_state = lambda state, device="cuda": None
    cudnn: Any = torch.backends.cudnn
    cudnn.is_acceptable = lambda tensor: False  # it would warn at each recurrent layer


@contextmanager
def copyable_fakes() -> Iterator[None]:
    """Let `copy.deepcopy` copy fake parameters, as `torch.nn.Transformer` copies its layers.

    Assumed: a fake tensor is copied with its attributes, its mode among them
    (torch/_tensor.py:158); of two modes tensors do not mix.
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
def tensors_of_sizes(device: torch.device) -> Iterator[None]:
    """Let `torch.Tensor(3, 4)` make its tensor on `device`, as `torch.empty(3, 4)` does there.

    Assumed: `torch.Tensor` is a class of Python that leaves `__new__` to its base, which knows no
    default device.
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
def nothing_drawn_twice() -> Iterator[None]:
    """Let `torch.nn.init.trunc_normal_` leave fake parameters as they are.

    It draws anew until all values are within its bounds, which asks for them. Assumed: it calls
    `_no_grad_trunc_normal_` of its module.
    """
    init: Any = torch.nn.init
    original = init._no_grad_trunc_normal_

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    init._no_grad_trunc_normal_ = drawn
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


@contextmanager
def convertible_modules() -> Iterator[None]:
    """Let `module.to(...)` work on fake parameters.

    `torch.nn.Module._apply` swaps the contents of fake tensors, which it may not do with those that
    are referred to elsewhere, as the fake mode does. Here a parameter is replaced, one that several
    modules have by one new one.
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
