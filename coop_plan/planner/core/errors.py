"""Errors of planning: infeasible budget, time limit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coop_plan.schemas import format_bytes

if TYPE_CHECKING:
    from coop_plan.planner.core.schedule import PlacedSchedule


class InfeasibleBudgetError(ValueError):
    """The budget cannot be met by the method.

    Attributes:
        budget_bytes: the budget asked for.
        min_feasible_bytes: the smallest budget the method was found to meet, resident bytes and
            outputs outside the arena included; None if it was not searched (option `smallest`).
        met_bytes: a budget that was met on the way, at most keep-everything's peak; None if none.
        blocking_op: id of the op that did not fit, or None; `blocking_op_name` is its target.
        working_set_bytes: working set of that op (inputs, outputs, workspace, each rounded up to
            the alignment).
        budget_lower_bound_bytes: proved lower bound on the peak of every schedule of any method
            (`planner.core.memory_bounds`); None if unknown.
        held: the unrecomputable residents during that op, and why they are; "" without any.
        unused: choices that the graph offers, that coop-offline makes and the method ignores:
            "variants", "transfers", "movable residents".
    """

    def __init__(
        self,
        method: str,
        budget_bytes: int,
        min_feasible_bytes: int | None,
        blocking_op: int | None,
        blocking_op_name: str,
        working_set_bytes: int,
        unused: Sequence[str] = (),
        held: str = "",
        budget_lower_bound_bytes: int | None = None,
        met_bytes: int | None = None,
    ) -> None:
        self.method = method
        self.budget_bytes = budget_bytes
        self.min_feasible_bytes = min_feasible_bytes
        self.met_bytes = met_bytes
        self.blocking_op = blocking_op
        self.blocking_op_name = blocking_op_name
        self.working_set_bytes = working_set_bytes
        self.unused = tuple(unused)
        self.held = held
        self.budget_lower_bound_bytes = budget_lower_bound_bytes
        known = []
        if min_feasible_bytes is not None:
            known.append(f"the smallest it can meet is {_exact(min_feasible_bytes)}")
        elif met_bytes is not None:
            known.append(f"it meets {_exact(met_bytes)}")
        if budget_lower_bound_bytes is not None:
            bound = f"{budget_lower_bound_bytes} bytes"
            if budget_lower_bound_bytes != min_feasible_bytes:
                bound = _exact(budget_lower_bound_bytes)
            known.append(f"no schedule at all one below {bound}")
        blocked = (
            f"op {blocking_op} ({blocking_op_name}) blocks it with a working set of"
            f" {_exact(working_set_bytes)}" + (f" beside {held}" if held else "")
            if blocking_op is not None
            else "resident tensors and outputs alone exceed it"
        )
        clauses = [f"{method} cannot meet a budget of {_exact(budget_bytes)}"]
        clauses += [", ".join(known)] if known else []
        clauses.append(blocked)
        if unused:
            named = " and ".join(unused)
            clauses.append(f"{method} does not use the graph's {named}, coop-offline does")
        if min_feasible_bytes is None and met_bytes is not None:
            clauses.append("budget min is the smallest it can meet")
        super().__init__("; ".join(clauses))

    def with_smallest(self, min_feasible_bytes: int) -> "InfeasibleBudgetError":
        """The same error with the smallest budget that was found."""
        return InfeasibleBudgetError(
            self.method,
            self.budget_bytes,
            min_feasible_bytes,
            self.blocking_op,
            self.blocking_op_name,
            self.working_set_bytes,
            self.unused,
            self.held,
            self.budget_lower_bound_bytes,
            self.met_bytes,
        )

    @property
    def proved(self) -> bool:
        """True if no schedule of any method meets the budget."""
        bound = self.budget_lower_bound_bytes
        return bound is not None and self.budget_bytes < bound


def _exact(size: int) -> str:
    return f"{size} bytes ({format_bytes(size)})"


INFEASIBLE_FIELDS = (
    *("budget_bytes", "min_feasible_bytes", "met_bytes", "budget_lower_bound_bytes"),
    *("blocking_op", "blocking_op_name", "working_set_bytes", "held"),
)


def infeasible_fields(error: InfeasibleBudgetError) -> dict[str, Any]:
    """The attributes of an error that are sent to clients, by name."""
    return {name: getattr(error, name) for name in INFEASIBLE_FIELDS}


class TimeLimitError(TimeoutError):
    """The time limit was reached before any plan existed."""


class DoesNotFitError(Exception):
    """Internal to methods: op `op` (a position) does not fit into the arena.

    `closest` is the placed schedule of the smallest arena that the method found, if any.
    """

    def __init__(self, op: int, closest: "PlacedSchedule | None" = None) -> None:
        self.op = op
        self.closest = closest
        super().__init__(f"op at position {op} does not fit")
