"""Online methods: simulated eager execution at real addresses, without knowledge of later ops.

`methods` defines Coop, DTR, DTE, DELTA and swap-only. `run` starts a run in an empty `state`, and
the compiled `simulator` executes the program: it recomputes missing inputs, allocates from `space`
(best fit), and evicts by the method's rule if an allocation fails. Eviction costs include evicted
`neighbours` (DTR's e*). The record of a run becomes a schedule with addresses.
"""
