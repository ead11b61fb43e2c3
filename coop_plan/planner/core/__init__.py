"""What every part of the planner speaks of: problem, schedule, lifetimes, timeline, plan."""
