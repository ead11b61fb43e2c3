"""Solving in a process of its own, which is killed when its time is up."""

import contextlib
import importlib.util
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from coop_plan.planner.exact.model.milp import (
    INFINITY,
    Answer,
    Milp,
    Outcome,
    Relaxation,
    relaxation_job,
)
from coop_plan.schemas import InvalidInputError

MEMORY_BYTES = 8 << 30
"""Address space that a solver's process may take."""

GRACE_SECONDS = 0.3
"""How much earlier than the kill a solver is asked to stop by itself."""


WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class News:
    """A proved bound and the best objective so far, while a solve runs."""

    bound: float
    objective: float


class MissingSolverError(InvalidInputError):
    """An exact method without its solver package."""


def require(package: str) -> None:
    """
    Raise unless the package is installed.

    Raises:
        MissingSolverError: in one sentence, with the extra to install.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingSolverError(
            f"exact planning needs {package}: pip install 'coop-plan[exact]'", "/method"
        )


class SolverError(RuntimeError):
    """The worker says that it could not even begin: a bug, or a broken solver package."""


class Child:
    """
    A process of ours that is sent pickles and answers with pickles; started when first needed.

    As a context manager it ends the process, whatever that is doing.
    """

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        require("ortools")
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End the process; it starts again when it is sent something."""
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

    def send(self, message: object) -> bool:
        """Whether the process was there to take it."""
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  (our own module, no shell)
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a solver may be a process of its own: kill both
                env=self._environment,
            )
            assert self._process.stdout is not None
            self._inbox = queue.SimpleQueue()
            threading.Thread(
                target=_read, args=(self._process.stdout, self._inbox), daemon=True
            ).start()
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def receive(self, deadline: float) -> Any:
        """
        The next message; None once the process is gone.

        Raises:
            queue.Empty: there was none by `deadline` (a `time.monotonic` value, s).
            SolverError: the process raised an exception.
        """
        message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        match message:
            case ("failure", text):
                raise SolverError(text)
        return message


class SolverProcess(Child):
    """The worker: every job has a deadline, at which it is killed if need be."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        super().__init__([sys.executable, str(WORKER), str(memory_bytes)])

    def solve(
        self,
        milp: Milp,
        deadline: float,
        *,
        solver: str = "highs",
        gap: float = 0.0,
        relative_gap: float = 0.0,
        progress: Callable[[News], None] | None = None,
    ) -> Answer:
        """
        Solve until `deadline` (a `time.monotonic` value, s), at most.

        A worker that dies or has to be killed leaves the last bound that it proved. `gap` and
        `relative_gap` are of the objective.

        Raises:
            SolverError: the worker raised an exception.
        """
        last = News(-INFINITY, INFINITY)
        job = dict(vars(milp)) | {"solver": solver, "gap": gap, "relative_gap": relative_gap}
        for message in self._messages(job, deadline):
            match message:
                case ("answer", outcome, bound, objective, values):
                    return Answer(Outcome(outcome), bound, objective, values)
                case ("news", bound, objective):
                    last = News(max(last.bound, bound), min(last.objective, objective))
                    if progress is not None:
                        progress(last)
        return Answer(Outcome.UNKNOWN, last.bound, last.objective, None)

    def relax(
        self, milp: Milp, deadline: float, accuracy: float, start: Relaxation | None = None
    ) -> Relaxation:
        """
        Solve the relaxation to a relative accuracy, or until `deadline` (monotonic, s).

        Every column must have finite bounds. `start` is the answer to the same program, or to one
        with fewer rows.

        Raises:
            SolverError: the worker raised an exception.
        """
        for message in self._messages(relaxation_job(milp, accuracy, start), deadline):
            match message:
                case ("relaxed", bound, values, multipliers):
                    return Relaxation(bound, values, multipliers)
        return Relaxation(-INFINITY, None, None)

    def solve_pulp(
        self, problem: dict[str, Any], deadline: float, solver: str
    ) -> tuple[Outcome, dict[str, float] | None]:
        """
        Solve `LpProblem.toDict()` with a solver of PuLP: the outcome, and values by name if any.

        Raises:
            SolverError: the worker raised an exception.
        """
        for message in self._messages({"pulp": problem, "solver": solver}, deadline):
            match message:
                case ("solved", outcome, values):
                    return Outcome(outcome), values
        return Outcome.UNKNOWN, None

    def schedule(self, job: dict[str, Any], deadline: float) -> tuple[Outcome, list[int] | None]:
        """
        Solve the job of `planner.exact.model.intervals`: the outcome, and the ops in order if any.

        Raises:
            SolverError: the worker raised an exception.
        """
        for message in self._messages(job, deadline):
            match message:
                case ("scheduled", outcome, ops):
                    return Outcome(outcome), ops
        return Outcome.UNKNOWN, None

    def pack(
        self,
        first: list[int],
        last: list[int],
        height: list[int],
        same: list[tuple[int, int]],
        capacity: int,
        deadline: float,
    ) -> list[int] | None:
        """
        Offsets of blocks with half-open lifetimes, or None if none were found in time.

        Heights, capacity and offsets are in one unit of the caller's; `same` are pairs of blocks
        that lie at one offset.

        Raises:
            SolverError: the worker raised an exception.
        """
        job = {"first": first, "last": last, "height": height, "same": same, "capacity": capacity}
        for message in self._messages(job, deadline):
            match message:
                case ("packed", offsets):
                    return cast("list[int] | None", offsets)
        return None

    def _messages(self, job: dict[str, Any], deadline: float) -> Iterator[Any]:
        """What the worker says of a job; a worker that is late or dies is ended."""
        seconds = deadline - time.monotonic() - GRACE_SECONDS
        if seconds <= 0:
            return
        if self.send(job | {"seconds": seconds}):
            with contextlib.suppress(queue.Empty):
                while (message := self.receive(deadline)) is not None:
                    yield message
        self.kill()


def _read(stream: BinaryIO, messages: "queue.SimpleQueue[object]") -> None:
    """Pass on what the worker says; None when it is gone."""
    with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
        while True:
            messages.put(pickle.load(stream))  # noqa: S301  (written by our own child process)
    messages.put(None)
