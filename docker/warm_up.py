"""Compiles every kernel once while the image is built."""

from coop_plan.api.service.app import EXAMPLE
from coop_plan.planner import plan
from coop_plan.planner.placement import place
from coop_plan.schemas import parse_graph

for method in ("coop", "coop-offline"):
    plan(parse_graph(EXAMPLE["graph"]), "min", method=method)
place([0, 1], [2, 3], [1, 1], capacity=1, time_limit=1.0)
