"""Exact planners: mixed-integer and constraint models with proved bounds."""
