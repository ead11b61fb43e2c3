"""A plan for a smaller budget at once, and better ones later, from the store."""

import asyncio
import json

import httpx
import pytest

from coop_plan.api.jobs.related_plans import RelatedPlans
from coop_plan.api.jobs.request_handler import Limits, Reply, RequestHandler
from coop_plan.api.service.app import create_app
from coop_plan.api.service.graph_store import SqliteGraphStore
from coop_plan.api.service.plan_service import ServiceSettings
from coop_plan.planner import find_faults, plan
from coop_plan.planner.plan_cache.record import StoredPlan
from coop_plan.planner.plan_cache.store import SqliteStore
from coop_plan.schemas import parse_plan
from tests.api.in_process import ask, service


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "plans", secret=b"secret")
    yield store
    store.close()


@pytest.fixture
def handler(store, tmp_path):
    graphs = SqliteGraphStore(tmp_path / "plans")
    yield RequestHandler(store, Limits(), graphs)
    graphs.close()


@pytest.fixture
def related(handler, store):
    return RelatedPlans(handler, store)


@pytest.fixture
def question(document):
    return {"graph": document, "budget": 330, "alignment": 1}


def body(question):
    return json.dumps(question).encode()


def solve(handler, question):
    reply, _ = handler.solve(body(question), "", lambda _: None)
    return reply.key


def for_smaller_budget(related, question):
    reply, data = related.for_smaller_budget(body(question), "")
    assert reply.found == bool(data)
    return parse_plan(data) if data else None


def test_a_plan_for_smaller_budget_memory_holds_for_more(handler, related, question, chain):
    solve(handler, question)
    solve(handler, question | {"budget": 320})
    answer = for_smaller_budget(related, question | {"budget": 460})
    assert find_faults(chain, answer) == []
    assert answer.budget_bytes == 460
    assert answer.peak_bytes <= 330
    best = handler.find(body(question), "", b"")[1]
    assert answer.cost_us == parse_plan(best).cost_us  # the better of the two
    assert for_smaller_budget(related, question | {"budget": 319}) is None
    for other in ({"alignment": 2}, {"outputs": "arena"}, {"method": "coop"}):
        assert for_smaller_budget(related, question | {"budget": 460} | other) is None


def test_a_bound_for_smaller_budget_memory_is_none_for_more(handler, related, question):
    question |= {"method": "optimal", "time_limit": 20}
    key = solve(handler, question)
    assert parse_plan(handler.stored_plan(key)[1]).status == "optimal"
    answer = for_smaller_budget(related, question | {"budget": 420})
    assert (answer.status, answer.lower_bound_us) == ("feasible", None)


def test_shares_are_compared_with_shares_and_bytes_with_bytes(handler, related, question, chain):
    solve(handler, question | {"budget": "70%"})
    assert for_smaller_budget(related, question | {"budget": "80%"}).budget_bytes < 460
    assert for_smaller_budget(related, question | {"budget": "69%"}) is None
    assert find_faults(chain, for_smaller_budget(related, question | {"budget": 500})) == []
    assert for_smaller_budget(related, question | {"budget": "min"}) is None


def test_wrong_costs_of_others_are_not_served_for_smaller_budget(
    handler, related, question, document
):
    ops = [op | {"cost_us": 1 + 99 * (n == 0)} for n, op in enumerate(document["ops"])]
    solve(handler, question | {"graph": document | {"ops": ops}})
    assert for_smaller_budget(related, question | {"budget": 460}) is None


def made_worse(store, key):
    """Put a plan in the place of the kept one that recomputes more than it must."""
    (record,) = store.get(key)
    graph, best = record.with_original_graph()
    bad = plan(graph, "min", alignment=1).model_copy({"budget_bytes": best.budget_bytes})
    assert bad.cost_us > best.cost_us
    worse = StoredPlan.of(bad, graph)
    assert store.replace(key, record, worse)
    return best, bad


def test_a_better_plan_replaces_the_kept_one_and_is_looked_for_once(
    handler, related, store, question, chain, monkeypatch
):
    question |= {"budget": 420}
    key = solve(handler, question)
    best, bad = made_worse(store, key)
    assert not handler.stored_plan(key)[0].settled
    assert not handler.find(body(question), "", b"")[0].settled
    progress = []
    reply, _ = related.improve(key, "", 20.0, progress.append)
    assert progress
    stored, data = handler.stored_plan(key)
    assert (stored.settled, reply.settled) == (True, True)
    better = parse_plan(data)
    assert find_faults(chain, better) == []
    assert better.cost_us <= best.cost_us < bad.cost_us
    found, data = handler.find(body(question), "", b"")
    assert (found.found, found.settled) == (True, True)
    assert parse_plan(data) == better
    monkeypatch.setattr("coop_plan.planner.plan", None)
    related.improve(key, "", 20.0, progress.append)
    assert handler.stored_plan(key)[1] == data


def test_no_plan_is_replaced_by_one_that_is_no_better(handler, related, store, question):
    key = solve(handler, question)
    before = handler.stored_plan(key)[1]
    related.improve(key, "", 20.0, lambda _: None)
    assert parse_plan(handler.stored_plan(key)[1]).cost_us <= parse_plan(before).cost_us
    assert store.get(key)[0].searched_seconds == 20.0


def test_a_better_plan_takes_nobody_elses_place(handler, related, store, question, monkeypatch):
    """One that was written while it was looked for stays."""
    key = solve(handler, question | {"budget": 420})
    made_worse(store, key)
    (record,) = store.get(key)
    theirs = record.model_copy({"searched_seconds": 1.0})

    def plan_while(graph, options, **_):
        assert store.replace(key, record, theirs)
        return plan(graph, options)

    monkeypatch.setattr("coop_plan.planner.plan", plan_while)
    related.improve(key, "", 20.0, lambda _: None)
    assert store.get(key) == [theirs]


def test_a_plan_for_a_link_and_a_host_budget_is_improved_for_them(handler, related, question):
    """The search has all options that the figures of the stored plan depend on."""
    question |= {"link": "1KB/s", "host_budget": 1000, "outputs": "arena"}
    key = solve(handler, question)
    old = parse_plan(handler.stored_plan(key)[1])
    assert (old.link_bytes_per_s, old.host_budget_bytes) == (1000, 1000)
    reply, _ = related.improve(key, "", 0.5, lambda _: None)
    assert reply.found
    new = parse_plan(handler.stored_plan(key)[1])
    same = "link_bytes_per_s", "host_budget_bytes", "outputs", "alignment", "budget_bytes"
    assert [getattr(new, name) for name in same] == [getattr(old, name) for name in same]
    assert new.cost_us <= old.cost_us


def test_what_a_baseline_made_is_not_improved(handler, related, question):
    """A request for dtr is for a comparison with dtr."""
    key = solve(handler, question | {"method": "dtr"})
    assert handler.stored_plan(key)[0].settled
    assert related.improve("0" * 64, "", 1.0, lambda _: None)[0].problem == "not-found"


@pytest.mark.parametrize("smaller", [True, False])
def test_a_job_that_ends_while_a_provisional_plan_is_read(tmp_path, monkeypatch, question, smaller):
    """The answer is provisional, or the job: never empty, nor another budget's plan as a miss."""

    async def scenario():
        server = service(monkeypatch, tmp_path / "plans")
        app = create_app(ServiceSettings(store=str(tmp_path / "plans"), secret=b"secret"))
        app.state.service = server
        call = server.call_reader

        async def call_when_done(task, *rest):
            while task.do == "for-smaller-budget" and server.jobs._running:
                await asyncio.sleep(0.01)
            if task.do == "for-smaller-budget" and not smaller:  # another writer emptied the store
                return Reply(), b""
            return await call(task, *rest)

        monkeypatch.setattr(server, "call_reader", call_when_done)
        try:
            if smaller:
                await ask(server, question | {"budget": 320})
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                headers = {"Prefer": "wait=0"}
                answer = await http.post("/plan", json=question, headers=headers)
            if smaller:
                assert answer.headers["coop-plan-cache"] == "provisional"
                assert "monitor" in answer.headers["link"]
                assert parse_plan(answer.content).peak_bytes <= 320
            else:
                assert answer.status_code == 202
                assert answer.json()["state"] == "done"
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 100))
