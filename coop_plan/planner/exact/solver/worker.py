"""Main module of the solver process: jobs come in on stdin, results go out on stdout, pickled.

The parent is `planner.exact.solver.process`, which kills this process at the deadline. So a solver
may hang, print, crash or run out of memory without harming the planner. Each job of
`planner.exact.solver.jobs` comes as a pair with its time limit (s). A solver is loaded by the first
job that needs it, so that the process starts at once.
"""

import contextlib
import os
import pickle
import resource
import sys
from collections.abc import Callable
from typing import BinaryIO

from coop_plan.planner.exact.solver.jobs import (
    Failure,
    Job,
    JobAnswer,
    RelaxMilp,
    SolveMilp,
    SolvePulp,
)


def answer(job: Job, seconds: float, send: Callable[[object], None]) -> JobAnswer:
    """Solve a job with the solver of its type; progress is passed to `send`."""
    match job:
        case SolveMilp():
            from coop_plan.planner.exact.solver.milp_solvers import solve_milp

            return solve_milp(job, seconds, send)
        case SolvePulp():
            from coop_plan.planner.exact.solver.milp_solvers import solve_pulp

            return solve_pulp(job, seconds)
        case RelaxMilp(accuracy=0.0):
            from coop_plan.planner.exact.solver.simplex import relax

            return relax(job, seconds)
        case RelaxMilp():
            from coop_plan.planner.exact.solver.pdlp import relax

            return relax(job, seconds)


def connect(memory: int) -> Callable[[object], None]:
    """Limit this process's memory (bytes); returns a function that sends messages on stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a solver may print

    def send(message: object) -> None:
        pickle.dump(message, messages)
        messages.flush()

    return send


def serve(jobs: BinaryIO, send: Callable[[object], None]) -> None:
    """Answer jobs until the stream ends."""
    while True:
        try:
            job, seconds = pickle.load(jobs)  # noqa: S301  (written by our own parent process)
        except EOFError:
            return
        try:
            message: JobAnswer | Failure = answer(job, seconds, send)
        except MemoryError:
            return
        except Exception as error:
            message = Failure(f"{type(error).__name__}: {error}")
        send(message)


def main() -> None:
    """Entry point of the process."""
    send = connect(int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, send)


if __name__ == "__main__":
    main()
