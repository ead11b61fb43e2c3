"""What is asked of the planner, from whatever door it comes."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypedDict

from msgspec import Meta, field
from msgspec.structs import fields as struct_fields
from msgspec.structs import replace

from coop_plan.planner.method import MethodInfo
from coop_plan.planner.registry import METHODS
from coop_plan.schemas import (
    Budget,
    Graph,
    InvalidInputError,
    Outputs,
    parse_budget,
    parse_bytes,
    parse_rate,
)
from coop_plan.schemas._parse import Model, escape, parse

MAX_ALIGNMENT = 1 << 30
MAX_SEED = (1 << 63) - 1


MAX_SECONDS = 1e9
"""A time limit of a generation: deadlines are sums with the clock."""


class OptionFields(TypedDict, total=False):
    """The fields of `PlanOptions` but the budget, for those who name them one by one."""

    method: str
    time_limit: float | None
    seed: int
    solver: str | None
    outputs: Outputs
    alignment: int
    host_budget: int | str | None
    link: int | str | None
    switches: Mapping[str, bool]


class PlanOptions(Model, frozen=True, kw_only=True):
    """
    One validated request but for its graph; the names are those of the command line and of REST.

    Attributes:
        budget: bytes, `"12GiB"`, `"50%"` (of keep-everything's peak) or `"min"`.
        method: a name in `METHODS`.
        time_limit: seconds, or None for the method's own.
        seed: of the methods that draw random numbers; one seed, one plan (without a time limit).
        solver: of `checkmate`, a name that PuLP knows.
        outputs: whether outputs of the step lie in the arena; see `schemas.Outputs`.
        alignment: of every offset, in bytes; a power of two.
        host_budget: bytes of the host that copies of tensors may take, or None for no limit; 0
            leaves transfers out of the question, and so out of what a bound is for.
        link: bandwidth to the host and back, bytes/s or `"25GB/s"`, instead of the graph's own; 0
            means that there is none.
        switches: ablation switches of the method; false turns one off.
    """

    budget_: str | int = field(name="budget")
    method: str = "coop-offline"
    time_limit: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0
    solver: str | None = None
    outputs: Outputs = "outside"
    alignment: int = 512
    host_budget_: str | int | None = field(name="host_budget", default=None)
    link_: str | int | None = field(name="link", default=None)
    switches: dict[str, bool] = {}

    def __post_init__(self) -> None:
        """Refuse what is of the right type and still no request."""
        for name in ("budget", "host_budget", "link"):
            try:
                getattr(self, name)
            except InvalidInputError as error:
                raise InvalidInputError(error.message, f"/{name}") from None
        alignment = self.alignment
        if alignment < 1 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
            raise InvalidInputError(
                f"alignment {alignment} is not a power of two between 1 and {MAX_ALIGNMENT}",
                "/alignment",
            )
        if self.method not in METHODS:
            known = ", ".join(METHODS)
            message = f"unknown method '{self.method[:50]}': choose from {known}"
            raise InvalidInputError(message, "/method")
        info = self.info
        if self.solver is not None and not info.takes_solver:
            raise InvalidInputError(f"{self.method} takes no solver", "/solver")
        for switch in self.switches:
            if switch not in info.switches:
                known = ", ".join(info.switches) or "none"
                message = f"{self.method} has no switch '{switch[:50]}' (it has: {known})"
                raise InvalidInputError(message, f"/switches/{escape(switch[:50])}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """
        Options from plain values.

        Raises:
            InvalidInputError: naming the field (`/budget`) and what is wrong with it.
        """
        return parse(cls, dict(fields))

    @classmethod
    def given(cls, budget: "PlanOptions | str | int", fields: OptionFields) -> "PlanOptions":
        """Options as the functions of the library take them: whole, or a budget and fields."""
        if isinstance(budget, PlanOptions):
            return budget
        return PlanOptions.of({"budget": budget} | dict(fields))

    @property
    def budget(self) -> Budget:
        """The budget, before it meets a graph."""
        return parse_budget(self.budget_)

    @property
    def host_budget(self) -> int | None:
        """Bytes of the host for copies of tensors, None for no limit."""
        return None if self.host_budget_ is None else parse_bytes(str(self.host_budget_))

    @property
    def link(self) -> int | None:
        """Bytes per second to the host and back, None for the graph's own."""
        return None if self.link_ is None else parse_rate(str(self.link_))

    @property
    def info(self) -> MethodInfo:
        """The method's entry in the registry."""
        return METHODS[self.method]

    @property
    def off(self) -> frozenset[str]:
        """The switches that are turned off."""
        return frozenset(switch for switch, on in self.switches.items() if not on)

    def without(self, *switches: str) -> Self:
        """The same options with these switches off, as far as the method has them."""
        off = dict.fromkeys((name for name in switches if name in self.info.switches), False)
        return replace(self, switches=self.switches | off) if off else self

    def on(self, graph: Graph) -> Graph:
        """The graph that is planned: with the link that was asked for."""
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
        """
        The cache key of these options for a graph: its structure, not names, ids or costs.

        A plan made for other costs is valid, but may not be the best: whoever wants none gives the
        graph's cost signature as `costs`. `planner` names the planner's version: another one makes
        another plan. `links` says whether the device has copy engines: a plan that uses them does
        not hold where there are none. With `any_budget` it is one key for every budget.
        """
        # A request has more fields than its options.
        asked = {name: getattr(self, name) for name in OPTION_NAMES if name != "switches"}
        asked |= {
            "budget": None
            if any_budget
            else [self.budget.kind, str(self.budget.value.normalize())],
            "off": sorted(self.off),
            "links": links,
        }
        text = json.dumps([planner, fingerprint, costs, asked], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


OPTION_NAMES = tuple(option.encode_name for option in struct_fields(PlanOptions))
"""The names of all options, as every door writes them."""
