"""Background refinement: stored plans are improved while the solvers are idle."""

import asyncio
from collections import OrderedDict

from coop_plan.api.jobs.jobs import JobExecutor, Jobs
from coop_plan.api.jobs.request_handler import ProblemError, Reply

SEARCH_SECONDS = 60.0
"""Time limit of the search for a better plan than a stored one."""

PAUSE_SECONDS = 5.0
"""The queue of jobs must be empty for so long before a search begins."""

POLL_SECONDS = 0.5
"""Interval at which a search checks that no job waits for its process."""

MAX_PLANS = 1000
"""Plans to improve that are remembered, and improved ones: the last requested."""

PlanName = tuple[str, str]
"""Key and costs of a stored plan."""


class BackgroundImprover:
    """Searches better plans for the last requested ones, one at a time, each once.

    A search is cancelled when a job waits for a process, and repeated later. Servers that share a
    store or a broker improve each plan once: its record says that it was searched.
    """

    def __init__(
        self,
        jobs: Jobs,
        executor: JobExecutor,
        *,
        pause: float = PAUSE_SECONDS,
        poll: float = POLL_SECONDS,
    ) -> None:
        self._jobs, self._executor = jobs, executor
        self._pause, self._poll = pause, poll
        self._pending: OrderedDict[PlanName, None] = OrderedDict()
        self._searched: OrderedDict[PlanName, None] = OrderedDict()
        self._any_pending = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def on_hit(self, reply: Reply) -> None:
        """Queue the plan of a cache hit, unless it was searched or is settled."""
        name = reply.key, reply.costs
        if reply.found and not reply.settled and name not in self._searched:
            _add(self._pending, name)
            self._any_pending.set()

    async def _run(self) -> None:
        while True:
            await self._any_pending.wait()
            await asyncio.sleep(self._pause)
            if await self._busy():
                continue
            name, _ = self._pending.popitem()
            _add(self._searched if await self._search(*name) else self._pending, name)
            if not self._pending:
                self._any_pending.clear()

    async def _search(self, key: str, costs: str) -> bool:
        """True if the search ran to its end; False if it was cancelled for other jobs."""
        try:
            job = self._jobs.search(key, costs, SEARCH_SECONDS)
        except ProblemError:
            return False
        try:
            while not job.finished:
                await asyncio.sleep(self._poll)
                if not job.finished and await self._busy():
                    return False
        finally:
            self._jobs.unsubscribe(job)
        return True

    async def _busy(self) -> bool:
        """True if a job waits for a process, or the queue cannot be read."""
        try:
            return await self._executor.queued() > 0
        except ProblemError:
            return True

    async def close(self) -> None:
        """Cancel the search and stop."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _add(names: OrderedDict[PlanName, None], name: PlanName) -> None:
    names[name] = None
    names.move_to_end(name)
    if len(names) > MAX_PLANS:
        names.popitem(last=False)
