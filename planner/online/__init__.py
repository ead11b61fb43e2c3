"""One eager execution of a step at real addresses, compiled; see `planner.methods.online`."""
