"""Rows and entries of the arrays of `ArenaState`."""

FREE = -1
"""Owner of a free block."""

# Entries of `ArenaState.counts`: blocks; free blocks; union-find nodes; events; offsets, drops and
# in-place writes recorded.
BLOCKS, HOLES, NODES, EVENTS, OFFSETS, DROPS, WRITES = range(7)
# Failed allocations; tensors these evicted; retained tensors; last stamp of a graph traversal;
# transient buffers of the op; offloads; whether any prefetch began.
FAILURES, EVICTED, RETAINED, STAMP, TRANSIENT, OFFLOAD_COUNT, HAS_PREFETCHED = range(7, 14)
# Bytes on the host; bytes allocated.
HOST_BYTES, USED = range(14, 16)

# Entries of `ArenaState.total`: compute's clock, µs; sum of free ratios at failed allocations; µs
# at which the copy engines to the host and back are free.
CLOCK, FREE_RATIOS, OUT_FREE, IN_FREE = range(4)

# Rows of `ArenaState.block`: offset, size and owner of the blocks in address order; size and offset
# of the free ones, sorted by (size, offset); victims of an eviction.
BLOCK_AT, BLOCK_SIZE, OWNER, HOLE_AT, HOLE_SIZE, VICTIM = range(6)

# Rows of `ArenaState.tensor`: union-find node or -1; live; live before the current op; produced
# before; retained though dead; pins; evictable.
NODE, LIVE, WAS_LIVE, WRITTEN, IS_RETAINED, PINS, EVICTABLE = range(7)
# Offset; list of retained tensors; stack and stamps of a graph traversal.
ADDRESS, RETAINED_LIST, TO_VISIT, VISITED = range(7, 11)
# On the host; being offloaded; being prefetched; can be offloaded; number of its offload.
HOSTED, LEAVING, ARRIVING, MOVABLE, OFFLOAD_ORDER = range(11, 16)

# Rows of `ArenaState.times`, µs: cost of its producer; last access; ends of its copies.
OWN_COST, LAST_ACCESS, OFFLOAD_END, PREFETCH_END = range(4)

# Rows of `ArenaState.op`: its outputs are allocated from the right; stamp of the last traversal; on
# the stack with its inputs pinned.
FROM_RIGHT, SEEN, IS_OPEN = range(3)

# Rows of `ArenaState.part`, the union-find of evicted tensors: parent; stamp of the last query.
PARENT, ROOT_SEEN = range(2)

# Rows of `ArenaState.event`, and of `ArenaState.record`, each with a length of its own.
EVENT_OP, EVENT_WORKSPACE, EVENT_DO = range(3)
OFFSET, DROPPED, DROP_EVENT, INPLACE_EVENT, INPLACE_OUT, INPLACE_SOURCE = range(6)
