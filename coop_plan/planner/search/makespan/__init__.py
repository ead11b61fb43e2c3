"""
Recomputes and transfers as one: sequences of runs with marks, and the search among them.

A sequence (`marks`) lists runs, and marks that say what is read from a copy out of the host; when
that is copied there and back follows from the sequence (`timing`), so no change leaves a copy
behind that has become early, late or in the way of others. `moves` change a sequence, `repair`
makes room, `metropolis_search` is a Metropolis search over such changes, and `search` anneals from
coop-offline's plan, so that a link never makes a plan dearer. `worth` says why a link is of no use.
`params` has the numbers.
"""
