"""First plan of a captured step, and the choice between eager and fused kernels for it."""

from dataclasses import dataclass, replace

from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.distributed.collectives import group_of
from coop_plan.runtime.distributed.sharing import shared_costs
from coop_plan.runtime.dynamic_shapes.history import ShapeHistory
from coop_plan.runtime.execute.find_plan import log_raised, plan_for
from coop_plan.runtime.gradients import capture_adjust
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment
from coop_plan.runtime.options import Options
from coop_plan.schemas import Plan


@dataclass(frozen=True)
class FirstPlan:
    """A verified plan of `captured`; `under` is the step in the environment planned for."""

    captured: Captured
    under: Captured
    environment: MemoryEnvironment
    plan: Plan
    cached: bool


@dataclass(frozen=True)
class Planner:
    """Makes first plans within the budget of `options`.

    A share that cannot be met is raised, with a warning that begins with `raised`. With `hooked`
    leaves, hooks are assumed to consume gradients if the budget is infeasible otherwise.
    """

    options: Options
    history: ShapeHistory
    raised: str
    hooked: bool

    def plan(self, captured: Captured) -> FirstPlan:
        """The plan of a step.

        Raises:
            planner.InfeasibleBudgetError: the budget cannot be met.
        """
        consumed = frozenset(capture_adjust.consumable(captured)) if self.hooked else frozenset()
        if any(group_of(node) for node in captured.ops):
            consumed = frozenset()
        now = MemoryEnvironment()
        captured = under = replace(captured, graph=shared_costs(captured.graph))
        try:
            made, cached = plan_for(
                *(captured.graph, self.options),
                raised="" if consumed else self.raised,
                history=self.history,
                checkpoints=captured.checkpoints,
            )
        except InfeasibleBudgetError as error:
            if not consumed:
                raise
            now = MemoryEnvironment(consumed=consumed)
            under = capture_adjust.under(captured, now)
            try:
                made, cached = plan_for(under.graph, self.options.within(error.budget_bytes))
            except InfeasibleBudgetError:
                if self.options.plan.budget.kind == "bytes":
                    raise error from None
                made, cached = plan_for(
                    *(under.graph, self.options),
                    raised=self.raised,
                    history=self.history,
                    checkpoints=under.checkpoints,
                )
        return FirstPlan(captured, under, now, made, cached)

    def better(self, fused: Captured, eager: Captured) -> FirstPlan:
        """The plan of less cost within one budget; at `min`, that of the smaller budget.

        A share is one of the peak of `fused`. The graph of eager kernels is not planned if all its
        ops, run once, cost more than the fused plan.

        Raises:
            planner.InfeasibleBudgetError: neither can meet the budget.
        """
        exact = replace(self, raised="")
        eager = replace(eager, graph=shared_costs(eager.graph))  # ranks choose alike
        try:
            best = exact.plan(fused)
        except InfeasibleBudgetError as error:
            return self._instead(fused, eager, error)
        if self.options.plan.budget.kind == "min":
            other = exact.plan(eager)
        elif best.plan.cost_us <= sum(op.cost_us for op in eager.graph.ops):
            return best
        else:
            try:
                other = exact.within(best.plan.budget_bytes).plan(eager)
            except InfeasibleBudgetError:
                return best
        return min(best, other, key=lambda found: (found.plan.budget_bytes, found.plan.cost_us))

    def _instead(
        self, fused: Captured, eager: Captured, reason: InfeasibleBudgetError
    ) -> FirstPlan:
        """The plan if `fused` cannot meet the budget."""
        try:
            return replace(self.within(reason.budget_bytes), raised="").plan(eager)
        except InfeasibleBudgetError:
            if self.options.plan.budget.kind == "bytes":
                raise
        least = self.within(None).better(fused, eager)
        log_raised(self.raised, least.plan, str(reason), self.history)
        return least

    def within(self, budget_bytes: int | None) -> "Planner":
        """Planner of the same for a budget in bytes; None for the smallest feasible one."""
        return replace(self, options=self.options.within(budget_bytes))
