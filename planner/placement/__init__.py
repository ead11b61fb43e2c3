"""Offsets for buffers with known lifetimes (dynamic storage allocation)."""

from planner.placement.instance import FixedOverlapError
from planner.placement.solve import Placement, place

__all__ = ["FixedOverlapError", "Placement", "place"]
