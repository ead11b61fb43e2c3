"""A plan store by its address."""

from pathlib import Path

from coop_plan.planner.plan_cache.store import PlanStore, SqliteStore, StoreError

SCHEMES = ("redis://", "rediss://", "unix://")


def in_redis(address: str) -> bool:
    """Whether an address names a Redis; all others are files."""
    return address.startswith(SCHEMES)


def open_store(address: str, secret: bytes, max_bytes: int = 1 << 30) -> PlanStore:
    """
    The store at an address: `redis://HOST:PORT/N`, or the path of an SQLite file.

    A Redis is not asked anything yet, and limits its size itself.

    Raises:
        StoreError: it cannot be opened, or the library for it is not installed.
    """
    if not in_redis(address):
        return SqliteStore(Path(address), secret=secret, max_bytes=max_bytes)
    try:
        from coop_plan.planner.plan_cache.redis_store import RedisStore
    except ModuleNotFoundError as error:
        message = f"{address} needs {error.name}: pip install 'coop-plan[cluster]'"
        raise StoreError(message) from None
    return RedisStore(address, secret=secret)
