"""What a worker does with a request: read it, look for its answer, make it. Pure of HTTP.

Everything is bytes in, a small reply and bytes out, so that it can run in a process of its own.
"""

import sqlite3
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from coop_plan.planner.cache.record import Record, StoredPlan, StoredRefusal, as_bytes, as_record
from coop_plan.planner.cache.store import PlanStore, planner_version
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import Graph, InvalidInputError, Plan, fingerprint
from coop_plan.schemas._parse import parse

REMEMBERED = 64
"""Verified plans that a worker keeps at hand, as they are sent."""


class PlanRequest(PlanOptions, frozen=True, kw_only=True):
    """What `POST /plan` takes; the names are those of the command line."""

    graph: Graph


class Limits(msgspec.Struct, frozen=True):
    """What a request may be: bytes of its body unpacked, ops, and seconds of its time limit."""

    body_bytes: int = 64 << 20
    ops: int = 100_000
    seconds: float = 600.0


class Reply(msgspec.Struct, omit_defaults=True):
    """
    What a worker says; a plan, if there is one, follows as bytes.

    `problem` names one of `api.problems`, with its members. Without an answer `key` and `costs`
    say by what a solve for it is shared, and `seconds` how long it may take.
    """

    key: str = ""
    costs: str = ""
    found: bool = False
    seconds: float | None = None
    problem: str = ""
    detail: str = ""
    members: dict[str, Any] = {}
    dropped: int = 0
    fraction: float | None = None
    final: bool = True


class RefusedError(Exception):
    """A request that ends with a problem."""

    def __init__(self, name: str, detail: str, **members: Any) -> None:
        self.reply = Reply(problem=name, detail=detail, members=members)
        super().__init__(detail)


class Answers:
    """Answers requests from a store, and makes what is not in it."""

    def __init__(self, store: PlanStore, limits: Limits) -> None:
        self._store, self._limits = store, limits
        self._at_hand: OrderedDict[str, tuple[Record, bytes]] = OrderedDict()
        self.dropped = 0
        """Records that were damaged, or held no answer to what they were kept by."""

    def read(self, body: bytes, encoding: str = "") -> tuple[str, PlanRequest]:
        """The key and the request of a body."""
        data = unpack(body, encoding, self._limits.body_bytes)
        request = parse(PlanRequest, data)
        limits, graph = self._limits, request.graph
        if len(graph.ops) > limits.ops:
            message = f"{len(graph.ops)} ops; this server takes {limits.ops}"
            raise RefusedError("too-many-ops", message, max_ops=limits.ops)
        if request.time_limit is not None and request.time_limit > limits.seconds:
            message = f"this server gives a request {limits.seconds:g} s at most"
            raise InvalidInputError(message, "/time_limit")
        linked = request.on(graph).device.linked
        return request.key(fingerprint(graph), planner_version(), links=linked), request

    def ask(self, body: bytes, encoding: str, made: bytes) -> tuple[Reply, bytes]:
        """
        The answer to a request, if it is there: in the store or in `made`, a solve's own record.

        A plan that was made for quite other costs is none, unless it is that record.
        """
        key, request = self.read(body, encoding)
        graph = request.graph
        records = [as_record(made)] if made else self._records(key)
        best: Plan | None = None
        for record in records:
            answer = record.for_question(graph, request)
            if answer is None:
                self.dropped += 1
                continue
            if not isinstance(answer, Plan):
                return infeasible(key, answer), b""
            suits = bool(made) or (isinstance(record, StoredPlan) and record.suits(graph, answer))
            if suits and (best is None or answer.cost_us < best.cost_us):
                best = answer
        if best is not None:
            return Reply(key=key, found=True), best.to_json().encode()
        # Whoever finds plans for other costs waits for a plan of costs like theirs, to the digit.
        costs = "" if not records else str(hash(tuple(op.cost_us for op in graph.ops)))
        return Reply(key=key, costs=costs, seconds=request.time_limit), b""

    def solve(
        self,
        body: bytes,
        encoding: str,
        another: bool,
        say: Callable[[str, float | None], None],
    ) -> tuple[Reply, bytes]:
        """Make the answer, or another one for other costs, and keep it; its record."""
        from coop_plan.planner import InfeasibleBudgetError, TimeLimitError, plan

        key, request = self.read(body, encoding)
        graph = request.graph
        record: Record
        try:
            made = plan(graph, request, progress=lambda p: say(p.message, p.fraction))
            record = StoredPlan.of(self._better(key, request, made) if another else made, graph)
        except InfeasibleBudgetError as error:
            record = StoredRefusal.of(error, graph)
        except TimeLimitError as error:
            return Reply(key=key, problem="time-limit", detail=str(error)), b""
        try:
            self._store.put(key, record, another=another)
        except (OSError, sqlite3.Error):
            self.dropped += 1  # a full disk: whoever waits gets the answer all the same
        if not another:  # another server may have been first: its answer is everybody's
            record = next(iter(self._records(key)), record)
        return Reply(key=key, found=True), as_bytes(record)

    def stored(self, key: str) -> tuple[Reply, bytes]:
        """The first plan of a key, verified, in the ids of the graph it was made for."""
        for record in self._records(key):
            at_hand = self._at_hand.get(key)
            if at_hand is not None and at_hand[0] == record:
                return Reply(key=key, found=True), at_hand[1]
            found = record.as_made() if isinstance(record, StoredPlan) else None
            if found is None:
                continue
            data = found[1].to_json().encode()
            self._at_hand[key] = record, data
            while len(self._at_hand) > REMEMBERED:
                self._at_hand.popitem(last=False)
            return Reply(key=key, found=True), data
        return Reply(problem="not-found", detail="no plan of that key"), b""

    def _better(self, key: str, request: PlanRequest, made: Plan) -> Plan:
        """The plan that was made or a kept one, whichever costs less for this graph."""
        candidates = [made]
        for record in self._records(key):
            found = record.for_question(request.graph, request)
            if isinstance(found, Plan):
                candidates.append(found)
        return min(candidates, key=lambda candidate: candidate.cost_us)

    def _records(self, key: str) -> list[Record]:
        """What is kept by a key; a store that fails keeps nothing."""
        try:
            return self._store.get(key)
        except (OSError, sqlite3.Error):
            self.dropped += 1
            return []


def infeasible(key: str, error: Any) -> Reply:
    """An `InfeasibleBudgetError` as a reply."""
    members = {
        "budget_bytes": error.budget_bytes,
        "min_feasible_bytes": error.min_feasible_bytes,
        "blocking_op": error.blocking_op,
        "blocking_op_name": error.blocking_op_name,
        "working_set_bytes": error.working_set_bytes,
    }
    return Reply(key=key, problem="budget-infeasible", detail=str(error), members=members)


def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """
    A body without its Content-Encoding, which unpacks to `limit` bytes at most.

    Raises:
        RefusedError: it would be larger, or is not of that encoding.
    """
    if encoding in ("", "identity"):
        return body
    try:
        if encoding == "gzip":
            inflate = zlib.decompressobj(wbits=31)
            data = inflate.decompress(body, limit + 1)
            whole = inflate.eof and not inflate.unused_data
        else:
            import zstandard

            with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
                data = reader.read(limit + 1)
            whole = True
    except Exception as error:
        if type(error).__name__ not in ("error", "ZstdError"):
            raise
        raise RefusedError("invalid-input", f"the body is not {encoding}", pointer="") from None
    if len(data) > limit:
        message = f"at most {limit} bytes, unpacked"
        raise RefusedError("body-too-large", message, max_body_bytes=limit)
    if not whole:
        raise RefusedError("invalid-input", f"the {encoding} body is cut short", pointer="")
    return data
