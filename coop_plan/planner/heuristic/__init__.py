"""
coop-offline: plans the whole step first, places second, keeps what fits.

`solve` is the method, and the order in which the files act:

1. `portfolio` makes eviction runs under many rules at many logical budgets and keeps the best
   that fits. A `run` fills a `state`; the compiled `eviction` step goes through the program
   once, evicting by closure costs and next uses (`closures`). Its record is the ops in their
   order, of which `planner.core.lifetimes` makes the blocks to place.
2. `hill_climb` changes the weights of single retention intervals from there, at random or by what each
   eviction took beside what it was expected to, without knowing the arena: so neighbouring arenas
   see the same plans, and overhead does not rise with the budget.
3. With a deadline, `anneal` perturbs the weights towards this one arena.
4. `resequence` anneals the sequence of ops itself, by the search of `planner.search.compute`; with a link to
   the host, `planner.search.makespan` has a search of recomputes and transfers.

The cheapest run's ops become a `planner.core.schedule.Schedule`, and its layout their addresses.
Beside the portfolio, Coop's own plan (`planner.online`) is a candidate. `params` has a group of
parameters for each of these parts.
"""
