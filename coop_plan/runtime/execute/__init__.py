"""Execution: a plan lowered to FX graphs, which run in its arena."""
