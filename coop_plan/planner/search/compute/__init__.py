"""
Orders of runs, and the one walk among them.

A `sequence` is a list of ops that run. `lives` knows from when to when each copy of a tensor is
there, `edit` puts events in and takes them out, or back, `measure` tells what a trial costs and the
memory it needs, `moves` change it, `repair` makes room, and `walk` is a Metropolis walk over such
changes: a step costs what it touches, and one look over all events. Where tensors may be moved to
the host, `planner.search.makespan` has moves and a measure of its own.
"""
