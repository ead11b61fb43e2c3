"""
coop-offline plans the whole step first and places second.

`coop_offline` is the method. Its parts act in this order:

1. `portfolio` runs the offline `eviction` under many rules at many logical budgets, and keeps the
   cheapest run that fits. An `eviction_run` fills an `eviction_state`; victims are chosen by
   recompute cost (`recompute_cost`) and next use. The run's ops, in order, define the blocks.
2. `hill_climb` changes weights of retention intervals of the best runs, at random or by learned
   corrections. It does not know the arena, so neighbouring budgets see the same runs.
3. With a deadline, `weight_annealing` perturbs the weights for this arena alone.
4. `planner.search.compute` anneals the sequence of runs. With a link to the host,
   `planner.search.makespan` searches recomputes and transfers jointly.

Coop's own plan (`planner.online`) is a candidate, too. `params` has one group of parameters a part.
"""
