"""Inductor's partition of a joint graph into forward and backward, and the code it writes."""

import ast
import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from coop_plan.runtime.torch_internals.joint_graphs import is_primal
from coop_plan.runtime.torch_internals.ops import OpOverload

__all__ = ["CustomPartitionerFn"]

Choice = Callable[[fx.Graph, Callable[[], list[fx.Node]]], list[fx.Node]]
"""Chooses the nodes that are saved for the backward, inputs of the forward among them.

Gets the joint graph, and a function that returns Inductor's own choice."""

Modules = tuple[fx.GraphModule, fx.GraphModule]
"""A forward and a backward."""

DRAWS = ("prims.inductor_random", "prims.inductor_randint", "prims.inductor_lookup_seed")
"""Ops that Inductor computes in the kernels that use their results, from a seed."""


Strides = Sequence[tuple[int, ...] | None]
"""Strides of tensors; None of other values."""


class Lowered(NamedTuple):
    """Python code that Inductor runs for a graph, before any kernel is compiled.

    Attributes:
        code: source of a module, whose function `call` runs the kernels.
        values: fake inputs and buffers by their names in `call`, in the layouts that they have
            there.
        strides: of the outputs.
    """

    code: str
    values: dict[str, torch.Tensor]
    strides: Strides


def partition(
    module: fx.GraphModule, inputs: Sequence[Any], choose: Choice, **rest: Any
) -> Modules:
    """Split a joint graph as Inductor does, with `choose` in place of its choice of saved nodes.

    `rest` is passed on. The joint graph may be partitioned again: equal nodes keep their names.

    Assumed: `choose_saved_values_set(joint_graph, node_info, memory_budget)` alone decides, and is
    looked up in its module. Dynamo compiles under a lock.
    """
    own = partitioners.choose_saved_values_set

    def chosen(graph: fx.Graph, *args: Any, **kwargs: Any) -> list[fx.Node]:
        return choose(graph, lambda: own(graph, *args, **kwargs))

    with patch.object(partitioners, "choose_saved_values_set", chosen):
        made: Modules = partitioners.min_cut_rematerialization_partition(module, inputs, **rest)
    return made


def is_kept_by_rule(node: fx.Node) -> bool:
    """True if the partitioner must not recompute a node: collectives, effects, users' policies."""
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional"


def draws_from_seed(node: fx.Node) -> bool:
    """True if an op's random numbers are a function of its seed."""
    return isinstance(node.target, OpOverload) and str(node.target).rpartition(".")[0] in DRAWS


def is_static_input(node: fx.Node) -> bool:
    """True if an input of a joint graph exists before the step, and is never freed in it."""
    return is_primal(node)


def traced_tensors(graph: fx.Graph) -> list[torch.Tensor]:
    """Tensors that a joint graph was traced with, parameters among them.

    Assumed: a fake mode describes each tensor once, in a dictionary of weak keys.
    """
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if mode is None:
        return []
    return list(mode.fake_tensor_converter.meta_converter.describer.lookup_tensor)


def donated_inputs(modules: Modules, results: int) -> list[int]:
    """Positions of the backward's inputs that it may overwrite, as AOTAutograd tells Inductor.

    `results` is the number of outputs of the forward. Sizes are fixed: no numbers are saved.
    """
    if not functorch_config.donated_buffer:
        return []
    given = _values(modules[0].graph.find_nodes(op="placeholder"))
    ahead, behind = (_values(_returned(module)) for module in modules)
    found: list[int] = collect_fw_donated_buffer_idxs(
        given, ahead[:results], behind, ahead[results:]
    )
    return found


def _returned(module: fx.GraphModule) -> Sequence[Any]:
    output = next(iter(reversed(module.graph.nodes)))
    values: Sequence[Any] = output.args[0]
    return values


def _values(nodes: Sequence[Any]) -> list[Any]:
    return [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]


def lowered(
    module: fx.GraphModule,
    results: int,
    donated: Sequence[int] | None = None,
    strides: Strides = (),
) -> Lowered:
    """A partitioned graph as Inductor lowers, fuses, orders and writes it; nothing is compiled.

    The first `results` outputs are returned to the user. `donated` are those of a backward, None of
    a forward. `strides` are of its first inputs: the forward may save tensors in other layouts than
    eager's, as AOTAutograd tells Inductor. The module is not changed. Must run where Inductor
    partitions the graph: its settings and the fake mode are those of the compilation.

    Assumed: `fx_codegen_and_compile` (compile_fx.py) calls the same passes in this order.
    """
    import torch._inductor.compile_fx as inductor  # takes a second to import
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    compile_fx: Any = inductor
    module = copy.deepcopy(module)
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    output = next(iter(reversed(module.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(results))
    compile_fx.view_to_reshape(module)
    with torch.no_grad(), V.set_debug_handler(DebugContext()), config.patch(cpp_wrapper=False):
        for i, stride in enumerate(strides):
            if stride is not None:
                inputs[i] = inputs[i].as_strided(inputs[i].shape, stride)
        mode = compile_fx.fake_tensor_prop(module, inputs)
        compile_fx._recursive_record_original_output_strides(module)
        with V.set_fake_mode(mode), compile_fx.maybe_disable_comprehensive_padding(inputs):
            compile_fx._recursive_post_grad_passes(module, is_inference=False)
            graph: Any = GraphLowering(
                module,
                example_inputs=inputs,
                shape_env=mode.shape_env,
                is_backward=donated is not None,
            )
            graph.bw_donated_idxs = donated
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                given = [_stride(value) for value in graph.graph_outputs]
                code, _ = graph.codegen()
                with mode:
                    values = dict(_values_by_name(graph))
    return Lowered(code.value, values, given)


def _stride(output: Any) -> tuple[int, ...] | None:
    """Strides of an output of a lowered graph."""
    from torch._inductor.ir import IRNode

    if not isinstance(output, IRNode) or not output.has_tensor_output():
        return None
    return tuple(map(int, output.get_stride()))


def _values_by_name(graph: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of inputs and buffers of a lowered graph, with tensors of their layouts."""
    for name in (*graph.graph_inputs, *graph.name_to_buffer):
        buffer = graph.try_get_buffer(name)
        if buffer is not None and buffer.maybe_get_layout() is not None:
            with contextlib.suppress(NotImplementedError, AttributeError):
                count = int(graph.get_allocation_storage_size(buffer))
                layout = buffer.get_layout()
                whole = torch.empty(count, dtype=layout.dtype, device=layout.device)
                size, stride = (tuple(map(int, part)) for part in (layout.size, layout.stride))
                yield name, whole.as_strided(size, stride, int(layout.offset))


LIBRARIES = ("extern_kernels.", "aten.", "torch.ops.")
"""Beginnings of the ops of libraries in the code that Inductor writes."""


def library_call(
    call: ast.Call, values: Mapping[str, torch.Tensor]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """The op of a library that a call in the code runs, with its fake arguments.

    None for other functions, for collectives, and for arguments that have no value.
    """
    from torch._inductor.select_algorithm import extern_kernels

    function = ast.unparse(call.func)
    if not function.startswith(LIBRARIES) or "_c10d_functional" in function:
        return None
    known = {
        "extern_kernels": extern_kernels,
        "aten": torch.ops.aten,
        "torch": torch,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
        "reinterpret_tensor": _reinterpreted,
        "arguments": lambda *args, **kwargs: (args, kwargs),
    }
    given = ast.Call(ast.Name("arguments"), call.args, call.keywords)
    scope = {**known, **values}
    try:
        target = eval(function, scope)  # noqa: S307 - the code that runs in the step
        args, kwargs = eval(ast.unparse(given), scope)  # noqa: S307
    except (NameError, AttributeError):  # a constant of the module, or a number it computes
        return None
    return target, args, kwargs


def _reinterpreted(
    base: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    return base.as_strided(size, stride, base.storage_offset() + offset)


def refuse_caches() -> NoReturn:
    """Leave a graph out of the caches of AOTAutograd and Inductor, if called from `uuid`.

    Assumed: `None`, which is documented for this, is a key like others for partitioners in 2.13.
    """
    raise BypassFxGraphCache("the partition is verified in every process")
