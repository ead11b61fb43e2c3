"""Dual side: lower bounds, proved by a process that runs during the search."""
