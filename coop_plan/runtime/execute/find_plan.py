"""Finds a verified plan for a captured step: cached, rescaled, made here or by a server."""

import logging
from collections.abc import Callable
from functools import partial

from coop_plan.planner import InfeasibleBudgetError, PlanOptions, plan, verify
from coop_plan.planner.rescale import rescaled
from coop_plan.runtime.cache import plans
from coop_plan.runtime.dynamic_shapes.history import ShapeHistory
from coop_plan.runtime.errors import OptionsError, PlanServerError
from coop_plan.runtime.options import Options
from coop_plan.runtime.progress import Work
from coop_plan.schemas import Graph, Plan, format_bytes

log = logging.getLogger("coop-plan")

RESIZABLE = "coop-offline"
"""The default method. Another one was requested by name, so its plans are not rescaled."""

AWAY_SECONDS = 1.0
"""Time to retry a server that did not answer last time."""

_away: set[str] = set()
"""Servers that did not answer last time."""


def plan_for(
    graph: Graph, options: Options, *, raised: str = "", history: ShapeHistory | None = None
) -> tuple[Plan, bool]:
    """Returns the plan, and True if it was cached.

    A plan in `history` for similar sizes is rescaled if it does as well at these sizes. A plan that
    was searched for is added to `history`.

    A share that cannot be met is raised to the smallest budget, with a warning that begins with
    `raised`; without that, it is an error as bytes are.

    With a server, the plan is the server's. An unreachable server is an error, or with
    `server_fallback="local"` the plan is made here and a warning is logged.

    Raises:
        planner.InfeasibleBudgetError: the budget cannot be met.
        PlanServerError: the server has no plan.
    """
    if options.server is not None:
        made = _from_server(options.server, graph, options, raised, history)
        if made is not None:
            return made, False
    key = plans.key_of(graph, options)
    found = plans.find(key, graph, options)
    if found is not None:
        _remember(graph, found, history)
        return found, True
    made = None if history is None else _resized(graph, options, history)
    if made is None:
        make = partial(plan, progress=Work().tell)
        made = _or_smallest(make, graph, options, raised, history)
        verify(graph, made)
        _remember(graph, made, history)
    plans.store(key, graph, made)
    return made, False


def _remember(graph: Graph, made: Plan, history: ShapeHistory | None) -> None:
    if history is not None and made.method == RESIZABLE:
        history.plans.append((graph, made))


def _resized(graph: Graph, options: Options, history: ShapeHistory) -> Plan | None:
    if options.plan.method != RESIZABLE:
        return None
    size = _bytes(graph)
    for like, made in sorted(history.plans, key=lambda other: abs(_bytes(other[0]) - size)):
        found = rescaled(graph, like, made, options.plan)
        if found is not None:
            return found
    return None


def _bytes(graph: Graph) -> int:
    return sum(tensor.bytes for tensor in graph.tensors)


def _from_server(
    server: str, graph: Graph, options: Options, raised: str, history: ShapeHistory | None
) -> Plan | None:
    try:
        from coop_plan.client.client import Client
        from coop_plan.client.protocol import ServerAwayError, ServerError
    except ModuleNotFoundError as error:
        message = f"option 'server' needs {error.name}: pip install 'coop-plan[client]'"
        raise OptionsError(message) from None
    away = server in _away
    _away.discard(server)
    try:
        with Client(server, **({"patience_seconds": AWAY_SECONDS} if away else {})) as client:
            if away:
                client.check_alive(AWAY_SECONDS)
            return _or_smallest(client.plan, graph, options, raised, history)
    except ServerAwayError as error:
        if options.server_fallback == "error":
            message = f'{error}; with server_fallback="local" the step is planned here'
            raise PlanServerError(message) from None
        if not away:
            log.warning("%s; steps are planned here (server_fallback) until it answers", str(error))
        _away.add(server)
        return None
    except ServerError as error:
        raise PlanServerError(f"{server}: {error}") from None


def _or_smallest(
    make: Callable[[Graph, PlanOptions], Plan],
    graph: Graph,
    options: Options,
    raised: str,
    history: ShapeHistory | None,
) -> Plan:
    try:
        return make(graph, options.plan)
    except InfeasibleBudgetError as error:
        if options.plan.budget.kind != "share" or not raised:
            raise
        reason = str(error)
        made = make(graph, options.within(None).plan)
    log.log(
        logging.WARNING if history is None else history.level("least"),
        "%s cannot meet its share and takes %s, the least: %s",
        *(raised, format_bytes(made.budget_bytes), reason),
    )
    return made
