"""Rows and entries of the arrays of `EvictionState`."""

NEVER = 1 << 40
"""Position of a next use that does not exist."""

# Entries of `EvictionState.counts`: bytes in use; events; in-place writes of the current op; last
# stamp of a graph traversal.
USED, EVENTS, WRITES, STAMP = range(4)
# Lengths of lists; last position at which the pool is used; length of TO_CHECK.
LARGE_COUNT, SMALL_COUNT, DIRTY_COUNT, POOL_COUNT, POOL_UNTIL, CHECK_COUNT = range(4, 10)
POOL_SMALL = 10
"""1 if the pool has small tensors."""

# Rows of `EvictionState.tensor`: live; produced before; pins; evictable; index in `Arrays.uses` of
# the next use; position at which an evicted tensor is needed; closure or next use out of date;
# position of the next use.
LIVE, MADE, PINS, EVICTABLE, SLOT, DEMAND, DIRTY, NEXT_USE = range(8)
# Index in LARGE or SMALL; retained though dead; in DIRTY_LIST; stamp of the last traversal.
LIST_INDEX, RETAINED, IN_DIRTY_LIST, VISITED = range(8, 12)
# Lists of tensors: live ones from `small` bytes on, and smaller ones; those that changed since the
# pool was filled.
LARGE, SMALL, DIRTY_LIST = range(12, 15)
# A retained tensor is in the list to check, or waits for an evicted tensor that needs it: the first
# that waits for a tensor, and the next that waits for the same one (-1: none). Banished: nothing
# will ever need it again.
TO_CHECK, FIRST_WAITING, NEXT_WAITING, BANISHED = range(15, 19)

# Rows of `EvictionState.value`: closure cost × weight / bytes; closure cost × weight, µs.
DENSITY, CLOSURE = range(2)

# Rows of `EvictionState.op`: stamp of the last traversal; ops to run for the current position.
SEEN, ORDER = range(2)

# Rows of `EvictionState.pair`, the in-place writes of the current op.
INPLACE_OUT, INPLACE_SOURCE = range(2)
