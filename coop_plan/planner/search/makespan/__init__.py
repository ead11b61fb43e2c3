"""Joint search of recomputes and transfers: sequences of runs and prefetch markers.

A marker in a sequence (`sequence`) says that later reads of its tensor use a prefetched copy. The
objective (`objective`) simulates the copy engines and derives the time of each transfer, so that no
edit leaves a copy too early or too late. `moves` proposes changes, `repair` frees memory at the
peak, `metropolis` is the search kernel, and `annealing` starts it from coop-offline's plans.
"""
