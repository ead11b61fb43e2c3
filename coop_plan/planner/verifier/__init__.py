"""The independent verifier; it imports the contract (`schemas`) and nothing else of ours."""

from coop_plan.planner.verifier.replay import Fault
from coop_plan.planner.verifier.rules import InvalidPlanError, find_faults, verify

__all__ = ["Fault", "InvalidPlanError", "find_faults", "verify"]
