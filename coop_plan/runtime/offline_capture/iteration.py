"""The graph of a whole iteration on an absent device: a step with its optimizer's updates as ops.

It is that of `train_iteration` with one micro-batch. Parameters, states and frozen weights are
movable residents. An update is that of one parameter, without `foreach`. It takes the time of its
ops, and no less than one pass over the tensors that it reads and writes. On the host it takes one
pass, if the device's file has the host's bandwidth.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import UPDATE
from coop_plan.runtime.capture.joint_graph import Captured, capture_joint
from coop_plan.runtime.capture.op_variants import VariantPasses
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.execute.homes import Resident
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.runtime.offline_capture.optimizers import Update
from coop_plan.runtime.offline_capture.roofline import InnerOps, OpWork, Roofline
from coop_plan.runtime.op_profile import Allocation, OpProfile, UpdateProfile
from coop_plan.runtime.torch_internals.joint_graphs import is_primal
from coop_plan.runtime.torch_internals.ops import OpOverload, tree_flatten
from coop_plan.runtime.variants.inplace_outputs import has_layout
from coop_plan.runtime.whole_iteration.graph import SUMS, in_loop_order, iteration_graph
from coop_plan.runtime.whole_iteration.movable import with_movable


def with_updates(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    optimizer: OptimizerSpec,
    model: Roofline,
) -> fx.GraphModule:
    """The graph of an iteration, from the joint graph of a step that returns its loss.

    The optimizer updates the parameters, which are among the `static_inputs`.

    Raises:
        CaptureError: the step returns more than its loss, or another input requires a gradient.
        InvalidInputError: the optimizer has no such update.
    """
    end = next(iter(reversed(joint.graph.nodes)))
    outputs: Any = end.args[0]
    primals = [node.meta["val"] for node in joint.graph.nodes if is_primal(node)]
    profiles: dict[Hashable, UpdateProfile] = {}
    updates: dict[int, UpdateProfile] = {}
    for at, gradient in enumerate(outputs[num_fwd_outputs:]):
        if gradient is not None:
            like = primals[at]
            if at not in static_inputs:
                raise CaptureError(
                    f"a tensor of shape {tuple(like.shape)} requires a gradient and is no"
                    " nn.Parameter, which an optimizer has: make it one, or call its"
                    " requires_grad_(False)"
                )
            layout = like.shape, like.stride(), like.dtype
            if layout not in profiles:
                profiles[layout] = _update_profile(like, optimizer, model)
            updates[at] = profiles[layout]
    limit = 1.0 if optimizer.clip_norm else None
    return iteration_graph(joint, num_fwd_outputs, updates, limit)


def capture_iteration(
    module: fx.GraphModule, results: int, static_inputs: Sequence[int], name: str, model: Roofline
) -> Captured:
    """The modelled graph of an iteration with so many results; arguments as of `capture_joint`."""
    passes = VariantPasses((), _overwritten_by_sums, ())
    captured = capture_joint(module, results, static_inputs, name, model, passes)
    found = in_loop_order(captured)
    return with_movable(found, _residents(found, static_inputs))


def _update_profile(like: Any, spec: OptimizerSpec, model: Roofline) -> UpdateProfile:
    """Memory and time of the update of a parameter; masters and averages are states."""
    alone = msgspec.structs.replace(
        spec, clip_norm=False, update="fused" if spec.update == "fused" else "plain"
    )
    with like.fake_mode:
        parameter = torch.empty_like(like).requires_grad_()
        parameter.grad = torch.empty_like(like)
        update = Update(alone, [parameter])
        temporaries = []
        for _ in range(2):  # the first step makes the states
            with InnerOps(model) as inner:
                update.step()
            temporaries.append(inner.peak_bytes - inner.live_bytes)
        kept = [*update.masters, *update.states]
    on_device = (value for value in kept if value.device.type == like.device.type)
    parts = tuple(value.untyped_storage().nbytes() for value in on_device)
    states, size = sum(parts), like.untyped_storage().nbytes()
    one_pass = OpWork("memory", 0, 3 * size + 2 * states, like.dtype)
    cost = max(inner.cost_us, model.cost_us(one_pass))
    first, later = (
        OpProfile(cost, (), (Allocation(taken, -1, 0),), taken, 0) for taken in temporaries
    )
    host_rate = model.spec.host_bytes_per_s
    host_us = one_pass.bytes / host_rate * 1e6 if host_rate else None
    return UpdateProfile(first, later, states, False, parts, host_us)


def _residents(captured: Captured, static_inputs: Sequence[int]) -> dict[int, Resident]:
    """Parameters, states and frozen weights by tensor id: all have storages of their own."""
    graph, primals = captured.graph, list(filter(is_primal, captured.module.graph.nodes))
    named = {tensor.id: tensor for tensor in graph.tensors}
    static = [t for at in static_inputs for t in captured.storages[primals[at]] if t is not None]
    found = {t: Resident(named[t].name, (named[t].bytes,)) for t in static if named[t].bytes}
    for node, op in zip(captured.ops, graph.ops, strict=True):
        if UPDATE in node.meta:
            parts = node.meta[UPDATE].profile.state_parts
            found |= {states: Resident(named[states].name, parts) for states in op.inputs[2:]}
        else:
            for t in op.mutates:
                found.pop(t, None)
    return found


def _overwritten_by_sums(
    target: OpOverload, args: Any, kwargs: Any, profile: OpProfile
) -> list[int]:
    """Arguments that a sum or a product of gradients overwrites, as `train_iteration` finds them.

    That tries it, which an absent device does not allow: any of the result's layout are here.
    """
    if target not in SUMS:
        return []
    tensors = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
    return [i for i, value in enumerate(tensors) if has_layout(value, profile.outputs[0])]
