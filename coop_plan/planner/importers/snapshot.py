"""Reader of the buffers in a memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`).

The snapshot is a pickle of plain containers: `segments` with the blocks at the end of the
recording, and per device the events of its allocator (`torch/cuda/_memory_viz.py` documents both).
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any

from coop_plan.schemas.errors import InvalidInputError


@dataclass(frozen=True)
class Buffers:
    """Lifetimes are half-open, in events of the allocator; sizes and addresses are bytes."""

    device: int
    lower: list[int]
    upper: list[int]
    size: list[int]
    address: list[int]
    reserved_bytes: int
    """Bytes that the allocator had reserved at the end."""

    @property
    def live_bytes(self) -> int:
        """Maximum of the live bytes over time."""
        changes: dict[int, int] = {}
        for lower, upper, size in zip(self.lower, self.upper, self.size, strict=True):
            changes[lower] = changes.get(lower, 0) + size
            changes[upper] = changes.get(upper, 0) - size
        live = peak = 0
        for time in sorted(changes):
            live += changes[time]
            peak = max(peak, live)
        return peak


class _Plain(pickle.Unpickler):
    """Unpickler of containers, numbers and text; other classes could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, and only plain data is read")


def read_snapshot(data: bytes) -> Buffers:
    """The buffers on the device with the most events.

    A buffer allocated before the recording is live from 0, one that is not freed to the end.

    Raises:
        InvalidInputError: the first fault and its JSON pointer.
    """
    try:
        snapshot = _Plain(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle can raise nearly anything
        message = f"not a memory snapshot: {str(error) or type(error).__name__}"
        raise InvalidInputError(message) from None
    if not isinstance(snapshot, dict):
        raise InvalidInputError("not a memory snapshot: the pickle is not a dictionary")
    traces = _list(snapshot, "device_traces", "")
    for device, events in enumerate(traces):
        if not isinstance(events, list):
            raise InvalidInputError(
                "a device's trace must be a list of events", f"/device_traces/{device}"
            )
    device = max(range(len(traces)), key=lambda d: (len(traces[d]), -d), default=0)
    if not traces or not traces[device]:
        message = "no events: call torch.cuda.memory._record_memory_history() before the step"
        raise InvalidInputError(message, "/device_traces")
    return _buffers(snapshot, traces[device], device)


def _buffers(snapshot: dict[str, Any], events: list[Any], device: int) -> Buffers:
    live: dict[int, tuple[int, int]] = {}
    rows: list[tuple[int, int, int, int]] = []
    seen: set[int] = set()
    for time, event in enumerate(events):
        place = f"/device_traces/{device}/{time}"
        if not isinstance(event, dict):
            raise InvalidInputError("an event must be a dictionary", place)
        action = event.get("action")
        if action not in ("alloc", "free_completed"):
            continue
        address, size = (_number(event, name, place) for name in ("addr", "size"))
        if action == "alloc":
            if address in live:
                raise InvalidInputError(
                    f"address {address} is allocated twice without a free", f"{place}/addr"
                )
            live[address] = time, size
        elif address in live:
            began, own = live.pop(address)
            rows.append((began, time, own, address))
        elif address in seen:
            raise InvalidInputError(f"address {address} is freed twice", f"{place}/addr")
        else:
            rows.append((0, time, size, address))
        seen.add(address)
    end = len(events)
    rows += [(began, end, size, address) for address, (began, size) in live.items()]
    reserved = 0
    for number, segment in enumerate(_list(snapshot, "segments", "")):
        place = f"/segments/{number}"
        if not isinstance(segment, dict):
            raise InvalidInputError("a segment must be a dictionary", place)
        if segment.get("device", device) != device:
            continue
        reserved += _number(segment, "total_size", place)
        address = _number(segment, "address", place)
        for index, block in enumerate(_list(segment, "blocks", place)):
            at = f"{place}/blocks/{index}"
            if not isinstance(block, dict):
                raise InvalidInputError("a block must be a dictionary", at)
            size = _number(block, "size", at)
            if str(block.get("state", "")).startswith("active") and address not in seen:
                rows.append((0, end, size, address))
            address += size
    rows = [row for row in sorted(rows) if row[2] > 0 and row[0] < row[1]]
    if not rows:
        message = f"device {device} has no allocation of more than 0 bytes"
        raise InvalidInputError(message, f"/device_traces/{device}")
    lower, upper, sizes, addresses = (list(column) for column in zip(*rows, strict=True))
    return Buffers(device, lower, upper, sizes, addresses, reserved)


def _list(parent: dict[str, Any], name: str, place: str) -> list[Any]:
    found = parent.get(name)
    if not isinstance(found, list):
        raise InvalidInputError(f"there is no list `{name}`", f"{place}/{name}")
    return found


def _number(parent: dict[str, Any], name: str, place: str) -> int:
    value = parent.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidInputError(
            f"{name} must be an integer from 0 to 2**63 - 1, in bytes", f"{place}/{name}"
        )
    return value
