"""A plan service without processes: its pools answer in threads of the test."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from coop_plan.api.cluster.job_runner import JobRunner
from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs import worker_process
from coop_plan.api.jobs.related_plans import RelatedPlans
from coop_plan.api.jobs.request_handler import RequestHandler
from coop_plan.api.service import plan_service
from coop_plan.api.service.auth import Caller
from coop_plan.api.service.metrics import Metrics
from coop_plan.api.service.open_graph_store import open_graph_store
from coop_plan.api.service.request_body import Body, Memory
from coop_plan.planner.plan_cache.open_store import open_store
from tests.api.test_jobs import FakeWorker


class InProcessPool:
    """`ProcessPool` in the calling thread; `solved` has the bodies that were planned."""

    solved = []

    def __init__(self, settings, size):
        self.settings = settings

    def call(self, task, body=b"", record=b"", *, seconds, on_progress=None, on_start=None):
        if on_start is not None:
            on_start(FakeWorker())
        if task.do == "solve":
            self.solved.append(body)
        settings = self.settings
        store = open_store(settings.store, settings.secret)
        graphs = open_graph_store(settings.store, 1 << 30)
        handler = RequestHandler(store, settings.limits, graphs)
        sink = SimpleNamespace(send_bytes=lambda _: None)
        related = RelatedPlans(handler, store)
        try:
            return worker_process._answer(
                handler, settings.limits, related, task, body, record, sink
            )
        finally:
            store.close()
            graphs.close()

    def close(self):
        pass


def service(monkeypatch, store, broker="", memory=None, **settings):
    """A service on a store; to be made in a running event loop."""
    monkeypatch.setattr(plan_service, "ProcessPool", InProcessPool)
    options = {"secret": b"secret", "improve": False, "readers": 2, "solvers": 1} | settings
    made = plan_service.ServiceSettings(store=str(store), broker=broker, **options)
    return plan_service.PlanService(made, Metrics(), memory or Memory(256 << 20))


async def ask(server, question, wait=60.0, caller=None):
    """The answer to a question: reply, plan and job."""
    body = Body("", Memory(1 << 30))
    body.data = json.dumps(question).encode()
    return await server.answer(request(caller), body, wait, provisional=False)


async def never():
    await asyncio.Event().wait()


def request(caller=None):
    return SimpleNamespace(state=SimpleNamespace(caller=caller or Caller()), receive=never)


@contextlib.asynccontextmanager
async def worker(broker, settings):
    """A worker of a cluster in a thread: it polls the queue in place of Celery."""
    jobs = JobStore(broker, settings.secret)
    runner = JobRunner(jobs, InProcessPool(settings, 1), lambda _: None, lambda: False)
    done = asyncio.Event()

    def run_queued():
        for job in jobs.redis.zrange("coop-plan:queued", 0, 0):
            runner.run(job.decode())

    async def run():
        while not done.is_set():
            await asyncio.get_running_loop().run_in_executor(thread, run_queued)
            await asyncio.sleep(0.01)

    thread = ThreadPoolExecutor(1)
    task = asyncio.create_task(run())
    try:
        yield
    finally:
        done.set()
        await task
        thread.shutdown()
        jobs.close()
