"""Plans that outlive the process: a second start of the same step makes none.

Kept as the service keeps its plans, and apart from them; read again through the verifier.
"""

from contextlib import closing
from pathlib import Path

from coop_plan.planner.plan_cache.record import StoredPlan
from coop_plan.planner.plan_cache.store import SqliteStore, planner_version
from coop_plan.runtime.cache.files import cache_dir, going_on_without
from coop_plan.runtime.options import Options
from coop_plan.schemas import Graph, Plan, cost_signature, fingerprint


def key_of(graph: Graph, options: Options) -> str:
    """What a plan is kept by: structure, costs, what was asked, and the planner's version."""
    asked = options.plan
    costs, links = cost_signature(graph), asked.apply_link(graph).device.linked
    return asked.key(fingerprint(graph), planner_version(), costs, links=links)


def find(key: str, graph: Graph, options: Options) -> Plan | None:
    """The plan kept by this key, if there is one, it holds for `graph`, and is what was asked."""
    with going_on_without(_path()), _open() as store:
        for record in store.get(key):
            found = record.for_question(graph, options.plan)
            if isinstance(found, Plan):
                return found
            store.delete(key)
    return None


def keep(key: str, graph: Graph, plan: Plan) -> None:
    """Keep a verified plan of `graph`."""
    with going_on_without(_path()), _open() as store:
        store.put(key, StoredPlan.of(plan, graph))


def _open() -> closing[SqliteStore]:
    return closing(SqliteStore(_path(), wal=False))


def _path() -> Path:
    return cache_dir() / "step_plans.sqlite3"
