"""Related plans of a request: one for a smaller budget at once, and a better one later."""

import contextlib
import sqlite3
from collections.abc import Callable

from coop_plan.api.jobs.request_handler import NO_PLAN, Reply, RequestHandler, stored_plan_reply
from coop_plan.planner.method import Progress
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.plan_cache.record import SEARCH, StoredPlan, as_bytes
from coop_plan.planner.plan_cache.store import PlanStore
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import Plan


class RelatedPlans:
    """Finds related plans in a store, and makes better ones."""

    def __init__(self, handler: RequestHandler, store: PlanStore) -> None:
        self._handler, self._store = handler, store

    def for_smaller_budget(self, body: bytes, encoding: str) -> tuple[Reply, bytes]:
        """The cheapest stored plan for a smaller budget than the request's.

        The plan is valid for the request. Its bound is left out: it does not hold for plans that
        may use more memory.
        """
        request = self._handler.parse(body, encoding)
        budget, graph = request.options.budget, request.graph
        best: Plan | None = None
        keys: list[str] = []
        if budget.kind != "min":
            with contextlib.suppress(OSError, sqlite3.Error):
                keys = self._store.keys_at_most(request.family(budget.kind), float(budget.value))
        for key in keys:
            for record in self._handler.records(key):
                if not isinstance(record, StoredPlan):
                    continue
                options = request.options.model_copy({"budget_": record.plan.budget_bytes})
                found = record.for_request(graph, options)
                if found is None or not record.is_answer(graph, found):
                    continue
                if best is None or found.cost_us < best.cost_us:
                    best = found
        if best is None:
            return Reply(key=request.key), b""
        unproved = {"status": "feasible", "lower_bound_us": None, "lower_bound_model": None}
        best = best.model_copy(unproved)
        if budget.kind == "bytes":
            best = best.model_copy({"budget_bytes": int(budget.value)})
        if find_faults(graph, best, limit=1):
            return Reply(key=request.key), b""
        return Reply(key=request.key, found=True), best.to_json().encode()

    def improve(
        self, key: str, costs: str, seconds: float, on_progress: Callable[[Progress], None]
    ) -> tuple[Reply, bytes]:
        """Search a cheaper plan than that of a key and costs and store it in its place; its record.

        The record notes the search, so that it is not repeated for these costs.
        """
        from coop_plan.planner import InfeasibleBudgetError, TimeLimitError, plan

        old = next(self._handler.plans(key, costs), None)
        found = None if old is None else old.with_original_graph()
        if old is None or found is None:
            return NO_PLAN, b""
        graph, best = found
        if old.fully_refined:
            return stored_plan_reply(key, old), as_bytes(old)
        options = PlanOptions.of_plan(best, method=SEARCH, time_limit=seconds)
        try:
            made = plan(graph, options, progress=on_progress)
            if made.cost_us < best.cost_us:
                best = made
        except (InfeasibleBudgetError, TimeLimitError):
            on_progress(Progress("no better plan was found"))
        new = StoredPlan.of(best, graph).model_copy({"searched_seconds": seconds})
        with contextlib.suppress(OSError, sqlite3.Error):  # then it is searched again
            self._store.replace(key, old, new)
        return stored_plan_reply(key, new), as_bytes(new)
