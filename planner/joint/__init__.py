"""
Recomputation and transfers as one sequence, searched as one.

A `sequence` is a list of events: ops that run, copies to the host that begin, tensors that leave
the device when their copy is over, and tensors that are fetched back. `measure` tells its makespan
and the memory it needs, `moves` change it, `walk` is a Metropolis walk over such changes, and
`search` anneals from coop-offline's plan, so that a link never makes a plan dearer. `params` has
the numbers.
"""
