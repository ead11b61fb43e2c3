"""Finds a verified plan for a captured step: cached, rescaled, made here, by a rank or a server."""

import logging
import zlib
from collections.abc import Callable, Hashable, Sequence

from coop_plan import planner
from coop_plan.planner import InfeasibleBudgetError, PlanOptions, verify
from coop_plan.planner.plan_cache.record import StoredPlan, as_bytes, as_record
from coop_plan.planner.planning import peak_of_order
from coop_plan.planner.progress import Work
from coop_plan.planner.rescale import rescaled
from coop_plan.runtime.cache import plans
from coop_plan.runtime.capture.checkpoints import eager_order
from coop_plan.runtime.distributed.sharing import WAIT_SECONDS, made_once
from coop_plan.runtime.dynamic_shapes.history import ShapeHistory
from coop_plan.runtime.errors import OptionsError, PlanServerError
from coop_plan.runtime.options import Options
from coop_plan.schemas import Graph, Plan, format_bytes
from coop_plan.schemas.errors import missing_package

log = logging.getLogger("coop-plan")

RESIZABLE = "coop-offline"
"""The default method. Another one was requested by name, so its plans are not rescaled."""

AWAY_SECONDS = 1.0
"""Time to retry a server that did not answer last time."""

_away: set[str] = set()
"""Servers that did not answer last time."""


def plan(graph: Graph, options: PlanOptions) -> Plan:
    """As `planner.plan`, with progress in the log."""
    return planner.plan(graph, options, progress=Work().report)


def plan_for(
    graph: Graph,
    options: Options,
    *,
    raised: str = "",
    history: ShapeHistory | None = None,
    checkpoints: Sequence[Hashable | None] = (),
    from_above: bool = True,
) -> tuple[Plan, bool]:
    """Returns the plan, and True if it was cached.

    A share with which a plan takes more than eager autograd with the user's `checkpoints`, which
    recompute each op, is lowered to that if the method can meet it.

    A plan in `history` for similar sizes is rescaled if it does as well at these sizes. A plan that
    was searched for is added to `history`.

    A share that cannot be met is raised to the smallest budget, with a warning that begins with
    `raised`; without that, it is an error as bytes are. Bytes are refused after a search for the
    smallest budget, `from_above`: the method may miss a plan that it finds then
    (`Task.at_any_costs`).

    With a server, the plan is the server's. An unreachable server is an error, or with
    `server_fallback="local"` the plan is made here and a warning is logged.

    In a process group, one of the ranks that need the same plan does all this for the others.

    Raises:
        planner.InfeasibleBudgetError: the budget cannot be met.
        PlanServerError: the server has no plan.
    """
    found = _plan_for(graph, options, raised, history, from_above)
    if options.plan.budget.kind != "share":
        return found
    eager = peak_in_eager(graph, checkpoints)
    if eager is None or found[0].peak_bytes <= eager:
        return found
    try:
        return _plan_for(graph, options.within(eager), "", history)
    except InfeasibleBudgetError:
        return found


def peak_in_eager(graph: Graph, checkpoints: Sequence[Hashable | None]) -> int | None:
    """Peak in bytes of the step in eager autograd with `checkpoints`; None without any."""
    if not any(checkpoint is not None for checkpoint in checkpoints):
        return None
    return peak_of_order(graph, eager_order(graph, checkpoints))


def _plan_for(
    graph: Graph,
    options: Options,
    raised: str,
    history: ShapeHistory | None,
    from_above: bool = True,
) -> tuple[Plan, bool]:
    key = plans.key_of(graph, options)

    def make() -> tuple[Plan, bool]:
        if options.server is not None:
            made = _from_server(options.server, graph, options, raised, history, from_above)
            if made is not None:
                return made, False
        found = plans.find(key, graph, options)
        if found is not None:
            _remember(graph, found, history)
            return found, True
        made = None if history is None else _resized(graph, options, history)
        if made is None:
            made = _or_smallest(plan, graph, options, raised, history, from_above)
            verify(graph, made)
            _remember(graph, made, history)
        plans.store(key, graph, made)
        return made, False

    def unpack(data: bytes) -> tuple[Plan, bool] | None:
        found = _unpacked(data, graph, options)
        if found is None:
            return None
        _remember(graph, found, history)
        if options.server is None and plans.find(key, graph, options) is None:
            plans.store(key, graph, found)  # in the cache of this host
        return found, True

    return made_once(
        f"plan/{key}/{bool(raised)}",
        make,
        pack=lambda made: _packed(made[0], graph),
        unpack=unpack,
        seconds=WAIT_SECONDS + (options.plan.time_limit or 0.0),
    )


def _packed(made: Plan, graph: Graph) -> bytes:
    """A plan for other ranks."""
    record = StoredPlan.of(made, graph).model_copy(update={"packed": b""})
    return zlib.compress(as_bytes(record), 1)


def _unpacked(data: bytes, graph: Graph, options: Options) -> Plan | None:
    """Another rank's plan, verified; None if it is not valid here."""
    record = as_record(zlib.decompress(data))
    found = record.for_request(graph, options.plan)
    return found if isinstance(found, Plan) else None


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
    server: str,
    graph: Graph,
    options: Options,
    raised: str,
    history: ShapeHistory | None,
    from_above: bool,
) -> Plan | None:
    try:
        from coop_plan.client.client import PATIENCE_SECONDS, Client
        from coop_plan.client.protocol import ServerAwayError, ServerError
    except ModuleNotFoundError as error:
        raise OptionsError(missing_package("option 'server'", error.name, "client")) from None
    away = server in _away
    _away.discard(server)
    try:
        patience = AWAY_SECONDS if away else PATIENCE_SECONDS
        with Client(server, patience_seconds=patience) as client:
            if away:
                client.check_alive(AWAY_SECONDS)
            return _or_smallest(client.plan, graph, options, raised, history, from_above)
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
    from_above: bool = True,
) -> Plan:
    try:
        return make(graph, options.plan)
    except InfeasibleBudgetError as error:
        if options.plan.budget.kind == "bytes" and from_above and not error.proved:
            return make(graph, options.plan.model_copy({"smallest": True}))
        if options.plan.budget.kind != "share" or not raised:
            raise
        reason = str(error)  # text: an error would keep the frames of all callers alive
        made = make(graph, options.within(None).plan)
    log_raised(raised, made, reason, history)
    return made


def log_raised(raised: str, made: Plan, reason: str, history: ShapeHistory | None) -> None:
    """Log that a share is raised to the smallest budget; the line begins with `raised`."""
    log.log(
        logging.WARNING if history is None else history.level("least"),
        "%s cannot meet its share and takes %s, the least: %s",
        *(raised, format_bytes(made.budget_bytes), reason),
    )
