"""Offsets for buffers with known lifetimes (dynamic storage allocation).

`solve` has the entry point, `place`, and calls the other modules in this order. `instance` checks
the arguments and divides time into sections; `windows` has the shapes of buffers with gaps. `bound`
computes a lower bound. `greedy` packs buffers in orders of sort `keys`, as a `skyline` or by
`first_fit`, and moves blamed buffers forward between passes. If the bound is not met, an exact
search follows: `restarts` runs the compiled depth-first search of `canonical` placements of a
`task` under one capacity, and `descend` lowers the capacity. `params` has its limits.
"""

from coop_plan.planner.placement.instance import FixedOverlapError
from coop_plan.planner.placement.solve import Placement, place

__all__ = ["FixedOverlapError", "Placement", "place"]
