"""Request handler of a worker: parses requests, finds stored plans and makes new ones. No HTTP.

Its interface is bytes in, a small reply and bytes out, so that it can run in another process.
"""

import contextlib
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from coop_plan.api.service.graph_store import Digest, GraphCache, GraphStore, ParsedGraph
from coop_plan.planner.core.errors import InfeasibleBudgetError, infeasible_fields
from coop_plan.planner.method import Progress
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.plan_cache.cost_rule import all_costs, cost_class, cost_digest
from coop_plan.planner.plan_cache.record import (
    Record,
    StoredPlan,
    StoredRefusal,
    as_bytes,
    as_record,
)
from coop_plan.planner.plan_cache.store import Families, PlanStore, holds, planner_version
from coop_plan.schemas import Graph, InvalidInputError, Plan, fingerprint
from coop_plan.schemas._parse import parse
from coop_plan.schemas.fingerprint import digest_of

T = TypeVar("T")


class PlanRequest(PlanOptions, frozen=True, kw_only=True):
    """Body of `POST /plan`: planning options and a graph, or the digest of a graph sent before."""

    graph: Graph | Digest


ENTRIES_PER_OP = 4
"""Limit on tensors, and on ops with variants, for each op that a graph may have."""

VALUES_PER_OP = 40
"""Limit on JSON values of a body for each op that a graph may have; captures have 11 to 33."""


AWAY_SECONDS = 10.0
"""Time for which a solve waits for a graph store that does not answer: it may be restarting."""

PAUSE_SECONDS = 0.5


class Limits(msgspec.Struct, frozen=True):
    """Limits on a request: bytes of its decompressed body, ops, and its time limit in seconds."""

    body_bytes: int = 64 << 20
    ops: int = 100_000
    seconds: float = 600.0


State = Literal["queued", "running", "done", "failed", "cancelled"]
"""State of a job."""


class Figures(msgspec.Struct, frozen=True):
    """Figures of a running solve; see `planner.method.Progress`."""

    fraction: float | None = None
    overhead: float | None = None
    bound: float | None = None
    gap: float | None = None

    @classmethod
    def of(cls, progress: Progress) -> "Figures":
        """Figures from a progress callback, with NumPy's numbers as Python's."""
        figures = (progress.fraction, progress.overhead, progress.bound, progress.gap)
        return cls(*(None if figure is None else float(figure) for figure in figures))


class Reply(msgspec.Struct, omit_defaults=True):
    """Reply of a worker; the bytes of a plan or a graph follow it.

    Attributes:
        key: cache key of the plan.
        costs: name of the costs that the plan was made with, or of the request's own.
        cost_class: name of the solve that may be shared; empty if its plan is no answer.
        found: the bytes that follow are the answer.
        seconds: the request's time limit.
        problem: a name in `api.service.problems`, with `detail` and `members`.
        dropped: records of the store that were damaged or no answer to their key.
        figures: of a running solve, or of the stored plan.
        settled: no search can improve the plan, or one was made.
        final: False for progress, and for a plan in place of the one that is made.
        unkept: the store did not take the record that follows.
        seals: signatures of the store's records that the answer was made from.
    """

    key: str = ""
    costs: str = ""
    cost_class: str = ""
    found: bool = False
    seconds: float | None = None
    problem: str = ""
    detail: str = ""
    members: dict[str, Any] = {}
    dropped: int = 0
    figures: Figures = Figures()
    settled: bool = False
    final: bool = True
    unkept: bool = False
    seals: list[bytes] = []


class ProblemError(Exception):
    """Ends a request with the problem of this name in `api.service.problems`."""

    def __init__(self, name: str, detail: str, **members: Any) -> None:
        self.name, self.detail, self.members = name, detail, members
        super().__init__(detail)


class ParsedRequest(msgspec.Struct, frozen=True, gc=False):
    """A parsed request; `stored` is its graph as it is stored, if the request names it."""

    key: str
    graph: Graph
    options: PlanRequest
    structure: str
    stored: ParsedGraph | None

    def family(self, kind: str) -> str:
        """Key of all requests that differ only in budgets of this kind ("bytes" or "share")."""
        linked = self.options.apply_link(self.graph).device.linked
        key = self.options.key(self.structure, planner_version(), links=linked, any_budget=True)
        return f"{key} {kind}"

    def families(self, made: Plan) -> Families:
        """Each family of its plan, with the plan's budget in it."""
        budget = self.options.budget
        places: list[tuple[str, int | float]] = [(self.family("bytes"), made.budget_bytes)]
        if budget.kind == "share":
            places.append((self.family("share"), float(budget.value)))
        return places


class RequestHandler:
    """Answers requests from a store, and makes the plans that are not in it.

    `limits` are those of the current request's caller.
    """

    def __init__(self, store: PlanStore, limits: Limits, graphs: GraphStore) -> None:
        self._store, self.limits = store, limits
        self._graphs = GraphCache(graphs)
        self.room = sys.maxsize
        self.dropped = 0
        """Records that were damaged, or no answer to their key."""

    def parse(self, body: bytes, encoding: str = "", patience: float = 0.0) -> ParsedRequest:
        """The request in a body; waits for `patience` seconds for a store that does not answer."""
        data = self._decompress(body, encoding)
        request = parse(PlanRequest, data)
        limits = self.limits
        if request.time_limit is not None and request.time_limit > limits.seconds:
            message = f"the time limit on this server is {limits.seconds:g} s"
            raise InvalidInputError(message, "/time_limit")
        kept: ParsedGraph | None = None
        if isinstance(request.graph, str):
            digest = request.graph
            kept = self._kept_graph(digest, patience)
            if kept is None:
                message = f"graph {digest} is not stored (any more): send it with PUT /graphs"
                raise ProblemError("unknown-graph", message, digest=digest)
            graph, structure = kept.graph, kept.fingerprint
        else:
            graph, structure = request.graph, fingerprint(request.graph)
        self._check_ops(graph)
        linked = request.apply_link(graph).device.linked
        key = request.key(structure, planner_version(), links=linked)
        return ParsedRequest(key, graph, request, structure, kept)

    def _kept_graph(self, digest: str, patience: float) -> ParsedGraph | None:
        """The stored graph; None if the store does not answer, so that the client sends it."""
        until = time.monotonic() + patience
        while True:
            try:
                return self._graphs.get(digest, self._check_room)
            except (OSError, sqlite3.Error):
                if time.monotonic() >= until:
                    return None
                time.sleep(PAUSE_SECONDS)

    def _decompress(self, body: bytes, encoding: str) -> bytes:
        """The decompressed body; refused if it has far more entries than a graph may have.

        Counting characters is cheap. A body that it lets pass is bounded by the process's memory.
        """
        limits = self.limits
        data = decompress(body, encoding, limits.body_bytes)
        max_entries, max_values = ENTRIES_PER_OP * limits.ops, VALUES_PER_OP * limits.ops
        if data.count(b'"cost_us"') > max_entries:
            message = f"more than {max_entries} ops and variants, the limit"
            raise ProblemError("too-many-ops", message, max_ops=limits.ops)
        if data.count(b'"kind"') > max_entries or data.count(b",") > max_values:
            message = f"more than {max_entries} tensors or {max_values} values, the limit"
            raise ProblemError("too-much-work", message)
        self._check_room(len(data))
        return data

    def _check_room(self, size: int) -> None:
        if size > self.room:
            raise ProblemError("needs-room", "the document is large", bytes=size)

    def _check_ops(self, graph: Graph) -> None:
        limit = self.limits.ops
        if len(graph.ops) > limit:
            message = f"the graph has {len(graph.ops)} ops; the limit is {limit}"
            raise ProblemError("too-many-ops", message, max_ops=limit)

    def put_graph(self, body: bytes, encoding: str, digest: str) -> tuple[Reply, bytes]:
        """Store a graph by its digest; `found` if it is stored already."""
        document = self._decompress(body, encoding)
        actual = digest_of(document)
        if actual != digest:
            message = f"the digest of this document is {actual}"
            raise ProblemError("wrong-digest", message, digest=actual)
        try:
            new = self._graphs.put(digest, document, self._check_ops)
        except (OSError, sqlite3.Error) as error:
            message = f"the graph cannot be stored now: send it with the request ({error})"
            raise ProblemError("not-stored", message) from None
        return Reply(found=not new), b""

    def graph(self, digest: str) -> tuple[Reply, bytes]:
        """The document of a digest."""
        document = self._from_store(self._graphs.store.get, digest)
        if document is None:
            raise ProblemError("not-found", f"graph {digest} is not stored")
        return Reply(found=True), document

    def graphs(self) -> tuple[Reply, bytes]:
        """Summaries of the stored graphs, as JSON."""
        return Reply(found=True), msgspec.json.encode(self._from_store(self._graphs.store.listed))

    def _from_store(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        try:
            return call(*arguments, **named)
        except (OSError, sqlite3.Error):
            message = "the store does not answer"
            raise ProblemError("busy", message, retry_after=5) from None

    def find(self, body: bytes, encoding: str, made: bytes) -> tuple[Reply, bytes]:
        """The answer to a request from the store, or from `made`, the record of a job.

        Without an answer the bytes are the request for a solve; see `_for_solve`.
        A plan that was made for other costs is an answer only by the rule of `cost_rule`.
        """
        parsed = self.parse(body, encoding)
        key, graph, options = parsed.key, parsed.graph, parsed.options
        seals = [] if made else self._seals(key)
        records = [as_record(made)] if made else self.records(key)
        best: tuple[Plan, StoredPlan] | None = None
        refusal: InfeasibleBudgetError | None = None
        for record in records:
            answer = record.for_request(graph, options, parsed.structure)
            if answer is None:
                self.dropped += 1
                continue
            if isinstance(record, StoredRefusal):
                if record.is_answer(graph) and not isinstance(answer, Plan):
                    refusal = answer
            elif (
                isinstance(answer, Plan)
                and record.is_answer(graph, answer)
                and (best is None or answer.cost_us < best[0].cost_us)
            ):
                best = answer, record
        if best is not None:
            plan, record = best
            found = stored_plan_reply(key, record)
            found.seals, found.figures = seals, Figures(overhead=plan.overhead)
            return found, plan.to_json().encode()
        if refusal is not None:
            members = infeasible_fields(refusal)
            reply = Reply(key, problem="budget-infeasible", detail=str(refusal), members=members)
            return reply, b""
        if made:
            return self.find(body, encoding, b"")
        mine = all_costs(graph)
        costs, shared = cost_digest(mine), cost_class(mine)
        # If the plan of a caller of this class is no answer, these costs get their own solve.
        if any(record.cost_class == shared for record in records):
            shared = ""
        seconds = options.time_limit
        reply = Reply(key=key, costs=costs, cost_class=shared, seconds=seconds)
        return reply, self._for_solve(parsed)

    def _for_solve(self, parsed: ParsedRequest) -> bytes:
        """The request with the digest of its graph, which is stored for the solver.

        So neither a server nor a broker holds the graphs of queued jobs. If the graph cannot be
        stored, it is in the request.
        """
        graph: Graph | str = parsed.graph
        stored = parsed.stored or ParsedGraph(
            parsed.graph, parsed.structure, msgspec.json.encode(parsed.graph)
        )
        with contextlib.suppress(OSError, sqlite3.Error):
            digest = digest_of(stored.document)
            self._graphs.ensure(digest, stored)
            graph = digest
        return msgspec.json.encode(msgspec.structs.replace(parsed.options, graph=graph))

    def solve(
        self, body: bytes, encoding: str, on_progress: Callable[[Progress], None]
    ) -> tuple[Reply, bytes]:
        """Make and store the plan for the request's costs; its record."""
        from coop_plan.planner import InfeasibleBudgetError, TimeLimitError, plan

        parsed = self.parse(body, encoding, AWAY_SECONDS)
        key, graph = parsed.key, parsed.graph
        record: Record
        families: Families = ()
        try:
            made = plan(graph, parsed.options, progress=on_progress)
            record = StoredPlan.of(self._cheapest(parsed, made), graph)
            families = parsed.families(made)
        except InfeasibleBudgetError as error:
            record = StoredRefusal.of(error, graph)
        except TimeLimitError as error:
            return Reply(key=key, problem="time-limit", detail=str(error)), b""
        # Another server may have stored one for these costs first: all clients get the same plan.
        costs = record.cost_digest
        for another in (False, True):
            try:
                self._store.put(key, record, another=another, families=families)
            except (OSError, sqlite3.Error):
                self.dropped += 1  # for example a full disk: the clients get the plan all the same
                return Reply(key=key, found=True, unkept=True), as_bytes(record)
            kept = next((other for other in self.records(key) if other.cost_digest == costs), None)
            if kept is not None:
                return Reply(key=key, found=True), as_bytes(kept)
        return Reply(key=key, found=True), as_bytes(record)

    def keep(self, key: str, data: bytes) -> tuple[Reply, bytes]:
        """Store a record that a solve made, unless it is stored; refused if that fails."""
        record = as_record(data)
        for another in (False, True):
            if self._from_store(holds, self._store, key, record):
                break
            self._from_store(self._store.put, key, record, another=another)
        return Reply(key=key, found=True), b""

    def plans(self, key: str, costs: str = "") -> Iterator[StoredPlan]:
        """The stored plans of a key, oldest first; only those made with `costs`, if given."""
        for record in self.records(key):
            if isinstance(record, StoredPlan) and costs in ("", record.cost_digest):
                yield record

    def stored_plan(self, key: str, costs: str = "") -> tuple[Reply, bytes]:
        """The first of `plans`, verified, with the ids of the graph that it was made for."""
        seals = self._seals(key)
        if not seals:
            self._from_store(self._store.check)
        for record in self.plans(key, costs):
            made = record.with_original_graph()
            if made is not None:
                reply = stored_plan_reply(key, record)
                reply.seals = seals
                return reply, made[1].to_json().encode()
        return NO_PLAN, b""

    def _cheapest(self, request: ParsedRequest, made: Plan) -> Plan:
        """The cheapest for this graph of the new plan and the stored ones."""
        candidates = [made]
        for record in self.records(request.key):
            found = record.for_request(request.graph, request.options)
            if isinstance(found, Plan):
                candidates.append(found)
        return min(candidates, key=lambda candidate: candidate.cost_us)

    def _seals(self, key: str) -> list[bytes]:
        """Signatures of the records of a key; none if the store fails."""
        try:
            return self._store.signatures(key)
        except (OSError, sqlite3.Error):
            return []

    def records(self, key: str) -> list[Record]:
        """Records of a key; none if the store fails."""
        try:
            return self._store.get(key)
        except (OSError, sqlite3.Error):
            self.dropped += 1
            return []


NO_PLAN = Reply(problem="not-found", detail="no plan is stored by this key")


def stored_plan_reply(key: str, record: StoredPlan) -> Reply:
    """The reply that a plan is stored, with its overhead by the costs it was made with."""
    figures = Figures(overhead=record.plan.overhead)
    costs, settled = record.cost_digest, record.fully_refined
    return Reply(key, costs, found=True, figures=figures, settled=settled)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The body without its Content-Encoding.

    Raises:
        ProblemError: the result is larger than `limit` bytes, or the encoding is wrong.
    """
    data, complete = body, True
    try:
        if encoding == "gzip":
            inflate = zlib.decompressobj(wbits=31)
            data = inflate.decompress(body, limit + 1)
            complete = inflate.eof and not inflate.unused_data
        elif encoding == "zstd":
            import zstandard

            with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
                data = reader.read(limit + 1)
    except Exception as error:
        if type(error).__name__ not in ("error", "ZstdError"):
            raise
        raise ProblemError("invalid-input", f"the body is not {encoding}", pointer="") from None
    if len(data) > limit:
        message = f"the decompressed body is larger than {limit} bytes, the limit"
        raise ProblemError("body-too-large", message, max_body_bytes=limit)
    if not complete:
        raise ProblemError("invalid-input", f"the {encoding} body is cut short", pointer="")
    return data
