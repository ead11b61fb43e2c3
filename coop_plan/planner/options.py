"""Planning options, shared by the command, REST, Python and the runtime.

`PlanOptions` is their one source: names, types, defaults, limits and help. The command's options,
the body of `POST /plan` and the keyword arguments of `plan` are derived from it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from msgspec import Meta, field
from msgspec.structs import fields as struct_fields
from msgspec.structs import replace

from coop_plan.schemas import (
    Budget,
    Graph,
    InvalidInputError,
    Outputs,
    Plan,
    parse_budget,
    parse_bytes,
    parse_rate,
)
from coop_plan.schemas._parse import Model, escape, parse

if TYPE_CHECKING:
    from coop_plan.planner.method import MethodInfo


class PlanOptions(Model, frozen=True, kw_only=True):
    """One validated planning request without its graph.

    A field's `description` is its help text in the command and in OpenAPI. Of `extra`, "metavar"
    and "default" are shown in the command's help.
    """

    budget_: Annotated[
        str | int,
        Meta(
            description="Limit on the peak memory of the step, resident tensors included: bytes,"
            " 12GiB, 12GB, 50% (of the peak with everything kept), or min (the smallest budget"
            " that the method can meet).",
            extra={"metavar": "SIZE"},
        ),
    ] = field(name="budget")
    method: Annotated[
        str, Meta(description="Planning method, as listed by `coop-plan methods`.")
    ] = "coop-offline"
    # At most a generation, as deadlines are sums with the clock.
    time_limit: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        Meta(
            description="Seconds for each plan, at most.",
            extra={"metavar": "SECONDS", "default": "the method's own"},
        ),
    ] = None
    seed: Annotated[
        int,
        Meta(
            ge=0,
            le=(1 << 63) - 1,
            description="Seed of randomized methods. Without a time limit, the same seed gives the"
            " same plan.",
        ),
    ] = 0
    smallest: Annotated[
        bool,
        Meta(
            description="If the budget cannot be met, search the smallest one that can be for the"
            " answer, which takes several plans' time."
        ),
    ] = False
    solver: Annotated[
        str | None,
        Meta(
            description="Integer-programming solver of method checkmate, by its name in PuLP, such"
            " as GUROBI_CMD.",
            extra={"metavar": "NAME", "default": "CBC"},
        ),
    ] = None
    outputs: Annotated[
        Outputs,
        Meta(
            description="Where tensors that leave the step (loss, gradients) are allocated."
            " outside: outside the arena, so that a training loop may keep them. arena: inside it,"
            " where they share addresses with dead tensors. gradients: only what backward ops make"
            " is inside.",
            extra={"metavar": "WHERE"},
        ),
    ] = "outside"
    alignment: Annotated[
        int, Meta(description="Alignment of every offset in the arena, in bytes; a power of two.")
    ] = 512
    host_budget_: Annotated[
        str | int | None,
        Meta(
            description="Limit on host memory for offloaded tensors, such as 64GiB. 0 turns"
            " offloading off.",
            extra={"metavar": "SIZE", "default": "no limit"},
        ),
    ] = field(name="host_budget", default=None)
    link_: Annotated[
        str | int | None,
        Meta(
            description="Bandwidth between host and device in each direction, such as 25GB/s, in"
            " place of the graph's own. 0 turns offloading off.",
            extra={"metavar": "RATE", "default": "from the graph"},
        ),
    ] = field(name="link", default=None)
    switches: Annotated[
        dict[str, bool],
        Meta(
            description="Parts of the method that are turned off (false), to measure what they are"
            " worth. All are on by default; `coop-plan methods` lists each method's."
        ),
    ] = {}

    def __post_init__(self) -> None:
        """Refuse values that their types allow."""
        from coop_plan.planner.core.problem import check_alignment
        from coop_plan.planner.registry import METHODS

        for name in ("budget", "host_budget", "link"):
            try:
                getattr(self, name)
            except InvalidInputError as error:
                raise InvalidInputError(error.message, f"/{name}") from None
        check_alignment(self.alignment)
        if self.method not in METHODS:
            message = f"unknown method '{self.method[:50]}': choose from {', '.join(METHODS)}"
            raise InvalidInputError(message, "/method")
        info = self.info
        if self.solver is not None and not info.takes_solver:
            raise InvalidInputError(f"{self.method} takes no solver", "/solver")
        for switch in self.switches:
            if switch not in info.switches:
                switches = ", ".join(info.switches) or "none"
                message = f"{self.method} has no switch '{switch[:50]}' (it has: {switches})"
                raise InvalidInputError(message, f"/switches/{escape(switch[:50])}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Options from plain values by name.

        Raises:
            InvalidInputError: the field (`/budget`) and what is wrong with it.
        """
        return parse(cls, dict(fields))

    @classmethod
    def given(cls, budget: "PlanOptions | str | int", fields: Mapping[str, Any]) -> "PlanOptions":
        """Options from the arguments of a function: all of them, or a budget and other fields."""
        if isinstance(budget, PlanOptions):
            return budget
        return PlanOptions.of({"budget": budget} | dict(fields))

    @classmethod
    def of_plan(cls, plan: Plan, **others: Any) -> Self:
        """The options that a plan's figures depend on, by its document; with `others`."""
        link = plan.link_bytes_per_s
        asked = {
            "budget": plan.budget_bytes,
            "outputs": plan.outputs,
            "alignment": plan.alignment,
            "host_budget": plan.host_budget_bytes,
            "link": None if link is None else int(link),
        }
        return cls.of(asked | others)

    @property
    def budget(self) -> Budget:
        """The budget, parsed but not resolved: a share needs a graph's peak."""
        return parse_budget(self.budget_)

    @property
    def host_budget(self) -> int | None:
        """Limit on host memory for offloaded tensors, in bytes; None for no limit."""
        return None if self.host_budget_ is None else parse_bytes(str(self.host_budget_))

    @property
    def link(self) -> int | None:
        """Bandwidth between host and device in bytes/s; None for the graph's own."""
        return None if self.link_ is None else parse_rate(self.link_)

    @property
    def info(self) -> "MethodInfo":
        """The method's entry in the registry."""
        from coop_plan.planner.registry import METHODS

        return METHODS[self.method]

    @property
    def off(self) -> frozenset[str]:
        """The switches that are turned off."""
        return frozenset(switch for switch, on in self.switches.items() if not on)

    def without(self, *switches: str) -> Self:
        """The same options with these switches off; switches of other methods are ignored."""
        off = dict.fromkeys((name for name in switches if name in self.info.switches), False)
        return replace(self, switches=self.switches | off) if off else self

    def apply_link(self, graph: Graph) -> Graph:
        """The graph as it is planned: with `link` as the device's bandwidths, if it is given."""
        device = graph.device.with_link(self.link)
        return graph if device is graph.device else graph.model_copy(update={"device": device})

    def key(
        self,
        fingerprint: str,
        planner: str,
        costs: str | None = None,
        *,
        links: bool = False,
        any_budget: bool = False,
    ) -> str:
        """Cache key of a plan: a hash of the graph's structure, these options and the planner.

        Args:
            fingerprint: of the graph, without names, ids and costs.
            planner: version of the planner, since another version makes another plan.
            costs: cost signature of the graph, if plans for other costs are to be missed.
            links: True if the device has copy engines; without them a plan with copies is invalid.
            any_budget: leave the budget out, for one key of all budgets.
        """
        # Subclasses (the request of REST) have more fields, which are not part of the key.
        options = {name: getattr(self, name) for name in OPTION_NAMES if name != "switches"}
        options |= {
            "budget": None
            if any_budget
            else [self.budget.kind, str(self.budget.value.normalize())],
            "off": sorted(self.off),
            "links": links,
        }
        text = json.dumps([planner, fingerprint, costs, options], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


OPTION_NAMES = tuple(option.encode_name for option in struct_fields(PlanOptions))
"""Names of all planning options, in the command, REST and Python alike."""
