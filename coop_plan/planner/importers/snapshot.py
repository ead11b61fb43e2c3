"""
Buffers of a memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`).

The snapshot is a pickle of plain containers: `segments` with the blocks that are there in the end,
and for each device the events of its allocator (`torch/cuda/_memory_viz.py` documents both).
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any

from coop_plan.schemas.errors import InvalidInputError


@dataclass(frozen=True)
class Buffers:
    """Lifetimes are half-open, in events of the allocator; sizes and addresses in bytes."""

    device: int
    lower: list[int]
    upper: list[int]
    size: list[int]
    address: list[int]
    reserved_bytes: int
    """What the allocator held in the end."""

    @property
    def live_bytes(self) -> int:
        """The most that lives at once."""
        changes: dict[int, int] = {}
        for lower, upper, size in zip(self.lower, self.upper, self.size, strict=True):
            changes[lower] = changes.get(lower, 0) + size
            changes[upper] = changes.get(upper, 0) - size
        live = most = 0
        for time in sorted(changes):
            live += changes[time]
            most = max(most, live)
        return most


class _Plain(pickle.Unpickler):
    """Containers, numbers and text: a pickle that names anything else could run it."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only plain data is read")


def read_snapshot(data: bytes) -> Buffers:
    """
    The buffers on the device with the most events.

    One that was allocated before the recording began lives from 0 on, one that is not freed lives
    to the end. `InvalidInputError` names the place of a fault as a JSON pointer.
    """
    try:
        snapshot = _Plain(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle can raise nearly anything
        message = f"no memory snapshot: {str(error) or type(error).__name__}"
        raise InvalidInputError(message) from None
    if not isinstance(snapshot, dict):
        raise InvalidInputError("no memory snapshot: it is no dictionary")
    traces = _list(snapshot, "device_traces", "")
    for device, events in enumerate(traces):
        if not isinstance(events, list):
            raise InvalidInputError("a list of events", f"/device_traces/{device}")
    device = max(range(len(traces)), key=lambda d: (len(traces[d]), -d), default=0)
    if not traces or not traces[device]:
        message = (
            "no events: record them with torch.cuda.memory._record_memory_history() before the step"
        )
        raise InvalidInputError(message, "/device_traces")
    return _buffers(snapshot, traces[device], device)


def _buffers(snapshot: dict[str, Any], events: list[Any], device: int) -> Buffers:
    live: dict[int, tuple[int, int]] = {}
    rows: list[tuple[int, int, int, int]] = []
    known: set[int] = set()
    for time, event in enumerate(events):
        place = f"/device_traces/{device}/{time}"
        if not isinstance(event, dict):
            raise InvalidInputError("an event is a dictionary", place)
        action = event.get("action")
        if action not in ("alloc", "free_completed"):
            continue
        address, size = (_number(event, name, place) for name in ("addr", "size"))
        if action == "alloc":
            if address in live:
                raise InvalidInputError(f"address {address} is allocated twice", f"{place}/addr")
            live[address] = time, size
        elif address in live:
            began, own = live.pop(address)
            rows.append((began, time, own, address))
        elif address in known:
            raise InvalidInputError(f"address {address} is freed twice", f"{place}/addr")
        else:
            rows.append((0, time, size, address))
        known.add(address)
    end = len(events)
    rows += [(began, end, size, address) for address, (began, size) in live.items()]
    reserved = 0
    for number, segment in enumerate(_list(snapshot, "segments", "")):
        place = f"/segments/{number}"
        if not isinstance(segment, dict):
            raise InvalidInputError("a segment is a dictionary", place)
        if segment.get("device", device) != device:
            continue
        reserved += _number(segment, "total_size", place)
        address = _number(segment, "address", place)
        for index, block in enumerate(_list(segment, "blocks", place)):
            at = f"{place}/blocks/{index}"
            if not isinstance(block, dict):
                raise InvalidInputError("a block is a dictionary", at)
            size = _number(block, "size", at)
            if str(block.get("state", "")).startswith("active") and address not in known:
                rows.append((0, end, size, address))
            address += size
    rows = [row for row in sorted(rows) if row[2] > 0 and row[0] < row[1]]
    if not rows:
        raise InvalidInputError("no buffer is allocated", f"/device_traces/{device}")
    lower, upper, sizes, addresses = (list(column) for column in zip(*rows, strict=True))
    return Buffers(device, lower, upper, sizes, addresses, reserved)


def _list(parent: dict[str, Any], name: str, place: str) -> list[Any]:
    found = parent.get(name)
    if not isinstance(found, list):
        raise InvalidInputError(f"no list `{name}`", f"{place}/{name}")
    return found


def _number(parent: dict[str, Any], name: str, place: str) -> int:
    value = parent.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidInputError(f"{name} is a number of bytes", f"{place}/{name}")
    return value
