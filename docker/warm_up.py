"""Compile every kernel once, while the image is built."""

from api.service import EXAMPLE
from planner import METHODS, plan
from schemas import parse_graph

for method in METHODS.values():
    if method.name != "keep-all":
        plan(parse_graph(EXAMPLE["graph"]), "min", method=method.name)
