"""Plan store in Redis, for servers and workers on several machines."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from coop_plan.planner.plan_cache.record import SIGNATURE_BYTES, Record, read_signed, sign
from coop_plan.planner.plan_cache.store import (
    ALTERNATIVES,
    CANDIDATES,
    Families,
    StoreError,
    without_password,
)
from coop_plan.schemas import InvalidInputError

PREFIX = "coop-plan:"

PUT = """
local slots = {}
for _, slot in ipairs(redis.call('HKEYS', KEYS[1])) do
    if #slot < 16 and string.match(slot, '^%d+$') then table.insert(slots, tonumber(slot))
    else redis.call('HDEL', KEYS[1], slot) end -- it is not ours
end
if #slots > 0 and ARGV[2] == '0' then return 0 end
table.sort(slots)
if #slots >= tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], slots[1]) end
redis.call('HSET', KEYS[1], (slots[#slots] or -1) + 1, ARGV[1])
return 1
"""
"""KEYS: the records of a key. ARGV: a record, "1" to add it to others, the limit of records."""

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
"""KEYS: the records of a key. ARGV: a record, and its replacement; an empty one deletes it."""

SIGNATURES = """
local fields = redis.call('HGETALL', KEYS[1])
for i = 2, #fields, 2 do fields[i] = string.sub(fields[i], 1, tonumber(ARGV[1])) end
return fields
"""
"""KEYS: the records of a key. ARGV: the number of leading bytes to return of each."""

WAIT_SECONDS = 0.8
"""Timeout of one try of a command."""

RETRIES = 1

AWAY_SECONDS = 1.0
"""After a failure, time without commands: their callers are refused at once."""


def connect(address: str) -> redis.Redis:
    """A client of the Redis at an address; connects at the first command.

    Raises:
        StoreError: the address is invalid.
    """
    retry = Retry(
        ExponentialWithJitterBackoff(base=0.05, cap=0.1),
        retries=RETRIES,
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
        message = f"{without_password(address)} is not the address of a Redis: {error}"
        raise StoreError(message) from None


class RedisStore:
    """
    Plan store in one Redis, whose `maxmemory-policy` (allkeys-lru) evicts records when it is full.

    That Redis should not store data that must not be evicted.
    """

    waits = True

    def __init__(self, address: str, *, secret: bytes) -> None:
        self._redis = connect(address)
        self._calls = Calls(self._redis, "plan store")
        self.secret = secret
        self._put = self._redis.register_script(PUT)
        self._replace = self._redis.register_script(REPLACE)
        self._signatures = self._redis.register_script(SIGNATURES)
        self.dropped = 0

    def get(self, key: str) -> list[Record]:
        """The records of a key, oldest first; damaged ones are deleted."""
        found: list[Record] = []
        with self._calls(_answers(key)):
            stored: Any = self._redis.hgetall(_answers(key))
        for data in _in_order([part for field in stored.items() for part in field]):
            try:
                found.append(read_signed(data, key, self.secret))
            except InvalidInputError:
                self.dropped += 1
                with contextlib.suppress(redis.RedisError):
                    self._replace(keys=[_answers(key)], args=[data, b""])
        return found

    def signatures(self, key: str) -> list[bytes]:
        """The signatures of a key's records; see `PlanStore.signatures`."""
        with self._calls(_answers(key)):
            return _in_order(self._signatures(keys=[_answers(key)], args=[SIGNATURE_BYTES]))

    def put(
        self, key: str, record: Record, *, another: bool = False, families: Families = ()
    ) -> None:
        """Store the first record of a key, or another one; see `PlanStore.put`."""
        data = sign(record, key, self.secret)
        with self._calls(_answers(key)):
            stored = self._put(keys=[_answers(key)], args=[data, int(another), ALTERNATIVES])
        for name, measure in families if stored else ():
            with self._calls(_family(name)):
                self._redis.zadd(_family(name), {key: measure})

    def replace(self, key: str, old: Record, new: Record) -> bool:
        """Replace a record; returns False if the old one is not stored any more."""
        before, data = sign(old, key, self.secret), sign(new, key, self.secret)
        with self._calls(_answers(key)):
            return bool(self._replace(keys=[_answers(key)], args=[before, data]))

    def keys_at_most(self, family: str, measure: float) -> list[str]:
        """Keys of a family with a measure of at most this one, the largest first."""
        name = _family(family)
        with self._calls(name):
            named: Any = self._redis.zrevrangebyscore(name, measure, "-inf", 0, CANDIDATES)
            keys = {key: key.decode(errors="replace") for key in named}
            stored = [key for key in named if self._redis.exists(_answers(keys[key]))]
            if len(stored) < len(keys):  # Redis has evicted the others
                self._redis.zrem(name, *(set(keys) - set(stored)))
        return [keys[key] for key in stored]

    def delete(self, key: str) -> None:
        """Delete the records of a key."""
        with self._calls():
            self._redis.delete(_answers(key))

    def check(self) -> None:
        """Raise `StoreError` if the Redis does not answer."""
        with self._calls():
            self._redis.ping()

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def _in_order(fields: Sequence[bytes]) -> list[bytes]:
    """The values of a hash by slot number, from its fields and values in turn."""
    slots = dict(zip(fields[::2], fields[1::2], strict=True))
    # Other fields are not ours; `int` refuses thousands of digits.
    slots = {slot: data for slot, data in slots.items() if slot.isdigit() and len(slot) < 20}
    return [slots[slot] for slot in sorted(slots, key=int)]


def _answers(key: str) -> str:
    return f"{PREFIX}answers:{key}"


def _family(name: str) -> str:
    return f"{PREFIX}family:{name}"


class Calls:
    """Contexts of calls of a Redis, which convert its errors to `StoreError`.

    While it is away, one call at a time tries; the others are refused at once.
    """

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client, self._name, self._away, self._until = client, name, False, 0.0

    @contextlib.contextmanager
    def __call__(self, *keys: str) -> Iterator[None]:
        """Context of one call; if `keys` have another type, others wrote them: they are deleted."""
        now = time.monotonic()
        if self._away and now < self._until:
            raise StoreError(f"{self._name}: it does not answer")
        self._until = now + 2 * (1 + RETRIES) * WAIT_SECONDS
        try:
            yield
        except redis.RedisError as error:
            if "WRONGTYPE" in str(error):
                self._away = False
                with contextlib.suppress(redis.RedisError):
                    self._client.delete(*keys)
                raise StoreError(f"{self._name}: {error}") from error
            self._away, self._until = True, time.monotonic() + AWAY_SECONDS
            raise StoreError(f"{self._name}: {error}") from error
        self._away = False
