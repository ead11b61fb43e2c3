"""Movable residents of an iteration: parameters and states that its plan may keep on the host.

Updates of such residents may run there.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from coop_plan.runtime.capture.graph_builder import UPDATE
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.capture.op_variants import OpVariant
from coop_plan.runtime.execute.homes import Resident, can_move, have_home
from coop_plan.runtime.execute.lower_to_fx import inputs_of
from coop_plan.runtime.op_profile import OpProfile, parts_bytes
from coop_plan.runtime.whole_iteration.updates import ParameterUpdate
from coop_plan.schemas import Variant

HOST = "host"
"""Name of the variant of an update on the host."""


def movable_residents(
    captured: Captured,
    updates: Mapping[int, ParameterUpdate],
    inputs: Sequence[Any],
    static: Sequence[int],
) -> dict[int, Resident]:
    """The residents of a captured iteration that may move, by tensor id.

    These are parameters that are updated, with their states, and static inputs that are only read:
    frozen weights. Each has a storage of its own, which it fills, and no state of another parameter
    is there.

    Args:
        captured: the iteration.
        updates: updates of its parameters, by position among the inputs.
        inputs: its inputs.
        static: positions of the inputs that are parameters or buffers.
    """
    owners = Counter(
        value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)
    )
    for update in updates.values():
        owners.update(storage.data_ptr() for storage in update.state_storages())
    written, found = set[int](), dict[int, Resident]()
    for node, op in zip(captured.ops, captured.graph.ops, strict=True):
        if UPDATE not in node.meta:
            written.update(op.mutates)
            continue
        position: Any = node.args[1]
        update, parts = updates[position], node.meta[UPDATE].profile.state_parts
        states = update.state_storages()
        alone = all(owners[storage.data_ptr()] == 1 for storage in states)
        if parts and alone and have_home(states, parts):
            name = f"states of a parameter of shape {tuple(update.parameter.shape)}"
            found |= dict.fromkeys(op.inputs[2:], Resident(name, parts, update.state_storages))
    primals = inputs_of(captured)
    for at in {*static, *updates}:
        value, (t,) = inputs[at], captured.storages[primals[at]]
        if (
            t is None
            or t in written
            or value.device != captured.device
            or owners[value.untyped_storage().data_ptr()] > 1
            or not can_move(value)
        ):
            continue
        size = value.untyped_storage().nbytes()
        if captured.graph.tensors[t].bytes == size:
            name = f"elements of a parameter of shape {tuple(value.shape)}"
            found[t] = Resident(name, (size,), parameter=value, position=at)
    return found


def with_movable(captured: Captured, residents: Mapping[int, Resident]) -> Captured:
    """The iteration with these residents (tensor ids) marked as movable.

    An update that overwrites nothing else may have a variant on the host.
    """
    tensors = [
        tensor.model_copy({"movable": True, "bytes": parts_bytes(residents[tensor.id].parts)})
        if tensor.id in residents
        else tensor
        for tensor in captured.graph.tensors
    ]
    ops, variants = list(captured.graph.ops), dict(captured.variants)
    for at, (node, op) in enumerate(zip(captured.ops, ops, strict=True)):
        cost = node.meta[UPDATE].profile.host_us if UPDATE in node.meta else None
        if cost is None or not {*op.mutates} == {*op.inputs[1:]} <= residents.keys():
            continue
        gradient: Any = node.args[2]
        value = gradient.meta["val"]
        if not (value.is_conj() or value.is_neg()):  # of which a copy's bytes are not the values
            made = Variant(name=HOST, cost_us=cost, inputs=op.inputs, outputs=[], engine="host")
            ops[at] = op.model_copy({"variants": [made]})
            variants[node] = {HOST: OpVariant(node, OpProfile(cost, (), (), 0, 0))}
    graph = captured.graph.model_copy({"tensors": tensors, "ops": ops})
    return replace(captured, graph=graph, variants=variants)
