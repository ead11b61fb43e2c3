"""
What each op of an execution trace took, from a Kineto trace (`profiler.export_chrome_trace`).

An op on a device takes what the kernels take that it launches, which carry its External id; on the
host it takes its own time.
"""

import statistics
from collections import defaultdict
from typing import Any

from coop_plan.planner.importers.operators import Work
from coop_plan.schemas.errors import InvalidInputError

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
KINDS = ON_DEVICE | {"cpu_op", "user_annotation"}


class Times:
    """Durations in µs, by the profiler's number for a node or by the order of equal names."""

    def __init__(self, document: Any) -> None:
        events = document.get("traceEvents") if isinstance(document, dict) else document
        if not isinstance(events, list):
            raise InvalidInputError("no Kineto trace: it has no list `traceEvents`", "/traceEvents")
        self.device_us: dict[int, float] = defaultdict(float)
        self.calls: list[tuple[float, str, int, float]] = []
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
                self.calls.append((begin, str(event.get("name")), number, duration))
        self.calls.sort()
        if not self.calls:
            raise InvalidInputError(
                "the trace has no operators (events of cat cpu_op)", "/traceEvents"
            )

    def of(self, works: list[Work], ops: list[Work]) -> list[float | None]:
        """What each of `ops` takes, None where it is not found; `works` are all nodes in order."""
        number = self._same_run(works) or self._same_names(works)
        own = {external: duration for _, _, external, duration in self.calls}

        def device_us(op: Work, run: int) -> float:
            return sum(
                self.device_us.get(number[work.node.id][run], 0.0)
                for work in op.subtree
                if run < len(number.get(work.node.id, ()))
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

    def _same_run(self, works: list[Work]) -> dict[int, list[int]]:
        """Numbers by node, if both traces are of one run: the profiler's numbers bear one name."""
        names = {number: name for _, name, number, _ in self.calls}
        for shift in self._shifts(works, names):
            matched = {
                work.node.id: [work.node.record + shift]
                for work in works
                if names.get(work.node.record + shift) == work.node.name
            }
            called = [work for work in works if "::" in work.node.name]
            if sum(work.node.id in matched for work in called) >= 0.9 * len(called) > 0:
                return matched
        return {}

    def _shifts(self, works: list[Work], names: dict[int, str]) -> list[int]:
        """What Kineto's numbers may be ahead: it counts from its own start in some versions."""
        first = next((work.node for work in works if "::" in work.node.name), None)
        if first is None:
            return []
        near = range(-2, 3)
        return [shift for shift in near if names.get(first.record + shift) == first.name]

    def _same_names(self, works: list[Work]) -> dict[int, list[int]]:
        """Numbers by node, if they are of two runs of one script: the k-th of a name is the k-th.

        Several steps were recorded where every name comes so many times as often.
        """
        here: dict[str, list[int]] = defaultdict(list)
        there: dict[str, list[int]] = defaultdict(list)
        for work in works:
            here[work.node.name].append(work.node.id)
        for _, name, number, _ in self.calls:
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
        raise InvalidInputError(f"{key} is a number of µs", f"/traceEvents/{position}/{key}")
    if key == "dur" and value < 0:
        raise InvalidInputError("dur is below 0", f"/traceEvents/{position}/dur")
    return float(value)
