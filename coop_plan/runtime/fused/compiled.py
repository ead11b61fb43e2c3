"""The compiled ops of fused regions, one for all regions of equal structure."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.custom_ops import BOXED_KERNELS, define_op
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.torch_internals.fakes import Layout
from coop_plan.runtime.torch_internals.inductor import compile_graph, settings_digest
from coop_plan.runtime.torch_internals.ops import OpOverload

_ops: dict[str, tuple[torch.device, OpOverload]] = {}
_lock = fork_safe_lock()


def compiled_op(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> OpOverload:
    """The op `coop_plan::fused_...` of a region, as `op(list of inputs) -> list of results`.

    Its name is a digest of the region's structure and of the inputs' layouts, equal on all ranks.

    Args:
        graph: the region's ops, on storages; returns a tuple.
        inputs: fake tensors with the layouts that the ops before the region make.

    Raises:
        CaptureError: Inductor cannot compile the region, as without a compiler.
    """
    results: Any = next(iter(reversed(graph.nodes))).args[0]
    name, device = f"fused_{_digest(graph, inputs)}", results[0].meta["val"].device
    with _lock:
        if name not in _ops:
            try:
                kernel = compile_graph(graph, inputs)
            except Exception as error:
                reason = str(error).strip().splitlines()[:1]
                raise CaptureError(
                    f"Inductor cannot compile a region ({type(error).__name__}: {''.join(reason)})"
                ) from error
            op = define_op(
                name, "(Tensor[] inputs) -> Tensor[]", lambda inputs: [*kernel([*inputs])]
            )
            BOXED_KERNELS[op] = kernel
            _ops[name] = device, op
        compiled_for, op = _ops[name]
    if compiled_for != device:
        raise CaptureError(f"a region of {device} was compiled for {compiled_for} in this process")
    return op


def _digest(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> str:
    """Digest of all that a region's code depends on but the index of its device."""
    numbers = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = [settings_digest(), torch.__version__, str(torch.get_num_threads())]
    lines += [f"{Layout.of(value)} {value.untyped_storage().nbytes()}" for value in inputs]
    lines += [
        f"{node.target} {fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)}"
        for node in graph.nodes
        if node.op != "placeholder"
    ]
    text = re.sub(r"(device\(type='\w+'), index=\d+", r"\1", "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
