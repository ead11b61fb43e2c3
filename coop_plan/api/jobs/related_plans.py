"""Plans beside the one that was asked for: for a smaller budget at once, and better ones later."""

from collections.abc import Callable

from coop_plan.api.jobs.request_handler import NO_PLAN, Answers, Reply, kept_plan
from coop_plan.planner.plan_cache.record import SEARCH, StoredPlan, as_bytes
from coop_plan.planner.plan_cache.store import PlanStore
from coop_plan.planner.method import Progress
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import Plan


class OtherPlans:
    """Finds and makes them, from the records of a store."""

    def __init__(self, answers: Answers, store: PlanStore) -> None:
        self._answers, self._store = answers, store

    def for_less(self, body: bytes, encoding: str) -> tuple[Reply, bytes]:
        """
        The best kept plan for a smaller budget than that of a request.

        It holds, but what was proved of it says nothing of plans that may use more.
        """
        question = self._answers.read(body, encoding)
        budget, graph = question.options.budget, question.graph
        best: Plan | None = None
        keys = []
        if budget.kind != "min":
            keys = self._store.keys_at_most(question.family(budget.kind), float(budget.value))
        for key in keys:
            for record in self._answers.records(key):
                if not isinstance(record, StoredPlan):
                    continue
                asked = question.options.model_copy({"budget_": record.plan.budget_bytes})
                found = record.for_request(graph, asked)
                if found is None or not record.cost_compatible(graph, found):
                    continue
                if best is None or found.cost_us < best.cost_us:
                    best = found
        if best is None:
            return Reply(key=question.key), b""
        unproved = {"status": "feasible", "lower_bound_us": None, "lower_bound_model": None}
        best = best.model_copy(unproved)
        if budget.kind == "bytes":
            best = best.model_copy({"budget_bytes": int(budget.value)})
        if find_faults(graph, best, limit=1):
            return Reply(key=question.key), b""
        return Reply(key=question.key, found=True), best.to_json().encode()

    def improve(
        self, key: str, seconds: float, say: Callable[[Progress], None]
    ) -> tuple[Reply, bytes]:
        """
        Look for a plan that costs less than the first of a key, which it replaces; its record.

        By the costs that one was made with, so that only better ones replace it. That it was looked
        for is kept too, and not done twice.
        """
        from coop_plan.planner import InfeasibleBudgetError, TimeLimitError, plan

        records = self._answers.records(key)
        old = next((record for record in records if isinstance(record, StoredPlan)), None)
        found = None if old is None else old.with_original_graph()
        if old is None or found is None:
            return NO_PLAN, b""
        graph, best = found
        if old.fully_refined:
            return kept_plan(key, old), as_bytes(old)
        asked = {
            "budget": best.budget_bytes,
            "method": SEARCH,
            "time_limit": seconds,
            "outputs": best.outputs,
            "alignment": best.alignment,
            "host_budget": best.host_budget_bytes,
            "link": best.link_bytes_per_s,
        }
        try:
            made = plan(graph, PlanOptions.of(asked), progress=say)
            if made.cost_us < best.cost_us:
                best = made
        except (InfeasibleBudgetError, TimeLimitError):
            say(Progress("no better plan was found"))
        new = StoredPlan.of(best, graph).model_copy({"searched_seconds": seconds})
        self._store.replace(key, old, new)
        return kept_plan(key, new), as_bytes(new)
