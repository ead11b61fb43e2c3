"""`open_store`: the plan store at an address."""

from pathlib import Path

from coop_plan.planner.plan_cache.store import PlanStore, SqliteStore, StoreError

SCHEMES = ("redis://", "rediss://", "unix://")


def in_redis(address: str) -> bool:
    """True if the address is that of a Redis; all others are file paths."""
    return address.startswith(SCHEMES)


def without_password(address: str) -> str:
    """The address as it may be printed: without the user and the password of a Redis."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    place, slash, path = rest.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path.partition('?')[0]}"


def open_store(address: str, secret: bytes, max_bytes: int = 1 << 30) -> PlanStore:
    """The store at an address: `redis://HOST:PORT/N`, or the path of an SQLite file.

    A Redis is not contacted yet, and limits its size itself.

    Raises:
        StoreError: the store cannot be opened, or its client library is not installed.
    """
    if not in_redis(address):
        return SqliteStore(Path(address), secret=secret, max_bytes=max_bytes)
    try:
        from coop_plan.planner.plan_cache.redis_store import RedisStore
    except ModuleNotFoundError as error:
        place = without_password(address)
        message = f"plan store {place} needs {error.name}: pip install 'coop-plan[cluster]'"
        raise StoreError(message) from None
    return RedisStore(address, secret=secret)
