"""Runs plans in PyTorch: capture, profile, arena, and the `coop` backend of `torch.compile`.

Importing this package does not import torch; its parts do.
"""

from coop_plan.runtime.errors import (
    BuildError,
    CaptureError,
    CudaGraphError,
    GraphBreakError,
    OptionsError,
    RuntimeRefusalError,
    StepInFlightError,
    StepSpentError,
)
from coop_plan.runtime.reports import StepReport, clear_reports, reports

__all__ = [
    "BuildError",
    "CaptureError",
    "CudaGraphError",
    "GraphBreakError",
    "OptionsError",
    "RuntimeRefusalError",
    "StepInFlightError",
    "StepReport",
    "StepSpentError",
    "clear_reports",
    "reports",
]
