"""`torch.compile(fn, backend="coop", options={"budget": ...})`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from planner import plan, verify
from runtime.capture import Captured, capture_joint
from runtime.executor import PlannedStep
from runtime.options import Options
from runtime.partition import split
from runtime.reports import StepReport, add, reports


def coop(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Dynamo backend: plans the joint graph of `gm` within a budget and runs it in one arena.

    Without gradients (`no_grad`, inference) the graph runs as it is: nothing is kept for a
    backward, so there is nothing to plan.

    Raises:
        OptionsError, CaptureError, planner.InfeasibleBudgetError: at the first call of the
            compiled function, inside Dynamo's own exception.
    """
    wanted = Options.parse(options)
    compilation = _Compilation(wanted, options)
    backend = aot_autograd(
        fw_compiler=compilation.forward,
        bw_compiler=compilation.backward,
        inference_compiler=_as_it_is,
        partition_fn=compilation.partition,
    )
    compiled: Callable[..., Any] = backend(gm, example_inputs)
    return compiled


class _Compilation:
    """One joint graph on its way from capture to running code."""

    def __init__(self, options: Options, owner: object) -> None:
        self.options = options
        self.owner = owner
        self.step: PlannedStep | None = None

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        captured = capture_joint(joint, num_fwd_outputs, static_lifetime_input_indices or ())
        self.step, halves = plan_captured(captured, self.options, self.owner)
        return halves

    def forward(self, module: fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        assert self.step is not None
        return self.step.forward(module, args)

    def backward(self, module: fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        assert self.step is not None
        return self.step.backward(module, args)


def plan_captured(
    captured: Captured, options: Options, owner: object
) -> tuple[PlannedStep, tuple[fx.GraphModule, fx.GraphModule]]:
    """Plan a captured step, verify the plan, and make it runnable."""
    began = time.perf_counter()
    made = plan(
        captured.graph,
        options.budget,
        method=options.method,
        alignment=options.alignment,
        time_limit=options.time_limit,
        switches=options.switches,
    )
    verify(captured.graph, made)
    report = StepReport(
        name=f"step {len(reports())}",
        budget_bytes=made.budget_bytes,
        peak_bytes=made.peak_bytes,
        planned_arena_bytes=made.arena_bytes,
        planned_overhead=made.overhead,
        method=made.method,
        status=made.status,
        graph=captured.graph,
        plan=made,
        profile_seconds=captured.profile_seconds,
        plan_seconds=time.perf_counter() - began,
    )
    halves = split(captured, made)
    step = PlannedStep(captured, made, report, owner)
    add(report)
    return step, halves


def _as_it_is(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    def run(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        with torch.no_grad():
            return module(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
