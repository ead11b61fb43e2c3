"""Runtime: runs plans in PyTorch, with the `coop` backend of `torch.compile`.

Importing this package does not import torch; its modules do.
"""

from coop_plan.runtime.errors import (
    BudgetExceededError,
    BuildError,
    CaptureError,
    CopyError,
    CudaGraphError,
    NothingPlannedError,
    OptionsError,
    PartlyUpdatedError,
    PlanServerError,
    RuntimeRefusalError,
    StepSpentError,
)
from coop_plan.runtime.reports import StepReport, clear_reports, reports

if __name__ != "coop_plan.runtime":  # found by a link of a checkout
    raise ImportError(f"import coop_plan.runtime, not {__name__}")

__all__ = [
    "BudgetExceededError",
    "BuildError",
    "CaptureError",
    "CopyError",
    "CudaGraphError",
    "NothingPlannedError",
    "OptionsError",
    "PartlyUpdatedError",
    "PlanServerError",
    "RuntimeRefusalError",
    "StepReport",
    "StepSpentError",
    "clear_reports",
    "reports",
]
