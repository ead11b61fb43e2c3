"""Columns and entries of the arrays of `MakespanState`."""

# Columns of `MakespanState.transfer`: position of the event before which it is listed; its kind;
# its tensor.
BEFORE, KIND, MOVED_TENSOR = range(3)
# Kinds of transfer events: an offload begins or its end is waited for, after which the bytes are
# free; a prefetch begins or its end is waited for.
OFFLOAD_START, OFFLOAD_END, PREFETCH_START, PREFETCH_END = range(4)
# Entries of `MakespanState.clock`, µs: compute's clock; when the engines to the host and back are
# free. The last entry is in bytes: the host's excess summed over all offloads.
NOW, OUT_FREE, IN_FREE, HOST_EXCESS_SUM = range(4)
# Entries of `MakespanState.flow`. Bytes: live; of these, unused and waiting for their offload; on
# the host; the host's largest excess. Counts: tensors queued for an offload; offloads begun;
# offloads ended; transfer events; events; prefetches; offloaded tensors. A flag: prefetches wait
# for memory that events before their read will need.
(
    LIVE,
    AWAITING_OFFLOAD,
    HOST_LIVE,
    HOST_EXCESS,
    QUEUE_LENGTH,
    SENT_COUNT,
    LEFT_COUNT,
    TRANSFER_COUNT,
    EVENT_COUNT,
    PREFETCH_COUNT,
    OFFLOADED_COUNT,
    LOOK_AHEAD,
    FLOW_SIZE,
) = range(13)
# Columns of `MakespanState.offload`, per tensor: whether it is offloaded; whether its offload has
# ended; its last prefetch; the event that produces it and the last that reads that copy; the next
# tensor in the list of either event.
(
    IS_OFFLOADED,
    IS_AWAY,
    LAST_PREFETCH,
    PRODUCER_EVENT,
    LAST_READER,
    NEXT_PRODUCED,
    NEXT_LAST_READ,
) = range(7)
# Columns of `MakespanState.offload_head`, per event: first offloaded tensor that it produces, and
# first of which it is the last reader.
PRODUCED, LAST_READS = range(2)
