"""Worker process of the service: it parses, looks up, verifies and plans, and can be killed.

`python -m coop_plan.api.jobs.worker_process FD` reads its settings from the socket FD, then answers
requests in order. A request that crashes its worker does not affect the server.
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

from coop_plan.api.jobs.related_plans import RelatedPlans
from coop_plan.api.jobs.request_handler import Figures, Limits, ProblemError, Reply, RequestHandler
from coop_plan.api.service.open_graph_store import open_graph_store
from coop_plan.planner.method import Progress
from coop_plan.planner.plan_cache.open_store import open_store
from coop_plan.planner.plan_cache.store import planner_version
from coop_plan.schemas import InvalidInputError

PR_SET_PDEATHSIG = 1

SOLVER_NICENESS = 10
"""Niceness of solving processes, so that cache hits take about as long as on idle cores."""

LARGE_BYTES = 1 << 20
"""After a larger message a worker returns its free memory to the system."""

LIBRARY_BYTES = 256 << 20
"""With less address space left, any failure counts as lack of memory: libraries that cannot be
loaded and threads that cannot be started raise errors of many types."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """Settings of a worker; `memory_bytes` limits the address space beyond that at its start."""

    store: str
    secret: bytes
    limits: Limits
    memory_bytes: int
    store_bytes: int = 1 << 30
    solves: bool = False
    """True if it makes plans: its niceness is then raised, in favour of cache hits."""


class WorkerRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to a worker; a body follows it, and `with_record` the record of a finished job."""

    do: str
    encoding: str = ""
    key: str = ""
    costs: str = ""
    with_record: bool = False
    seconds: float = 0.0
    limits: Limits | None = None
    """Limits of the caller; by default the server's."""
    room: int = sys.maxsize
    """Bytes of the largest document that may be parsed; a larger one is `needs-room`."""
    version: str = ""
    """Planner's version of the server that wrote the request, if another version may read it."""


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job: a request to a worker, with its limit in seconds, and its plan's key and costs."""

    key: str
    costs: str = ""
    task: WorkerRequest
    seconds: float

    @property
    def plan(self) -> str:
        """The plan's path below `/plans/`."""
        return plan_path(self.key, self.costs)


def plan_path(key: str, costs: str) -> str:
    """The path below `/plans/` of the plan that was made with these costs."""
    return f"{key}-{costs}" if costs else key


def main(descriptor: int) -> None:
    """Answer requests until the server closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to act on
    die_with_parent()
    connection = Connection(descriptor)
    settings = msgspec.msgpack.decode(connection.recv_bytes(), type=WorkerSettings)
    if settings.solves:
        os.nice(SOLVER_NICENESS)
    limit = _address_space() + settings.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    store = open_store(settings.store, settings.secret, settings.store_bytes)
    graphs = open_graph_store(settings.store, settings.store_bytes)
    handler = RequestHandler(store, settings.limits, graphs)
    related = RelatedPlans(handler, store)
    # Documents have no cycles: reference counts free them at once.
    gc.collect()
    gc.freeze()
    gc.disable()
    connection.send_bytes(msgspec.json.encode(Reply()))
    while True:
        try:
            task = msgspec.json.decode(connection.recv_bytes(), type=WorkerRequest)
            body = connection.recv_bytes()
            record = connection.recv_bytes() if task.with_record else b""
        except EOFError:
            return
        reply, data = _answer(handler, settings.limits, related, task, body, record, connection)
        reply.dropped, handler.dropped = handler.dropped + store.dropped, 0
        store.dropped = 0
        large = len(body) + len(record) + len(data) > LARGE_BYTES
        del body, record
        connection.send_bytes(msgspec.json.encode(reply))
        connection.send_bytes(data)
        if large:
            del reply, data
            trim_heap()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent thread ends, also during a solve."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def trim_heap() -> None:
    """Return free heap memory to the system."""
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _answer(
    handler: RequestHandler,
    limits: Limits,
    related: RelatedPlans,
    task: WorkerRequest,
    body: bytes,
    record: bytes,
    connection: Connection,
) -> tuple[Reply, bytes]:
    def on_progress(progress: Progress) -> None:
        reply = Reply(detail=progress.message, figures=Figures.of(progress), final=False)
        connection.send_bytes(msgspec.json.encode(reply))

    handler.limits, handler.room = task.limits or limits, task.room
    try:
        match task.do:
            case "find":
                return handler.find(body, task.encoding, record)
            case "solve":
                return handler.solve(body, task.encoding, on_progress)
            case "improve":
                return related.improve(task.key, task.costs, task.seconds, on_progress)
            case "for-smaller-budget":
                return related.for_smaller_budget(body, task.encoding)
            case "stored-plan":
                return handler.stored_plan(task.key, task.costs)
            case "keep":
                return handler.keep(task.key, record)
            case "put-graph":
                return handler.put_graph(body, task.encoding, task.key)
            case "graph":
                return handler.graph(task.key)
            case "graphs":
                return handler.graphs()
        detail = f"version {planner_version()} has no task '{task.do}' of {task.version}"
        raise ProblemError("busy", detail, retry_after=10)
    except ProblemError as refused:
        members = refused.members
        return Reply(problem=refused.name, detail=refused.detail, members=members), b""
    except InvalidInputError as error:
        members = {"pointer": error.pointer}
        return Reply(problem="invalid-input", detail=error.message, members=members), b""
    except Exception as error:
        left = resource.getrlimit(resource.RLIMIT_AS)[0] - _address_space()
        if isinstance(error, MemoryError) or left < LIBRARY_BYTES:
            detail = "the request needs more memory than this server gives it"
            return Reply(problem="too-much-work", detail=detail), b""
        sys.excepthook(type(error), error, error.__traceback__)
        return Reply(problem="internal-error", detail=f"{type(error).__name__} in a worker"), b""


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(int(sys.argv[1]))
