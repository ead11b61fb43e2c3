"""Columns, rows and entries of the arrays of `SearchState`."""

# Columns of `SearchState.event`: the op; the block and the index in it; the first of its accesses;
# flags: in the candidate, the op's first run, not in the current sequence.
CODE, BLOCK, INDEX, FIRST_ACCESS, PRESENT, FIRST_RUN, IS_NEW = range(7)
# Columns of `SearchState.event_bytes`: bytes of the copies whose lifetime begins with the event,
# and ends with it; bytes live during the event only; bytes that an in-place output saves.
ALLOCATED, FREED, TRANSIENT, INPLACE_SAVED = range(4)
# Columns of `SearchState.block`: number of events; their number before the step if the block has
# changed, else NONE; whether the summary in the other columns is out of date. The summary: net
# change of live bytes; peak and sum over events of the live bytes, both relative to the block's
# start; the first write of a copy that outlives the block and can be
# evicted; the last block in which such a copy ends.
EVENTS, SAVED_COUNT, DIRTY, NET, PEAK, BLOCK_AREA, FIRST_LONG, LAST_END = range(8)
# Columns of `SearchState.access`: tensor; READ or WRITE; event; next and previous access of the
# tensor, in candidate order; next access of the event; the write that began the copy, and, of such
# a write, the event that ends the copy; next write of the list that FIRST_LONG begins.
TENSOR, ACCESS_KIND, EVENT, NEXT, PREVIOUS, NEXT_OF_EVENT, COPY, END, NEXT_LONG = range(9)
READ, WRITE = range(2)
# Columns of `SearchState.tensor`: first and last access; whether its lifetimes are out of date;
# whether it is queued for dead-code elimination.
HEAD, TAIL, STALE, QUEUED = range(4)
# Rows of `SearchState.lists`: free events; events of the candidate that the current sequence does
# not have, the reverse, and events that moved; stale tensors; tensors queued for dead-code
# elimination; changed blocks.
FREE, ADDED, REMOVED, MOVED, STALES, QUEUE, CHANGED = range(7)
# Entries of `SearchState.counts`: length of the stored sequence; lengths of the lists above.
LENGTH, FREE_COUNT, ADDED_COUNT, REMOVED_COUNT, MOVED_COUNT, STALE_COUNT = range(6)
QUEUE_COUNT, CHANGED_COUNT = range(6, 8)
# Blocks in use; whether an insertion found a full block; head and length of the list of free
# accesses; event of the peak and its bytes above the capacity.
BLOCKS, FULL, FREE_ACCESS, FREE_ACCESSES, PEAK_EVENT, PEAK_EXCESS = range(8, 14)
COUNTS = 14
# Entries of `SearchState.sums`: compute cost (µs) of the candidate and of the current sequence;
# live bytes summed over the candidate's events.
CANDIDATE_COST, CURRENT_COST, AREA = range(3)
NONE = -1
"""Null index of an event or an access."""
MIN_COST_US = 1e-9
"""Lower bound on a recompute cost in a ratio of bytes to µs."""
