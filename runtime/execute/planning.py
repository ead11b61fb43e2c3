"""A verified plan for a captured step, from the cache or made."""

from coop_plan.planner import plan, verify
from coop_plan.runtime.cache import plans
from coop_plan.runtime.options import Options
from coop_plan.schemas import Graph, Plan


def plan_for(graph: Graph, options: Options) -> tuple[Plan, bool]:
    """The plan, and whether it was in the cache.

    Raises:
        planner.InfeasibleBudgetError: the budget cannot be met.
    """
    key = plans.key_of(graph, options)
    found = plans.find(key, graph, options)
    if found is not None:
        return found, True
    made = plan(graph, options.plan)
    verify(graph, made)
    plans.keep(key, graph, made)
    return made, False
