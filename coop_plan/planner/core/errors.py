"""What planning can answer instead of a plan."""

from collections.abc import Sequence

from coop_plan.schemas import format_bytes


class InfeasibleBudgetError(ValueError):
    """
    The budget cannot be met by the method.

    Attributes:
        budget_bytes: the budget asked for.
        min_feasible_bytes: the smallest budget the method was found to meet, resident bytes and
            outputs outside the arena included.
        blocking_op: id of the op that did not fit, and `blocking_op_name` its target.
        working_set_bytes: what that op needs in the arena at once (inputs, outputs, workspace,
            each rounded up to the alignment).
        budget_lower_bound_bytes: below it no schedule of any method has a peak, which is proved
            (`planner.core.memory_bounds`); None if it is not known.
        held: what is in the arena beside that and cannot be made again, and why; or nothing.
        unused: what the graph offers and the method does not use: "variants", "transfers".
    """

    def __init__(
        self,
        method: str,
        budget_bytes: int,
        min_feasible_bytes: int,
        blocking_op: int | None,
        blocking_op_name: str,
        working_set_bytes: int,
        unused: Sequence[str] = (),
        held: str = "",
        budget_lower_bound_bytes: int | None = None,
    ) -> None:
        self.method = method
        self.budget_bytes = budget_bytes
        self.min_feasible_bytes = min_feasible_bytes
        self.blocking_op = blocking_op
        self.blocking_op_name = blocking_op_name
        self.working_set_bytes = working_set_bytes
        self.unused = tuple(unused)
        self.held = held
        self.budget_lower_bound_bytes = budget_lower_bound_bytes
        blocked = (
            f"; op {blocking_op} ({blocking_op_name}) blocks it with a working set of"
            f" {working_set_bytes} bytes ({format_bytes(working_set_bytes)})"
            + (f" beside {held}" if held else "")
            if blocking_op is not None
            else "; resident tensors and outputs alone exceed it"
        )
        least = budget_lower_bound_bytes
        proved = "" if least is None else f", no schedule at all one below {least} bytes"
        if least is not None and least < min_feasible_bytes:
            proved += f" ({format_bytes(least)})"
        super().__init__(
            f"{method} cannot meet a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)});"
            f" the smallest it can meet is {min_feasible_bytes} bytes"
            f" ({format_bytes(min_feasible_bytes)}){proved}{blocked}"
            + (f"; {method} does not use the graph's {' and '.join(unused)}" if unused else "")
        )


class TimeLimitError(TimeoutError):
    """The time limit was reached before any plan existed."""


class DoesNotFitError(Exception):
    """Internal to methods: at this arena size, op `op` (an index) could not be run."""

    def __init__(self, op: int) -> None:
        self.op = op
        super().__init__(f"op at position {op} does not fit")
