"""What was planned beside what was measured, one record per compiled step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coop_plan.schemas import Graph, Plan

if TYPE_CHECKING:
    from coop_plan.runtime.capture.joint_graph import Captured
    from coop_plan.runtime.report_views import ScalarWriter


@dataclass(frozen=True)
class CopySpan:
    """When a copy of a step ran, µs of `time.perf_counter`; to the host (`away`) or back."""

    buffer: int
    bytes: int
    away: bool
    begin_us: float
    end_us: float


@dataclass
class StepReport:
    """Sizes in bytes, times as named.

    `resident_bytes` are there before the step: parameters, buffers, inputs. `measured_overhead` is
    time in recomputed ops and in waits for copies / time in first computations, taken inside the
    last step; `outside_bytes` are planned allocations that were not served at their address in it.
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
    """Resident bytes and all that the process allocated from the last step's forward to the end of
    its backward, at the highest; on CUDA all that the step's ops took."""
    outside_bytes: int = 0
    held_bytes: int = 0
    """Gradients that were there when the last step began; `measured_peak_bytes` contains them."""
    outside_plan: str = ""
    """What the process had beside the plan at its highest, in words, as it was last looked at: in
    the first step of a plan, and in the one after a step that took more than its budget; and what
    lies where the plan has something else by then."""
    plans_made: int = 1
    """The figures and documents here are of the last one."""
    measured_overhead: float | None = None
    steps_run: int = 0
    forwards_again: int = 0
    """Forwards that ran a second time before their backward, because the budget did not allow them
    to keep their memory beside others, or for a second backward."""
    profile_seconds: float = 0.0
    profiled_ops: int = 0
    """Ops that had to be measured: neither this process nor one before it had met them."""
    plan_cached: bool = False
    """Whether the plan was read from the cache, and verified, and not made."""
    plan_seconds: float = 0.0
    compile_seconds: float = 0.0
    """From Dynamo's graph to running code: AOTAutograd's tracing, profiling and planning in it."""
    last_step_us: float | None = None
    """Time inside the ops of the last step, forward and backward, µs. On CUDA this and
    `measured_overhead` are times on the device, of the last step that was over when one began; the
    first steps are timed there, and then some."""

    measured_host_arena_bytes: int = 0
    """How far the slab on the host was used in the last step."""
    measured_offload_stall_us: float = 0.0
    measured_prefetch_stall_us: float = 0.0
    """What the last step's ops waited for copies to the host, and for copies from there."""
    copies: list[CopySpan] = field(default_factory=list, repr=False)
    """When each copy of the last step ran, on the CPU."""

    @property
    def measured_makespan_us(self) -> float | None:
        """Time of the last step in ops and in waits for copies, µs; `plan.cost_us` was planned."""
        if self.last_step_us is None:
            return None
        return self.last_step_us + self.measured_offload_stall_us + self.measured_prefetch_stall_us

    def show(self) -> None:
        """Print what was planned beside what was measured; a notebook draws the memory map, too."""
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
        """Another plan takes the place of the one that was reported."""
        self.budget_bytes, self.peak_bytes = plan.budget_bytes, plan.peak_bytes
        self.planned_arena_bytes = plan.arena_bytes
        self.resident_bytes = plan.resident_bytes - captured.resident_in_step
        self.planned_overhead, self.method, self.status = plan.overhead, plan.method, plan.status
        self.graph, self.plan, self.plan_cached = captured.graph, plan, cached
        self.plans_made += 1


_reports: list[StepReport] = []


def reports() -> list[StepReport]:
    """The records of all steps compiled in this process, oldest first."""
    return list(_reports)


def clear_reports() -> None:
    """Forget the records so far; compiled steps keep running."""
    _reports.clear()


REPORT = "coop_report"
"""Attribute of a compiled step's function: its record."""


def drop(report: StepReport | None) -> None:
    """Forget a record, as another takes its place or its step is gone."""
    for i, other in enumerate(_reports):
        if other is report:
            del _reports[i]
            return


def add(report: StepReport) -> None:
    """Add a record."""
    _reports.append(report)
