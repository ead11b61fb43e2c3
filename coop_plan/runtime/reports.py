"""Reports: planned and measured figures, one record a compiled step."""

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from coop_plan.planner.inspect.buffers import replay_plan
from coop_plan.schemas import Graph, Plan, format_bytes
from coop_plan.schemas.graph import FUSED_NAME

if TYPE_CHECKING:
    from coop_plan.runtime.capture.joint_graph import Captured


class ScalarWriter(Protocol):
    """Interface of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""


class CopySpan(NamedTuple):
    """Time span of a transfer, µs of `time.perf_counter`; to the host (`away`) or back."""

    buffer: int
    bytes: int
    away: bool
    begin_us: float
    end_us: float


@dataclass
class StepReport:
    """Figures of a compiled step; sizes in bytes.

    `budget_bytes` is that of `plan`. If the last step was one of several calls in an iteration that
    was not planned as a whole, it is the iteration's, the largest of its calls, and
    `measured_peak_bytes` is the iteration's, too. `resident_bytes` exist before the step:
    parameters, buffers, inputs; `plan.resident_bytes` also count those that are allocated in it.
    `measured_overhead` is the last step's time in ops and in waits beyond that in first runs and in
    updates on the host, divided by the latter two. `outside_bytes` are its planned allocations that
    were not served at their address.
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
    planned_ops_share: float | None = None
    planned_bytes_share: float | None = None
    """Shares of the ops and of the bytes of the compiled function's forward that are planned; the
    rest is code that Dynamo left to eager autograd. Measured in a call that compiles nothing."""
    plans_made: int = 1
    """Plans made so far; this report is of the last one."""
    measured_overhead: float | None = None
    steps_run: int = 0
    replayed_steps: int = 0
    """Steps that CUDA graphs ran (`cuda_graphs`); the other figures are of the ones before."""
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
    """CPU time in the ops of the last step, forward and backward, µs. On CUDA, this and
    `measured_overhead` are device times of the last step that had finished when another began; the
    first steps are timed there, and some later ones."""

    measured_host_arena_bytes: int = 0
    """Bytes of the host arena that the last step used."""
    measured_offload_stall_us: float = 0.0
    measured_prefetch_stall_us: float = 0.0
    """Waits of the last step's ops for transfers to the host, and for transfers from it; like the
    times of ops, on the CPU without waits for a processor that another process has."""
    measured_copies_us: float = 0.0
    """CPU time of the last step in starts of copies and in waits, without `stall`s."""
    measured_host_us: float = 0.0
    """Time in the last step's updates on the host, µs."""
    measured_host_stall_us: float = 0.0
    """Wait of the last step's end for updates on the host."""
    copies: list[CopySpan] = field(default_factory=list, repr=False)
    """Time span of each transfer of the last step, on the CPU."""

    @property
    def measured_makespan_us(self) -> float | None:
        """Time of the last step in ops, starts of copies and waits, µs.

        `plan.cost_us` is the planned time.
        """
        if self.last_step_us is None:
            return None
        stalls = self.measured_offload_stall_us + self.measured_prefetch_stall_us
        stalls += self.measured_host_stall_us
        return self.last_step_us + self.measured_copies_us + stalls

    @property
    def planned_host_us(self) -> float:
        """Planned time in updates on the host, µs."""
        view = replay_plan(self.graph, self.plan)
        return sum(m.end_us - m.begin_us for m in view.moments if m.engine == "host")

    @property
    def kernels(self) -> str:
        """Kernels of the plan: "fused" if fused regions are ops of it, else "eager"."""
        return "fused" if any(FUSED_NAME in op.name for op in self.graph.ops) else "eager"

    @property
    def peak_moment(self) -> int:
        """Step of the plan at which its peak is first reached, as in `explain` and in the map."""
        return replay_plan(self.graph, self.plan).peak

    @property
    def peak_parts(self) -> tuple[int, int, int]:
        """Parts of `peak_bytes`: the plan's residents, its arena, and the outputs outside it."""
        resident, arena = self.plan.resident_bytes, self.plan.arena_bytes
        return resident, arena, self.peak_bytes - resident - arena

    def show(self) -> None:
        """Print a table of planned and measured figures; a notebook draws the memory map, too."""
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for name in ("", "planned", "measured"):
            table.add_column(name, justify="left" if not name else "right")
        for row in self._rows():
            table.add_row(*row)
        console = Console(highlight=False)
        console.print(self._title(), markup=False, soft_wrap=True)
        console.print(table)

    def write_scalars(self, writer: ScalarWriter, step: int) -> None:
        """Write the figures to TensorBoard (`torch.utils.tensorboard.SummaryWriter`)."""
        scalars = {
            "budget_bytes": self.budget_bytes,
            "planned_peak_bytes": self.peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "outside_bytes": self.outside_bytes,
            "measured_overhead": self.measured_overhead,
            "measured_makespan_us": self.measured_makespan_us,
        }
        for name, value in scalars.items():
            if value is not None:
                writer.add_scalar(f"coop/{self.name}/{name}", float(value), step)

    def _repr_html_(self) -> str:
        from coop_plan.planner.inspect.drawing import drawing
        from coop_plan.web import page

        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in self._rows()
        )
        drawn = drawing(self.graph, self.plan, self.name)
        frame = html.escape(page("show.js", f"Memory of {self.name}", {"drawings": [drawn]}))
        return (
            f"<p>{html.escape(self._title())}</p>"
            f"<table><tr><th></th><th>planned</th><th>measured</th></tr>{cells}</table>"
            f'<iframe title="memory map" sandbox="allow-scripts" srcdoc="{frame}"'
            ' style="width:100%;height:46rem;border:0"></iframe>'
        )

    def _rows(self) -> list[tuple[str, str, str]]:
        """Rows of name, planned and measured figure; empty text stands for no figure."""
        overhead = self.measured_overhead
        makespan = self.measured_makespan_us
        resident, arena, outputs = map(format_bytes, self.peak_parts)
        planned_us, measured_us = self.planned_host_us, self.measured_host_us
        on_host = "  on the host", f"{planned_us / 1e3:.2f} ms", f"{measured_us / 1e3:.2f} ms"
        return [
            ("budget", format_bytes(self.budget_bytes), ""),
            ("peak", format_bytes(self.peak_bytes), format_bytes(self.measured_peak_bytes)),
            ("  first at step", str(self.peak_moment), ""),
            ("  resident", resident, ""),
            ("  arena", arena, format_bytes(self.measured_arena_bytes)),
            ("  outputs", outputs, ""),
            ("outside the plan", "", format_bytes(self.outside_bytes)),
            (
                "overhead",
                f"{self.planned_overhead:.2%}",
                "" if overhead is None else f"{overhead:.2%}",
            ),
            (
                "step",
                f"{self.plan.cost_us / 1e3:.2f} ms",
                "" if makespan is None else f"{makespan / 1e3:.2f} ms",
            ),
            *([on_host] if planned_us else []),
        ]

    def _title(self) -> str:
        kernels = ", fused kernels" if self.kernels == "fused" else ""
        return f"{self.name}: {self.method} ({self.status}){kernels}, {self.steps_run} steps run"

    @classmethod
    def of(
        cls, name: str, graph: Graph, plan: Plan, resident_in_step: int, **fields: Any
    ) -> "StepReport":
        """Report of a plan; `resident_in_step` of its resident bytes are allocated in the step."""
        return cls(name=name, **_figures(graph, plan, resident_in_step), **fields)

    def replace_plan(self, captured: "Captured", plan: Plan, *, cached: bool) -> None:
        """Report another plan from now on."""
        vars(self).update(_figures(captured.graph, plan, captured.resident_in_step))
        self.plan_cached = cached
        self.plans_made += 1


def _figures(graph: Graph, plan: Plan, resident_in_step: int) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "planned_arena_bytes": plan.arena_bytes,
        "resident_bytes": plan.resident_bytes - resident_in_step,
        "planned_overhead": plan.overhead,
        "method": plan.method,
        "status": plan.status,
        "graph": graph,
        "plan": plan,
    }


_reports: list[StepReport] = []


def reports() -> list[StepReport]:
    """Reports of all steps compiled in this process, oldest first."""
    return list(_reports)


def steps_run() -> int:
    """Number of planned steps that have run, by all reports."""
    return sum(report.steps_run for report in _reports)


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
