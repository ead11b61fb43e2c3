"""Two versions on one store and one broker: unknown fields are left out, unknown tasks refused."""

import asyncio

import msgspec.inspect
import pytest

from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.jobs import Jobs
from coop_plan.api.jobs.request_handler import Figures, Limits, Reply, RequestHandler
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest, _answer
from coop_plan.api.service.graph_store import GraphSummary
from coop_plan.planner.plan_cache.store import planner_version
from tests.planner.test_record_versions import with_fields
from tests.redis_server import needs_redis, redis_server

TASK = WorkerRequest("solve", limits=Limits(), version="0.1.0")
MESSAGES = [
    TASK,
    JobRequest(key="k", costs="c", task=TASK, seconds=7.0),
    Reply(key="k", problem="busy", members={"retry_after": 1}, figures=Figures(overhead=0.1)),
    Figures(gap=0.5),
    GraphSummary("sha256:0", "name", 3, 100),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_of_a_later_version_are_read_without_its_fields(message):
    known = msgspec.json.decode(msgspec.json.encode(message))
    members = {"members": known["members"]} if "members" in known else {}
    later = msgspec.json.encode(with_fields(known) | members)
    assert msgspec.json.decode(later, type=type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_of_an_earlier_version_are_read_with_defaults(message):
    document = msgspec.json.decode(msgspec.json.encode(message))
    fields = msgspec.inspect.type_info(type(message)).fields
    optional = [field.name for field in fields if not field.required]
    for name in optional:
        earlier = {key: value for key, value in document.items() if key != name}
        read = msgspec.convert(earlier, type(message))
        assert {f: getattr(read, f) for f in earlier} == {f: getattr(message, f) for f in earlier}


def test_a_task_of_a_later_version_is_refused_with_both_versions():
    task = WorkerRequest("dream", version="9.9.9")
    handler = RequestHandler(None, Limits(), None)
    reply, data = _answer(handler, Limits(), None, task, b"", b"", None)
    assert (reply.problem, data) == ("busy", b"")
    assert "9.9.9" in reply.detail
    assert planner_version() in reply.detail


@needs_redis
def test_a_job_names_the_version_of_its_server(tmp_path):
    class Executor:
        def admit(self, caller, unfinished):
            pass

        async def run(self, job, request, body):
            self.request = request

    async def scenario(executor):
        jobs = Jobs(executor, secret=b"secret", seconds=7.0)
        await jobs.join(Reply(key="k" * 64), b"body").task

    executor = Executor()
    asyncio.run(scenario(executor))
    with redis_server(tmp_path) as server:
        store = JobStore(server.address, b"secret")
        store.submit("a", "s", executor.request, b"body", 9)
        assert store.lease("a").request.task.version == planner_version()
        store.close()
