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
    PlanServerError,
    RuntimeRefusalError,
    StepSpentError,
)
from coop_plan.runtime.reports import StepReport, clear_reports, reports

__all__ = [
    "BudgetExceededError",
    "BuildError",
    "CaptureError",
    "CopyError",
    "CudaGraphError",
    "NothingPlannedError",
    "OptionsError",
    "PlanServerError",
    "RuntimeRefusalError",
    "StepReport",
    "StepSpentError",
    "clear_reports",
    "reports",
]
