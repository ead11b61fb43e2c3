"""
Durations of an execution trace's ops, from a Kineto trace (`profiler.export_chrome_trace`).

The duration of an op on a device is that of the kernels that it launches, which carry its External
id; on the host it is its own.
"""

import statistics
from collections import defaultdict
from typing import Any

from coop_plan.planner.importers.operators import Call
from coop_plan.schemas.errors import InvalidInputError

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
KINDS = ON_DEVICE | {"cpu_op", "user_annotation"}


class KinetoTimes:
    """Durations in µs, matched to nodes by the profiler's number or the order of equal names."""

    def __init__(self, document: Any) -> None:
        events = document.get("traceEvents") if isinstance(document, dict) else document
        if not isinstance(events, list):
            raise InvalidInputError(
                "not a Kineto trace: there is no list `traceEvents`; write one with"
                " profiler.export_chrome_trace",
                "/traceEvents",
            )
        self.device_us: dict[int, float] = defaultdict(float)
        self.events: list[tuple[float, str, int, float]] = []
        for position, event in enumerate(events):
            if not isinstance(event, dict) or event.get("ph") != "X":
                continue
            kind = event.get("cat")
            if not isinstance(kind, str) or kind not in KINDS:
                continue
            begin, duration = (_micros(event, key, position) for key in ("ts", "dur"))
            arguments = event.get("args")
            arguments = arguments if isinstance(arguments, dict) else {}
            number = arguments.get("External id")
            if not isinstance(number, int):
                continue
            if kind in ON_DEVICE:
                self.device_us[number] += duration
            else:
                self.events.append((begin, str(event.get("name")), number, duration))
        self.events.sort()
        if not self.events:
            raise InvalidInputError(
                "the trace has no operators (events of cat cpu_op): record ProfilerActivity.CPU",
                "/traceEvents",
            )

    def of(self, calls: list[Call], ops: list[Call]) -> list[float | None]:
        """Duration of each of `ops`, None if not found; `calls` are all calls in order."""
        number = self._same_run(calls) or self._same_names(calls)
        own = {external: duration for _, _, external, duration in self.events}

        def device_us(op: Call, run: int) -> float:
            return sum(
                self.device_us.get(number[call.node.id][run], 0.0)
                for call in op.subtree
                if run < len(number.get(call.node.id, ()))
            )

        found: list[float | None] = []
        for op in ops:
            runs = number.get(op.node.id)
            if not runs:
                found.append(None)
            elif self.device_us:
                found.append(statistics.median(device_us(op, run) for run in range(len(runs))))
            else:
                found.append(statistics.median(own[external] for external in runs))
        return found

    def _same_run(self, calls: list[Call]) -> dict[int, list[int]]:
        """Numbers by node if both traces are of one run: equal numbers have equal names."""
        names = {number: name for _, name, number, _ in self.events}
        for shift in self._shifts(calls, names):
            matched = {
                call.node.id: [call.node.record + shift]
                for call in calls
                if names.get(call.node.record + shift) == call.node.name
            }
            named = [call for call in calls if "::" in call.node.name]
            if sum(call.node.id in matched for call in named) >= 0.9 * len(named) > 0:
                return matched
        return {}

    def _shifts(self, calls: list[Call], names: dict[int, str]) -> list[int]:
        """Possible offsets of Kineto's numbers, which some versions count from their own start."""
        first = next((call.node for call in calls if "::" in call.node.name), None)
        if first is None:
            return []
        near = range(-2, 3)
        return [shift for shift in near if names.get(first.record + shift) == first.name]

    def _same_names(self, calls: list[Call]) -> dict[int, list[int]]:
        """
        Numbers by node if the traces are of two runs of one script: the k-th event of each name.

        If a name occurs r times as often in the Kineto trace, that trace has r steps.
        """
        here: dict[str, list[int]] = defaultdict(list)
        there: dict[str, list[int]] = defaultdict(list)
        for call in calls:
            here[call.node.name].append(call.node.id)
        for _, name, number, _ in self.events:
            there[name].append(number)
        matched: dict[int, list[int]] = {}
        for name, ids in here.items():
            runs, rest = divmod(len(there[name]), len(ids))
            if rest == 0:
                for k, node in enumerate(ids):
                    matched[node] = [there[name][k + run * len(ids)] for run in range(runs)]
        return matched


def _micros(event: dict[str, Any], key: str, position: int) -> float:
    value = event.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
        raise InvalidInputError(f"{key} must be a number of µs", f"/traceEvents/{position}/{key}")
    if key == "dur" and value < 0:
        raise InvalidInputError(
            f"dur must be at least 0, not {value}", f"/traceEvents/{position}/dur"
        )
    return float(value)
