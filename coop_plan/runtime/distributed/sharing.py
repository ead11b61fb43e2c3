"""Plans, costs and profiles that the ranks of a job share by content, in the job's store.

A key names the question, never a count: two ranks share a result if they ask for the same. The
first rank that asks claims the key and makes the result. The others take it, or wait for it while
it is being made. No rank waits for one that makes nothing, and no rank calls a collective here.

Correctness does not depend on it. Ranks whose steps have collectives must run them in one order,
not by one plan: all plans run each collective once, in program order.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from coop_plan.runtime.errors import PlanServerError
from coop_plan.runtime.torch_internals.ranks import default_store, world_size
from coop_plan.schemas import Graph, Op, fingerprint

log = logging.getLogger("coop-plan")

WAIT_SECONDS = 120.0
"""Time that a rank waits for a result that another rank makes."""

FIRST_POLL, LAST_POLL = 1e-3, 0.05
"""Seconds between looks into the store, from the first to all late ones."""

CLAIM, MADE, FAILED = b"claimed by ", b"made ", b"failed on "
"""Beginnings of the values of a key."""

T = TypeVar("T")

_claims = itertools.count()
_given_up: set[int] = set()
"""Ranks that this one waited for in vain; it never waits for them again."""
_failures: set[bytes] = set()
"""Failures that were raised here; the next time this rank tries by itself."""


def made_once(
    name: str,
    make: Callable[[], T],
    *,
    pack: Callable[[T], bytes],
    unpack: Callable[[bytes], T | None],
    seconds: float = WAIT_SECONDS,
) -> T:
    """The result of `make`, which one rank of the job calls for all that ask for `name`.

    Args:
        name: names the question by content.
        make: makes the result here.
        pack: the result as bytes.
        unpack: another rank's result; None if it is not valid here, and one is made here.
        seconds: time to wait for another rank that makes it.

    Raises:
        PlanServerError: another rank got no plan from the planning service.
    """
    if world_size() == 1:
        return make()
    key = f"coop-plan/{name}"
    own = CLAIM + f"{torch.distributed.get_rank()} {next(_claims)}".encode()
    value = _claim(key, own, b"")
    if value.startswith(FAILED) and value in _failures:
        value = _claim(key, own, value)
    if value.startswith(CLAIM) and value != own:
        value = _wait(key, value, seconds)
    if value.startswith(FAILED):
        _failures.add(value)
        rank, _, reason = value.removeprefix(FAILED).decode().partition(" ")
        if reason:
            raise PlanServerError(f"rank {rank}: {reason}")
    if value.startswith(MADE):
        found = unpack(value.removeprefix(MADE))
        if found is not None:
            return found
        log.warning("a result of another rank is not valid here, and is made here: %s", name)
    try:
        made = make()
    except BaseException as error:
        if value == own:
            reason = f" {error}" if isinstance(error, PlanServerError) else ""
            failure = FAILED + f"{torch.distributed.get_rank()}{reason}".encode()
            _failures.add(failure)
            _put(key, failure)
        raise
    if not value.startswith(MADE):
        _put(key, MADE + pack(made))
    return made


def shared_costs(graph: Graph) -> Graph:
    """The graph with costs and launches of the job's first rank that captured such a structure.

    Measured costs differ between ranks, and equal costs make plans and their figures equal.
    """
    if world_size() == 1:
        return graph
    launches = {name: getattr(graph.device, name) for name in ("launch_us", "copy_launch_us")}
    costs = [[op.cost_us, *(v.cost_us for v in op.variants)] for op in graph.ops]
    own = json.dumps([launches, costs])
    found = _claim(f"coop-plan/costs/{fingerprint(graph)}", own.encode(), b"")
    if found == own.encode():
        return graph
    launches, costs = json.loads(found)
    device = graph.device.model_copy(update=launches)
    ops = [_with_costs(op, *cost) for op, cost in zip(graph.ops, costs, strict=True)]
    return graph.model_copy(update={"device": device, "ops": ops})


def _with_costs(op: Op, cost: float, *others: float) -> Op:
    variants = [
        variant.model_copy(update={"cost_us": other})
        for variant, other in zip(op.variants, others, strict=True)
    ]
    return op.model_copy(update={"cost_us": cost, "variants": variants})


def _claim(key: str, own: bytes, instead_of: bytes) -> bytes:
    """Set a key that has the value `instead_of`, empty for none; returns its value afterwards."""
    try:
        found: bytes = default_store().compare_set(key, instead_of, own)
    except RuntimeError as error:  # DistError: the store is closed, or does not answer
        _warn(error)
        return own
    return found


def _put(key: str, value: bytes) -> None:
    try:
        default_store().set(key, value)
    except RuntimeError as error:
        _warn(error)


def _warn(error: RuntimeError) -> None:
    reason = str(error).partition("\n")[0]
    log.warning("the store of the process group fails, and nothing is shared: %s", reason)


def _wait(key: str, claim: bytes, seconds: float) -> bytes:
    """The value of a key that replaces another rank's claim; the claim if none does in time."""
    rank = int(claim.removeprefix(CLAIM).split()[0])
    if rank in _given_up:
        return claim
    store, began, pause = default_store(), time.monotonic(), FIRST_POLL
    value = claim
    while value == claim:
        if time.monotonic() - began > seconds:
            _given_up.add(rank)
            log.warning(
                "rank %d has not made in %.0f s what this rank needs too: it is made here, and no"
                " rank waits for that one again",
                *(rank, seconds),
            )
            break
        time.sleep(pause)
        pause = min(2 * pause, LAST_POLL)
        try:
            value = store.get(key)
        except RuntimeError as error:
            _warn(error)
            break
    return value
