"""Planned step: the forward and backward that AOTAutograd calls, in any order of invocations."""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from coop_plan.runtime.capture.graph_builder import device_of
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.capture.sized_numbers import Numbers
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import Counters, Memory
from coop_plan.runtime.dynamic_shapes.history import ShapeHistory
from coop_plan.runtime.errors import BudgetExceededError, CudaGraphError, RuntimeRefusalError
from coop_plan.runtime.execute.arena_pool import ArenaPools, pool_of, take_saved
from coop_plan.runtime.execute.budget_check import BudgetCheck
from coop_plan.runtime.execute.compiled_plan import CompiledPlan
from coop_plan.runtime.execute.graph_replay import GraphReplay
from coop_plan.runtime.execute.invocation import Invocation, invocation_of
from coop_plan.runtime.execute.loans import lend_to_optimizers
from coop_plan.runtime.execute.lower_to_fx import inputs_of, snapshot_positions
from coop_plan.runtime.execute.measured import note_counters, note_times
from coop_plan.runtime.execute.rng_state import Generator, default_generator
from coop_plan.runtime.gradients import capture_adjust
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment
from coop_plan.runtime.gradients.held_gradients import HeldGradients, handed_over, held_in_place
from coop_plan.runtime.gradients.undefined import Undefined, outputs_used_within
from coop_plan.runtime.iteration.joint_plan import RecordedCall, input_bytes
from coop_plan.runtime.iteration.recorder import TOLERANCE
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import StepReport
from coop_plan.runtime.source_lines import SourceLines
from coop_plan.runtime.torch_internals.autograd import (
    HookUse,
    after_this_backward,
    creates_graph,
    has_saved_tensors_hooks,
    refuse_second_backward,
    skip_added_hooks,
    use_of,
)
from coop_plan.runtime.torch_internals.joint_graphs import boxed, compiled_node
from coop_plan.schemas import Plan

log = logging.getLogger("coop-plan")

_planning = fork_safe_lock()
"""Held while a step is planned again: another thread waits for that plan."""

RELEASE_POLLS = 50
"""Polls (1 ms) for gradients to be released before re-planning."""


class PlannedStep:
    """One compiled step, planned for the environment `now`; `lines` are the user's source lines.

    Each call is an invocation. It keeps its memory until its backward, unless the budget does not
    allow that; then its forward runs again before its backward. `call` is the state of the
    `torch.compile` call, which lives as long as one of its steps.
    """

    def __init__(
        self,
        captured: Captured,
        now: MemoryEnvironment,
        plan: Plan,
        report: StepReport,
        pools: ArenaPools,
        lines: SourceLines,
        call: object,
        options: Options,
        history: ShapeHistory,
    ) -> None:
        self.report = report
        self.lines = lines
        self._pools = pools
        self._captured = captured
        self._call = call
        self._strict = options.strict
        budget, name = plan.budget_bytes, report.name
        self._held_gradients = HeldGradients(captured, now, options, budget, name, history)
        self._finished: tuple[weakref.ref[Memory], CompiledPlan] | None = None
        self._check = BudgetCheck(report, lines, options)
        self._hooks_noted = False
        self._replan_failed = False
        self._learned = False
        self._outputs = captured.num_fwd_outputs
        self._copied = snapshot_positions(captured)
        self._parameters = _parameters(captured)
        gradients = captured.output_args[captured.num_fwd_outputs :]
        self._passable = [
            i for i, made in enumerate(gradients) if made is not None and i not in self._parameters
        ]
        self._undefined = Undefined(captured)
        self._used_within = outputs_used_within(captured)
        self._retained_noted = False
        self._generators = _generators(captured)
        self._clock: cuda.Clock | None = None
        if captured.device.type == "cuda":
            self._clock = cuda.Clock(captured.device.index)
            lend_to_optimizers()
        self._replay: GraphReplay | None = None
        if options.cuda_graphs and self._clock is not None:
            self._replay = GraphReplay(captured, name, lines.begin, self._clock)
        self._compiled: CompiledPlan
        if not self._plan_from_history():
            self._compiled = CompiledPlan(capture_adjust.under(captured, now), plan, self._clock)

    def watch(self, outputs: Any) -> None:
        """Watch the outputs of a call, as the user gets them, until its backward."""
        self._undefined.watch(outputs)
        if not self._used_within or self._retained_noted or not isinstance(outputs, tuple | list):
            return
        node = compiled_node(outputs)
        if node is None or len(outputs) != self._outputs:
            return
        inner = [
            weakref.ref(outputs[i]) for i in self._used_within if _made_by_autograd(outputs[i])
        ]

        def look(_: Any) -> None:
            alive = (output() for output in inner)
            if self._retained_noted or not any(o is not None and o.retains_grad for o in alive):
                return
            self._retained_noted = True
            log.warning(
                "%s: retain_grad() on an output of '%s' that another output is computed from does"
                " not get the gradient within the compiled function, as with any backend of"
                " AOTAutograd: make it an input of a second compiled function",
                *(self.lines.begin, self.report.name),
            )

        node.register_prehook(look)

    def forward(self, numbers: Numbers = ()) -> Callable[[list[Any]], Any]:
        """The forward as a boxed callable: primals to outputs and a handle.

        `numbers` are those of the sizes of its calls, if the step is one for any sizes.
        """

        def forward(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            if self._clock is not None:
                cuda.reject_captured_recompute(self._compiled.uncapturable)
                if self._compiled.outputs == "gradients":
                    cuda.refuse_capture_of_gradients()
                if (times := self._clock.read()) is not None:
                    note_times(self.report, *times, self._clock.stall_us)
            self._note_saved_tensors_hooks()
            pool = self._pools.of_thread()
            # PyTorch refuses to read their states while a CUDA graph is captured.
            generators = [] if self._is_captured() else self._generators
            invocation = Invocation(self.report.name, self._compiled, pool, generators, numbers)
            passing = [i for i in self._passable if _made_by_autograd(inputs[i])]
            leaves = self._held_gradients.leaves(inputs)
            call = RecordedCall(self._captured, self._clock, passing, leaves)
            with pool.entering():
                planned = pool.recorder.forward(invocation, self, call, inputs)
                if planned is not None:
                    invocation.use_plan(planned)
                else:
                    self._replan_as_learned()
                    if pool.recorder.has_one_call:
                        self._update_held_gradients(inputs)
                    if invocation.compiled is not self._compiled:
                        invocation.use_own_plan(self._compiled)
                invocation.held_bytes = self._held_gradients.held(inputs)
                fresh = pool.place(invocation)
                compiled = invocation.compiled
                invocation.leaves = {
                    position: inputs[position]
                    for position in (*compiled.gradient_slots, *compiled.consumed)
                }
                if invocation.transfers is not None:
                    invocation.transfers.begin(invocation.memory)
                invocation.mark_overlap()
                handle = invocation.make_handle()
            pool.add_owner(next((inputs[i] for i in self._parameters), None))
            with self._running(invocation, fresh=fresh):
                inputs += [inputs[i].clone() for i in self._copied]
                invocation.keep_inputs(inputs, self._parameters)
                half = invocation.compiled if self._replay is None else self._replay
                made = half.forward(invocation, inputs)
            outputs = made[: self._outputs]
            assert invocation.memory is not None
            invocation.memory.note_results(outputs)
            invocation.keep_saved(made[self._outputs :], outputs)
            updated = invocation.compiled.updated_inputs.values()
            given = [None if i in updated else output for i, output in enumerate(outputs)]
            pool.recorder.received(invocation, given)
            self._measure_iteration(invocation, "forward")
            return (*outputs, handle)

        return boxed(forward)

    def backward(self) -> Callable[[list[Any]], Any]:
        """The backward as a boxed callable: a handle and tangents to gradients."""

        def backward(args: list[Any]) -> Any:
            handle, *tangents = args
            args.clear()
            invocation = invocation_of(handle)
            recorder = pool_of(invocation).recorder
            recorder.backward(invocation)
            saved = take_saved(invocation)
            if saved is None:
                saved = self._forward_again(invocation)
            invocation.check(saved)
            invocation.mark_overlap()
            if creates_graph():
                self._refuse_second_backward()
            invocation.held = held_in_place(invocation.leaves)
            invocation.handed = handed_over(invocation.leaves, invocation.compiled.consumed)
            slots = invocation.compiled.gradient_slots.items()
            elsewhere = [slot for p, slot in slots if slot is not None and p not in invocation.held]
            invocation.run.serve_elsewhere(elsewhere)
            recorder.given(invocation, tangents)
            given = [*saved, *tangents]
            del saved, tangents
            half = invocation.compiled if self._replay is None else self._replay
            with self._running(invocation, fresh=False):
                result = half.backward(invocation, given)
            for position in invocation.used:
                skip_added_hooks(invocation.leaves[position])
            assert invocation.memory is not None
            invocation.memory.note_results(result)
            result = self._undefined.left_out(result)
            recorder.returned(invocation, result)
            within = self._measure_iteration(invocation, "backward")
            if not invocation.in_joint_plan:
                self._observe_hooks(invocation.inputs, result)
            self._finish(
                invocation, [p for p in invocation.leaves if self._is_duplicated(invocation, p)]
            )
            if within is not None and not invocation.in_joint_plan:
                self.report.measured_peak_bytes, self.report.budget_bytes = within
            return result

        return boxed(backward)

    def _is_captured(self) -> bool:
        return self._clock is not None and cuda.capturing()

    def _note_saved_tensors_hooks(self) -> None:
        """Log once that hooks on saved tensors have no effect on a plan."""
        if self._hooks_noted or not has_saved_tensors_hooks():
            return
        self._hooks_noted = True
        log.warning(
            "%s: saved_tensors_hooks do not change what '%s' keeps for its backward, which is as"
            " planned; call it outside of them, with a smaller budget instead",
            *(self.lines.begin, self.report.name),
        )

    def _refuse_second_backward(self) -> None:
        """Name the alternative in the error of a double backward."""
        refuse_second_backward(
            RuntimeRefusalError(
                f"{self.lines.begin}: the gradients of '{self.report.name}' cannot be"
                " differentiated: no double backward runs through what AOTAutograd compiled; for a"
                " gradient penalty call the function itself, not the compiled one"
            )
        )

    def _forward_again(self, invocation: Invocation) -> Sequence[Any]:
        """Run the forward again after its memory was released; returns the saved tensors."""
        if self._generators and self._is_captured():
            raise CudaGraphError(
                f"the forward of '{self.report.name}' would have to run again in a CUDA graph,"
                f" because {invocation.rerun_reason}, and PyTorch cannot draw its random numbers"
                " again there"
            )
        if not self.report.forwards_again:
            log.warning(
                "%s: '%s' runs its forward again before its backward, because %s",
                *(self.lines.begin, self.report.name, invocation.rerun_reason),
            )
        self.report.forwards_again += 1
        invocation.runs_again, invocation.graphs = True, None
        # After a first backward (retain_graph=True), its gradients are held.
        invocation.held_bytes = self._held_gradients.held(invocation.inputs)
        with invocation.rewound_generators():
            pool_of(invocation).allocate(invocation)
            if invocation.transfers is not None:
                invocation.transfers.begin(invocation.memory)
            with self._running(invocation, fresh=True):
                made = invocation.compiled.forward(invocation, [*invocation.inputs])
        invocation.keep_saved(made[self._outputs :], made[: self._outputs])
        saved = take_saved(invocation)
        assert saved is not None
        return saved

    @contextlib.contextmanager
    def _running(self, invocation: Invocation, *, fresh: bool) -> Iterator[None]:
        """Context in which this thread allocates from the invocation's arena."""
        assert invocation.memory is not None
        invocation.memory.tenant = None
        untried = cuda.without_cudnn_benchmark() if self._clock else contextlib.nullcontext()
        try:
            invocation.run.begin(
                invocation.memory, fresh=fresh, watch=invocation.compiled.measure_outside
            )
            if self._clock is not None and fresh:
                self._clock.begin()
            try:
                with untried, torch.no_grad():
                    yield
            finally:
                invocation.resume_generator()
                if self._clock is not None:
                    self._clock.mark(cuda.OTHER)
                invocation.compiled.arena.leave()
        except BaseException:
            if invocation.transfers is not None:
                invocation.transfers.abandon()
            invocation.memory = None  # no result is needed
            raise

    def _update_held_gradients(self, inputs: Sequence[Any]) -> None:
        """Plan again if other gradients are held than was planned for."""
        left = self._gradients_in_arena()
        for _ in range(RELEASE_POLLS):
            if self._held_gradients.environment.across_steps.issuperset(left):
                break
            time.sleep(1e-3)  # a process group's thread releases them a moment after it is done
            left = self._gradients_in_arena()
        with _planning:
            if self._held_gradients.observe(inputs, left):
                self._replan()

    def _gradients_in_arena(self) -> list[int]:
        """Positions of the previous call's gradients that are still alive in the arena."""
        if self._finished is None:
            return []
        found, compiled = self._finished
        memory = found()
        if memory is None or memory.tenant is not compiled:
            return []
        return [
            compiled.final_gradients[offset]
            for offset in memory.live_offsets
            if offset in compiled.final_gradients
        ]

    def _replan_as_learned(self) -> None:
        """Plan again if an earlier step exceeded its plan."""
        if not self._learned:  # without the lock: another thread may be planning
            return
        with _planning:
            if not self._learned:
                return
            self._learned = False
            try:
                self._replan(0 if self._strict else self.report.measured_peak_bytes)
            except BudgetExceededError as error:
                self._replan_failed = True
                log.warning("%s: %s", self.lines.begin, str(error))  # keeps no frames

    def _plan_from_history(self) -> bool:
        """Plan for the environment of the function's steps at other sizes, if it has any."""
        with _planning:
            try:
                if self._held_gradients.expect():
                    self._replan()
                    return True
            except BudgetExceededError:
                pass  # the environment may differ at these sizes
        return False

    def _replan(self, instead_of: int = 0) -> None:
        captured, plan, cached = self._held_gradients.plan(instead_of)
        self._compiled = CompiledPlan(captured, plan, self._clock)
        self.report.replace_plan(captured, plan, cached=cached)

    def _observe_hooks(self, inputs: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Until the end of this backward, observe what hooks do with their leaves' gradients."""
        watched = self._held_gradients.watch_unobserved_hooks(inputs, gradients)
        if watched and not creates_graph():
            after_this_backward(
                lambda: self._learn({p: use_of(hooks) for p, hooks in watched.items()})
            )

    def _learn(self, used: Mapping[int, HookUse | None], **found: Any) -> None:
        """Plan again before the next forward if that environment was not planned for."""
        with _planning:
            if not self._replan_failed and self._held_gradients.learn(used, **found):
                self._learned = True

    @staticmethod
    def _is_duplicated(invocation: Invocation, position: int) -> bool:
        """True if a gradient is held, and autograd gets a new one to add to it."""
        return position not in invocation.held and invocation.leaves[position].grad is not None

    def _finish(self, invocation: Invocation, duplicated: Sequence[int]) -> None:
        """Measure a finished backward, and note what later steps must plan for."""
        counters = invocation.run.counters()
        memory, compiled = invocation.memory, invocation.compiled
        used = {p: invocation.used.get(p) for p in compiled.consumed}
        invocation.finish()
        if self._clock is not None:
            self._clock.end()
        self.report.steps_run += 1
        if invocation.in_joint_plan:
            pool_of(invocation).recorder.finished(invocation, counters, memory, duplicated)
            return
        invocation.run.end()
        if memory is not None:
            memory.release_above(counters.before_bytes + counters.process_bytes)
            memory.tenant = compiled
            self._finished = weakref.ref(memory), compiled
        watched, compiled.measure_outside = compiled.measure_outside, False
        if compiled is not self._compiled:  # the report describes a newer plan
            return
        if invocation.graphs is not None:  # nothing was allocated
            self.report.replayed_steps += 1
            return
        self._measure(counters, invocation)
        peak = self.report.measured_peak_bytes
        over = peak > self.report.budget_bytes + TOLERANCE
        if self._clock is not None:  # the counters have no peak there
            self._check.allocations(counters)
            over = False
        if not invocation.alone:
            return
        # All of it, not only the excess: the next plan may use what this one left free.
        outside = peak - self.report.peak_bytes if over else 0
        self._learn(used, outside=outside, duplicated=duplicated)
        if over:
            if not watched:
                compiled.measure_outside = True
            self._check.step(counters, pool_of(invocation).recorder)

    def _measure_iteration(self, invocation: Invocation, half: str) -> tuple[int, int] | None:
        """Peak of several graphs in an iteration after a half, and their budget, checked."""
        recorder = pool_of(invocation).recorder
        found = recorder.measure(invocation)
        if found is None or self._clock is not None:  # the counters have no peak on CUDA
            return None
        self._check.iteration(*found, invocation, recorder, half)
        return found

    def _measure(self, counters: Counters, invocation: Invocation) -> None:
        report = self.report
        report.held_bytes = sum(invocation.held_bytes.values())
        before = report.resident_bytes + report.held_bytes
        if self._captured.any_sizes:
            planned = sum(input_bytes(self._captured))
            before -= planned - sum(input_bytes(self._captured, invocation.inputs))
        note_counters(report, counters, invocation, before, on_cuda=self._clock is not None)


def _made_by_autograd(value: object) -> bool:
    """True for a tensor that autograd made; inputs may also be meshes of DTensor."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _parameters(captured: Captured) -> set[int]:
    """Positions of the inputs that are parameters."""
    found = set()
    for i, node in enumerate(inputs_of(captured)):
        (t,) = captured.storages[node]
        if t is not None and captured.graph.tensors[t].kind == "parameter":
            found.add(i)
    return found


def _generators(captured: Captured) -> list[Generator]:
    """Generators that the forward's random ops use."""
    nodes = zip(captured.graph.ops[: captured.forward_ops], captured.ops, strict=False)
    devices = {device_of(node) for op, node in nodes if op.rng}
    return [default_generator(device) for device in devices]
