"""Plans that the store did not take: answers from memory, offered to the store until it does."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

MAX_BYTES = 64 << 20
"""Bytes of records that are held; the oldest are given up."""

RETRY_SECONDS = 5.0

Keep = Callable[[str, bytes], Awaitable[bool]]
"""Stores the record of a key, if the store has it not; False if that fails."""


class UnkeptPlans:
    """The last record of each key that the store did not take. For one event loop."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._records: OrderedDict[str, bytes] = OrderedDict()
        self._any = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def add(self, key: str, record: bytes) -> None:
        """Hold a new record until it is in the store."""
        if record:
            self._records[key] = record
            self._any.set()
        while len(self._records) > 1 and self.bytes > MAX_BYTES:
            self._records.popitem(last=False)

    def get(self, key: str) -> bytes:
        """The record of a key that is not in the store, or empty."""
        return self._records.get(key, b"")

    @property
    def bytes(self) -> int:
        """Bytes of the records."""
        return sum(map(len, self._records.values()))

    async def _run(self) -> None:
        while True:
            await self._any.wait()
            for key, record in list(self._records.items()):
                if not await self._keep(key, record):
                    await asyncio.sleep(RETRY_SECONDS)
                    break
                if self._records.get(key) is record:
                    del self._records[key]
            if not self._records:
                self._any.clear()

    async def close(self) -> None:
        """Stop; records that the store did not take are lost."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
