"""Details of HTTP: headers of any bytes, HEAD, searches by GET, tokens that change."""

import asyncio
import contextlib
import os

import httpx
import pytest

from coop_plan.api.service import plan_service
from coop_plan.api.service.app import create_app
from coop_plan.api.service.plan_service import ServiceSettings
from coop_plan.api.service.tokens import TokenFile, add
from coop_plan.client import protocol
from coop_plan.planner import PlanOptions
from tests.api.in_process import InProcessPool


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a scenario with a client of the service in this process."""
    monkeypatch.setattr(plan_service, "ProcessPool", InProcessPool)

    def call(scenario, **settings):
        async def all_of_it():
            options = {"store": str(tmp_path / "plans"), "secret": b"secret", "improve": False}
            app = create_app(ServiceSettings(**options | settings))
            transport = httpx.ASGITransport(app)
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
            ):
                await scenario(client)

        asyncio.run(asyncio.wait_for(all_of_it(), 120))

    return call


@pytest.fixture
def question(document):
    return {"graph": document, "budget": 330, "alignment": 1}


def test_head_is_get_without_a_body(run, question):
    async def scenario(client):
        made = await client.post("/plan", json=question)
        paths = ["/", "/docs", "/livez", "/readyz", "/metrics", "/graphs", "/openapi.json"]
        for path in [*paths, made.headers["location"], "/plans/none", "/graphs/none", "/nope"]:
            answers = [await client.request(method, path) for method in ("GET", "HEAD")]
            assert answers[0].status_code == answers[1].status_code, path
        described = (await client.get("/openapi.json")).json()["paths"]
        assert not any("head" in operations for operations in described.values())

    run(scenario)


@pytest.mark.parametrize("last", ["²", "\u0661", "1" * 5000, "-1", "x", "", "1_0"])
def test_an_event_id_of_any_bytes_is_no_error(run, question, last):
    async def scenario(client):
        answer = await client.post("/plan", json=question, headers={"Prefer": "wait=0"})
        job = answer.headers["location"] if answer.status_code == 202 else "/jobs/none"
        headers = {"Last-Event-ID": last.encode()}
        events = await client.get(f"{job}/events", headers=headers)
        assert events.status_code in (200, 404)
        head = await client.head(f"{job}/events", headers=headers)
        assert (head.status_code, head.content) == (events.status_code, b"") or job == "/jobs/none"

    run(scenario)


def test_a_get_of_a_reader_or_of_another_site_starts_no_search(run, question, tmp_path):
    file = tmp_path / "tokens.json"
    tokens = {name: add(file, name, [name]) for name in ("plan", "read")}

    async def scenario(client):
        def headers(name, **more):
            return {"Authorization": f"Bearer {tokens[name]}"} | more

        made = await client.post("/plan", json=question, headers=headers("plan"))
        better = {"better-than": "0"}
        address = made.headers["location"]
        for sent in (
            headers("read"),
            headers("plan", **{"Sec-Fetch-Site": "cross-site"}),
            headers("plan", **{"Sec-Fetch-Site": "same-site"}),
        ):
            for method in ("GET", "HEAD"):
                refused = await client.request(method, address, params=better, headers=sent)
                assert refused.status_code == 403
        assert (await client.get(address, headers=headers("read"))).status_code == 200
        allowed = await client.get(address, params=better, headers=headers("plan"))
        assert allowed.status_code in (200, 202, 204)

    run(scenario, tokens=TokenFile(file))


def test_tokens_are_read_again_when_their_file_changes(run, tmp_path):
    file = tmp_path / "tokens.json"
    first = add(file, "first", ["plan"])

    async def scenario(client):
        async def status(token):
            headers = {"Authorization": f"Bearer {token}"}
            return (await client.get("/graphs", headers=headers)).status_code

        assert await status(first) == 200
        second = add(file, "second", ["read"])
        assert [await status(first), await status(second)] == [200, 200]
        text = file.read_text()
        file.write_text("{")
        assert await status(second) == 200
        file.unlink()
        third = add(file, "third", ["plan"])
        assert [await status(t) for t in (first, second, third)] == [401, 401, 200]
        file.write_text(text.replace('"read"', '"admin"'))
        os.utime(file, (1, 1))
        assert [await status(t) for t in (first, second, third)] == [200, 403, 401]

    run(scenario, tokens=TokenFile(file))


def test_our_client_waits_as_long_as_it_is_told(chain):
    exchanges = protocol.plan_exchanges(chain, PlanOptions.given(330, {}))
    assert next(exchanges).pause == 0.0
    for after, pause in [("7", 7.0), ("", 0.0), ("²", 0.0), ("soon", 0.0), ("99999", 60.0)]:
        headers = {"Retry-After": after.encode()} if after else {}
        asked = exchanges.send(httpx.Response(202, headers=headers, json={}))
        assert (asked.method, asked.pause) == ("POST", pause)
    with contextlib.suppress(StopIteration):
        exchanges.close()
