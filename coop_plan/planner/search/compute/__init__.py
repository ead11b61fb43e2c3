"""
Metropolis search over event orders; the objective is the sum of op costs.

A `sequence` lists the ops that run. `liveness` holds the lifetime of each copy of a tensor, `edits`
inserts and removes events and undoes both, `objective` computes cost and excess memory of a
candidate, `moves` change it, `repair` frees memory, and `metropolis` accepts or rejects. A step
costs the events that it changes and one pass over the blocks. `planner.search.makespan` has the
moves and the objective with transfers.
"""
