"""A verified plan for a captured step, from the cache or made."""

from coop_plan.planner import InfeasibleBudgetError, plan, verify
from coop_plan.runtime.cache import plans
from coop_plan.runtime.options import Options
from coop_plan.schemas import Graph, Plan


def plan_for(graph: Graph, options: Options, *, part: bool = False) -> tuple[Plan, bool]:
    """The plan, and whether it was in the cache.

    For a `part` of what an iteration runs it is the smallest if its share cannot be met: a share is
    of the peak of the iteration, which is not known before it has run.

    Raises:
        planner.InfeasibleBudgetError: the budget cannot be met.
    """
    key = plans.key_of(graph, options)
    found = plans.find(key, graph, options)
    if found is not None:
        return found, True
    try:
        made = plan(graph, options.plan)
    except InfeasibleBudgetError:
        if options.plan.budget.kind != "share" or not part:
            raise
        made = plan(graph, options.within(None).plan)
    verify(graph, made)
    plans.keep(key, graph, made)
    return made, False
