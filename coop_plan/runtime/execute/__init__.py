"""Execution: a plan as ordinary FX code, run step by step in its arena."""
