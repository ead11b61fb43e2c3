"""`torch.compile(fn, backend="coop", options={"budget": ...})`."""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from coop_plan.planner import InfeasibleBudgetError
from coop_plan.planner.progress import log_duration
from coop_plan.runtime import unplanned_calls
from coop_plan.runtime.capture.cost_scaling import use_costs
from coop_plan.runtime.capture.joint_graph import Captured, capture_joint
from coop_plan.runtime.capture.kept_trace import Joint, KeptTrace
from coop_plan.runtime.capture.sized_numbers import Numbers
from coop_plan.runtime.capture.tracing_rules import as_eager
from coop_plan.runtime.dynamic_shapes.dispatch import AllSizes
from coop_plan.runtime.dynamic_shapes.history import ShapeHistory
from coop_plan.runtime.dynamic_shapes.specialize import (
    SIGNATURE,
    AtNumbers,
    ByShape,
    CallState,
    ForAllSizes,
    call_state,
    function_of,
    is_symbolic,
    keep_recompiling,
    shape_of,
)
from coop_plan.runtime.dynamic_shapes.symbolic_trace import signature
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.execute.arena_pool import ArenaPools, arena_pools_of, release
from coop_plan.runtime.execute.budget_check import warn_of_profiling
from coop_plan.runtime.execute.first_plan import CaptureGraph, ChunkedGraph, FirstPlan, Planner
from coop_plan.runtime.execute.launch_times import measure_launches
from coop_plan.runtime.execute.lower_to_fx import stubs
from coop_plan.runtime.execute.planned_step import PlannedStep
from coop_plan.runtime.fused.regions import fuse_regions
from coop_plan.runtime.fused.split import split_regions
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import StepReport, add, reports
from coop_plan.runtime.source_lines import SourceLines, source_lines_of
from coop_plan.runtime.torch_internals import warn_of_version
from coop_plan.runtime.torch_internals.autograd import all_leaves_have_only_post_hooks
from coop_plan.runtime.torch_internals.dynamo import (
    allow_symbolic_module_ints,
    compile_call,
    forget_recompile_limit,
    make_tracing_flag_thread_local,
)
from coop_plan.runtime.torch_internals.dynamo_graphs import assigns_data, uses_functorch_grad
from coop_plan.runtime.torch_internals.joint_graphs import aot_autograd, boxed, copy_of
from coop_plan.runtime.torch_internals.kept_traces import slot_compiler
from coop_plan.runtime.variants.linear_cross_entropy import (
    chunk_heads,
    chunk_heads_beyond,
    heads_of,
)
from coop_plan.runtime.variants.passes import PASSES_FOR_ANY_SIZES, VARIANT_PASSES

log = logging.getLogger("coop-plan")

EXPERTS = (
    '; with experts_implementation="grouped_mm" (of from_pretrained or the configuration) the model'
    " is one graph, planned as a whole"
)
"""Remedy for experts of transformers that choose their tokens by indices."""

warn_of_version()
make_tracing_flag_thread_local()


def coop(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Dynamo backend: plans the joint graph of `gm` within a budget and runs it in one arena.

    Each input shape has its own plan within the same budget; a share refers to that shape's peak.
    With `shapes="eager"`, only the first shape of a function is planned: others run as eager
    autograd, with eager's numbers, NOT within the budget, and with a warning.

    Without gradients (`no_grad`, inference) the graph runs unplanned: nothing is saved for a
    backward.

    Raises:
        OptionsError, CaptureError, planner.InfeasibleBudgetError: at the first call with a shape;
            inside Dynamo's own exception if the graph has no symbols in it.
    """
    parsed = Options.parse(options)
    first, function = call_state(compile_call() or options), function_of(gm)
    pools = arena_pools_of(parsed)  # held by the steps
    lines, hooked = source_lines_of(gm), all_leaves_have_only_post_hooks(gm)
    keep_recompiling(lines.begin, first)
    if assigns_data(gm):
        log.warning(
            "%s: an assignment to a tensor's .data cannot be planned: its graph runs as eager"
            " autograd, not within the budget; move it out of the compiled function",
            lines.begin,
        )
        return unplanned_calls.count_unplanned(gm)

    def compile_static(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        shape = shape_of(graph, inputs)
        another = first.shapes.get(function, shape) != shape
        if parsed.shapes == "eager" and another and torch.is_grad_enabled():
            log.warning(
                "%s: input sizes %s run as eager autograd, not within the budget",
                *(lines.begin, shape),
            )
            return unplanned_calls.count_unplanned(graph)
        history, varies = first.history[function], is_symbolic(gm)
        compilation = _Compilation(parsed, pools, lines, first, history, sign=varies, hooked=hooked)
        with as_eager(), use_costs(first.costs[function]):
            compiled = compilation.run(graph, inputs)
        if compilation.step is not None:
            first.shapes.setdefault(function, shape)
            if lines.breaks:
                unplanned_calls.graph_break_logged()
                log.warning(
                    "graph break at %s: code outside the graph is not within the budget;"
                    " fullgraph=True makes this an error%s",
                    *(
                        lines.end,
                        EXPERTS if lines.ends_at_experts and first.names_experts() else "",
                    ),
                )
            step = compilation.step
            counted = unplanned_calls.count_planned(compiled, step.report, step.watch)
            setattr(counted, SIGNATURE, compilation.signature)
            return counted
        if uses_functorch_grad(gm):
            log.warning(
                "%s: torch.func computes gradients within the graph and leaves no backward to plan:"
                " the graph runs unplanned, not within the budget; loss.backward() is planned",
                lines.begin,
            )
            return unplanned_calls.count_unplanned(compiled)
        return compiled

    def compile_all(
        graph: fx.GraphModule, examples: Sequence[Any], inputs: Sequence[Any]
    ) -> ForAllSizes:
        every = AllSizes(graph, examples, inputs)

        def planned(joint: fx.GraphModule, *, any_sizes: bool = False) -> AtNumbers:
            of = first.history[function]
            compilation = _Compilation(
                *(parsed, pools, lines, first, of), hooked=hooked, any_sizes=any_sizes
            )
            with use_costs(first.costs[function]):
                step = compilation.plan(joint, every.num_fwd_outputs, every.static_inputs)

            def at(numbers: Numbers) -> Callable[..., Any]:
                run = every.calling(step, numbers)
                return unplanned_calls.count_planned(run, step.report, step.watch)

            return at

        def up_to(joint: fx.GraphModule) -> AtNumbers | None:
            try:
                return planned(joint, any_sizes=True)
            except InfeasibleBudgetError:
                return None  # some variants may fit, which are exact at one size

        return ForAllSizes(
            every.trace, lambda joint: planned(joint)(()), up_to, lambda: every.backwards
        )

    if first.numbers_change(function, gm, example_inputs):
        allow_symbolic_module_ints()
    if is_symbolic(gm):
        return ByShape(gm, compile_static, compile_all if parsed.shapes == "plan" else None).run
    return compile_static(gm, example_inputs)


def _reset() -> None:
    """For torch._dynamo.reset(): steps may outlive it."""
    release()
    forget_recompile_limit()


coop.reset = _reset  # type: ignore[attr-defined]
unplanned_calls.install(coop)


@dataclass(eq=False)
class _Compilation:
    """Compilation of one joint graph, from capture to a planned step."""

    options: Options
    pools: ArenaPools
    lines: SourceLines
    call: CallState
    history: ShapeHistory
    sign: bool = False
    hooked: bool = False
    any_sizes: bool = False
    step: PlannedStep | None = None
    signature: list[object] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    trace: KeptTrace | None = None

    def run(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """AOTAutograd's function for a static graph, traced now or in an earlier start."""
        trace = KeptTrace(graph, inputs)
        if self.sign or not trace.can_be_kept:
            return self._traced(graph, inputs, lambda compiler: compiler)
        self.trace = trace
        with trace.lookup():
            compiled = self._traced(graph, inputs, slot_compiler)
        self.trace = None
        if trace.found is not None and trace.slots is not None:
            forward, backward = trace.slots
            step = self.plan(*trace.found)
            forward.run, backward.run = step.forward(), step.backward()
        return compiled

    def _traced(
        self, graph: fx.GraphModule, inputs: Sequence[Any], compiler: Callable[..., Any]
    ) -> Callable[..., Any]:
        backend = aot_autograd(
            fw_compiler=compiler(self.forward),
            bw_compiler=compiler(self.backward),
            inference_compiler=compiler(_as_it_is),
            partition_fn=self.partition,
        )
        compiled: Callable[..., Any] = backend(graph, inputs)
        return compiled

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = static_lifetime_input_indices or ()
        if self.sign:
            self.signature = signature(joint)
        if self.trace is not None:
            self.trace.traced(Joint(joint, num_fwd_outputs, static))
        captured = self._capture(joint, num_fwd_outputs, static)
        return stubs(captured.module, captured.output_args, num_fwd_outputs)

    def plan(
        self, joint: fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]
    ) -> PlannedStep:
        """The planned step of a static joint graph."""
        self._capture(joint, num_fwd_outputs, static_inputs)
        assert self.step is not None
        self._compiled(self.step)
        return self.step

    def _capture(
        self, joint: fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]
    ) -> Captured:
        passes = PASSES_FOR_ANY_SIZES if self.any_sizes else VARIANT_PASSES
        variants = passes if self.options.variants else None
        capture = functools.partial(
            capture_joint,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=static_inputs,
            launches=measure_launches,
            variants=variants,
            cuda_graphs=self.options.cuda_graphs,
        )
        if not self.any_sizes:  # chunks are equal to the whole at one size
            chunk_heads_beyond(joint, self.options.plan.budget)
        fuse = self.options.kernels == "fused" and not self.any_sizes  # sizes are in their code
        heads = [] if self.any_sizes else heads_of(joint)
        other = copy_of(joint) if fuse or heads else joint

        def chunked() -> Captured | None:
            module = copy_of(other)
            return capture(module) if chunk_heads(module) else None

        def over_regions(limits: Mapping[int, int]) -> Captured | None:
            try:
                return capture(copy_of(other), fuse=functools.partial(fuse_regions, limits=limits))
            except CaptureError as error:
                kernels = "does not run split regions" if limits else "runs eager kernels"
                log.warning("%s: its graph %s: %s", self.lines.begin, kernels, error)
                return None

        fused = over_regions({}) if fuse else None
        captured = capture(joint)
        captured.any_sizes = self.any_sizes

        @functools.cache
        def split() -> Captured | None:
            assert fused is not None
            return split_regions(fused, captured, self.options.plan, over_regions)

        self.step = plan_captured(
            *(captured, self.options, self.pools, self.lines, self.call, self.history),
            hooked=self.hooked,
            fused=fused,
            split=split,
            chunked=ChunkedGraph.of(captured, heads, chunked),
        )
        return captured

    def forward(self, _: fx.GraphModule, __: Sequence[Any]) -> Callable[..., Any]:
        assert self.step is not None
        return self.step.forward()

    def backward(self, _: fx.GraphModule, __: Sequence[Any]) -> Callable[..., Any]:
        assert self.step is not None
        code = self.step.backward()
        self._compiled(self.step)
        return code

    def _compiled(self, step: PlannedStep) -> None:
        seconds = step.report.compile_seconds = time.perf_counter() - self.began
        log_duration(f"{step.report.name}: compiled in", seconds)


def plan_captured(
    captured: Captured,
    options: Options,
    pools: ArenaPools,
    lines: SourceLines,
    call: CallState,
    history: ShapeHistory,
    *,
    hooked: bool = False,
    fused: Captured | None = None,
    split: CaptureGraph = lambda: None,
    chunked: ChunkedGraph | None = None,
) -> PlannedStep:
    """Plan a captured step, verify the plan, and make it runnable.

    If the budget is infeasible and all leaves are `hooked`, hooks are assumed to consume gradients.
    `fused` is the step over fused regions, `split` captures that with some of them split, and
    `chunked` that with heads in chunks. Each runs if its plan is better.
    """
    began = time.perf_counter()
    if captured.device.type == "cuda":
        options.check_on_cuda()
    elif options.cuda_graphs:
        log.warning("%s: cuda_graphs has no effect on the CPU", lines.begin)
    planner = Planner(options, history, f"{lines.begin}: this graph", hooked)
    graphs = [captured] if fused is None else [captured, fused]

    def whole(planner: Planner) -> FirstPlan:
        return planner.plan(graphs[0]) if fused is None else planner.better(fused, graphs[0], split)

    found = planner.with_chunks(whole, chunked)
    if all(found.captured.module is not graph.module for graph in graphs):
        graphs.append(found.captured)
    captured, under, now, made = found.captured, found.under, found.environment, found.plan
    report = StepReport.of(
        *(f"step {len(reports())}", under.graph, made, under.resident_in_step),
        profile_seconds=sum(each.profile_seconds for each in graphs),
        profiled_ops=sum(each.profiled_ops for each in graphs),
        plan_cached=found.cached,
        plan_seconds=time.perf_counter() - began,
    )
    warn_of_profiling(report, lines, captured.profiling_bytes, captured.profiling_op)
    step = PlannedStep(captured, now, made, report, pools, lines, call, options, history)
    add(report)
    return step


def _as_it_is(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    def run(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        with torch.no_grad():
            return module(*inputs)

    return boxed(run)
