"""
One eager execution of a step at real addresses, with no knowledge of what is to come.

`methods` names Coop's, DTR's and DTE's rules and starts a `run`, which fills a `state` with an
empty arena and lets the compiled `simulator` advance through the program: it recomputes what is
missing, takes room from `space` (the free blocks by size, best fit), and where there is none evicts
what a rule finds cheapest, by the cost of its evicted `neighbours` (DTR's e*). The run's record
becomes the schedule, with addresses. `params` has what the papers leave open.
"""
