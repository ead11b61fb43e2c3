"""Answers in Redis, for servers and workers on several machines."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from coop_plan.planner.plan_cache.record import SEAL_BYTES, Record, seal, unseal
from coop_plan.planner.plan_cache.store import ALTERNATIVES, CANDIDATES, Families, StoreError
from coop_plan.schemas import InvalidInputError

PREFIX = "coop-plan:"

PUT = """
local slots = redis.call('HKEYS', KEYS[1])
if #slots > 0 and ARGV[2] == '0' then return 0 end
local first, last
for _, slot in ipairs(slots) do
    local number = tonumber(slot)
    if not first or number < first then first = number end
    if not last or number > last then last = number end
end
if #slots >= tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], first) end
redis.call('HSET', KEYS[1], (last or -1) + 1, ARGV[1])
return 1
"""
"""KEYS: the answers of a key. ARGV: a record, "1" to keep it beside others, how many are kept."""

REPLACE = """
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
    if fields[i + 1] == ARGV[1] then
        if ARGV[2] == '' then redis.call('HDEL', KEYS[1], fields[i])
        else redis.call('HSET', KEYS[1], fields[i], ARGV[2]) end
        return 1
    end
end
return 0
"""
"""KEYS: the answers of a key. ARGV: a record, and what comes in its place, nothing if empty."""

SEALS = """
local fields = redis.call('HGETALL', KEYS[1])
for i = 2, #fields, 2 do fields[i] = string.sub(fields[i], 1, tonumber(ARGV[1])) end
return fields
"""
"""KEYS: the answers of a key. ARGV: how many bytes of each are wanted."""

WAIT_SECONDS = 10.0
"""How long a Redis is waited for that restarts, and one that does not answer."""


def connect(address: str) -> redis.Redis:
    """
    A client of the Redis at an address, which is not asked anything yet.

    Raises:
        StoreError: the address is none.
    """
    retry = Retry(
        ExponentialWithJitterBackoff(base=0.05, cap=1.0),
        retries=int(WAIT_SECONDS),
        supported_errors=(redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError),
    )
    try:
        return redis.Redis.from_url(
            address,
            socket_timeout=WAIT_SECONDS,
            socket_connect_timeout=WAIT_SECONDS,
            retry=retry,
        )
    except ValueError as error:
        raise StoreError(f"{address} is no address of a Redis: {error}") from None


class RedisStore:
    """
    Answers in one Redis, whose `maxmemory-policy` says what goes when it is full (allkeys-lru).

    Nothing else is to be kept there that must not go.
    """

    def __init__(self, address: str, *, secret: bytes) -> None:
        self._redis = connect(address)
        self._secret = secret
        self._put = self._redis.register_script(PUT)
        self._replace = self._redis.register_script(REPLACE)
        self._seals = self._redis.register_script(SEALS)
        self.dropped = 0

    def get(self, key: str) -> list[Record]:
        """The answers kept by a key, the first one first; damaged ones are dropped."""
        found: list[Record] = []
        with failing():
            kept: Any = self._redis.hgetall(_answers(key))
        for data in _in_order([part for field in kept.items() for part in field]):
            try:
                found.append(unseal(data, key, self._secret))
            except InvalidInputError:
                self.dropped += 1
                with contextlib.suppress(redis.RedisError):
                    self._replace(keys=[_answers(key)], args=[data, b""])
        return found

    def seals(self, key: str) -> list[bytes]:
        """The seals of a key's answers; see `PlanStore.seals`."""
        with failing():
            return _in_order(self._seals(keys=[_answers(key)], args=[SEAL_BYTES]))

    def put(
        self, key: str, record: Record, *, another: bool = False, families: Families = ()
    ) -> None:
        """Keep the first answer of a key, or another beside it; see `PlanStore.put`."""
        data = seal(record, key, self._secret)
        with failing():
            if self._put(keys=[_answers(key)], args=[data, int(another), ALTERNATIVES]):
                for name, measure in families:
                    self._redis.zadd(_family(name), {key: measure})

    def replace(self, key: str, old: Record, new: Record) -> bool:
        """Put a record in the place of one that is still there; whether it was."""
        was, data = seal(old, key, self._secret), seal(new, key, self._secret)
        with failing():
            return bool(self._replace(keys=[_answers(key)], args=[was, data]))

    def below(self, family: str, measure: float) -> list[str]:
        """Keys of a family's answers that measure no more than this, the largest first."""
        name = _family(family)
        with failing():
            named: Any = self._redis.zrevrangebyscore(name, measure, "-inf", 0, CANDIDATES)
            keys = [key.decode() for key in named]
            kept = [key for key in keys if self._redis.exists(_answers(key))]
            if len(kept) < len(keys):  # Redis let go of them
                self._redis.zrem(name, *(set(keys) - set(kept)))
        return kept

    def delete(self, key: str) -> None:
        """Forget a key."""
        with failing():
            self._redis.delete(_answers(key))

    def check(self) -> None:
        """Raise where answers cannot be kept."""
        with failing():
            self._redis.ping()

    def close(self) -> None:
        """Let go of the connections."""
        self._redis.close()


def _in_order(fields: Sequence[bytes]) -> list[bytes]:
    """The values of a hash, the first slot first."""
    slots = dict(zip(fields[::2], fields[1::2], strict=True))
    return [slots[slot] for slot in sorted(slots, key=int)]


def _answers(key: str) -> str:
    return f"{PREFIX}answers:{key}"


def _family(name: str) -> str:
    return f"{PREFIX}family:{name}"


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """What Redis raises, as a `StoreError`."""
    try:
        yield
    except redis.RedisError as error:
        raise StoreError(f"plan store: {error}") from error
