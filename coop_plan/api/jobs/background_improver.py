"""Better plans by themselves: kept ones are improved while nothing else is to be done."""

import asyncio
from collections import OrderedDict

from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.jobs.jobs import Bench, Jobs
from coop_plan.api.service.problems import ProblemError

SEARCH_SECONDS = 60.0
"""How long a better plan than a kept one is looked for."""

PAUSE_SECONDS = 5.0
"""How long nobody may wait for a process before a search begins."""

LOOK_SECONDS = 0.5
"""How long who comes for a process may wait for a search to give way."""

MOST = 1000
"""Keys to be looked for, and keys that were: those last asked for."""


class Improver:
    """
    Looks for better plans of the keys asked for last, one at a time, each once.

    A search gives way to whatever waits for a process, and comes again later. Where many servers
    share a store or a broker a key's plan is improved once: its record says so.
    """

    def __init__(
        self,
        jobs: Jobs,
        bench: Bench,
        *,
        pause: float = PAUSE_SECONDS,
        look: float = LOOK_SECONDS,
    ) -> None:
        self._jobs, self._bench = jobs, bench
        self._pause, self._look = pause, look
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._tried: OrderedDict[str, None] = OrderedDict()
        self._some = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def asked(self, reply: Reply) -> None:
        """Somebody got a kept plan."""
        if reply.found and not reply.settled and reply.key not in self._tried:
            _add(self._keys, reply.key)
            self._some.set()

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(self._pause)
            if await self._crowded():
                continue
            key, _ = self._keys.popitem()
            if await self._search(key):
                _add(self._tried, key)
            else:
                _add(self._keys, key)
            if not self._keys:
                self._some.clear()

    async def _search(self, key: str) -> bool:
        """Whether a search came to its end."""
        try:
            job = self._jobs.search(key, SEARCH_SECONDS)
        except ProblemError:
            return False
        try:
            while not job.over:
                await asyncio.sleep(self._look)
                if not job.over and await self._crowded():
                    return False
        finally:
            self._jobs.leave(job)
        return True

    async def _crowded(self) -> bool:
        try:
            return await self._bench.queued() > 0
        except ProblemError:
            return True

    async def close(self) -> None:
        """Stop looking."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _add(keys: OrderedDict[str, None], key: str) -> None:
    keys[key] = None
    keys.move_to_end(key)
    if len(keys) > MOST:
        keys.popitem(last=False)
