"""
Sequences of runs and transfers, and the one walk among them.

A `sequence` is a list of events: ops that run, copies to the host that begin, tensors that leave
the device when their copy is over, and tensors that are fetched back. `window` cuts a part out of
one and says what there is before it and what is needed after it; `measure` tells what a trial of it
costs and the memory it needs, `moves` and `transfers` change it, `repair` makes room, and `walk` is
a Metropolis walk over such changes. Without a link there are no transfers, and the walk is one
among orders of ops (`params.RECOMPUTES`). `search` anneals recomputes and transfers as one from
coop-offline's plan, so that a link never makes a plan dearer. `params` has the numbers.
"""
