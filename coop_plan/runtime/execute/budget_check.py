"""Check of a step against its budget: an excess is an error or a line that names the call."""

import logging

from coop_plan.runtime.device.arena import Counters
from coop_plan.runtime.errors import BudgetExceededError
from coop_plan.runtime.execute.invocation import Invocation
from coop_plan.runtime.iteration.recorder import TOLERANCE, IterationRecorder
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import StepReport
from coop_plan.runtime.source_lines import SourceLines
from coop_plan.schemas import format_bytes

log = logging.getLogger("coop-plan")

WARM_UP_STEPS = 2
"""First steps on CUDA, in which libraries allocate their workspaces."""


class BudgetCheck:
    """Check of a step with a report, called at the user's `lines`.

    All methods raise BudgetExceededError instead of a warning if the budget is strict.
    """

    def __init__(self, report: StepReport, lines: SourceLines, options: Options) -> None:
        self._report = report
        self._lines = lines
        self._strict = options.strict
        self._in_bytes = options.plan.budget.kind == "bytes"
        self._warned = False
        self._known_excess: dict[int, int] = {}  # of iterations, by budget

    def iteration(
        self,
        peak: int,
        budget: int,
        invocation: Invocation,
        recorder: IterationRecorder,
        half: str,
    ) -> None:
        """Report the half with which an iteration exceeds a budget more than before.

        A later half that takes no more in the same iteration is not reported.
        """
        excess = peak - budget
        known = TOLERANCE + self._known_excess.get(budget, 0)
        if excess <= known or not recorder.note_excess(peak):
            return
        self._known_excess[budget] = excess
        who, whose = "the graphs of one iteration", "their"
        if recorder.has_one_call:
            who, whose = "it", "its"
        text = (
            f"{self._lines.begin}: with the {half} of '{self._report.name}', {who} used"
            f" {format_bytes(peak)} of {whose} budget of {format_bytes(budget)}"
        )
        if waiting := recorder.waiting_names(invocation):
            text += (
                f"; {format_bytes(recorder.bytes_beside(invocation))} are inputs and outputs of"
                f" other calls, some of which wait for their backward ({waiting}): those"
                " without one belong under torch.no_grad()"
            )
        if self._is_error(recorder):
            raise BudgetExceededError(text)
        if recorder.will_plan_jointly:
            text += "; once each call has its backward, the next one is planned"
        log.warning("%s", text)

    def step(self, counters: Counters, recorder: IterationRecorder) -> None:
        """Report a step whose measured peak is above its budget, once."""
        report = self._report
        text = (
            f"{self._lines.begin}: '{report.name}' used {format_bytes(report.measured_peak_bytes)}"
            f" of its budget of {format_bytes(report.budget_bytes)}"
        )
        if counters.stray_count:
            text += f"; outside the plan: {report.outside_plan}"
        self._raise_or_warn(text, self._is_error(recorder))

    def allocations(self, counters: Counters) -> None:
        """Report allocations outside the plan on CUDA, where only their sum is counted, once.

        In the first steps libraries allocate workspaces, once for each thread.
        """
        report = self._report
        if not counters.outside_bytes or report.steps_run <= WARM_UP_STEPS:
            return
        text = (
            f"{self._lines.begin}: ops of '{report.name}' allocated"
            f" {format_bytes(counters.outside_bytes)} in total outside their planned addresses:"
            " its budget may have been exceeded"
        )
        if counters.conflict_slot >= 0:
            text += f"; {report.outside_plan}"
        self._raise_or_warn(text, self._strict)

    def _is_error(self, recorder: IterationRecorder) -> bool:
        """True if an excess is an error. A share is of the peak of all graphs of an iteration."""
        return self._strict and (self._in_bytes or not recorder.will_plan_jointly)

    def _raise_or_warn(self, text: str, error: bool) -> None:
        if error:
            raise BudgetExceededError(text)
        if not self._warned:
            self._warned = True
            log.warning("%s", text)


def warn_of_profiling(
    report: StepReport, lines: SourceLines, profiling_bytes: int, profiling_op: str
) -> None:
    """Log if the measurement of an op took more than the budget, beside what was there."""
    if report.resident_bytes + profiling_bytes > report.budget_bytes + TOLERANCE:
        log.warning(
            "%s: while '%s' was compiled, measuring %s took %s beside %s of parameters and inputs:"
            " more than its budget of %s, but only then",
            *(lines.begin, report.name, profiling_op),
            *(format_bytes(profiling_bytes), format_bytes(report.resident_bytes)),
            format_bytes(report.budget_bytes),
        )
