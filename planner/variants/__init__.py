"""
Which body runs each op, chosen jointly with the schedule (MONeT: Shah et al., ICLR 2021).

`choices` says which bodies of an op are worth anything; `model` is the time-point program with
bodies, whose minimum is a bound and whose solution is one body per op; `restrict` makes a step of
which each op has that body alone, for the methods that know of no others; `rebody` then gives each
run of their schedule the cheapest body that fits there. `search` puts them together.
"""
