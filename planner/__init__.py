"""Plans a training step into a memory budget. Pure: arrays in, plan out; no torch, no HTTP."""

from planner.errors import InfeasibleBudgetError, TimeLimitError
from planner.methods import METHODS, MethodInfo, Progress
from planner.planning import plan
from planner.problem import Problem
from planner.verifier import Fault, InvalidPlanError, find_faults, verify

__all__ = [
    "METHODS",
    "Fault",
    "InfeasibleBudgetError",
    "InvalidPlanError",
    "MethodInfo",
    "Problem",
    "Progress",
    "TimeLimitError",
    "find_faults",
    "plan",
    "verify",
]
