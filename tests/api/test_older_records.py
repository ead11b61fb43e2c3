"""A store whose older sealed records are put back: answers never get worse than what is known."""

import asyncio

import pytest

from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.planner.plan_cache.record import StoredPlan, StoredRefusal
from coop_plan.planner.plan_cache.store import SqliteStore
from tests.api.in_process import ask, service

QUESTION = {"budget": 430, "alignment": 1}


def worse(chain):
    """A valid plan under the name of the method that was asked for, as an earlier solve made it."""
    made = plan(chain, 330, alignment=1)
    return StoredPlan.of(made.model_copy({"budget_bytes": 430}), chain)


def refused(chain):
    """A refusal of the method that was asked for, which proves nothing."""
    error = InfeasibleBudgetError("coop-offline", 430, None, None, "", 0)
    return StoredRefusal.of(error, chain)


@pytest.mark.parametrize(("older", "by_path"), [(worse, False), (worse, True), (refused, False)])
def test_an_older_record_put_back_replaces_no_better_answer(
    tmp_path, monkeypatch, chain, document, older, by_path
):
    question = QUESTION | {"graph": document}

    async def scenario():
        server = service(monkeypatch, tmp_path / "plans")
        store = SqliteStore(tmp_path / "plans", secret=b"secret")
        try:
            first, _, _ = await ask(server, question)

            async def answer():
                if by_path:
                    return await server.stored_plan(first.key, first.costs)
                return (await ask(server, question))[:2]

            known = await answer()
            (record,) = store.get(first.key)
            assert older(chain).cost_digest == record.cost_digest
            assert store.replace(first.key, record, older(chain))
            for _ in range(2):
                reply, data = await answer()
                assert (data, reply.settled) == (known[1], known[0].settled)
        finally:
            store.close()
            await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_a_refusal_put_beside_a_plan_is_no_answer(tmp_path, monkeypatch, chain, document):
    question = QUESTION | {"graph": document}

    async def scenario():
        server = service(monkeypatch, tmp_path / "plans")
        store = SqliteStore(tmp_path / "plans", secret=b"secret")
        try:
            first, data, _ = await ask(server, question)
            (record,) = store.get(first.key)
            store.replace(first.key, record, refused(chain))
            store.put(first.key, record, another=True)
            assert (await ask(server, question))[1] == data
        finally:
            store.close()
            await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_the_older_plan_is_worse_and_valid(chain):
    better = plan(chain, 430, alignment=1)
    older = worse(chain)
    assert older.for_graph(chain) is not None
    assert older.plan.cost_us > better.cost_us
