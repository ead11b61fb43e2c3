"""Offsets for buffers with known lifetimes (dynamic storage allocation)."""

from coop_plan.planner.placement.instance import FixedOverlapError
from coop_plan.planner.placement.solve import Placement, place

__all__ = ["FixedOverlapError", "Placement", "place"]
