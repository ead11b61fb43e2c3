"""One eager execution of a step at real addresses, compiled; see `planner.online.methods`."""
