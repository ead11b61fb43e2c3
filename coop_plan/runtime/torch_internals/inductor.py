"""Inductor as the compiler of one small graph of ATen ops, outside the traces of AOTAutograd."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from coop_plan.runtime.torch_internals.inductor_cpp import compile_sources, sources_kept
from coop_plan.runtime.torch_internals.tracing import without_modes

compiler_config: Any = torch.compiler.config
_aten = torch.ops.aten
_prims = torch.ops.prims

REDUCTIONS = {
    *(_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.var, _aten.var_mean, _aten.any),
    *(_aten.all, _aten.argmax, _aten.logsumexp, _aten.linalg_vector_norm),
    *(_aten._softmax, _aten._log_softmax),
    *(_aten._softmax_backward_data, _aten._log_softmax_backward_data),
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward),
    *(_aten.native_group_norm, _aten.native_group_norm_backward),
    *(_aten._native_batch_norm_legit_functional, _aten.native_batch_norm_backward),
    *(_aten._fused_rms_norm, _aten._fused_rms_norm_backward),
    *(_aten.nll_loss_forward, _aten.nll_loss_backward),
}
"""Ops that Inductor decomposes into reductions and pointwise ops."""

CREATIONS = {
    *(_aten.full, _aten.zeros, _aten.ones, _aten.arange, _aten.scalar_tensor),
    *(_aten.full_like, _aten.zeros_like, _aten.ones_like),
}
"""Ops whose results depend on no element of a tensor."""

MOVES = {
    *(_aten.clone, _aten._to_copy, _aten.copy, _aten.cat, _aten.stack, _aten.repeat),
    *(_aten.constant_pad_nd, _aten.slice_backward, _aten.select_backward),
    *(_aten.slice_scatter, _aten.select_scatter, _aten.tril, _aten.triu),
    *(_aten.upsample_nearest2d, _aten.upsample_nearest2d_backward),
}
"""Ops that copy elements to places that depend on no element."""

UNTAGGED_POINTWISE = {
    *(_aten.where, _aten.masked_fill, _aten.clone, _aten._to_copy, _prims.convert_element_type),
}
"""Pointwise ops without the tag."""

NORMS = (
    _aten.native_layer_norm.default,
    _aten.native_group_norm.default,
    _aten._native_batch_norm_legit_functional.default,
    _aten._fused_rms_norm.default,
)
"""Ops whose decompositions by Inductor are statistics and pointwise ops."""

BoxedKernel = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Compiled graph: takes its inputs in one list, which it clears, and returns its outputs."""

SETTINGS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "deterministic": True,
    "cpp.vec_isa_ok": config.cpp.vec_isa_ok is not False,
}
"""Inductor's settings: results of each op are rounded as in eager, no kernel is chosen by timing.

The compiler is not tried for each vector instruction set that the CPU has, each in a new process.

Assumed: `make_fx` reads the first one, too, and marks the ops whose results are rounded."""

FEW_SCRATCH_TENSORS: dict[str, Any] = {
    "realize_reads_threshold": 16,
    "realize_opcount_threshold": 400,
    "realize_acc_reads_threshold": 32,
}
"""Settings for CUDA: an expression with several readers is computed in each of their kernels.

By default Inductor writes one of more than 4 reads or 30 operations to memory. On a GPU such passes
over memory cost more than the operations, and the tensor is scratch that the budget includes."""


def _instruction_set() -> str:
    """Vector instructions of the CPU that Inductor writes code for."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # takes a second to import

    with config.patch(SETTINGS):
        return str(pick_vec_isa())


@contextmanager
def outside_traces(device: str) -> Iterator[FakeTensorMode]:
    """A fake mode and tracing context apart from those that a backend of Dynamo runs in.

    Inductor has the settings for regions on this type of device.

    Assumed: the tracing context is thread-local; Inductor writes to it. Its code is cached on disk
    if the context's fake mode may have symbols, and AOTAutograd's cache (`kept_traces`) does not
    bundle it. The keys of that cache leave the instruction set out, but have a tag.
    """
    tag = f"{compiler_config.cache_key_tag} {_instruction_set()}"
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with (
        tracing(TracingContext(mode)),
        torch.no_grad(),
        without_modes(),
        config.patch(SETTINGS | (FEW_SCRATCH_TENSORS if device == "cuda" else {})),
        compiler_config.patch(cache_key_tag=tag),
        functorch_config.patch(bundled_autograd_cache=False),
    ):
        yield mode


def decomposed(run: Callable[..., Any], examples: Sequence[Any]) -> fx.Graph:
    """Graph of `run` on the fake tensors `examples`, in the ops that Inductor compiles."""
    with outside_traces(examples[0].device.type), examples[0].fake_mode:
        return _traced(run, examples).graph


def device_of_results(graph: fx.Graph) -> torch.device:
    """The device of a graph's results; a graph of creations has no inputs."""
    results: Any = next(iter(reversed(graph.nodes))).args[0]
    device: torch.device = results[0].meta["val"].device
    return device


def compile_graphs(
    graphs: Sequence[tuple[fx.Graph, Sequence[torch.Tensor]]],
) -> list[BoxedKernel]:
    """Compile graphs that return tuples of tensors, each for inputs with the layouts of examples.

    Results have eager's layouts. All are on one type of device. Inductor's cache on disk is used.

    Assumed: inputs of `compile_fx_inner` that are static are not copied for alignment; the result's
    `current_callable` is the function of the generated code.

    Raises:
        Exception: of any type, if Inductor or its compiler fails.
    """
    from torch._inductor.compile_fx import compile_fx_inner  # takes a second to import

    kernels: list[BoxedKernel] = []
    with outside_traces(device_of_results(graphs[0][0]).type) as mode, sources_kept():
        for graph, examples in graphs:
            module, inputs = traced_for_inductor(graph, examples, mode)
            static = range(len(inputs))
            made: Any = compile_fx_inner(
                module, inputs, static_input_idxs=static, is_inference=True
            )
            kernels.append(made.current_callable)
        compile_sources(kernels)
    return kernels


def traced_for_inductor(
    graph: fx.Graph, examples: Sequence[torch.Tensor], mode: FakeTensorMode
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph in the ops that Inductor lowers, and its inputs, of a mode of `outside_traces`.

    Assumed: Inductor takes the layouts of results from the output node's meta.
    """
    inputs = [_like(value, mode) for value in examples]
    with mode:  # numbers in decompositions are tensors, too
        module = _traced(fx.GraphModule({}, graph), inputs)
    output = next(iter(reversed(module.graph.nodes)))
    output.meta["original_output_strides"] = [v.meta["val"].stride() for v in output.args[0]]
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    return module, inputs


def settings_digest() -> str:
    """Digest of the versions and settings that change Inductor's code for this machine.

    Assumed: `get_hash` computes again only what changed, which each `config.patch` does.
    """
    own = SETTINGS, FEW_SCRATCH_TENSORS, torch.__version__, torch.get_num_threads()
    text = f"{config.get_hash().hex()} {_instruction_set()} {own}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _traced(run: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), _aten.nll_loss_backward.default: _nll_loss_backward}
    traced: fx.GraphModule = make_fx(run, table)(*inputs)
    traced.graph.eliminate_dead_code()
    return traced


def _nll_loss_backward(
    gradient: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Pointwise gradient of a negative log-likelihood's scores, (rows, classes) or (classes,).

    Inductor's decomposition scatters into zeros, which are a tensor like `scores` between kernels.
    """
    if reduction == 1:  # the mean
        gradient = gradient / total_weight
    if scores.dim() == 1 and target.dim():
        target = target[0]
    target = target.unsqueeze(-1)
    if scores.dim() > gradient.dim() > 0:
        gradient = gradient.unsqueeze(-1)
    if weight is not None:
        gradient = gradient * weight
    chosen = torch.arange(scores.shape[-1], device=scores.device) == target
    return torch.where(chosen & (target != ignore_index), -gradient, 0).to(scores.dtype)


def _like(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of a mode, with the layout of `value` in a storage of the same size."""
    size = value.untyped_storage().nbytes() // value.element_size()
    with mode:
        whole = torch.empty(size, dtype=value.dtype, device=value.device)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())
