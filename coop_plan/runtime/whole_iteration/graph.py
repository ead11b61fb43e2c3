"""The graph of an iteration, from AOTAutograd's joint graph of the losses of its micro-batches.

Program order is that of the loop in eager: the forward and the backward of each micro-batch, then
the checks for a GradScaler, and the norm of the gradients, if they are clipped. Each parameter is
updated as soon as all forwards ran, its gradient is complete and no later op reads the parameter.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import UPDATE, UpdateOp, write_input
from coop_plan.runtime.capture.input_updates import omit_statistics
from coop_plan.runtime.capture.joint_graph import Captured, forward_nodes, with_costs_in_order
from coop_plan.runtime.capture.op_variants import VariantPasses
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.gradients.capture_adjust import update
from coop_plan.runtime.op_profile import OpProfile, UpdateProfile
from coop_plan.runtime.torch_internals.joint_graphs import (
    interpreted_module,
    is_primal,
    is_tangent,
    plain_outputs,
    tangent_output,
)
from coop_plan.runtime.torch_internals.ops import TO_COPY, OpOverload, norm_order
from coop_plan.runtime.variants.inplace_outputs import overwritable_arguments

aten = torch.ops.aten

SUMS = (aten.add.Tensor, aten.mul.Tensor)
"""Ops that add and scale gradients."""

SCALAR = "return its loss alone, a tensor of one element"

FORMATS = (
    (torch.contiguous_format, range(64)),
    (torch.channels_last, (4,)),
    (torch.channels_last_3d, (5,)),
)
"""Memory formats of parameters, and their numbers of dimensions."""

NORM_EPSILON = 1e-6
"""Summand of the norm in `torch.nn.utils.clip_grad_norm_`."""


@dataclass(frozen=True)
class ScaledGradients:
    """Gradients of scaled losses, by position of the parameter.

    Attributes:
        record: a further input, after all others: a float32 tensor of the scale, then for each
            optimizer 1 if one of its gradients is not finite, else 0, which the graph writes.
        owners: place of a gradient's optimizer in the record.
        divided: gradients that their updates divide by the scale.
    """

    record: torch.Tensor
    owners: Mapping[int, int]
    divided: Collection[int]


def iteration_graph(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    updates: Mapping[int, UpdateProfile],
    clip_norm: float | None,
    scaled: ScaledGradients | None = None,
) -> fx.GraphModule:
    """The graph of an iteration; its outputs are the forward's outputs, then the gradients' norm.

    Args:
        joint: a joint graph whose tangents are those of scalar losses, one a micro-batch.
        num_fwd_outputs: how many of its outputs are the forward's.
        updates: updates of the optimizer in its order, by position of the parameter.
        clip_norm: largest norm of all gradients, as in `torch.nn.utils.clip_grad_norm_`.
        scaled: if a GradScaler scales the losses.

    Raises:
        CaptureError: a gradient belongs to no parameter of the optimizer, or with a GradScaler no
            gradient to an optimizer.
    """
    return _Builder(joint, num_fwd_outputs, scaled).build(updates, clip_norm)


class _Builder:
    """Emits the nodes of the joint graph in the order of the loop."""

    def __init__(
        self, joint: fx.GraphModule, num_fwd_outputs: int, scaled: ScaledGradients | None
    ) -> None:
        self._joint = joint
        self._scaled = scaled
        self._record: fx.Node
        self._graph = fx.Graph()
        self._placed: dict[fx.Node, fx.Node] = {}
        end = next(iter(reversed(joint.graph.nodes)))
        outputs: list[Any] = list(end.args[0])
        self._results, self._gradients = outputs[:num_fwd_outputs], outputs[num_fwd_outputs:]
        self._descs = list(end.meta.get("desc", []))[:num_fwd_outputs]
        self._losses = _losses(joint, outputs)
        self._batches = _batches_behind(joint, self._losses)
        self._ranks: dict[fx.Node, int] = {}

    def build(
        self, updates: Mapping[int, UpdateProfile], clip_norm: float | None
    ) -> fx.GraphModule:
        """As `iteration_graph`."""
        primals = list(filter(is_primal, self._joint.graph.nodes))
        for node in primals:
            self._placed[node] = self._graph.node_copy(node)
        if self._scaled is not None:
            self._record = self._graph.placeholder(f"primals_{len(primals) + 1}")
            fake = next(iter(self._losses)).meta["val"]
            self._record.meta["val"] = fake.fake_mode.from_tensor(
                self._scaled.record, static_shapes=True
            )
        for position, value in enumerate(self._gradients):
            if isinstance(value, fx.Node) and position not in updates:
                shape = tuple(primals[position].meta["val"].shape)
                raise CaptureError(
                    f"a tensor of shape {shape} requires a gradient and is in no group of the"
                    " optimizer: add it, or call its requires_grad_(False)"
                )
        trained = [
            position
            for position in updates
            if position < len(self._gradients) and isinstance(self._gradients[position], fx.Node)
        ]
        summed, seen = self._emit_batches(trained), set[fx.Node]()
        sums = {
            position: self._as_accumulated(summed[position], primals[position].meta["val"], seen)
            for position in trained
        }
        if self._scaled is not None:
            self._unscale(sums, self._scaled)
        norm = self._clip(sums, clip_norm) if clip_norm is not None and sums else None
        for position in trained:
            node = self._graph.call_function(update, (None, position, sums[position]))
            made = updates[position]
            node.meta = {"val": None, UPDATE: UpdateOp(made, self._placed[primals[position]])}
        results = [self._placed.get(value, value) for value in self._results]
        results += [] if norm is None else [norm]
        self._graph.output(tuple(results)).meta["desc"] = self._descs
        return interpreted_module(self._joint, self._graph)

    def _emit_batches(self, trained: Sequence[int]) -> dict[int, fx.Node]:
        """Emit forward and backward of each micro-batch; returns the sums of the gradients.

        As in `.grad`, the gradients of a micro-batch are added to the sum of those before it, as
        soon as they are complete.
        """
        omit_statistics(self._joint.graph)
        self._ranks = ranks = self._ranked(forward_nodes(self._joint, self._results))
        nodes = list(self._joint.graph.nodes)
        terms = {position: self._terms(self._gradients[position]) for position in trained}
        sums: dict[int, fx.Node] = {}
        for rank, (tangent, loss) in enumerate(self._losses.items()):
            for node in nodes:
                if ranks.get(node) == rank:
                    self._emit(node, rank)
            self._placed[tangent] = self._tangent(self._placed[loss])
            self._placed[tangent].meta["val"] = tangent.meta["val"]  # which views share
            last = {position: of[rank][-1] for position, of in terms.items() if rank in of}
            ends: dict[fx.Node, list[int]] = {}
            for position, node in last.items():
                ends.setdefault(node, []).append(position)
            for node in nodes:
                if self._batches[node] == {rank} or node in ends:
                    self._emit(node, rank)
                    for position in ends.get(node, ()):
                        self._accumulate(sums, position, terms[position][rank], rank)
        return sums

    def _tangent(self, loss: fx.Node) -> fx.Node:
        """The gradient of a loss: one, or the scale in the loss's dtype."""
        one = self._call(aten.ones_like.default, loss)
        if self._scaled is None:
            return one
        return self._times(one, self._call(aten.select.int, self._record, 0, 0))

    def _accumulate(
        self, sums: dict[int, fx.Node], position: int, terms: Sequence[fx.Node], rank: int
    ) -> None:
        """Add the terms of a micro-batch's gradient to the sum of those before it."""
        own = self._emit(terms[0], rank)
        for term in terms[1:]:
            own = self._call(aten.add.Tensor, own, self._emit(term, rank))
        before = sums.get(position)
        sums[position] = own if before is None else self._call(aten.add.Tensor, before, own)

    def _ranked(self, ours: set[fx.Node]) -> dict[fx.Node, int]:
        """The micro-batch of each forward node; that of an effect is the one it was traced in."""
        losses = [*self._losses.values()]
        ranks: dict[fx.Node, int] = {}
        for rank, loss in enumerate(losses):
            for node in _ancestors(loss):
                ranks.setdefault(node, rank)
        present = 0
        for node in self._joint.graph.nodes:
            if node in ours and node.op == "call_function" and node not in ranks:
                read = [ranks[arg] for arg in node.all_input_nodes if arg.op == "call_function"]
                ranks[node] = max(read, default=present)
            if node in losses:
                present = min(losses.index(node) + 1, len(losses) - 1)
        return {node: rank for node, rank in ranks.items() if node.op == "call_function"}

    def _emit(self, node: fx.Node, rank: int) -> fx.Node:
        """Copy a node of a micro-batch after those that it reads, unless it is there.

        Raises:
            CaptureError: it reads what a later micro-batch makes.
        """
        stack = [node]
        while stack:
            top = stack[-1]
            if self._ranks.get(top, 0) > rank:
                raise CaptureError(
                    f"a micro-batch reads {top} of a later one: give train_iteration one batch a"
                    " call"
                )
            missing = [arg for arg in top.all_input_nodes if arg not in self._placed]
            if top not in self._placed and not missing:
                self._placed[top] = self._graph.node_copy(top, self._placed.__getitem__)
            if missing:
                stack += missing
            else:
                stack.pop()
        return self._placed[node]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call; its value is that of the op on fake tensors."""
        node = self._graph.call_function(target, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        fake = next(iter(node.all_input_nodes)).meta["val"]
        with fake.fake_mode, torch.no_grad():
            node.meta["val"] = target(*given, **named)
        return node

    def _terms(self, gradient: fx.Node) -> dict[int, list[fx.Node]]:
        """Summands of a gradient by micro-batch, each in the order in which autograd adds them."""
        found: dict[int, list[fx.Node]] = {}
        stack = [gradient]
        while stack:
            top = stack.pop()
            if len(self._batches[top]) <= 1:
                found.setdefault(min(self._batches[top], default=0), []).append(top)
            elif top.target is aten.add.Tensor and not top.kwargs:
                first, second = top.args
                assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
                stack += [second, first]
            else:
                raise CaptureError(
                    f"{top.target} combines gradients of several micro-batches: give"
                    " train_iteration one batch a call"
                )
        return found

    def _as_accumulated(self, gradient: fx.Node, like: Any, seen: set[fx.Node]) -> fx.Node:
        """A gradient as autograd sets it: in the parameter's layout, with memory of its own.

        An op may make another layout than its fake result has: whether `contiguous` is a copy is
        known when it is profiled.
        """
        possible = [form for form, dims in FORMATS if like.dim() in dims]
        formats = (form for form in possible if like.is_contiguous(memory_format=form))
        kept = next(formats, torch.preserve_format)
        shared = gradient in seen or gradient.op != "call_function"
        seen.add(gradient)
        if shared or kept is torch.preserve_format:
            return self._call(aten.clone.default, gradient, memory_format=kept)
        return self._call(aten.contiguous.default, gradient, memory_format=kept)

    def _unscale(self, gradients: dict[int, fx.Node], scaled: ScaledGradients) -> None:
        """Check and unscale the gradients as `GradScaler.unscale_` does.

        All of them depend on the record, so that it is written before the first update. Those that
        their updates divide by the scale are multiplied by one, as GradScaler does.
        """
        parts = [self._call(aten.select.int, self._record, 0, 0)]
        for number in range(1, scaled.record.numel()):
            own = [node for at, node in gradients.items() if scaled.owners[at] == number]
            if not own:
                raise CaptureError(
                    f"optimizer {number} of {scaled.record.numel() - 1} has no gradient, and"
                    " GradScaler fails without one: leave the optimizer out"
                )
            norms = [
                self._call(aten.linalg_vector_norm.default, node, math.inf)
                for node in own
                if node.meta["val"].numel()
            ]
            stacked = self._call(aten.stack.default, norms or parts[:1])
            largest = self._call(aten.linalg_vector_norm.default, stacked, math.inf)
            finite = self._call(aten.lt.Scalar, largest, math.inf)
            parts.append(self._call(aten.logical_not.default, finite))
        written = self._graph.call_function(
            write_input, (None, self._call(aten.stack.default, parts), self._record)
        )
        written.meta["val"] = self._record.meta["val"]
        scale = self._call(aten.select.int, written, 0, 0)
        one = self._call(aten.ones_like.default, scale)
        wide = self._call(TO_COPY, scale, dtype=torch.float64)
        inverse = self._call(aten.reciprocal.default, wide)
        inverse = self._call(TO_COPY, inverse, dtype=torch.float32)
        for at, gradient in gradients.items():
            factor = one if at in scaled.divided else inverse
            gradients[at] = self._times(gradient, factor)

    def _clip(self, gradients: dict[int, fx.Node], limit: float) -> fx.Node:
        """Scale the gradients as `clip_grad_norm_` does without `foreach`; returns their norm."""
        nodes = [*gradients.values()]
        order = norm_order([node.meta["val"] for node in nodes])
        norms = [self._call(aten.linalg_vector_norm.default, nodes[at], 2.0) for at in order]
        stacked = self._call(aten.stack.default, norms)
        total = self._call(aten.linalg_vector_norm.default, stacked, 2.0)
        above = self._call(aten.add.Tensor, total, NORM_EPSILON)
        inverse = self._call(aten.reciprocal.default, above)
        factor = self._call(aten.mul.Tensor, inverse, limit)
        factor = self._call(aten.clamp.default, factor, None, 1.0)
        for position, gradient in gradients.items():
            gradients[position] = self._times(gradient, factor)
        return total

    def _times(self, value: fx.Node, factor: fx.Node) -> fx.Node:
        """A tensor times a scalar, in the tensor's dtype."""
        product = self._call(aten.mul.Tensor, value, factor)
        dtype = value.meta["val"].dtype
        same = product.meta["val"].dtype == dtype  # not that of a tensor without dimensions
        return product if same else self._call(TO_COPY, product, dtype=dtype)


def _losses(joint: fx.GraphModule, outputs: Sequence[Any]) -> dict[fx.Node, fx.Node]:
    """The losses by their tangents, in the order of the micro-batches."""
    descs = plain_outputs(joint)
    found: dict[fx.Node, fx.Node] = {}
    for tangent in filter(is_tangent, joint.graph.nodes):
        output = tangent_output(tangent)
        loss = outputs[descs.index(output)] if output in descs else None
        if not isinstance(loss, fx.Node) or loss.meta["val"].numel() != 1:
            raise CaptureError(f"the function of train_iteration must {SCALAR}")
        found[tangent] = loss
    return found


def _batches_behind(
    joint: fx.GraphModule, losses: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, frozenset[int]]:
    """The micro-batches whose tangents each node depends on."""
    number = {tangent: i for i, tangent in enumerate(losses)}
    found: dict[fx.Node, frozenset[int]] = {}
    for node in joint.graph.nodes:
        own = frozenset({number[node]} if node in number else ())
        found[node] = own.union(*(found[arg] for arg in node.all_input_nodes))
    return found


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, stack = set[fx.Node](), [node]
    while stack:
        top = stack.pop()
        if top not in found:
            found.add(top)
            stack += top.all_input_nodes
    return found


def in_loop_order(captured: Captured) -> Captured:
    """A captured iteration with its ops in program order, each update as early as it can be.

    An update comes behind the last op that makes its gradient or reads its parameter, and behind
    all forwards, which may fail by their inputs: then no parameter is updated.
    """
    place = {node: i for i, node in enumerate(captured.module.graph.nodes)}
    ops = captured.graph.ops
    order = sorted(
        (i for i, node in enumerate(captured.ops) if UPDATE not in node.meta),
        key=lambda i: place[captured.ops[i]],
    )
    last_use = {t: at for at, i in enumerate(order) for t in (*ops[i].inputs, *ops[i].outputs)}
    last_forward = max((at for at, i in enumerate(order) if ops[i].phase == "forward"), default=-1)
    after: dict[int, list[int]] = {}
    for i, node in enumerate(captured.ops):
        if UPDATE in node.meta:
            at = max(last_forward, *(last_use.get(t, -1) for t in ops[i].inputs))
            after.setdefault(at, []).append(i)
    order = [
        *after.get(-1, ()),
        *(j for at, i in enumerate(order) for j in (i, *after.get(at, ()))),
    ]
    renumbered = [
        ops[i].model_copy(update={"id": at, **_phase(captured.ops[i])})
        for at, i in enumerate(order)
    ]
    ordered = replace(
        captured,
        graph=captured.graph.model_copy(update={"ops": renumbered}),
        ops=[captured.ops[i] for i in order],
        profiles=[captured.profiles[i] for i in order],
        forward_ops=last_forward + 1,
    )
    return with_costs_in_order(ordered)


def _phase(node: fx.Node) -> dict[str, str]:
    return {"phase": "optimizer"} if UPDATE in node.meta else {}


def overwritten_by_sums(
    target: OpOverload, args: Any, kwargs: Any, profile: OpProfile
) -> list[int]:
    """Arguments that a sum or a product may overwrite, as `.grad` is added to and clipped."""
    if target not in SUMS:
        return []
    return overwritable_arguments(target, args, kwargs, profile)


IN_PLACE_SUMS = VariantPasses(rewrites=(), overwritable_arguments=overwritten_by_sums, additions=())
"""Passes without the option `variants`."""
