"""Compile every kernel once, while the image is built."""

from api.service import EXAMPLE
from planner import plan
from planner.placement import place
from schemas import parse_graph

for method in ("coop", "coop-offline"):
    plan(parse_graph(EXAMPLE["graph"]), "min", method=method)
place([0, 1], [2, 3], [1, 1], capacity=1, time_limit=1.0)
