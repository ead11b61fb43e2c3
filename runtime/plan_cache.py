"""Plans that outlive the process: a second start of the same step makes none.

Kept as the service keeps its plans, and apart from them; read again through the verifier.
"""

from contextlib import closing
from pathlib import Path

from planner import find_faults
from planner.store import SqliteStore, StoredPlan, plan_key
from runtime.build import cache_dir
from runtime.cache_file import going_on_without
from runtime.options import Options
from schemas import Graph, Plan, cost_signature, fingerprint


def key_of(graph: Graph, options: Options) -> str:
    """What a plan is kept by: structure, costs, what was asked, and the planner's version."""
    return plan_key(
        fingerprint(graph),
        options.budget,
        options.method,
        options.outputs,
        options.alignment,
        options.switches,
        options.time_limit,
        seed=0,
        solver=None,
        costs=cost_signature(graph),
    )


def find(key: str, graph: Graph, options: Options) -> Plan | None:
    """The plan kept by this key, if there is one, it holds for `graph`, and is what was asked."""
    with going_on_without(_path()), _open() as store:
        record = store.get(key)
        if record is None:
            return None
        try:
            candidate = record.for_graph(graph)
            if _is_asked(candidate, options) and not find_faults(graph, candidate, limit=1):
                return candidate
        except (KeyError, ValueError):
            pass  # it names what the graph has not
        store.delete(key)
    return None


def keep(key: str, graph: Graph, plan: Plan) -> None:
    """Keep a verified plan of `graph`."""
    with going_on_without(_path()), _open() as store:
        store.put(key, StoredPlan.of(plan, graph))


def _is_asked(plan: Plan, options: Options) -> bool:
    asked = int(options.budget.value) if options.budget.kind == "bytes" else plan.budget_bytes
    return (plan.budget_bytes, plan.method, plan.outputs, plan.alignment) == (
        asked,
        options.method,
        options.outputs,
        options.alignment,
    )


def _open() -> closing[SqliteStore]:
    return closing(SqliteStore(_path(), wal=False))


def _path() -> Path:
    return cache_dir() / "step_plans.sqlite3"
