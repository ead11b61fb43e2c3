"""Plans one training step into a hard memory budget: what to keep, drop and recompute, and the
address of every tensor in one fixed arena.

The public names are here; they are loaded when they are first used, so that importing this package
loads neither kernels nor PyTorch. `torch.compile(..., backend="coop")` needs no import at all.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coop_plan.client.client import AsyncClient, Client
    from coop_plan.client.protocol import JobState, ServerAwayError, ServerError, ServerProblemError
    from coop_plan.planner import (
        METHODS,
        Fault,
        InfeasibleBudgetError,
        InvalidPlanError,
        PlanOptions,
        Progress,
        TimeLimitError,
        find_faults,
        plan,
        verify,
    )
    from coop_plan.runtime.errors import RuntimeRefusalError
    from coop_plan.runtime.execute.arena_pool import release
    from coop_plan.runtime.inductor_budget.budget import InductorBudget
    from coop_plan.runtime.offline_capture.calibrate import calibrate
    from coop_plan.runtime.offline_capture.capture import capture
    from coop_plan.runtime.offline_capture.fit import fit
    from coop_plan.runtime.reports import StepReport, clear_reports, reports
    from coop_plan.runtime.train_step import train_step
    from coop_plan.runtime.whole_iteration.train_iteration import train_iteration
    from coop_plan.schemas import Graph, InvalidInputError, Plan, load_graph, load_plan

__all__ = [
    "METHODS",
    "AsyncClient",
    "Client",
    "Fault",
    "Graph",
    "InductorBudget",
    "InfeasibleBudgetError",
    "InvalidInputError",
    "InvalidPlanError",
    "JobState",
    "Plan",
    "PlanOptions",
    "Progress",
    "RuntimeRefusalError",
    "ServerAwayError",
    "ServerError",
    "ServerProblemError",
    "StepReport",
    "TimeLimitError",
    "calibrate",
    "capture",
    "clear_reports",
    "find_faults",
    "fit",
    "load_graph",
    "load_plan",
    "plan",
    "release",
    "reports",
    "train_iteration",
    "train_step",
    "verify",
]

_MODULES = {
    "client.client": ("AsyncClient", "Client"),
    "client.protocol": ("JobState", "ServerAwayError", "ServerError", "ServerProblemError"),
    "runtime": ("RuntimeRefusalError", "StepReport", "clear_reports", "reports"),
    "runtime.execute.arena_pool": ("release",),
    "runtime.inductor_budget.budget": ("InductorBudget",),
    "runtime.offline_capture.calibrate": ("calibrate",),
    "runtime.offline_capture.capture": ("capture",),
    "runtime.offline_capture.fit": ("fit",),
    "runtime.train_step": ("train_step",),
    "runtime.whole_iteration.train_iteration": ("train_iteration",),
    "schemas": ("Graph", "InvalidInputError", "Plan", "load_graph", "load_plan"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_FOLDERS = ("api", "client", "planner", "runtime", "schemas", "web")


def incomplete() -> str:
    """Message that names the folders which this installation lacks; empty if it is whole."""
    here = Path(__file__).parent
    missing = [name for name in _FOLDERS if not (here / name / "__init__.py").is_file()]
    if not missing:
        return ""
    return f"incomplete installation: {here} lacks {', '.join(missing)}; install coop-plan again"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'planner')}"), name)
    except ModuleNotFoundError as error:
        if reason := incomplete():
            raise ImportError(reason) from error
        raise
