"""Records of the plan cache: a plan with its graph's ids and costs, or an infeasible budget."""

import hashlib
import hmac
import zlib
from typing import Any, ClassVar

import msgspec
import msgspec.inspect

from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.planner.core.memory_bounds import explain_residents, unrecomputable_residents
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.plan_cache.cost_rule import (
    TOLERANCE,
    all_costs,
    carried_bound,
    cost_class,
    cost_digest,
)
from coop_plan.planner.plan_cache.remap_ids import remap_ids
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import Graph, InvalidInputError, Plan, parse_graph
from coop_plan.schemas._parse import Model
from coop_plan.schemas.fingerprint import tensor_order


class StoredPlan(Model, frozen=True, kw_only=True, tag_field="kind", tag="plan"):
    """A plan and its graph: the ids in order, the costs, and the document.

    `packed` is the compressed document, read only if the request has no graph. `searched_seconds`
    is the time that `auto` spent on improving the plan.
    """

    kind: ClassVar[str] = "plan"
    plan: Plan
    ops: list[int]
    tensors: list[int]
    costs: list[float]
    packed: bytes
    searched_seconds: float = 0.0

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> "StoredPlan":
        """The record of a plan for `graph`."""
        return cls(
            plan=plan,
            ops=[op.id for op in graph.ops],
            tensors=tensor_order(graph),
            costs=all_costs(graph),
            packed=zlib.compress(graph.to_json().encode(), 1),
        )

    def for_graph(self, graph: Graph, structure: str = "") -> Plan | None:
        """The plan with the ids and costs of a graph, or None if it is invalid for that graph.

        `structure` is the graph's fingerprint, "" to compute it.
        """
        try:
            made_with = None if self.costs == all_costs(graph) else self.costs
            plan = remap_ids(self.plan, self.ops, self.tensors, graph, made_with)
        except (KeyError, ValueError):
            return None
        return None if find_faults(graph, plan, limit=1, structure=structure) else plan

    def for_request(self, graph: Graph, options: PlanOptions, structure: str = "") -> Plan | None:
        """The plan for a graph (with the requested link), or None if it was made for other options.

        The bytes of a share of keep-everything's peak are not checked, as only the planner knows
        them; the record's signature proves that the planner wrote it.
        """
        plan = self.plan
        budget = _budget_bytes(options, plan.budget_bytes)
        method = options.method
        if plan.method == SEARCH and method in SEARCHED:
            method = SEARCH
        made_with = plan.budget_bytes, plan.method, plan.outputs, plan.alignment
        requested = budget, method, options.outputs, options.alignment
        transfers = plan.host_budget_bytes, plan.link_bytes_per_s
        if (made_with, transfers) != (requested, (options.host_budget, options.link)):
            return None
        return self.for_graph(graph, structure)

    def is_answer(self, graph: Graph, plan: Plan) -> bool:
        """True if `plan`, which is `for_graph`'s, is an answer under the costs of `graph`.

        Costs are not part of the key. See `cost_rule` for the bound.
        """
        if self.costs == all_costs(graph):
            return True
        bound = carried_bound(
            graph,
            self.costs,
            self.plan.cost_us,
            link=graph.device.linked or plan.link_bytes_per_s is not None,
            recomputes=8,  # of an op that is relatively cheaper for the caller
        )
        return plan.cost_us <= bound * (1 + TOLERANCE)

    @property
    def cost_digest(self) -> str:
        """Name of the costs that the plan was made with."""
        return cost_digest(self.costs)

    @property
    def cost_class(self) -> str:
        """Class of the costs that the plan was made with."""
        return cost_class(self.costs)

    @property
    def fully_refined(self) -> bool:
        """True if no refinement is left: it was done, the plan is optimal, or never refined."""
        plan = self.plan
        return self.searched_seconds > 0 or plan.status == "optimal" or plan.method not in SEARCHED

    def with_original_graph(self) -> tuple[Graph, Plan] | None:
        """The record's own graph and the plan, or None if either is invalid."""
        try:
            graph = parse_graph(zlib.decompress(self.packed))
        except (ValueError, zlib.error):
            return None
        plan = self.for_graph(graph)
        return None if plan is None else (graph, plan)


class StoredRefusal(Model, frozen=True, kw_only=True, tag_field="kind", tag="infeasible"):
    """An `InfeasibleBudgetError` of a method; `op` is the position of the blocking op."""

    kind: ClassVar[str] = "infeasible"
    method: str
    budget_bytes: int
    min_feasible_bytes: int | None
    op: int | None
    working_set_bytes: int
    unused: list[str]
    budget_lower_bound_bytes: int | None = None
    met_bytes: int | None = None
    held: bool = False
    """True if unrecomputable residents block the budget; they are recomputed per graph."""
    cost_digest: str = ""
    cost_class: str = ""
    """Names of the costs of the graph that was refused."""

    @classmethod
    def of(cls, error: InfeasibleBudgetError, graph: Graph) -> "StoredRefusal":
        """The record of an error for `graph`."""
        blocking = error.blocking_op
        return cls(
            method=error.method,
            budget_bytes=error.budget_bytes,
            min_feasible_bytes=error.min_feasible_bytes,
            op=None if blocking is None else [op.id for op in graph.ops].index(blocking),
            working_set_bytes=error.working_set_bytes,
            unused=list(error.unused),
            held=bool(error.held),
            budget_lower_bound_bytes=error.budget_lower_bound_bytes,
            met_bytes=error.met_bytes,
            cost_digest=cost_digest(all_costs(graph)),
            cost_class=cost_class(all_costs(graph)),
        )

    def is_answer(self, graph: Graph) -> bool:
        """True if the refusal is an answer under the costs of `graph`: proved, or made for them."""
        bound = self.budget_lower_bound_bytes
        proved = bound is not None and self.budget_bytes < bound
        return proved or self.cost_digest == cost_digest(all_costs(graph))

    def for_request(
        self, graph: Graph, options: PlanOptions, structure: str = ""
    ) -> InfeasibleBudgetError | None:
        """The error with the ids of a graph, or None if it was made for other options."""
        budget = _budget_bytes(options, self.budget_bytes)
        if (budget, options.method) != (self.budget_bytes, self.method):
            return None
        if self.op is not None and self.op >= len(graph.ops):
            return None
        blocking = None if self.op is None else graph.ops[self.op]
        return InfeasibleBudgetError(
            self.method,
            self.budget_bytes,
            self.min_feasible_bytes,
            None if blocking is None else blocking.id,
            "" if blocking is None else blocking.name,
            self.working_set_bytes,
            self.unused,
            self._residents(graph, options),
            self.budget_lower_bound_bytes,
            self.met_bytes,
        )

    def _residents(self, graph: Graph, options: PlanOptions) -> str:
        if not self.held:
            return ""
        rules = options.alignment, options.outputs, options.host_budget
        problem = Problem.from_graph(options.apply_link(graph), *rules)
        found = unrecomputable_residents(problem, self.budget_bytes - problem.fixed_bytes)
        return "" if found is None else explain_residents(problem, found)


Record = StoredPlan | StoredRefusal

SIGNATURE_BYTES = 32
"""Length of the HMAC-SHA256 in front of a signed record."""

SEARCH = "auto"
"""The method that refines cached plans in the background."""

SEARCHED = ("coop-offline", "optimal", "auto")
"""Methods whose plans may be refined; requests for others are for the plans of these methods."""


def _budget_bytes(options: PlanOptions, recorded: int) -> int:
    """The requested budget in bytes; the recorded one for a share or "min"."""
    return int(options.budget.value) if options.budget.kind == "bytes" else recorded


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def as_bytes(record: Record) -> bytes:
    """The record in MessagePack."""
    return _encode(record)


def as_record(data: bytes | memoryview) -> Record:
    """The record from MessagePack; raises msgspec's errors."""
    try:
        record: Record = _decode(data)
    except msgspec.ValidationError:  # perhaps of a later version, whose further fields are left out
        known = _known(msgspec.msgpack.decode(data), msgspec.inspect.type_info(Record))
        record = msgspec.convert(known, Record)
    return record


def _known(value: Any, kind: msgspec.inspect.Type) -> Any:
    """The value without fields that its type does not have."""
    if isinstance(kind, msgspec.inspect.UnionType):
        structs = [k for k in kind.types if isinstance(k, msgspec.inspect.StructType)]
        lists = [k for k in kind.types if isinstance(k, msgspec.inspect.ListType)]
        if isinstance(value, dict):
            tags = [k for k in structs if not k.tag_field or value.get(k.tag_field) == k.tag]
            return _known(value, tags[0]) if tags else value
        return _known(value, lists[0]) if lists and isinstance(value, list) else value
    if isinstance(kind, msgspec.inspect.ListType) and isinstance(value, list):
        return [_known(item, kind.item_type) for item in value]
    if isinstance(kind, msgspec.inspect.StructType) and isinstance(value, dict):
        types = {field.encode_name: field.type for field in kind.fields}
        tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
        return tag | {name: _known(value[name], types[name]) for name in value if name in types}
    return value


def sign(record: Record, key: str, secret: bytes) -> bytes:
    """The record in MessagePack, signed for its key."""
    return sign_bytes(as_bytes(record), key, secret)


def read_signed(data: bytes, key: str, secret: bytes) -> Record:
    """The record of signed bytes, verified for its key.

    Raises:
        InvalidInputError: damaged, or not signed with this secret for this key.
    """
    try:
        return as_record(verified_bytes(data, key, secret))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidInputError(f"damaged record of key {key}: {error}") from None


def sign_bytes(data: bytes, key: str, secret: bytes) -> bytes:
    """The bytes, prefixed by an HMAC of the key and the bytes."""
    return _mac(data, key, secret) + data


def verified_bytes(data: bytes, key: str, secret: bytes) -> memoryview:
    """The signed bytes without their HMAC; raises `InvalidInputError` as `read_signed` does."""
    view = memoryview(data)
    if not hmac.compare_digest(
        _mac(view[SIGNATURE_BYTES:], key, secret), bytes(view[:SIGNATURE_BYTES])
    ):
        raise InvalidInputError(f"damaged record of key {key}: its signature does not match")
    return view[SIGNATURE_BYTES:]


def _mac(data: bytes | memoryview, key: str, secret: bytes) -> bytes:
    mac = hmac.new(secret, key.encode() + b"\0", hashlib.sha256)
    mac.update(data)
    return mac.digest()
