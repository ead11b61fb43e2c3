"""What is asked of the planner, from whatever door it comes."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypedDict

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

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
from coop_plan.schemas._parse import Model, parse

MAX_ALIGNMENT = 1 << 30
MAX_SEED = (1 << 63) - 1


def _budget(value: object) -> object:
    if isinstance(value, Budget):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidInputError('a budget is bytes, "12GiB", "50%" or "min"', "/budget")
    try:
        return parse_budget(value)
    except InvalidInputError as error:
        raise InvalidInputError(error.message, "/budget") from None


def _host_budget(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidInputError("a budget of the host is bytes or a size", "/host_budget")
    try:
        return parse_bytes(str(value))
    except InvalidInputError as error:
        raise InvalidInputError(error.message, "/host_budget") from None


def _link(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidInputError('a link is bytes per second or "25GB/s"', "/link")
    try:
        return parse_rate(str(value))
    except InvalidInputError as error:
        raise InvalidInputError(error.message, "/link") from None


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


class PlanOptions(Model):
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

    budget: Annotated[
        Budget,
        BeforeValidator(_budget),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
    ]
    method: str = "coop-offline"
    time_limit: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED, strict=True)] = 0
    solver: str | None = None
    outputs: Outputs = "outside"
    alignment: Annotated[int, Field(strict=True)] = 512
    host_budget: Annotated[
        int | None,
        BeforeValidator(_host_budget),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}),
    ] = None
    link: Annotated[
        int | None,
        BeforeValidator(_link),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}),
    ] = None
    switches: Mapping[str, Annotated[bool, Field(strict=True)]] = {}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """
        Options from plain values.

        Raises:
            InvalidInputError: naming the field (`/budget`) and what is wrong with it.
        """
        return parse(cls, dict(fields))

    @property
    def info(self) -> MethodInfo:
        """The method's entry in the registry."""
        return METHODS[self.method]

    @property
    def off(self) -> frozenset[str]:
        """The switches that are turned off."""
        return frozenset(switch for switch, on in self.switches.items() if not on)

    def on(self, graph: Graph) -> Graph:
        """The graph that is planned: with the link that was asked for."""
        device = graph.device.with_link(self.link)
        return graph if device is graph.device else graph.model_copy(update={"device": device})

    def key(
        self, fingerprint: str, planner: str, costs: str | None = None, *, links: bool = False
    ) -> str:
        """
        The cache key of these options for a graph: its structure, not names, ids or costs.

        A plan made for other costs is valid, but may not be the best: whoever wants none gives the
        graph's cost signature as `costs`. `planner` names the planner's version: another one makes
        another plan. `links` says whether the device has copy engines: a plan that uses them does
        not hold where there are none.
        """
        # A request has more fields than its options.
        plain = PlanOptions.model_fields.keys() - {"budget", "switches"}
        asked = self.model_dump(mode="json", include=plain)
        asked |= {
            "budget": [self.budget.kind, str(self.budget.value.normalize())],
            "off": sorted(self.off),
            "links": links,
        }
        text = json.dumps([planner, fingerprint, costs, asked], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @field_validator("method")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METHODS:
            known = ", ".join(METHODS)
            raise InvalidInputError(f"unknown method '{name}': choose from {known}", "/method")
        return name

    @field_validator("time_limit")
    @classmethod
    def _finite(cls, seconds: float | None) -> float | None:
        # A deadline is a sum with the clock: what is beyond a century is no limit at all.
        return None if seconds is None else min(seconds, math.pi * 1e9)

    @field_validator("alignment")
    @classmethod
    def _power_of_two(cls, alignment: int) -> int:
        if alignment < 1 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
            raise InvalidInputError(
                f"alignment {alignment} is not a power of two between 1 and {MAX_ALIGNMENT}",
                "/alignment",
            )
        return alignment

    @model_validator(mode="after")
    def _of_the_method(self) -> Self:
        info = self.info
        if self.solver is not None and not info.takes_solver:
            raise InvalidInputError(f"{self.method} takes no solver", "/solver")
        for switch in self.switches:
            if switch not in info.switches:
                known = ", ".join(info.switches) or "none"
                message = f"{self.method} has no switch '{switch}' (it has: {known})"
                raise InvalidInputError(message, f"/switches/{switch}")
        return self
