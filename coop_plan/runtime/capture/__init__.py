"""Capture: from a user's function to the profiled graph of one training step."""
