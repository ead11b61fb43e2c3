"""Reports: planned and measured figures, one record a compiled step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coop_plan.schemas import Graph, Plan

if TYPE_CHECKING:
    from coop_plan.runtime.capture.joint_graph import Captured
    from coop_plan.runtime.report_views import ScalarWriter


@dataclass(frozen=True)
class CopySpan:
    """Time span of a transfer, µs of `time.perf_counter`; to the host (`away`) or back."""

    buffer: int
    bytes: int
    away: bool
    begin_us: float
    end_us: float


@dataclass
class StepReport:
    """Figures of a compiled step; sizes in bytes.

    `resident_bytes` exist before the step: parameters, buffers, inputs. `measured_overhead` is the
    last step's time in recomputed ops and in waits for transfers, divided by the time in first
    runs. `outside_bytes` are its planned allocations that were not served at their address.
    """

    name: str
    budget_bytes: int
    peak_bytes: int
    planned_arena_bytes: int
    resident_bytes: int
    planned_overhead: float
    method: str
    status: str
    graph: Graph = field(repr=False)
    plan: Plan = field(repr=False)
    measured_arena_bytes: int = 0
    measured_peak_bytes: int = 0
    """Peak of resident bytes and all allocations of the process from the last step's forward to the
    end of its backward; on CUDA of the allocations of the step's ops."""
    outside_bytes: int = 0
    held_bytes: int = 0
    """Gradients held when the last step began; `measured_peak_bytes` contains them."""
    outside_plan: str = ""
    """Text on allocations outside the plan at the process's peak, and on tensors in places planned
    for others. Measured in the first step of a plan, and after a step that exceeded its budget."""
    plans_made: int = 1
    """Plans made so far; this report is of the last one."""
    measured_overhead: float | None = None
    steps_run: int = 0
    forwards_again: int = 0
    """Forwards that ran again before their backward, since the budget did not allow them to keep
    their memory, or for a second backward."""
    profile_seconds: float = 0.0
    profiled_ops: int = 0
    """Ops that had to be measured, since no profile of them was cached."""
    plan_cached: bool = False
    """True if the plan was read from the cache and verified."""
    plan_seconds: float = 0.0
    compile_seconds: float = 0.0
    """From Dynamo's graph to a planned step, with AOTAutograd's tracing, profiling and planning."""
    last_step_us: float | None = None
    """Time in the ops of the last step, forward and backward, µs. On CUDA, this and
    `measured_overhead` are device times of the last step that had finished when another began; the
    first steps are timed there, and some later ones."""

    measured_host_arena_bytes: int = 0
    """Bytes of the host arena that the last step used."""
    measured_offload_stall_us: float = 0.0
    measured_prefetch_stall_us: float = 0.0
    """Waits of the last step's ops for transfers to the host, and for transfers from it."""
    copies: list[CopySpan] = field(default_factory=list, repr=False)
    """Time span of each transfer of the last step, on the CPU."""

    @property
    def measured_makespan_us(self) -> float | None:
        """Time of the last step in ops and in waits, µs; `plan.cost_us` is the planned time."""
        if self.last_step_us is None:
            return None
        return self.last_step_us + self.measured_offload_stall_us + self.measured_prefetch_stall_us

    def show(self) -> None:
        """Print a table of planned and measured figures; a notebook draws the memory map, too."""
        from coop_plan.runtime.report_views import print_report

        print_report(self)

    def write_scalars(self, writer: "ScalarWriter", step: int) -> None:
        """Write the figures to TensorBoard (`torch.utils.tensorboard.SummaryWriter`)."""
        from coop_plan.runtime.report_views import write_scalars

        write_scalars(self, writer, step)

    def _repr_html_(self) -> str:
        from coop_plan.runtime.report_views import html_of

        return html_of(self)

    def replace_plan(self, captured: "Captured", plan: Plan, *, cached: bool) -> None:
        """Report another plan from now on."""
        self.budget_bytes, self.peak_bytes = plan.budget_bytes, plan.peak_bytes
        self.planned_arena_bytes = plan.arena_bytes
        self.resident_bytes = plan.resident_bytes - captured.resident_within
        self.planned_overhead, self.method, self.status = plan.overhead, plan.method, plan.status
        self.graph, self.plan, self.plan_cached = captured.graph, plan, cached
        self.plans_made += 1


_reports: list[StepReport] = []


def reports() -> list[StepReport]:
    """Reports of all steps compiled in this process, oldest first."""
    return list(_reports)


def clear_reports() -> None:
    """Remove all reports; compiled steps keep running."""
    _reports.clear()


REPORT = "coop_report"
"""Attribute of a compiled step's function that has its report."""


def drop(report: StepReport | None) -> None:
    """Remove a report whose step was replaced or dropped."""
    for i, other in enumerate(_reports):
        if other is report:
            del _reports[i]
            return


def add(report: StepReport) -> None:
    """Add a report."""
    _reports.append(report)
