"""Durations of an execution trace's ops, from a Kineto trace (`profiler.export_chrome_trace`).

The duration of an op on a device is that of the kernels launched below it; on the host it is its
own. A kernel's `correlation` is that of its launch, and the innermost operator around the launch on
its thread is the kernel's. The `External id` of a kernel is that operator's number in newer traces
only: until 2023 it was the correlation again.
"""

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coop_plan.planner.importers.operators import Call, is_operator
from coop_plan.schemas.errors import InvalidInputError

LEAST_SHARE = 0.5
"""Least share of the ops, and of the device time, that a Kineto trace of the same script has."""


class Span(NamedTuple):
    """An operator or annotation on the host, µs."""

    begin: float
    end: float
    name: str
    external: int
    record: int
    """The profiler's number (`rf_id` of the execution trace), 0 if the trace lacks it."""
    thread: tuple[str, str]


class Kernel(NamedTuple):
    """Work on the device; `span` is the innermost one around its launch, -1 if there is none."""

    launched: float
    duration: float
    span: int


@dataclass
class Match:
    """Nodes of the execution trace by span, each with its run of the step."""

    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    windows: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each run or of several, in ascending order, µs."""


@dataclass(frozen=True)
class Measured:
    """Durations of ops in µs, None if unknown, and the device time of the step that they cover."""

    micros: list[float | None]
    joined_us: float = 0.0
    device_us: float = 0.0
    note: str = ""


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
        # Categories until 2022, whose kernels also write `external id` in lower case.
        older = {
            "Operator": "cpu_op",
            "Kernel": "kernel",
            "Memcpy": "gpu_memcpy",
            "Memset": "gpu_memset",
            "Runtime": "cuda_runtime",
        }
        self.spans: list[Span] = []
        launches: dict[int, tuple[float, tuple[str, str]]] = {}
        work: list[tuple[float, float, int, int]] = []
        for position, event in enumerate(events):
            if not isinstance(event, dict) or event.get("ph") != "X":
                continue
            kind = event.get("cat")
            if not isinstance(kind, str):
                continue
            kind = older.get(kind, kind)
            arguments = event.get("args")
            arguments = arguments if isinstance(arguments, dict) else {}
            correlation = _number(arguments, "correlation")
            external = _number(arguments, "External id") or _number(arguments, "external id")
            thread = (str(event.get("pid")), str(event.get("tid")))
            if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
                begin, duration = (_micros(event, key, position) for key in ("ts", "dur"))
                work.append((begin, duration, external, correlation))
            elif kind in ("cpu_op", "user_annotation"):
                begin, duration = (_micros(event, key, position) for key in ("ts", "dur"))
                record = _number(arguments, "Record function id")
                name = str(event.get("name"))
                self.spans.append(Span(begin, begin + duration, name, external, record, thread))
            elif correlation and kind.endswith(("_runtime", "_driver")):
                launches[correlation] = (_micros(event, "ts", position), thread)
        if not self.spans:
            raise InvalidInputError(
                "the trace has no operators (events of cat cpu_op): record ProfilerActivity.CPU",
                "/traceEvents",
            )
        self.spans.sort(key=lambda span: (span.begin, -span.end))
        self.parent = [-1] * len(self.spans)
        self.by_external_id = 0
        self.kernels = self._join(work, launches)

    def _join(
        self,
        work: list[tuple[float, float, int, int]],
        launches: dict[int, tuple[float, tuple[str, str]]],
    ) -> list[Kernel]:
        """Each kernel with its span, by correlation; by External id if no launch in a span has it.

        An External id equal to the correlation is no operator's, even if an operator has it.
        """
        around = self._innermost(launches)
        numbered = {span.external: at for at, span in enumerate(self.spans) if span.external}
        kernels = []
        for begin, duration, external, correlation in work:
            launched = launches[correlation][0] if correlation in launches else begin
            span = around.get(correlation, -1)
            if span < 0 and external != correlation and external in numbered:
                span = numbered[external]
                self.by_external_id += 1
            kernels.append(Kernel(launched, duration, span))
        return kernels

    def _innermost(self, launches: dict[int, tuple[float, tuple[str, str]]]) -> dict[int, int]:
        """Innermost span around each launch on its thread; sets `parent` of all spans."""
        moments = [
            (span.begin, 0, at, span.thread)  # spans first: one may begin with its launch
            for at, span in enumerate(self.spans)
        ]
        moments += [(at, 1, number, thread) for number, (at, thread) in launches.items()]
        moments.sort()
        found: dict[int, int] = {}
        stacks: dict[tuple[str, str], list[int]] = defaultdict(list)
        for time, is_launch, number, thread in moments:
            stack = stacks[thread]
            while stack and self.spans[stack[-1]].end < time:
                stack.pop()
            top = stack[-1] if stack else -1
            if is_launch:
                found[number] = top
            else:
                self.parent[number] = top
                stack.append(number)
        return found

    def of(self, calls: list[Call], ops: list[Call], device: str) -> Measured:
        """Durations of `ops` on `device`; `calls` are all calls of the step in program order.

        Raises:
            InvalidInputError: the trace is of another script, or lacks what joins its kernels.
        """
        match = self._same_run(calls) or self._same_names(calls)
        owner = _owners(calls, ops)
        own = {op.node.id: at for at, op in enumerate(ops)}
        runs: list[dict[int, float]] = [{} for _ in ops]
        for span, (node, run) in match.nodes.items():
            if node in own:
                host = 0.0 if self.kernels else self.spans[span].end - self.spans[span].begin
                runs[own[node]][run] = host
        matched = sum(bool(found) for found in runs)
        if matched < LEAST_SHARE * len(ops):
            raise InvalidInputError(
                f"{matched} of the execution trace's {len(ops)} operators are in it: give the"
                " Kineto trace of the same script",
                "/traceEvents",
            )
        if not self.kernels:
            medians = [statistics.median(found.values()) if found else None for found in runs]
            note = "" if device == "cpu" else "times of the host: the trace has no kernels"
            return Measured(medians, note=note)
        launching, joined, rest = self._add_kernels(match, owner, runs)
        total = joined + sum(rest.values())
        if not launching or joined < LEAST_SHARE * total:
            raise InvalidInputError(
                f"of the step's {total:.0f} µs on the device, {joined:.0f} are of kernels launched"
                " by operators of the execution trace: record both traces in one"
                " torch.profiler.profile with ProfilerActivity.CPU and CUDA",
                "/traceEvents",
            )
        notes = []
        if total > joined:
            most = max(rest, key=lambda name: rest[name])
            notes.append(
                f"most of the rest was launched in {most[:80]}, which is no operator of the graph"
            )
        if self.by_external_id:
            notes.append(
                f"{self.by_external_id} of {len(self.kernels)} kernels joined by External id, since"
                " the trace lacks their launch"
            )
        micros = [
            statistics.median(found.values()) if at in launching else None
            for at, found in enumerate(runs)
        ]
        return Measured(micros, joined, total, "; ".join(notes))

    def _add_kernels(
        self, match: Match, owner: dict[int, int], runs: list[dict[int, float]]
    ) -> tuple[set[int], float, dict[str, float]]:
        """Add kernels to `runs`; returns ops with kernels, their µs, and the rest's by launcher."""
        begins = [begin for begin, _ in match.windows]
        launching: set[int] = set()
        joined = 0.0
        rest: dict[str, float] = defaultdict(float)
        for kernel in self.kernels:
            span = kernel.span
            while span >= 0 and span not in match.nodes:
                span = self.parent[span]
            node, run = match.nodes[span] if span >= 0 else (-1, 0)
            op = owner.get(node)
            if op is not None:
                launching.add(op)
                runs[op][run] = runs[op].get(run, 0.0) + kernel.duration
                joined += kernel.duration
                continue
            window = bisect_right(begins, kernel.launched) - 1
            if window >= 0 and kernel.launched <= match.windows[window][1]:
                span = kernel.span
                rest[self.spans[span].name if span >= 0 else "no scope"] += kernel.duration
        return launching, joined, rest

    def _same_run(self, calls: list[Call]) -> Match | None:
        """Match if both traces are of one run: equal numbers have equal names."""
        named = [call.node for call in calls if "::" in call.node.name]
        if not named:
            return None
        records = {span.record: at for at, span in enumerate(self.spans) if span.record}
        externals = {span.external: at for at, span in enumerate(self.spans) if span.external}
        # Some versions count External ids from the start of the Kineto trace.
        for spans, shift in [(records, 0), *((externals, shift) for shift in range(-2, 3))]:
            found: dict[int, tuple[int, int]] = {}
            for call in calls:
                at = spans.get(call.node.record + shift, -1)
                if at >= 0 and self.spans[at].name == call.node.name:
                    found[at] = (call.node.id, 0)
            nodes = {node for node, _ in found.values()}
            if sum(node.id in nodes for node in named) >= 0.9 * len(named):
                begin = min(self.spans[at].begin for at in found)
                end = max(self.spans[at].end for at in found)
                return Match(found, [(begin, end)])
        return None

    def _same_names(self, calls: list[Call]) -> Match:
        """Match if the traces are of two runs of one script: by order of names in each step."""
        here: dict[str, list[int]] = defaultdict(list)
        for call in calls:
            here[call.node.name].append(call.node.id)
        best, most = Match(), 0
        for steps in self._steps():
            found = [self._same_counts(here, first, last) for first, last in steps]
            matched = [len({node for _, node, _ in step}) for step in found]
            if max(matched, default=0) > most:
                most = max(matched)
                # A step of another kind, such as the first, has fewer.
                similar = [at for at, nodes in enumerate(matched) if nodes >= 0.9 * most]
                best = self._merged([steps[at] for at in similar], [found[at] for at in similar])
        return best

    def _steps(self) -> list[list[tuple[int, int]]]:
        """Ranges of spans that may be steps: by optimizer steps, by profiler steps, and all."""
        every = len(self.spans)
        begins = [span.begin for span in self.spans]
        ends = [
            bisect_right(begins, span.end)
            for span in self.spans
            if span.name.startswith("Optimizer.step")
        ]
        starts = [at for at, span in enumerate(self.spans) if span.name.startswith("ProfilerStep#")]
        return [
            list(zip([0, *ends[:-1]], ends, strict=True)) if ends else [],
            list(zip(starts, [*starts[1:], every], strict=True)) if starts else [],
            [(0, every)],
        ]

    def _same_counts(
        self, here: dict[str, list[int]], first: int, last: int
    ) -> list[tuple[int, int, int]]:
        """(span, node, run): the k-th of each name whose spans are r times as many as its nodes.

        The range has then r runs of the step, one after the other. If these overlap, as in a trace
        of a network of r times as many layers, only the names with r = 1 count.
        """
        there: dict[str, list[int]] = defaultdict(list)
        for at in range(first, last):
            there[self.spans[at].name].append(at)
        found = []
        for name, nodes in here.items():
            runs, rest = divmod(len(there.get(name, ())), len(nodes))
            if rest == 0 and runs:
                found += [
                    (at, nodes[k % len(nodes)], k // len(nodes)) for k, at in enumerate(there[name])
                ]
        repeated = {node for _, node, run in found if run}
        last_of: dict[int, int] = defaultdict(int)
        for at, node, run in found:
            if node in repeated:
                last_of[run] = max(last_of[run], at)
        early = [at < last_of[run - 1] for at, _, run in found if run]
        if sum(early) > 0.1 * len(early):
            return [entry for entry in found if entry[1] not in repeated]
        return found

    def _merged(
        self, steps: list[tuple[int, int]], found: list[list[tuple[int, int, int]]]
    ) -> Match:
        """One match of several ranges of spans; their runs are numbered through."""
        match, runs = Match(), 0
        for (first, last), nodes in zip(steps, found, strict=True):
            match.nodes.update((at, (node, runs + run)) for at, node, run in nodes)
            end = self.spans[last].begin if last < len(self.spans) else math.inf
            match.windows.append((self.spans[first].begin, end))
            runs += 1 + max(run for _, _, run in nodes)
        return match


def _owners(calls: list[Call], ops: list[Call]) -> dict[int, int]:
    """Op by node: the nodes of its subtree.

    A kernel that an operator around ops launches itself is its first op's.
    """
    node_of = {call.node.id: call.node for call in calls}
    owner = {call.node.id: at for at, op in enumerate(ops) for call in op.subtree}
    for at, op in enumerate(ops):
        node = node_of.get(op.node.parent)
        while node is not None and is_operator(node.name):
            owner.setdefault(node.id, at)
            node = node_of.get(node.parent)
    return owner


def _number(arguments: dict[str, Any], name: str) -> int:
    """A positive number of an event, 0 if there is none."""
    value = arguments.get(name)
    return value if type(value) is int and value > 0 else 0


def _micros(event: dict[str, Any], key: str, position: int) -> float:
    value = event.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
        raise InvalidInputError(f"{key} must be a number of µs", f"/traceEvents/{position}/{key}")
    if key == "dur" and value < 0:
        raise InvalidInputError(
            f"dur must be at least 0, not {value}", f"/traceEvents/{position}/dur"
        )
    return float(value)
