"""
Sequences of runs and transfers, and the one walk among them.

A `sequence` is a list of events: ops that run, copies to the host that begin, tensors that leave
the device when their copy is over, and tensors that are fetched back. `lives` knows from when to
when each copy of a tensor is there, `edit` puts events in and takes them out, or back, `measure`
tells what a trial costs and the memory it needs, `moves` and `transfers` change it, `repair` makes
room, and `walk` is a Metropolis walk over such changes: a step costs what it touches, and one look
over all events. Without a link there are no transfers, and the walk is one
among orders of ops (`params.RECOMPUTES`). `search` anneals recomputes and transfers as one from
coop-offline's plan, so that a link never makes a plan dearer. `params` has the numbers.
"""
