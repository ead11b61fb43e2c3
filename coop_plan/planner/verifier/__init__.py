"""The independent verifier; of this project it imports only the contract, `schemas`."""

from coop_plan.planner.verifier.placement import placement_fault
from coop_plan.planner.verifier.rules import InvalidPlanError, find_faults, verify
from coop_plan.planner.verifier.state import Fault

__all__ = ["Fault", "InvalidPlanError", "find_faults", "placement_fault", "verify"]
