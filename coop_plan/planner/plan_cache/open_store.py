"""`open_store`: the plan store at an address."""

from pathlib import Path

from coop_plan.planner.plan_cache.store import PlanStore, SqliteStore, StoreError, without_password
from coop_plan.schemas.errors import missing_package


def in_redis(address: str) -> bool:
    """True if the address is that of a Redis; all others are file paths."""
    return address.startswith(("redis://", "rediss://", "unix://"))


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
        place = f"plan store {without_password(address)}"
        raise StoreError(missing_package(place, error.name, "cluster")) from None
    return RedisStore(address, secret=secret)
