"""What a worker does with a request: read it, look for its answer, make it. Pure of HTTP.

Everything is bytes in, a small reply and bytes out, so that it can run in a process of its own.
"""

import sqlite3
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from coop_plan.api.service.graph_store import Digest, Graphs, GraphStore, digest_of
from coop_plan.planner.plan_cache.record import Record, StoredPlan, StoredRefusal, as_bytes, as_record
from coop_plan.planner.plan_cache.store import Families, PlanStore, planner_version
from coop_plan.planner.method import Progress
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import Graph, InvalidInputError, Plan, fingerprint
from coop_plan.schemas._parse import parse

T = TypeVar("T")


class PlanRequest(PlanOptions, frozen=True, kw_only=True):
    """
    What `POST /plan` takes; the names are those of the command line.

    The graph is a document, or the digest of one that was sent before.
    """

    graph: Graph | Digest


FORMS = 4
"""Ops and variants together, and tensors, for each op that a graph may have."""

VALUES = 40
"""Values in a body, for each op that a graph may have: captured ones have 11 to 33."""


class Limits(msgspec.Struct, frozen=True):
    """What a request may be: bytes of its body unpacked, ops, and seconds of its time limit."""

    body_bytes: int = 64 << 20
    ops: int = 100_000
    seconds: float = 600.0


class Figures(msgspec.Struct, frozen=True):
    """How far a solve is; see `planner.method.Progress`."""

    fraction: float | None = None
    overhead: float | None = None
    bound: float | None = None
    gap: float | None = None

    @classmethod
    def of(cls, progress: Progress) -> "Figures":
        """The figures of what a solve says, whose numbers may be NumPy's."""
        said = (progress.fraction, progress.overhead, progress.bound, progress.gap)
        return cls(*(None if figure is None else float(figure) for figure in said))


class Reply(msgspec.Struct, omit_defaults=True):
    """
    What a worker says; a plan, if there is one, follows as bytes.

    `problem` names one of `api.service.problems`, with its members. Without an answer `key` and `costs`
    say by what a solve for it is shared, and `seconds` how long it may take. `ops` and `read` (the
    bytes of the body, unpacked) are what limits of a client's own are held against; a graph that is
    only `named` is not in the body. `settled` says that nobody need look for a better plan. `seals`
    are those of the records in the store that the answer was made of.
    """

    key: str = ""
    costs: str = ""
    found: bool = False
    seconds: float | None = None
    problem: str = ""
    detail: str = ""
    members: dict[str, Any] = {}
    dropped: int = 0
    figures: Figures = Figures()
    settled: bool = False
    final: bool = True
    ops: int = 0
    read: int = 0
    named: bool = False
    seals: list[bytes] = []


class RefusedError(Exception):
    """A request that ends with a problem."""

    def __init__(self, name: str, detail: str, **members: Any) -> None:
        self.reply = Reply(problem=name, detail=detail, members=members)
        super().__init__(detail)


class Question(msgspec.Struct, frozen=True, gc=False):
    """A request that was read: its key, its graph (with the digest it was named by) and options."""

    key: str
    graph: Graph
    options: PlanRequest
    digest: str
    read: int
    structure: str

    def family(self, kind: str) -> str:
        """What questions have in common whose budgets of this kind alone are others."""
        linked = self.options.apply_link(self.graph).device.linked
        key = self.options.key(self.structure, planner_version(), links=linked, any_budget=True)
        return f"{key} {kind}"

    def families(self, made: Plan) -> Families:
        """The place of its plan among those for other budgets."""
        budget = self.options.budget
        places: list[tuple[str, int | float]] = [(self.family("bytes"), made.budget_bytes)]
        if budget.kind == "share":
            places.append((self.family("share"), float(budget.value)))
        return places


class Answers:
    """Answers requests from a store, and makes what is not in it."""

    def __init__(self, store: PlanStore, limits: Limits, graphs: GraphStore) -> None:
        self._store, self._limits = store, limits
        self._graphs = Graphs(graphs)
        self.dropped = 0
        """Records that were damaged, or held no answer to what they were kept by."""

    def read(self, body: bytes, encoding: str = "") -> Question:
        """The question of a body."""
        data = self._unpacked(body, encoding)
        request = parse(PlanRequest, data)
        limits, digest = self._limits, ""
        if request.time_limit is not None and request.time_limit > limits.seconds:
            message = f"this server gives a request {limits.seconds:g} s at most"
            raise InvalidInputError(message, "/time_limit")
        if isinstance(request.graph, str):
            digest = request.graph
            kept = self._from_graphs(self._graphs.get, digest)
            if kept is None:
                message = f"{digest} was not sent, or is not kept any more"
                raise RefusedError("unknown-graph", message, digest=digest)
            graph, structure = kept.graph, kept.fingerprint
        else:
            graph, structure = request.graph, fingerprint(request.graph)
        self._check_ops(graph)
        linked = request.apply_link(graph).device.linked
        key = request.key(structure, planner_version(), links=linked)
        return Question(key, graph, request, digest, len(data), structure)

    def _unpacked(self, body: bytes, encoding: str) -> bytes:
        """
        The body as it was before it was packed; refused where it is far more than a graph may be.

        Told by counting, which costs nothing; what hides from it meets the limits of the process.
        """
        limits = self._limits
        data = unpack(body, encoding, limits.body_bytes)
        if data.count(b'"cost_us"') > FORMS * limits.ops:
            message = f"more than {FORMS * limits.ops} ops and variants; this server takes no more"
            raise RefusedError("too-many-ops", message, max_ops=limits.ops)
        too_many = data.count(b'"kind"') > FORMS * limits.ops
        if too_many or data.count(b",") > VALUES * limits.ops:
            message = (
                f"more than {FORMS * limits.ops} tensors or {VALUES * limits.ops} values;"
                " this server reads no more"
            )
            raise RefusedError("too-much-work", message)
        return data

    def _check_ops(self, graph: Graph) -> None:
        limit = self._limits.ops
        if len(graph.ops) > limit:
            message = f"{len(graph.ops)} ops; this server takes {limit}"
            raise RefusedError("too-many-ops", message, max_ops=limit)

    def put_graph(self, body: bytes, encoding: str, digest: str) -> tuple[Reply, bytes]:
        """Keep a graph under its digest; `found` says that it was there."""
        document = self._unpacked(body, encoding)
        actual = digest_of(document)
        if actual != digest:
            message = f"the digest of this document is {actual}"
            raise RefusedError("wrong-digest", message, digest=actual)
        ops = 0

        def check(graph: Graph) -> None:
            nonlocal ops
            self._check_ops(graph)
            ops = len(graph.ops)

        try:
            new = self._graphs.put(digest, document, check)
        except (OSError, sqlite3.Error) as error:
            message = f"the graph could not be kept: {error}"
            raise RefusedError("busy", message, retry_after=5) from None
        return Reply(found=not new, ops=ops, read=len(document)), b""

    def graph(self, digest: str) -> tuple[Reply, bytes]:
        """The document of a digest."""
        document = self._from_graphs(self._graphs.document, digest)
        if document is None:
            raise RefusedError("not-found", "no graph of that digest")
        return Reply(found=True), document

    def graphs(self) -> tuple[Reply, bytes]:
        """The cards of graphs that are kept, as JSON."""
        return Reply(found=True), msgspec.json.encode(self._from_graphs(self._graphs.listed))

    def _from_graphs(self, get: Callable[..., T], *digest: str) -> T:
        try:
            return get(*digest)
        except (OSError, sqlite3.Error):
            message = "the store of graphs cannot be read"
            raise RefusedError("busy", message, retry_after=5) from None

    def ask(self, body: bytes, encoding: str, made: bytes) -> tuple[Reply, bytes]:
        """
        The answer to a request, if it is there: in the store or in `made`, a solve's own record.

        A plan that was made for quite other costs is none, unless it is that record.
        """
        question = self.read(body, encoding)
        key, graph, request = question.key, question.graph, question.options
        named = bool(question.digest)
        seals = [] if made else self._seals(key)
        reply = Reply(key=key, ops=len(graph.ops), read=question.read, named=named)
        records = [as_record(made)] if made else self.records(key)
        best: Plan | None = None
        for record in records:
            answer = record.for_question(graph, request, question.structure)
            if answer is None:
                self.dropped += 1
                continue
            if not isinstance(answer, Plan):
                return infeasible(key, answer), b""
            suits = bool(made) or (isinstance(record, StoredPlan) and record.suits(graph, answer))
            if suits and (best is None or answer.cost_us < best.cost_us):
                best = answer
        if best is not None:
            first = next(record for record in records if isinstance(record, StoredPlan))
            found = msgspec.structs.replace(reply, found=True, seals=seals, settled=first.settled)
            return found, best.to_json().encode()
        # Whoever finds plans for other costs waits for a plan of costs like theirs, to the digit.
        costs = "" if not records else str(hash(tuple(op.cost_us for op in graph.ops)))
        return msgspec.structs.replace(reply, costs=costs, seconds=request.time_limit), b""

    def whole(self, body: bytes, encoding: str) -> tuple[Reply, bytes]:
        """The body of a request that only names its graph, with the graph: what a solve needs."""
        question = self.read(body, encoding)
        request = msgspec.structs.replace(question.options, graph=question.graph)
        return Reply(key=question.key), request.to_json().encode()

    def solve(
        self,
        body: bytes,
        encoding: str,
        another: bool,
        say: Callable[[Progress], None],
    ) -> tuple[Reply, bytes]:
        """Make the answer, or another one for other costs, and keep it; its record."""
        from coop_plan.planner import InfeasibleBudgetError, TimeLimitError, plan

        question = self.read(body, encoding)
        key, graph, request = question.key, question.graph, question.options
        record: Record
        families: Families = ()
        try:
            made = plan(graph, request, progress=say)
            record = StoredPlan.of(self._better(question, made) if another else made, graph)
            families = question.families(made)
        except InfeasibleBudgetError as error:
            record = StoredRefusal.of(error, graph)
        except TimeLimitError as error:
            return Reply(key=key, problem="time-limit", detail=str(error)), b""
        try:
            self._store.put(key, record, another=another, families=families)
        except (OSError, sqlite3.Error):
            self.dropped += 1  # a full disk: whoever waits gets the answer all the same
        if not another:  # another server may have been first: its answer is everybody's
            record = next(iter(self.records(key)), record)
        return Reply(key=key, found=True), as_bytes(record)

    def stored(self, key: str) -> tuple[Reply, bytes]:
        """The first plan of a key, verified, in the ids of the graph it was made for."""
        seals = self._seals(key)
        for record in self.records(key):
            made = record.as_made() if isinstance(record, StoredPlan) else None
            if made is not None and isinstance(record, StoredPlan):
                reply = msgspec.structs.replace(kept_plan(key, record), seals=seals)
                return reply, made[1].to_json().encode()
        return NO_PLAN, b""

    def _better(self, question: Question, made: Plan) -> Plan:
        """The plan that was made or a kept one, whichever costs less for this graph."""
        candidates = [made]
        for record in self.records(question.key):
            found = record.for_question(question.graph, question.options)
            if isinstance(found, Plan):
                candidates.append(found)
        return min(candidates, key=lambda candidate: candidate.cost_us)

    def _seals(self, key: str) -> list[bytes]:
        """The seals of what is kept by a key."""
        try:
            return self._store.seals(key)
        except (OSError, sqlite3.Error):
            return []

    def records(self, key: str) -> list[Record]:
        """What is kept by a key; a store that fails keeps nothing."""
        try:
            return self._store.get(key)
        except (OSError, sqlite3.Error):
            self.dropped += 1
            return []


NO_PLAN = Reply(problem="not-found", detail="no plan of that key")


def kept_plan(key: str, record: StoredPlan) -> Reply:
    """That a plan is kept, and how good it is by the costs it was made with."""
    overhead = Figures(overhead=record.plan.overhead)
    return Reply(key=key, found=True, figures=overhead, settled=record.settled)


def infeasible(key: str, error: Any) -> Reply:
    """An `InfeasibleBudgetError` as a reply."""
    members = {
        "budget_bytes": error.budget_bytes,
        "min_feasible_bytes": error.min_feasible_bytes,
        "budget_lower_bound_bytes": error.budget_lower_bound_bytes,
        "blocking_op": error.blocking_op,
        "blocking_op_name": error.blocking_op_name,
        "working_set_bytes": error.working_set_bytes,
        "held": error.held,
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
