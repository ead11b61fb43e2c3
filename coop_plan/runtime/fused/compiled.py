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
    compile_graph,
    device_of_results,
    settings_digest,
)
from coop_plan.runtime.torch_internals.inductor_scheduler import Scheduled, scheduled
from coop_plan.runtime.torch_internals.ops import OpOverload
from coop_plan.schemas.graph import FUSED_NAME

T = TypeVar("T")

SCHEMA = "(Tensor[] inputs) -> Tensor[]"

_ops: dict[str, tuple[torch.device, OpOverload]] = {}
_lock = fork_safe_lock()

MODELLED: dict[OpOverload, Scheduled] = {}
"""Kernels of the ops that only have a model (`modelled_op`)."""


def compiled_op(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> OpOverload:
    """The op `coop_plan::fused_...` of a region, as `op(list of inputs) -> list of results`.

    Args:
        graph: the region's ops, on storages; returns a tuple.
        inputs: fake tensors with the layouts that the ops before the region make.

    Raises:
        CaptureError: Inductor cannot compile the region, as without a compiler.
    """
    name = f"{_name(graph, inputs)}.on_{settings_digest()}"
    device = device_of_results(graph)
    with _lock:
        if name not in _ops:
            kernel = _by_inductor("compile", compile_graph, graph, inputs)
            op = define_op(name, SCHEMA, lambda inputs: [*kernel([*inputs])])
            BOXED_KERNELS[op] = kernel
            _ops[name] = device, op
        compiled_for, op = _ops[name]
    if compiled_for != device:
        raise CaptureError(f"a region of {device} was compiled for {compiled_for} in this process")
    return op


def modelled_op(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> OpOverload:
    """The op of a region on an absent device, whose kernels are in `MODELLED`; it does not run.

    Arguments and errors are those of `compiled_op`.
    """
    name = f"{_name(graph, inputs)}.modelled"
    with _lock:
        if name not in _ops:
            kernels = _by_inductor("schedule", scheduled, graph, inputs)
            op = define_op(name, SCHEMA, _refuse)
            MODELLED[op] = kernels
            _ops[name] = device_of_results(graph), op
        return _ops[name][1]


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
