"""Planned iteration: runs the plan of a whole iteration for the inputs of a call."""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from coop_plan.runtime.capture.graph_builder import UPDATE
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.execute.arena_pool import ArenaPools, pool_of
from coop_plan.runtime.execute.budget_check import BudgetCheck
from coop_plan.runtime.execute.compiled_plan import CompiledPlan
from coop_plan.runtime.execute.homes import Copy, Homes, Resident
from coop_plan.runtime.execute.host_updates import Copied, HostUpdates
from coop_plan.runtime.execute.invocation import Invocation
from coop_plan.runtime.execute.lower_to_fx import snapshot_positions
from coop_plan.runtime.execute.measured import note_counters, note_times
from coop_plan.runtime.iteration.recorder import TOLERANCE
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import StepReport
from coop_plan.runtime.source_lines import SourceLines
from coop_plan.runtime.whole_iteration.all_or_none import AllOrNone
from coop_plan.runtime.whole_iteration.updates import ParameterUpdate
from coop_plan.schemas import Plan


class PlannedIteration:
    """An iteration planned as one graph; each call runs all of it, from inputs to updates.

    `updates` are those of its parameters, by position among the inputs. `homes` are those of all
    plans of the same `train_iteration`, `residents` the movable residents by tensor id.
    """

    def __init__(
        self,
        captured: Captured,
        updates: Mapping[int, ParameterUpdate],
        plan: Plan,
        report: StepReport,
        pools: ArenaPools,
        lines: SourceLines,
        options: Options,
        homes: Homes,
        residents: Mapping[int, Resident],
    ) -> None:
        self.report = report
        self._captured = captured
        self._updates = updates
        self._plan = plan
        self._pools = pools
        self._homes = homes
        self._residents = residents
        self._at_home = {home.tensor for home in plan.homes}
        self._homes_of = {
            node.args[1]: [t for t in op.inputs[1:] if t in self._at_home]
            for node, op in zip(captured.ops, captured.graph.ops, strict=True)
            if UPDATE in node.meta
        }
        self._stateful: set[Any] = {
            node.args[1]
            for node in captured.ops
            if UPDATE in node.meta and node.meta[UPDATE].profile.state_bytes
        }
        self._check = BudgetCheck(report, lines, options)
        self._copied = snapshot_positions(captured)
        self._clock: cuda.Clock | None = None
        if captured.device.type == "cuda":
            self._clock = cuda.Clock(captured.device.index)
        self._compiled = CompiledPlan(captured, plan, self._clock)

    def run(self, inputs: list[Any], all_or_none: AllOrNone) -> Sequence[Any]:
        """The outputs of the iteration for its inputs; the list is emptied.

        `all_or_none` is the context of the call.
        """
        if self._clock is not None and (times := self._clock.read()) is not None:
            note_times(self.report, *times, self._clock.stall_us)
        compiled, made_now = self._compiled, 0
        if without := {at for at in self._stateful if not self._updates[at].has_states}:
            compiled, made_now = self._making_states(without)
        pool = self._pools.of_thread()
        invocation = Invocation(self.report.name, compiled, pool, [])
        for resident in self._residents.values():
            if resident.position is not None:
                resident.parameter = inputs[resident.position]
        self._homes.begin(self._plan, self._residents, self._captured.device)
        with pool.entering():
            pool.allocate(invocation)
            if invocation.transfers is not None:
                homes = self._homes if self._plan.homes else None
                invocation.transfers.begin(invocation.memory, homes)
        pool.add_owner(next((update.parameter for update in self._updates.values()), None))

        def updating(at: int, update: ParameterUpdate) -> Callable[..., None]:
            def run(gradient: torch.Tensor, *copies: torch.Tensor | Copy) -> None:
                all_or_none.begin(len(self._homes_of))
                if update.is_skipped:
                    all_or_none.skip()
                    return
                homes = self._copied_homes(at, copies)
                self._homes.update(homes, partial(all_or_none.run, update, gradient))

            return run

        def on_host(update: ParameterUpdate) -> Callable[[Copied], None]:
            def start(copied: Copied) -> None:
                all_or_none.begin(len(self._homes_of))
                if update.is_skipped:
                    all_or_none.skip()
                else:
                    host.start(copied, partial(all_or_none.run, update))

            return start

        invocation.host = host = HostUpdates()
        invocation.updates = {at: updating(at, one) for at, one in self._updates.items()}
        invocation.updates_on_host = {at: on_host(one) for at, one in self._updates.items()}
        results = self._run(invocation, inputs)
        self._finish(invocation, made_now)
        return results

    def _run(self, invocation: Invocation, inputs: list[Any]) -> Sequence[Any]:
        """Both halves of the plan, in the invocation's arena."""
        compiled, memory, host = invocation.compiled, invocation.memory, invocation.host
        assert memory is not None and host is not None
        memory.tenant = None
        untried = cuda.without_cudnn_benchmark() if self._clock else nullcontext()
        try:
            invocation.run.begin(memory, fresh=True, watch=compiled.measure_outside)
            if self._clock is not None:
                self._clock.begin()
            try:
                with untried, torch.no_grad(), host:
                    inputs += [inputs[i].clone() for i in self._copied]
                    made = list(compiled.forward(invocation, inputs))
                    results = made[: self._captured.num_fwd_outputs]
                    del made[: self._captured.num_fwd_outputs]
                    compiled.backward(invocation, made)
            finally:
                invocation.resume_generator()
                if self._clock is not None:
                    self._clock.mark(cuda.OTHER)
                compiled.arena.leave()
        except BaseException:
            host.wait()  # also where an exception ended the wait
            if invocation.transfers is not None:
                invocation.transfers.abandon()
            invocation.memory = None  # no result is needed
            raise
        return results

    def _copied_homes(self, at: int, copies: Sequence[torch.Tensor | Copy]) -> dict[int, Copy]:
        """Copies of the homes of a parameter and its states, by tensor id."""
        lists = [[copy] if isinstance(copy, torch.Tensor) else copy for copy in copies]
        return dict(zip(self._homes_of[at], lists, strict=True))

    def _making_states(self, without: Container[int]) -> tuple[CompiledPlan, int]:
        """The plan for a call in which some updates make states, and their bytes without homes."""
        profiles, made = list(self._captured.profiles), 0
        for i, (node, op) in enumerate(
            zip(self._captured.ops, self._captured.graph.ops, strict=True)
        ):
            if UPDATE in node.meta and node.args[1] in without:
                profile = node.meta[UPDATE].profile
                profiles[i] = profile.first
                if not self._at_home.intersection(op.inputs[2:]):
                    made += profile.state_bytes
        captured = replace(self._captured, profiles=profiles)
        return CompiledPlan(captured, self._plan, self._clock), made

    def _finish(self, invocation: Invocation, made_now: int) -> None:
        """Measure a finished call, in which `made_now` bytes of the planned states were made."""
        counters = invocation.run.counters()
        memory, compiled = invocation.memory, invocation.compiled
        invocation.finish()
        if self._clock is not None:
            self._clock.end()
        self.report.steps_run += 1
        invocation.run.end()
        if memory is not None:
            memory.release_above(counters.before_bytes + counters.process_bytes)
            memory.tenant = compiled
        compiled.measure_outside = False
        before = self.report.resident_bytes - made_now
        on_cuda = self._clock is not None
        note_counters(self.report, counters, invocation, before, on_cuda=on_cuda)
        if on_cuda:
            self._check.allocations(counters)
        elif self.report.measured_peak_bytes > self.report.budget_bytes + TOLERANCE:
            self._check.step(counters, pool_of(invocation).recorder)
            compiled.measure_outside = True
