"""Metropolis search over sequences of runs: recomputes and the order of first runs.

A sequence lists the ops that run. `sequence` holds the search state, `event_list` the events in
blocks, `liveness` the lifetime of each copy. `edits` inserts, removes, accepts and undoes;
`objective` gives the cost and the memory excess of a candidate; `moves` proposes changes and
`repair` frees memory at the peak. `metropolis` is the search kernel, `annealing` its cooling
schedule. A step costs time in proportion to the tensors that it accesses, plus one pass over all
blocks. `planner.search.makespan` adds transfers to the host.
"""
