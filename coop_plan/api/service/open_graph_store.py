"""Choice of a graph store by a plan store's address."""

import sqlite3
from pathlib import Path

from coop_plan.api.service.graph_store import GraphStore, SqliteGraphStore
from coop_plan.planner.plan_cache.open_store import in_redis
from coop_plan.planner.plan_cache.store import StoreError


def open_graph_store(address: str, max_bytes: int) -> GraphStore:
    """The graph store at the address of a plan store.

    Raises:
        StoreError: the store cannot be opened.
    """
    if in_redis(address):
        from coop_plan.api.service.graph_store_redis import RedisGraphStore

        return RedisGraphStore(address)
    try:
        return SqliteGraphStore(Path(address), max_bytes=max_bytes)
    except sqlite3.Error as error:
        raise StoreError(f"plan store {address} cannot be opened: {error}") from error
