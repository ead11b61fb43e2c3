"""What is kept of an answer: a plan with the ids and costs it was made for, or what would do."""

import hashlib
import hmac
import zlib
from math import fsum
from typing import ClassVar

import msgspec

from coop_plan.planner.plan_cache.carry_over import carry_over
from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.planner.core.unrecomputable import most_held, reason
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import Graph, InvalidInputError, Plan, parse_graph
from coop_plan.schemas._parse import Model
from coop_plan.schemas.fingerprint import tensor_order

COSTS_ALIKE = 0.1
"""Two graphs cost alike if no more than this share of their time is spent elsewhere; measuring one
machine twice moves a hundredth."""

OVERHEAD_ALIKE = 0.02
"""How much more overhead than where it was made a plan may have, before it is made anew."""


class StoredPlan(Model, frozen=True, kw_only=True, tag_field="kind", tag="plan"):
    """
    A plan and the graph it was made for: its ids in order, its costs, and itself.

    `packed` is the graph's document, compressed: it is only read where no other graph is at hand.
    `searched_seconds` were spent by `auto` on a better plan than what was asked for gave at first.
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
        """What to keep of a plan for `graph`."""
        return cls(
            plan=plan,
            ops=[op.id for op in graph.ops],
            tensors=tensor_order(graph),
            costs=all_costs(graph),
            packed=zlib.compress(graph.to_json().encode(), 1),
        )

    def for_graph(self, graph: Graph, structure: str = "") -> Plan | None:
        """
        The plan in the ids and costs of a graph, or None where it does not hold for it.

        `structure` is the graph's fingerprint, where it is known already.
        """
        try:
            same = self.costs == all_costs(graph)
            carried = carry_over(self.plan, self.ops, self.tensors, graph, same_costs=same)
        except (KeyError, ValueError):  # it names what the graph has not
            return None
        return None if find_faults(graph, carried, limit=1, structure=structure) else carried

    def for_question(self, graph: Graph, options: PlanOptions, structure: str = "") -> Plan | None:
        """
        The plan for a graph (with the link asked for), if it answers what is asked.

        A valid plan for another question is a wrong answer. What a share of keep-everything's peak
        is in bytes only the planner knows: that a record is the planner's is told by its seal.
        """
        plan, asked = self.plan, options.budget
        budget = int(asked.value) if asked.kind == "bytes" else plan.budget_bytes
        method = options.method
        if plan.method == SEARCH and method in SEARCHED:
            method = SEARCH
        given = plan.budget_bytes, plan.method, plan.outputs, plan.alignment
        wanted = budget, method, options.outputs, options.alignment
        transfers = plan.host_budget_bytes, plan.link_bytes_per_s
        if (given, transfers) != (wanted, (options.host_budget, options.link)):
            return None
        return self.for_graph(graph, structure)

    def suits(self, graph: Graph, carried: Plan) -> bool:
        """
        Whether the plan, carried over to `graph`, is as good there as where it was made.

        Costs are no part of the key: whoever sent a graph first, with costs that are wrong, would
        make everybody's plan.
        """
        mine, theirs = self.costs, all_costs(graph)
        if mine == theirs:
            return True
        if carried.overhead > self.plan.overhead + OVERHEAD_ALIKE:
            return False
        one, two = fsum(mine[LINK:]), fsum(theirs[LINK:])
        if not one or not two:
            return one == two
        apart = fsum(
            abs(a / one - b / two) for a, b in zip(mine[LINK:], theirs[LINK:], strict=True)
        )
        return apart / 2 <= COSTS_ALIKE

    @property
    def settled(self) -> bool:
        """Whether nobody need look for a better plan: it was done, or there is none."""
        plan = self.plan
        return self.searched_seconds > 0 or plan.status == "optimal" or plan.method not in SEARCHED

    def as_made(self) -> tuple[Graph, Plan] | None:
        """The graph it was made for and the plan, or None where it does not hold."""
        try:
            graph = parse_graph(zlib.decompress(self.packed))
        except (ValueError, zlib.error):
            return None
        plan = self.for_graph(graph)
        return None if plan is None else (graph, plan)


class StoredRefusal(Model, frozen=True, kw_only=True, tag_field="kind", tag="infeasible"):
    """That a method cannot meet a budget (see `InfeasibleBudgetError`); `op` is a position."""

    kind: ClassVar[str] = "infeasible"
    method: str
    budget_bytes: int
    min_feasible_bytes: int
    op: int | None
    working_set_bytes: int
    unused: list[str]
    budget_lower_bound_bytes: int | None = None
    held: bool = False
    """Whether something that cannot be made again is in the way: what, in the ids of a graph."""

    @classmethod
    def of(cls, error: InfeasibleBudgetError, graph: Graph) -> "StoredRefusal":
        """What to keep of the answer for `graph`."""
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
        )

    def for_question(
        self, graph: Graph, options: PlanOptions, structure: str = ""
    ) -> InfeasibleBudgetError | None:
        """The answer in the ids of a graph, if it is one to what is asked."""
        asked = options.budget
        budget = int(asked.value) if asked.kind == "bytes" else self.budget_bytes
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
            self._what_is_held(graph, options),
            self.budget_lower_bound_bytes,
        )

    def _what_is_held(self, graph: Graph, options: PlanOptions) -> str:
        if not self.held:
            return ""
        of = options.alignment, options.outputs, options.host_budget
        problem = Problem.from_graph(options.apply_link(graph), *of)
        found = most_held(problem, self.budget_bytes - problem.fixed_bytes)
        return "" if found is None else reason(problem, found)


Record = StoredPlan | StoredRefusal

SEAL_BYTES = 32
"""Of the HMAC in front of a sealed record."""

LINK = 3
"""So many costs are the device's."""

SEARCH = "auto"
"""The method that looks for a better plan than a kept one when there is time."""

SEARCHED = ("coop-offline", "optimal", "auto")
"""Methods that are asked for a good plan; the others are asked for what they themselves make."""


def all_costs(graph: Graph) -> list[float]:
    """Every cost, the device's first: a proof holds for these alone."""
    device = graph.device
    costs = [device.d2h_bytes_per_s, device.h2d_bytes_per_s, device.copy_latency_us]
    for op in graph.ops:
        costs.append(op.cost_us)
        costs += [variant.cost_us for variant in op.variants]
    return costs


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def as_bytes(record: Record) -> bytes:
    """The record as bytes."""
    return _encode(record)


def as_record(data: bytes | memoryview) -> Record:
    """The record of bytes; raises msgspec's errors."""
    made: Record = _decode(data)
    return made


def seal(record: Record, key: str, secret: bytes) -> bytes:
    """The record as bytes, sealed for its key."""
    return seal_bytes(as_bytes(record), key, secret)


def unseal(data: bytes, key: str, secret: bytes) -> Record:
    """
    The record of bytes; one that was changed, or kept by another key, is no record.

    Raises:
        InvalidInputError: damaged, or not sealed with this secret for this key.
    """
    try:
        return as_record(unseal_bytes(data, key, secret))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidInputError(f"damaged record: {error}") from None


def seal_bytes(data: bytes, key: str, secret: bytes) -> bytes:
    """Bytes behind an HMAC of them and the key they are kept by."""
    return _mac(data, key, secret) + data


def unseal_bytes(data: bytes, key: str, secret: bytes) -> memoryview:
    """The bytes that were sealed; raises `InvalidInputError` as `unseal` does."""
    view = memoryview(data)
    if not hmac.compare_digest(_mac(view[SEAL_BYTES:], key, secret), bytes(view[:SEAL_BYTES])):
        raise InvalidInputError("damaged record")
    return view[SEAL_BYTES:]


def _mac(data: bytes | memoryview, key: str, secret: bytes) -> bytes:
    made = hmac.new(secret, key.encode() + b"\0", hashlib.sha256)
    made.update(data)
    return made.digest()
