"""
A process that works for the service: it parses, looks up, verifies, plans, and can be killed.

`python -m coop_plan.api.jobs.worker_process FD`: settings come first, then one request after the other, each
answered before the next is read. Whatever a request does to it, the server goes on.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from coop_plan.api.jobs.request_handler import Answers, Figures, Limits, RefusedError, Reply
from coop_plan.api.service.graph_store_redis import open_graphs
from coop_plan.api.jobs.related_plans import OtherPlans
from coop_plan.planner.plan_cache.open_store import open_store
from coop_plan.planner.method import Progress
from coop_plan.schemas import InvalidInputError

PR_SET_PDEATHSIG = 1

SOLVER_NICENESS = 10
"""Of processes that make plans: a hit beside them takes as long as on idle cores, about."""

LARGE_BYTES = 1 << 20
"""After a larger body a worker gives back the memory that it took."""

LIBRARY_BYTES = 256 << 20
"""With less memory left, what fails does so for want of it, whatever it says: a library that could
not be loaded, or only in part, a thread that could not be started."""


class Settings(msgspec.Struct, frozen=True):
    """What a worker is started with; `memory_bytes` of address space beyond what it starts with."""

    store: str
    secret: bytes
    limits: Limits
    memory_bytes: int
    store_bytes: int = 1 << 30
    solves: bool = False
    """Whether it makes plans: it then leaves the cores to those who look for kept ones."""


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to a worker; its body follows, and a record where one was made for it."""

    do: str
    encoding: str = ""
    key: str = ""
    with_record: bool = False
    another: bool = False
    """Solve for costs that the kept plans were not made for."""
    seconds: float = 0.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A task that takes time, `seconds` at most, for the question of a key."""

    key: str
    task: Task
    seconds: float


def main(descriptor: int) -> None:
    """Work until the server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to act on
    die_with_parent()
    connection = Connection(descriptor)
    settings = msgspec.msgpack.decode(connection.recv_bytes(), type=Settings)
    if settings.solves:
        os.nice(SOLVER_NICENESS)
    limit = _address_space() + settings.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    store = open_store(settings.store, settings.secret, settings.store_bytes)
    graphs = open_graphs(settings.store, settings.store_bytes)
    answers = Answers(store, settings.limits, graphs)
    others = OtherPlans(answers, store)
    # Documents have no cycles: reference counts free them at once.
    gc.collect()
    gc.freeze()
    gc.disable()
    connection.send_bytes(msgspec.json.encode(Reply()))
    while True:
        try:
            task = msgspec.json.decode(connection.recv_bytes(), type=Task)
            body = connection.recv_bytes()
            record = connection.recv_bytes() if task.with_record else b""
        except EOFError:
            return
        reply, data = _do(answers, others, task, body, record, connection)
        reply.dropped, answers.dropped = answers.dropped + store.dropped, 0
        store.dropped = 0
        large = len(body) + len(record) + len(data) > LARGE_BYTES
        del body, record
        connection.send_bytes(msgspec.json.encode(reply))
        connection.send_bytes(data)
        if large:
            del reply, data
            give_back()


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends: who is busy would not see it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def give_back() -> None:
    """Return free memory to the system: the allocator would keep it for the next large body."""
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


def _do(
    answers: Answers,
    others: OtherPlans,
    task: Task,
    body: bytes,
    record: bytes,
    connection: Connection,
) -> tuple[Reply, bytes]:
    def say(progress: Progress) -> None:
        news = Reply(detail=progress.message, figures=Figures.of(progress), final=False)
        connection.send_bytes(msgspec.json.encode(news))

    try:
        if task.do == "solve":
            return answers.solve(body, task.encoding, task.another, say)
        if task.do == "improve":
            return others.improve(task.key, task.seconds, say)
        if task.do == "for-less":
            return others.for_less(body, task.encoding)
        if task.do == "stored":
            return answers.stored(task.key)
        if task.do == "whole":
            return answers.whole(body, task.encoding)
        if task.do == "put-graph":
            return answers.put_graph(body, task.encoding, task.key)
        if task.do == "graph":
            return answers.graph(task.key)
        if task.do == "graphs":
            return answers.graphs()
        return answers.ask(body, task.encoding, record)
    except RefusedError as refused:
        return refused.reply, b""
    except InvalidInputError as error:
        members = {"pointer": error.pointer}
        return Reply(problem="invalid-input", detail=error.message, members=members), b""
    except Exception as error:
        if isinstance(error, MemoryError) or _left_bytes() < LIBRARY_BYTES:
            detail = "the request needs more memory than this server gives it"
            return Reply(problem="too-much-work", detail=detail), b""
        sys.excepthook(type(error), error, error.__traceback__)
        return Reply(problem="internal-error", detail=f"{type(error).__name__} in a worker"), b""


def _left_bytes() -> int:
    return resource.getrlimit(resource.RLIMIT_AS)[0] - _address_space()


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(int(sys.argv[1]))
