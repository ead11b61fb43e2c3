"""Callers with other costs: nobody's costs decide the plan of anybody else."""

import asyncio
import contextlib
import json
import random

import pytest

from coop_plan.api.service.plan_service import ServiceSettings
from coop_plan.planner import find_faults, plan
from coop_plan.schemas import parse_graph, parse_plan
from tests.api.in_process import InProcessPool, ask, service, worker
from tests.redis_server import needs_redis, redis_server
from tests.support import make_graph

BUDGET = "75%"


def training_step(rng, layers=10):
    """A chain of layers and their gradients, of random sizes."""
    sizes = [rng.choice([40, 100, 100, 160]) for _ in range(layers)]
    tensors = {0: ("input", 10)}
    tensors |= {n + 1: ("activation", size) for n, size in enumerate(sizes)}
    tensors |= {layers + n + 1: ("activation", size) for n, size in enumerate(sizes[::-1])}
    tensors[2 * layers + 1] = ("output", 8)
    ops = [{"inputs": [n], "outputs": [n + 1]} for n in range(layers)]
    ops += [
        {"inputs": [layers + n, layers - n], "outputs": [layers + n + 1]} for n in range(layers)
    ]
    ops.append({"inputs": [2 * layers], "outputs": [2 * layers + 1]})
    return json.loads(make_graph(tensors, ops).to_json())


def priced(rng, document, kind, base):
    """The graph with costs of a kind, from those of another caller."""
    if kind == "equal":
        costs = base
    elif kind == "noise":
        costs = [cost * rng.uniform(0.98, 1.02) for cost in base]
    elif kind == "slower":
        costs = [cost * 3 for cost in base]
    elif kind == "moved":  # a tenth of the time, from some ops to others
        moved, costs = sum(base) * 0.098, list(base)
        for op in rng.sample(range(len(base)), 4):
            taken = min(costs[op] * 0.99, moved)
            moved -= taken
            costs[op] -= taken
            costs[rng.randrange(len(base))] += taken
    else:
        costs = [10 ** rng.uniform(-1, 2) for _ in base]
    ops = [op | {"cost_us": cost} for op, cost in zip(document["ops"], costs, strict=True)]
    return document | {"ops": ops}


@contextlib.contextmanager
def stores(kind, folder):
    """Addresses of the plan store and the broker."""
    with contextlib.ExitStack() as stack:
        if kind != "redis":
            yield folder / "plans", ""
        else:
            servers = [folder / "store", folder / "broker"]
            for server in servers:
                server.mkdir()
            yield [stack.enter_context(redis_server(server)).address for server in servers]


@pytest.mark.parametrize("kind", ["one", "two", pytest.param("redis", marks=needs_redis)])
def test_each_gets_a_plan_as_good_as_alone(tmp_path, monkeypatch, kind):
    """In any order, at once or one after the other, on one server or on two."""
    rng = random.Random(51)

    async def asked(server, document, after=0.0):
        await asyncio.sleep(after)
        question = {"graph": document, "budget": BUDGET, "alignment": 1}
        reply, data, _ = await ask(server, question)
        assert reply.found
        return parse_plan(data)

    async def scenario(store, broker, documents):
        servers = [
            service(monkeypatch, store, broker, solvers=rng.choice([1, 2]))
            for _ in range(1 if kind == "one" else 2)
        ]
        async with contextlib.AsyncExitStack() as stack:
            if broker:
                settings = ServiceSettings(store=str(store), secret=b"secret")
                await stack.enter_async_context(
                    worker(broker, settings.worker(1 << 30, solves=True))
                )
            gap = rng.choice([None, None, 0.0, 0.1])
            try:
                if gap is None:
                    return [await asked(rng.choice(servers), document) for document in documents]
                return await asyncio.gather(
                    *(
                        asked(rng.choice(servers), document, number * gap)
                        for number, document in enumerate(documents)
                    )
                )
            finally:
                for server in servers:
                    await server.close()

    with stores(kind, tmp_path) as (store, broker):
        for _ in range(5):
            document = training_step(rng)
            base = [10 ** rng.uniform(0, 1.5) for _ in document["ops"]]
            kinds = rng.choices(["equal", "noise", "slower", "moved", "other"], k=4)
            documents = [priced(rng, document, kind, base) for kind in kinds]
            plans = asyncio.run(asyncio.wait_for(scenario(store, broker, documents), 120))
            for priced_as, made, cost_kind in zip(documents, plans, kinds, strict=True):
                graph = parse_graph(priced_as)
                alone = plan(graph, BUDGET, alignment=1)
                assert find_faults(graph, made) == []
                assert made.cost_us <= alone.cost_us * 1.01, cost_kind
                if made.lower_bound_us is not None:
                    assert made.lower_bound_us <= alone.cost_us


def test_one_solve_for_measurements_of_one_machine(tmp_path, monkeypatch):
    rng = random.Random(7)
    document = training_step(rng)
    base = [10 ** rng.uniform(0, 1) for _ in document["ops"]]
    documents = [priced(rng, document, "noise", base) for _ in range(12)]
    InProcessPool.solved.clear()

    async def scenario():
        server = service(monkeypatch, tmp_path / "plans", queue=1)
        try:
            for part in (documents[:6], documents[6:]):
                questions = [{"graph": d, "budget": BUDGET} for d in part]
                answers = await asyncio.gather(*(ask(server, q) for q in questions))
                assert all(reply.found for reply, _, _ in answers)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))
    assert len(InProcessPool.solved) == 1
