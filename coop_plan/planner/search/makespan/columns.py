"""Columns and entries of the arrays of `MakespanState`."""

# Columns of `MakespanState.transfer`: position of the event before which it is listed; its kind;
# its tensor.
BEFORE, KIND, MOVED_TENSOR = range(3)
# Kinds of transfer events: an offload begins or its end is waited for, after which the bytes are
# free; a prefetch begins or its end is waited for.
OFFLOAD_START, OFFLOAD_END, PREFETCH_START, PREFETCH_END = range(4)
# Entries of `MakespanState.clock`, µs: compute's clock; when the engines to the host and back are
# free; when the host has computed what follows the offloads begun. The last entry is in bytes: the
# host's excess summed over all offloads.
NOW, OUT_FREE, IN_FREE, HOST_END, HOST_EXCESS_SUM = range(5)
# Entries of `MakespanState.flow`. Bytes: live; of these, unused and waiting for their offload; on
# the host; the host's largest excess.
LIVE, AWAITING_OFFLOAD, HOST_LIVE, HOST_EXCESS = range(4)
# Counts: tensors queued for an offload; offloads begun; offloads ended; transfer events.
QUEUE_LENGTH, SENT_COUNT, LEFT_COUNT, TRANSFER_COUNT = range(4, 8)
# Counts: events; prefetches; offloaded tensors. A flag: prefetches wait for memory that events
# before their read will need.
EVENT_COUNT, PREFETCH_COUNT, OFFLOADED_COUNT, LOOK_AHEAD = range(8, 12)
FLOW_SIZE = 12
# Columns of `MakespanState.offload`, per tensor: whether it is offloaded; whether its offload has
# ended; its last prefetch.
IS_OFFLOADED, IS_AWAY, LAST_PREFETCH = range(3)
# The event that produces it and the last that reads that copy; next tensor in the list of either.
PRODUCER_EVENT, LAST_READER, NEXT_PRODUCED, NEXT_LAST_READ = range(3, 7)
# Columns of `MakespanState.offload_head`, per event: first offloaded tensor that it produces, and
# first of which it is the last reader.
PRODUCED, LAST_READS = range(2)
