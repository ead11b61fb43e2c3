"""coop-offline: plans evictions for the whole step first, then the layout, and keeps what fits.

`coop_offline` is the method. Its phases, in order:

1. `portfolio` makes eviction runs with many scoring rules at many logical budgets and keeps the
cheapest that fits. `eviction_run` starts a run in an `eviction_state`; the kernel `eviction`
executes the program once and evicts by recompute cost (`recompute_cost`) and next use.
`planner.core.lifetimes` turns the recorded ops into blocks to place.
2. `planner.search.compute` anneals the sequence of ops itself. With a link,
`planner.search.makespan` searches for recomputes and transfers.

The cheapest run becomes a `planner.core.schedule.Schedule` with addresses. Coop's own plan
(`planner.online`) is a further candidate on small graphs, and the last resort.
"""
