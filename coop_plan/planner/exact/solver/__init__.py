"""Solvers in child processes."""
