"""`train_iteration`: compiles a whole iteration, from the forward to the optimizer's updates."""

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from coop_plan.planner.progress import log_duration
from coop_plan.runtime.capture.joint_graph import Captured, capture_joint
from coop_plan.runtime.capture.tracing_rules import as_eager
from coop_plan.runtime.dynamic_shapes.history import ShapeHistory
from coop_plan.runtime.dynamic_shapes.specialize import call_state, keep_recompiling
from coop_plan.runtime.errors import CaptureError, OptionsError, RuntimeRefusalError
from coop_plan.runtime.execute.arena_pool import arena_pools_of
from coop_plan.runtime.execute.budget_check import warn_of_profiling
from coop_plan.runtime.execute.first_plan import ChunkedGraph, Planner
from coop_plan.runtime.execute.homes import Homes, Resident
from coop_plan.runtime.execute.launch_times import measure_launches
from coop_plan.runtime.execute.lower_to_fx import stubs
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import StepReport, add, reports
from coop_plan.runtime.source_lines import SourceLines, source_lines_of
from coop_plan.runtime.torch_internals.dynamo import (
    allow_output_capturing_hooks,
    ignore_once_loggers,
)
from coop_plan.runtime.torch_internals.joint_graphs import aot_autograd, boxed, copy_of, is_tangent
from coop_plan.runtime.torch_internals.tracing import without_modes
from coop_plan.runtime.variants.linear_cross_entropy import (
    chunk_heads,
    chunk_heads_beyond,
    heads_of,
)
from coop_plan.runtime.variants.passes import VARIANT_PASSES
from coop_plan.runtime.whole_iteration.all_or_none import AllOrNone, check_loaded
from coop_plan.runtime.whole_iteration.graph import (
    IN_PLACE_SUMS,
    SCALAR,
    in_loop_order,
    iteration_graph,
)
from coop_plan.runtime.whole_iteration.independence import check_independent, independence_key
from coop_plan.runtime.whole_iteration.movable import movable_residents, with_movable
from coop_plan.runtime.whole_iteration.planned_iteration import PlannedIteration
from coop_plan.runtime.whole_iteration.scaling import Scaling
from coop_plan.runtime.whole_iteration.updates import ParameterUpdate, Updates


def train_iteration(
    loss_fn: Callable[[Any], torch.Tensor],
    optimizer: Optimizer | Sequence[Optimizer],
    budget: int | str | None = None,
    *,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: object,
) -> "TrainIteration":
    """Compile an iteration: forwards and backwards of its micro-batches, and the optimizer's step.

    A call with micro-batches does, within the budget and with equal numbers, what this loop does:

        optimizer.zero_grad()
        for batch in batches:
            loss_fn(batch).backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)  # if it is given
        optimizer.step()

    With a `scaler`, backwards begin at `scaler.scale(loss)`, gradients are unscaled before they are
    clipped, `scaler.step` steps the optimizers, and `scaler.update()` ends the call.

    Parameters and the optimizer's states are part of the plan. Each parameter is updated as soon as
    its gradient is complete, so that gradients are not kept. The parameters have no `.grad` after
    the call.

    Args:
        loss_fn: returns the scalar loss of one micro-batch.
        optimizer: its updates of different parameters must be independent. Several optimizers, as
            Muon for matrices and AdamW for the rest, step in their order.
        budget: bytes, `"12GiB"`, `"60%"` of the peak of keep-everything, or `"min"`; parameters and
            the optimizer's states included [default: environment variable `COOP_BUDGET`].
        clip_norm: largest norm of all gradients together.
        scaler: if disabled, as none.
        options: the backend's other options (`docs/training.md`).

    Raises:
        OptionsError: at once, if an option is invalid.
    """
    given = Options.parse(options if budget is None else {"budget": budget, **options})
    if given.kernels == "fused":
        raise OptionsError('train_iteration runs eager kernels: kernels="fused" is for train_step')
    if given.cuda_graphs:
        raise OptionsError("train_iteration runs without CUDA graphs: cuda_graphs is of train_step")
    if clip_norm is not None and not clip_norm > 0:
        raise OptionsError(f"clip_norm must be above 0, not {clip_norm}")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
    if not optimizers:
        raise OptionsError("train_iteration needs an optimizer")
    scaling = None
    if scaler is not None and scaler.is_enabled():
        scaling = Scaling(scaler, optimizers, clipped=clip_norm is not None)
    return TrainIteration(loss_fn, optimizers, given, clip_norm, scaling)


class TrainIteration:
    """A compiled iteration; call it with one argument a micro-batch.

    `grad_norm` is the norm of the last call's gradients before they were clipped, None without
    `clip_norm`. A call holds `lock`: other threads that hold it find parameters and states of
    before or of after.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], torch.Tensor],
        optimizers: Sequence[Optimizer],
        options: Options,
        clip_norm: float | None,
        scaling: Scaling | None,
    ) -> None:
        self.grad_norm: torch.Tensor | None = None
        self.lock = threading.RLock()
        self._optimizers = optimizers
        self._steps = True
        self._scaling = scaling
        self._updates = Updates(optimizers, link=bool(options.plan.link), scaling=scaling)
        self._checked: set[Hashable] = set()
        self._options = options
        self._clip_norm = clip_norm
        self._pools = arena_pools_of(options)
        self._state = call_state(self)
        # Not in `_Traced`, which Dynamo keeps: plans keep parameters.
        self._plans: weakref.WeakKeyDictionary[_Traced, dict[Hashable, PlannedIteration]] = (
            weakref.WeakKeyDictionary()
        )
        self._homes = Homes()
        self._iterations = 0
        self._batches = 0
        self._all_or_none = AllOrNone(self._finish, optimizers)

        def losses(*batches: Any) -> list[torch.Tensor]:
            return [loss_fn(batch) for batch in batches]

        # Dynamo counts and keeps compilations by code object: each iteration has its own.
        losses.__code__ = losses.__code__.replace()
        # It keeps each backend until its reset, too, and this object with its model must be free.
        compile_one = weakref.WeakMethod(self._compile)

        def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            method = compile_one()
            assert method is not None
            return method(gm, examples)

        ignore_once_loggers()
        allow_output_capturing_hooks()
        self._losses = torch.compile(losses, backend=backend, fullgraph=True, dynamic=False)

    def __call__(self, *batches: Any) -> Any:
        """The losses of the micro-batches, a list; of one micro-batch its loss.

        Raises:
            planner.InfeasibleBudgetError: the budget cannot be met.
            RuntimeRefusalError: the iteration cannot be planned.
            PartlyUpdatedError: an op or a copy failed after the first update, before the last, in
                this call or in one after which the state of before was not loaded.
        """
        if not batches:
            raise RuntimeRefusalError("train_iteration needs a micro-batch: iteration(batch)")
        if self._all_or_none.is_running:
            raise RuntimeRefusalError(
                "train_iteration was called within itself, as by a handler of a signal, or by two"
                " threads: call it after the call that runs"
            )
        if torch.is_anomaly_enabled():
            raise RuntimeRefusalError(
                "anomaly detection checks the backward of autograd, which train_iteration does not"
                " run: turn it off (detect_anomaly), or use train_step"
            )
        _refuse_ranks()
        call = AllOrNone(self._finish, self._optimizers)
        with self.lock, call as self._all_or_none, torch.enable_grad():
            check_loaded(self._optimizers)
            self._updates.begin()
            before, self._batches = self._iterations, len(batches)
            losses = [_scalar(loss).detach() for loss in self._losses(*batches)]
        if self._iterations == before:
            raise RuntimeRefusalError(
                "train_iteration has nothing to train: the loss does not depend on a tensor that"
                " requires a gradient"
            )
        return losses[0] if len(losses) == 1 else losses

    def serve_loop(self) -> None:
        """Be called by a framework's loop, which steps the optimizers after each call.

        The steps have no gradients, and run hooks and schedulers. A scaler's are called as
        `scaler.step(optimizer)`, and its `update` after them.
        """
        self._steps = False

    def sum_norm_in_order_of(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sum the norm of the gradients in the order of these parameters, all that are clipped."""
        self._updates.order = {id(parameter): i for i, parameter in enumerate(parameters)}

    def _finish(self) -> None:
        if self._scaling is not None:
            self._scaling.note()
        if self._steps:
            self._updates.finish()

    def _compile(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        lines = source_lines_of(gm)
        keep_recompiling(lines.begin, self._state)
        traced = _Traced(self, lines)
        backend = aot_autograd(
            fw_compiler=lambda *_: boxed(partial(traced.run)),
            bw_compiler=lambda *_: boxed(partial(_no_backward)),
            inference_compiler=lambda module, _: boxed(lambda args: module(*args)),
            partition_fn=traced.partition,
        )
        with as_eager():
            compiled: Callable[..., Any] = backend(gm, examples)
        return compiled

    def plan_of(self, traced: "_Traced", inputs: Sequence[Any]) -> PlannedIteration:
        """The plan of a traced iteration for the parameters among its inputs.

        One trace serves other parameters of equal shapes, too, and other groups.
        """
        updates = self._updates.among(inputs)
        movable = [inputs[at] for at in traced.static] if self._options.plan.link else ()
        key = (
            self._updates.key(updates),
            *(value.untyped_storage().nbytes() for value in movable),
        )
        plans = self._plans.setdefault(traced, {})
        if key not in plans:
            plans[key] = self._planned(traced, updates, inputs)
        return plans[key]

    def _planned(
        self, traced: "_Traced", updates: dict[int, ParameterUpdate], inputs: Sequence[Any]
    ) -> PlannedIteration:
        """Profile and plan a traced iteration."""
        began = time.perf_counter()
        for optimizer in self._optimizers:
            kind = independence_key(optimizer)
            if kind not in self._checked:
                scaling = self._scaling
                check_independent(optimizer, {} if scaling is None else scaling.example(optimizer))
                self._checked.add(kind)
        trained = sum(map(is_tangent, traced.joint.graph.nodes))
        if trained < self._batches:
            raise CaptureError(
                f"{self._batches - trained} of {self._batches} losses depend on no parameter, or"
                " are one: each micro-batch of train_iteration needs a loss with a gradient"
            )
        if trained > self._batches:
            raise CaptureError(
                f"the function of train_iteration keeps {trained - self._batches} tensors with a"
                " gradient besides its loss, as in a list or an attribute: detach them"
            )
        profiles = {at: self._updates.profile(update) for at, update in updates.items()}
        results = traced.outputs + (self._clip_norm is not None)
        static, scaled = traced.static, None
        if self._scaling is not None:
            owned = {at: (update.optimizer, update.parameter) for at, update in updates.items()}
            static, scaled = [*static, len(inputs) - 1], self._scaling.gradients(owned)
        variants = VARIANT_PASSES if self._options.variants else IN_PLACE_SUMS

        def graph_of(joint: fx.GraphModule) -> fx.GraphModule:
            return iteration_graph(joint, traced.outputs, profiles, self._clip_norm, scaled)

        def movable(captured: Captured) -> dict[int, Resident]:
            if not self._options.plan.link:
                return {}
            return movable_residents(captured, updates, inputs, traced.static)

        def capture(module: fx.GraphModule) -> Captured:
            found = in_loop_order(
                capture_joint(
                    *(module, results, static, "iteration"),
                    variants=variants,
                    launches=measure_launches,
                )
            )
            return with_movable(found, movable(found))

        def chunked() -> Captured | None:
            joint = copy_of(traced.joint)
            return capture(graph_of(joint)) if chunk_heads(joint) else None

        chunk_heads_beyond(traced.joint, self._options.plan.budget)
        module = graph_of(traced.joint)
        heads = heads_of(module)
        captured = capture(module)
        if captured.device.type == "cuda":
            self._options.check_on_cuda()
        lines = traced.lines
        planning = time.perf_counter()
        found = Planner(
            self._options, ShapeHistory(), f"{lines.begin}: this iteration", hooked=False
        )
        first = found.with_chunks(
            lambda planner: planner.plan(captured), ChunkedGraph.of(captured, heads, chunked)
        )
        report = StepReport.of(
            *(f"iteration {len(reports())}", first.under.graph, first.plan),
            first.under.resident_in_step,
            profile_seconds=captured.profile_seconds,
            profiled_ops=captured.profiled_ops,
            plan_cached=first.cached,
            plan_seconds=time.perf_counter() - planning,
            compile_seconds=time.perf_counter() - began,
        )
        log_duration(f"{report.name}: compiled in", report.compile_seconds)
        largest = captured.profiling_bytes, captured.profiling_op
        warn_of_profiling(
            report, lines, *max(largest, (self._updates.profiling_bytes, "an update"))
        )
        add(report)
        return PlannedIteration(
            *(first.under, updates, first.plan, report, self._pools, lines, self._options),
            homes=self._homes,
            residents=movable(first.under),
        )

    def run(self, traced: "_Traced", inputs: list[Any]) -> Sequence[Any]:
        """Run a traced iteration; returns its outputs."""
        if self._scaling is not None:
            inputs.append(self._scaling.record)
        results = self.plan_of(traced, inputs).run(inputs, self._all_or_none)
        self._iterations += 1
        self.grad_norm = results[traced.outputs] if len(results) > traced.outputs else None
        return results


class _Traced:
    """A joint graph of losses, planned and run as an iteration."""

    def __init__(self, owner: TrainIteration, lines: SourceLines) -> None:
        self.lines = lines
        self.joint: fx.GraphModule
        self.outputs = 0
        self.static: Sequence[int] = ()
        self._owner = weakref.proxy(owner)  # which keeps the code that keeps this

    def partition(
        self,
        joint: fx.GraphModule,
        _: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **__: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Keep the joint graph, for AOTAutograd's `partition_fn`."""
        self.joint, self.outputs = copy_of(joint), num_fwd_outputs
        self.static = static_lifetime_input_indices or ()
        end = next(iter(reversed(joint.graph.nodes)))
        return stubs(joint, end.args[0], num_fwd_outputs)

    def run(self, args: list[Any]) -> Any:
        """Run the iteration; AOTAutograd saves the last output for a backward that never comes."""
        inputs = list(args)
        args.clear()
        with without_modes():  # AOTAutograd watches the first call by one
            results = self._owner.run(self, inputs)
        return (*results[: self.outputs], torch.zeros(()))


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise RuntimeRefusalError(f"the function of train_iteration must {SCALAR}")
    return loss


def _no_backward(_: list[Any]) -> Any:
    raise RuntimeRefusalError("train_iteration ran the backward of this loss already")


def _refuse_ranks() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            raise RuntimeRefusalError(
                f"train_iteration runs on one rank, and this process is one of {ranks}: its"
                " gradients would not be summed over them; use train_step with DDP or FSDP"
            )
