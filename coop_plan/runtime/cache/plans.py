"""On-disk cache of plans: a second start of the same step does not plan again.

The format is that of the service's plan cache, in a file of its own. Plans are verified when read.
"""

from contextlib import closing
from pathlib import Path

from coop_plan.planner.cache_files import cache_dir
from coop_plan.planner.plan_cache.record import StoredPlan
from coop_plan.planner.plan_cache.store import SqliteStore, planner_version
from coop_plan.runtime.cache.files import LOCK_SECONDS, open_private, tolerate_failures
from coop_plan.runtime.options import Options
from coop_plan.schemas import Graph, Plan, cost_signature, fingerprint


def key_of(graph: Graph, options: Options) -> str:
    """Cache key of a plan: graph structure, costs, planning options, and the planner's version."""
    planned = options.plan.apply_link(graph)
    costs, links = cost_signature(planned), planned.device.linked
    return options.plan.key(fingerprint(graph), planner_version(), costs, links=links)


def find(key: str, graph: Graph, options: Options) -> Plan | None:
    """The cached plan of a key, if it is valid for `graph` and the options."""
    with tolerate_failures(_path()), _open() as plans:
        for record in plans.get(key):
            found = record.for_request(graph, options.plan)
            if isinstance(found, Plan):
                return found
            plans.delete(key)
    return None


def store(key: str, graph: Graph, plan: Plan) -> None:
    """Store a verified plan of `graph`."""
    with tolerate_failures(_path()), _open() as plans:
        plans.put(key, StoredPlan.of(plan, graph))


def _open() -> closing[SqliteStore]:
    open_private(_path())
    return closing(SqliteStore(_path(), wal=False, lock_seconds=LOCK_SECONDS))


def _path() -> Path:
    return cache_dir() / "step_plans.sqlite3"
