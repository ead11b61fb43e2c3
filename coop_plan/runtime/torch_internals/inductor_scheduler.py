"""Inductor's scheduler without its code generator: the kernels of a graph on an absent device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from coop_plan.runtime.torch_internals.inductor import (
    device_of_results,
    outside_traces,
    traced_for_inductor,
)

MULTIPROCESSORS = 108
"""Multiprocessors of an A100. Inductor splits a reduction with too few results for all of them."""


class Scheduled(NamedTuple):
    """Number of kernels of a graph, the bytes that they move, and the bytes of their scratch.

    Moved are each input and each result once, and tensors between kernels twice.
    """

    kernels: int
    moved_bytes: int
    scratch_bytes: int


def scheduled(graph: fx.Graph, examples: Sequence[torch.Tensor]) -> Scheduled:
    """The kernels of a graph that returns a tuple of tensors, for inputs like `examples`.

    Nothing is compiled, and no Triton is needed. A CUDA device may be a pretended one.

    Raises:
        Exception: of any type, if Inductor fails.
    """
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    init_backend_registration()
    device = device_of_results(graph).type
    with outside_traces(device) as mode, _pretended_gpu(), V.set_fake_mode(mode), DebugContext():
        module, inputs = traced_for_inductor(graph, examples, mode)
        post_grad_passes(module, True)
        lowering = GraphLowering(
            module, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True
        )
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
            return _kernels(lowering)


def _kernels(lowering: Any) -> Scheduled:
    accesses = [
        node.get_read_write_buffer_accesses(True, True) for node in lowering.scheduler.nodes
    ]
    accesses = [found for found in accesses if found]  # others are no kernels
    spans: dict[str, list[int]] = {}
    moved: dict[str, int] = {}
    for i, found in enumerate(accesses):
        for accessed, size in found.items():
            name = _overwritten(lowering, accessed)
            spans.setdefault(name, [i, i])[1] = i
            moved[name] = max(moved.get(name, 0), size)
    arguments = {*lowering.get_output_names(), *lowering.graph_inputs}
    scratch = spans.keys() - arguments
    live = [0] * len(accesses)
    for name in scratch:
        first, last = spans[name]
        for i in range(first, last + 1):
            live[i] += _storage_bytes(lowering.name_to_buffer[name].get_layout())
    total = sum(moved.values()) + sum(moved[name] for name in scratch)
    return Scheduled(len(accesses), total, max(live, default=0))


def _overwritten(lowering: Any, name: str) -> str:
    """The buffer that a kernel overwrites to make `name`, or `name` itself."""
    from torch._inductor.ir import MutationLayoutSHOULDREMOVE

    while name in lowering.name_to_buffer:
        layout = lowering.name_to_buffer[name].get_output_spec()
        if not isinstance(layout, MutationLayoutSHOULDREMOVE):
            break
        name = layout.get_buffer().get_name()
    return name


def _storage_bytes(layout: Any) -> int:
    return int(layout.storage_size()) * int(layout.dtype.itemsize)


@contextmanager
def _pretended_gpu() -> Iterator[None]:
    """Let the scheduler for CUDA run without Triton and without a device.

    Assumed: the scheduler asks `has_triton` of its module, and properties of a device only through
    `DeviceProperties.create`.
    """
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    module: Any = scheduler
    properties: Any = DeviceProperties
    create, has_triton = DeviceProperties.__dict__["create"], module.has_triton

    def create_pretended(device: torch.device) -> Any:
        if device.type != "cuda":
            return create.__func__(DeviceProperties, device)
        return DeviceProperties(
            type="cuda", index=device.index, multi_processor_count=MULTIPROCESSORS, cc=80, major=8,
            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
            max_threads_per_block=1024, warp_size=32,
        )  # fmt: skip

    properties.create, module.has_triton = create_pretended, lambda: True
    try:
        yield
    finally:
        properties.create, module.has_triton = create, has_triton
