"""What was planned beside what was measured, one record per compiled step."""

from dataclasses import dataclass, field

from coop_plan.schemas import Graph, Plan


@dataclass
class StepReport:
    """Sizes in bytes, times as named.

    `resident_bytes` are there before the step: parameters, buffers, inputs. `measured_overhead` is
    time in recomputed ops / time in first computations, taken inside the last step; `outside_bytes`
    are planned allocations that were not served at their address in it.
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
    `measured_overhead` are times on the device, of the last step that was over when one began."""


_reports: list[StepReport] = []


def reports() -> list[StepReport]:
    """The records of all steps compiled in this process, oldest first."""
    return list(_reports)


def clear_reports() -> None:
    """Forget the records so far; compiled steps keep running."""
    _reports.clear()


def add(report: StepReport) -> None:
    """Add a record."""
    _reports.append(report)
