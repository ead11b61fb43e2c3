"""A verified plan for a captured step: from the cache, made here, or a planning service's."""

import logging
from collections.abc import Callable

from coop_plan.planner import InfeasibleBudgetError, PlanOptions, plan, verify
from coop_plan.planner.rescale import resized
from coop_plan.runtime.cache import plans
from coop_plan.runtime.dynamic_shapes.history import Others
from coop_plan.runtime.errors import OptionsError, PlanServerError
from coop_plan.runtime.options import Options
from coop_plan.schemas import Graph, Plan, format_bytes

log = logging.getLogger("coop-plan")

RESIZABLE = "coop-offline"
"""The default method: whoever names another wants what that makes of each size."""


def plan_for(
    graph: Graph, options: Options, *, part: bool = False, others: Others | None = None
) -> tuple[Plan, bool]:
    """The plan, and whether it was in the cache.

    Where `others` has a plan for sizes near these, and it does as well at these, it is that one;
    and one that was searched for is remembered there.

    For a `part` of what an iteration runs it is the smallest if its share cannot be met: a share is
    of the peak of the iteration, which is not known before it has run.

    With a server it is the server's, which has a cache of its own; one that is away is an error,
    or with `server_fallback="local"` the plan is made here, and a warning says so.

    Raises:
        planner.InfeasibleBudgetError: the budget cannot be met.
        PlanServerError: the server has no plan.
    """
    if options.server is not None:
        made = _from_server(options.server, graph, options, part, others)
        if made is not None:
            return made, False
    key = plans.key_of(graph, options)
    found = plans.find(key, graph, options)
    if found is not None:
        _remember(graph, found, others)
        return found, True
    made = None if others is None else _resized(graph, options, others)
    if made is None:
        made = _or_smallest(plan, graph, options, part, others)
        verify(graph, made)
        _remember(graph, made, others)
    plans.keep(key, graph, made)
    return made, False


def _remember(graph: Graph, made: Plan, others: Others | None) -> None:
    if others is not None and made.method == RESIZABLE:
        others.plans.append((graph, made))


def _resized(graph: Graph, options: Options, others: Others) -> Plan | None:
    if options.plan.method != RESIZABLE:  # all others are asked for by name
        return None
    size = _bytes(graph)
    for like, made in sorted(others.plans, key=lambda other: abs(_bytes(other[0]) - size)):
        found = resized(graph, like, made, options.plan)
        if found is not None:
            return found
    return None


def _bytes(graph: Graph) -> int:
    return sum(tensor.bytes for tensor in graph.tensors)


def _from_server(
    server: str, graph: Graph, options: Options, part: bool, others: Others | None
) -> Plan | None:
    try:
        from coop_plan.client.client import Client
        from coop_plan.client.protocol import ServerAwayError, ServerError
    except ModuleNotFoundError as error:
        message = f"option 'server' needs {error.name}: pip install 'coop-plan[client]'"
        raise OptionsError(message) from None
    try:
        with Client(server) as client:
            return _or_smallest(client.plan, graph, options, part, others)
    except ServerAwayError as error:
        if options.server_fallback == "error":
            message = f'{error}; with server_fallback="local" the step is planned here'
            raise PlanServerError(message) from None
        log.warning("%s; the step is planned here (server_fallback)", str(error))
        return None
    except ServerError as error:
        raise PlanServerError(f"{server}: {error}") from None


def _or_smallest(
    make: Callable[[Graph, PlanOptions], Plan],
    graph: Graph,
    options: Options,
    part: bool,
    others: Others | None,
) -> Plan:
    try:
        return make(graph, options.plan)
    except InfeasibleBudgetError as error:
        if options.plan.budget.kind != "share" or not part:
            raise
        told = str(error)
        made = make(graph, options.within(None).plan)
    log.log(
        logging.WARNING if others is None else others.level("least"),
        "one of several graphs takes %s, the least it can, before they are planned together: %s",
        *(format_bytes(made.budget_bytes), told),
    )
    return made
