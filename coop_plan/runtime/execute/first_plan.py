"""First plan of a captured step, and the choice among the graphs in which it can run."""

from collections.abc import Callable, Sequence
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
from coop_plan.runtime.variants.linear_cross_entropy import Head
from coop_plan.schemas import Plan


@dataclass(frozen=True)
class FirstPlan:
    """A verified plan of `captured`; `under` is the step in the environment planned for."""

    captured: Captured
    under: Captured
    environment: MemoryEnvironment
    plan: Plan
    cached: bool


PlanGraph = Callable[["Planner"], FirstPlan]
"""Plans a captured graph by a planner."""

CaptureGraph = Callable[[], Captured | None]
"""Captures another graph of the same step; None if there is none."""


@dataclass(frozen=True)
class ChunkedGraph:
    """The graph of a step with its heads in chunks (`variants.linear_cross_entropy`).

    Attributes:
        capture: captures it.
        extra_us: what the chunks cost beyond the head: its products, computed again.
        may_lower_min: False if another op needs more memory than the logits: fewer bytes would be
            few, and cost much recomputation.
    """

    capture: CaptureGraph
    extra_us: float
    may_lower_min: bool

    @classmethod
    def of(
        cls, whole: Captured, heads: Sequence[Head], capture: CaptureGraph
    ) -> "ChunkedGraph | None":
        """The chunked graph of a captured step with these heads; None if it has none."""
        if not heads:
            return None
        position = {node: i for i, node in enumerate(whole.ops)}
        ops = shared_costs(whole.graph).ops  # ranks choose alike
        costs = [ops[position[head.product]].cost_us for head in heads]
        extra = sum(cost * head.products_again for cost, head in zip(costs, heads, strict=True))
        in_arena = (tensor for tensor in whole.graph.tensors if not tensor.resident)
        bytes_of: dict[int | None, int] = {tensor.id: tensor.bytes for tensor in in_arena}
        inside = {node for head in heads for node in head.inside}
        made = {t for node in inside for t in whole.storages.get(node, ())}
        needs = (
            sum(bytes_of.get(t, 0) for t in (*op.inputs, *op.outputs)) + op.workspace_bytes
            for op in whole.graph.ops
            if made.isdisjoint((*op.inputs, *op.outputs))
        )
        logits = max(bytes_of[whole.storages[head.product][0]] for head in heads)
        return cls(capture, extra, logits >= max(needs, default=0))


@dataclass(frozen=True)
class Planner:
    """Makes first plans within the budget of `options`.

    A share that cannot be met is raised, with a warning that begins with `raised`. With `hooked`
    leaves, hooks are assumed to consume gradients if the budget is infeasible otherwise. Without
    `from_above`, bytes that the method misses are not searched for from above.
    """

    options: Options
    history: ShapeHistory
    raised: str
    hooked: bool
    from_above: bool = True

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
                from_above=self.from_above,
            )
        except InfeasibleBudgetError as error:
            if not consumed:
                raise
            now = MemoryEnvironment(consumed=consumed)
            under = capture_adjust.under(captured, now)
            try:
                within = self.options.within(error.budget_bytes)
                made, cached = plan_for(under.graph, within, from_above=self.from_above)
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

    def better(self, fused: Captured, eager: Captured, split: CaptureGraph) -> FirstPlan:
        """The plan of least cost within one budget; at `min`, that of the smallest budget.

        A share is one of the peak of `fused`. The graph of eager kernels is not planned if all its
        ops, run once, cost more than the fused plan. The graph with `split` regions is captured
        where that of eager kernels is planned, and at `min` where that takes less than `fused`.

        Raises:
            planner.InfeasibleBudgetError: none can meet the budget.
        """
        eager = replace(eager, graph=shared_costs(eager.graph))  # ranks choose alike
        if self.options.plan.budget.kind == "min":
            exact = replace(self, raised="")
            found = [exact.plan(fused), exact.plan(eager)]
            whole, ops = (made.plan.budget_bytes for made in found)
            parts = _captured(split) if ops < whole else []
            found += map(exact.plan, parts)
            best = min(found, key=lambda made: (made.plan.budget_bytes, made.plan.cost_us))
            within = replace(exact.within(best.plan.budget_bytes), from_above=False)
            return within.cheapest(parts, best)
        least_us = sum(op.cost_us for op in eager.graph.ops)
        return self._either(
            lambda planner: planner.plan(fused),
            lambda: [eager, *_captured(split)],
            lambda best: best.cost_us > least_us,
            lambda planner: planner.better(fused, eager, split),
        )

    def with_chunks(self, whole: PlanGraph, chunked: ChunkedGraph | None) -> FirstPlan:
        """The plan of less cost within one budget, of `whole` or of `chunked` if there is one.

        The latter is captured where its plan may be the better one: at `min`, and where `whole`
        cannot meet the budget, or only at more overhead than that of the chunks.

        Raises:
            planner.InfeasibleBudgetError: neither can meet the budget.
        """
        if chunked is None:
            return whole(self)
        if self.options.plan.budget.kind != "min":
            return self._either(
                whole,
                lambda: _captured(chunked.capture),
                lambda best: best.cost_us - best.base_cost_us > chunked.extra_us,
                lambda planner: planner.with_chunks(whole, chunked),
            )
        captured = chunked.capture() if chunked.may_lower_min else None
        if captured is None:
            return whole(self)
        exact = replace(self, raised="")
        best = exact.plan(captured)
        try:
            within = exact.within(best.plan.budget_bytes)
            other = whole(replace(within, from_above=False))
        except InfeasibleBudgetError:
            return best
        return min(best, other, key=lambda found: found.plan.cost_us)

    def _either(
        self,
        first: PlanGraph,
        others: Callable[[], Sequence[Captured]],
        is_worth: Callable[[Plan], bool],
        smallest: PlanGraph,
    ) -> FirstPlan:
        """The plan of least cost within one budget; a share is one of the peak of `first`.

        `others` are planned if `first` cannot meet the budget, or if its plan `is_worth` it. A
        share that none can meet is raised to the plan of `smallest`.
        """
        exact = replace(self, raised="")
        try:
            best = first(exact)
        except InfeasibleBudgetError as error:
            graphs = others()
            if not graphs:
                return first(self)
            try:
                return exact.within(error.budget_bytes).cheapest(graphs)
            except InfeasibleBudgetError:
                if self.options.plan.budget.kind == "bytes" or not self.raised:
                    raise
            reason = str(error)  # text: an error would keep the frames of all callers alive
        else:
            within = replace(exact.within(best.plan.budget_bytes), from_above=False)
            return within.cheapest(others() if is_worth(best.plan) else (), best)
        least = smallest(self.within(None))
        log_raised(self.raised, least.plan, reason, self.history)
        return least

    def cheapest(self, graphs: Sequence[Captured], best: FirstPlan | None = None) -> FirstPlan:
        """The plan of least cost among `best` and those of `graphs`; an error if there is none."""
        for number, graph in enumerate(graphs, 1):
            try:
                found = self.plan(graph)
            except InfeasibleBudgetError:
                if best is None and number == len(graphs):
                    raise
            else:
                best = found if best is None else min(best, found, key=lambda f: f.plan.cost_us)
        assert best is not None
        return best

    def within(self, budget_bytes: int | None) -> "Planner":
        """Planner of the same for a budget in bytes; None for the smallest feasible one."""
        return replace(self, options=self.options.within(budget_bytes))


def _captured(capture: CaptureGraph) -> list[Captured]:
    """The graph that is captured, if there is one."""
    made = capture()
    return [] if made is None else [made]
