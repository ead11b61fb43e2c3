"""The ops of fused regions, one for all regions of equal structure.

An op of a graph document is named after a digest of the region's structure and layouts, which is
equal on all ranks and machines. The overload of the op that runs is a digest of the machine.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from coop_plan.runtime.capture.custom_ops import BOXED_KERNELS, define_op
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.torch_internals.fakes import Layout
from coop_plan.runtime.torch_internals.inductor import (
    compile_graphs,
    device_of_results,
    settings_digest,
)
from coop_plan.runtime.torch_internals.inductor_scheduler import Scheduled, scheduled
from coop_plan.runtime.torch_internals.ops import OpOverload
from coop_plan.schemas.graph import FUSED_NAME

T = TypeVar("T")

RegionGraph = tuple[fx.Graph, Sequence[torch.Tensor]]
"""The graph of a region, on storages, which returns a tuple, and fake tensors for its inputs.

The inputs have the layouts that the ops before the region make."""

SCHEMA = "(Tensor[] inputs) -> Tensor[]"

_ops: dict[str, tuple[torch.device, OpOverload]] = {}
_lock = fork_safe_lock()

MODELLED: dict[OpOverload, Scheduled] = {}
"""Kernels of the ops that only have a model (`modelled_op`)."""


def compiled_ops(regions: Sequence[RegionGraph]) -> list[OpOverload]:
    """The ops `coop_plan::fused_...` of regions, as `op(list of inputs) -> list of results`.

    All that this process has not compiled yet are compiled together.

    Raises:
        CaptureError: Inductor cannot compile a region, as without a compiler.
    """

    def make(named: dict[str, RegionGraph]) -> None:
        kernels = _by_inductor("compile", compile_graphs, [*named.values()])
        for (name, (graph, _)), kernel in zip(named.items(), kernels, strict=True):
            op = define_op(name, SCHEMA, lambda inputs, kernel=kernel: [*kernel([*inputs])])
            BOXED_KERNELS[op] = kernel
            _ops[name] = device_of_results(graph), op

    made = _known(regions, f"on_{settings_digest()}", make)
    for (graph, _), (compiled_for, _) in zip(regions, made, strict=True):
        if compiled_for != device_of_results(graph):
            raise CaptureError(
                f"a region of {device_of_results(graph)} was compiled for {compiled_for} in this"
                " process"
            )
    return [op for _, op in made]


def modelled_ops(regions: Sequence[RegionGraph]) -> list[OpOverload]:
    """The ops of regions on an absent device, whose kernels are in `MODELLED`; they do not run.

    Errors are those of `compiled_ops`.
    """

    def make(named: dict[str, RegionGraph]) -> None:
        for name, (graph, inputs) in named.items():
            kernels = _by_inductor("schedule", scheduled, graph, inputs)
            op = define_op(name, SCHEMA, _refuse)
            MODELLED[op] = kernels
            _ops[name] = device_of_results(graph), op

    return [op for _, op in _known(regions, "modelled", make)]


def _known(
    regions: Sequence[RegionGraph],
    overload: str,
    make: Callable[[dict[str, RegionGraph]], None],
) -> list[tuple[torch.device, OpOverload]]:
    """Devices and ops of regions; `make` adds those that are new to `_ops`, by name."""
    names = [f"{_name(graph, inputs)}.{overload}" for graph, inputs in regions]
    with _lock:
        new = {name: given for name, given in zip(names, regions, strict=True) if name not in _ops}
        if new:
            make(new)
        return [_ops[name] for name in names]


def _refuse(_: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise CaptureError("a region that was captured for an absent device has no code")


def _by_inductor(verb: str, make: Callable[..., T], *region: Any) -> T:
    """Return what Inductor makes of a region; any of its errors is a `CaptureError`."""
    try:
        return make(*region)
    except Exception as error:
        reason = str(error).strip().splitlines()[:1]
        raise CaptureError(
            f"Inductor cannot {verb} a region ({type(error).__name__}: {''.join(reason)})"
        ) from error


def _name(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> str:
    """A name of all that a region's results depend on but the index of its device."""
    numbers = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = [f"{Layout.of(value)} {value.untyped_storage().nbytes()}" for value in inputs]
    lines += [
        f"{node.target} {fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)}"
        for node in graph.nodes
        if node.op != "placeholder"
    ]
    text = re.sub(r"(device\(type='\w+'), index=\d+", r"\1", "\n".join(lines))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{FUSED_NAME.partition('.')[2]}{digest}"
