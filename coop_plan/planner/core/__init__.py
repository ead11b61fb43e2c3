"""Data structures of all planning methods: problem, schedule, lifetimes, timeline, plan."""
