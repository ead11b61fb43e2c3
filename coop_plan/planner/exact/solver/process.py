"""Solver processes, killed at their deadline."""

import contextlib
import importlib.util
import os
import pickle
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from coop_plan.planner.exact.model.milp import Answer, Milp, Outcome, Relaxation
from coop_plan.planner.exact.solver.jobs import (
    Failure,
    Job,
    PulpAnswer,
    RelaxMilp,
    SolveMilp,
    SolveProgress,
    SolvePulp,
)
from coop_plan.schemas import InvalidInputError
from coop_plan.schemas.errors import missing_package

A = TypeVar("A")


class MissingSolverError(InvalidInputError):
    """An exact method lacks its solver package."""


def require(package: str) -> None:
    """Check that the package is installed.

    Raises:
        MissingSolverError: it is not; the message names the extra to install.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingSolverError(missing_package("exact planning", package, "exact"), "/method")


class SolverError(RuntimeError):
    """The child process raised an exception: a bug, or a broken solver package."""


class Child:
    """Child process that runs a module of this package and exchanges pickles with it.

    It starts at the first message. Leaving the context kills it.
    """

    def __init__(self, module: str) -> None:
        require("ortools")
        # -P: no module is imported from the current folder. The address space is limited to 8 GiB.
        self._command = [sys.executable, "-P", "-m", module, str(8 << 30)]
        self._process: subprocess.Popen[bytes] | None = None
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the process; the next message starts another one."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def send(self, message: object) -> None:
        """Send a message, without waiting for the process to start and read it."""
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  (our own module, no shell)
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a solver may be a process of its own: kill both
                env=os.environ | {"PYTHONPATH": os.pathsep.join(_module_path())},
            )
            assert self._process.stdout is not None
            self._inbox = queue.SimpleQueue()
            threading.Thread(
                target=_read_messages, args=(self._process.stdout, self._inbox), daemon=True
            ).start()
        assert self._process.stdin is not None
        arguments = self._process.stdin, pickle.dumps(message)
        threading.Thread(target=_write_message, args=arguments, daemon=True).start()

    def receive(self, deadline: float) -> Any:
        """The next message; None once the process has ended.

        Raises:
            queue.Empty: there was none by `deadline` (a `time.monotonic` value, s).
            SolverError: the process raised an exception.
        """
        message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        if isinstance(message, Failure):
            raise SolverError(message.text)
        return message


class SolverProcess(Child):
    """Solver process; every job has a deadline (a `time.monotonic` value, s) at which it is killed.

    A process that dies or is killed gives no result. `grace_seconds` are between a solver's own
    limit and the kill. All methods raise SolverError if the process raised an exception.
    """

    def __init__(self, grace_seconds: float = 0.3) -> None:
        super().__init__("coop_plan.planner.exact.solver.worker")
        self._grace_seconds = grace_seconds

    def solve(
        self,
        milp: Milp,
        deadline: float,
        *,
        solver: str = "highs",
        gap: float = 0.0,
        relative_gap: float = 0.0,
        nodes: int = 0,
        progress: Callable[[SolveProgress], None] | None = None,
    ) -> Answer:
        """See `SolveMilp`. Without a result the last reported bound is returned."""
        last = SolveProgress(-inf, inf)
        for message in self._messages(SolveMilp(milp, solver, gap, relative_gap, nodes), deadline):
            match message:
                case Answer():
                    return message
                case SolveProgress(bound, objective):
                    last = SolveProgress(max(last.bound, bound), min(last.objective, objective))
                    if progress is not None:
                        progress(last)
        return Answer(Outcome.UNKNOWN, last.bound, last.objective, None)

    def relax(
        self, milp: Milp, deadline: float, accuracy: float, start: Relaxation | None = None
    ) -> Relaxation:
        """See `RelaxMilp`."""
        nothing = Relaxation(-inf, None, None)
        return self._ask(RelaxMilp(milp, accuracy, start), deadline, nothing)

    def solve_pulp(self, problem: dict[str, Any], deadline: float, solver: str) -> PulpAnswer:
        """See `SolvePulp`."""
        return self._ask(SolvePulp(problem, solver), deadline, PulpAnswer(Outcome.UNKNOWN, None))

    def _ask(self, job: Job, deadline: float, default: A) -> A:
        """The result of a job, which has the type of `default`."""
        messages = self._messages(job, deadline)
        return next((m for m in messages if isinstance(m, type(default))), default)

    def _messages(self, job: Job, deadline: float) -> Iterator[object]:
        """Messages of the process about a job; a process that is late or dies is killed."""
        seconds = deadline - time.monotonic() - self._grace_seconds
        if seconds <= 0:
            return
        self.send((job, seconds))
        with contextlib.suppress(queue.Empty):
            while (message := self.receive(deadline)) is not None:
                yield message
        self.kill()


def _module_path() -> list[str]:
    """Module search path of a child: this process's, the standard library first.

    Otherwise a user's module next to the started script could shadow the standard library.
    """
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    standard |= {str(Path(folder) / "lib-dynload") for folder in standard}
    return sorted(filter(None, sys.path), key=lambda path: path not in standard)


def _write_message(stream: BinaryIO, message: bytes) -> None:
    """Write a message; a process that has died gets none, and its reader ends."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(message)
        stream.flush()


def _read_messages(stream: BinaryIO, messages: "queue.SimpleQueue[object]") -> None:
    """Forward messages of the process; None when it has ended."""
    with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
        while True:
            messages.put(pickle.load(stream))  # noqa: S301  (written by our own child process)
    messages.put(None)
