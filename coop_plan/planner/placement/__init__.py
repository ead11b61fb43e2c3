"""
Offsets for buffers with known lifetimes (dynamic storage allocation).

`solve` has the one entry, `place`, and the order in which the files act: an `instance` is checked
and cut into sections of time, `bound` says what no placement can go below, and `greedy` tries
placements in orders of sort `keys`, packed as a `skyline` or by `first_fit`, while blame moves
buffers forward. What they leave open goes to the exact search: `restarts` runs the compiled
depth-first search of `canonical` placements under one capacity, and `descend` lowers the capacity.
`params` has the parameters of each.
"""

from coop_plan.planner.placement.instance import FixedOverlapError
from coop_plan.planner.placement.solve import Placement, place

__all__ = ["FixedOverlapError", "Placement", "place"]
