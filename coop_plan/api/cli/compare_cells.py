"""Comparison of methods and budgets: one cell per pair, planned in worker processes."""

import base64
import gzip
import json
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal

from coop_plan.planner.core.errors import InfeasibleBudgetError, TimeLimitError
from coop_plan.planner.inspect.drawing import drawing, graph_columns
from coop_plan.planner.kernels import compile_method
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import plan
from coop_plan.schemas import Graph, parse_graph

State = Literal["planned", "infeasible", "out of time", "failed"]


@dataclass(frozen=True)
class Cell:
    """Result of a method for a budget, with `asked` as the user wrote it.

    `figures` are the plan's fields except its steps, None without a plan; `least_bytes` is the
    smallest budget that the method can meet, None if unknown; `map` is the gzipped JSON of the
    plan's rectangles in base64, and `why` the error.
    """

    asked: str
    method: str
    state: State
    figures: dict[str, Any] | None = None
    least_bytes: int | None = None
    map: str = ""
    why: str = ""

    @property
    def bound(self) -> float | None:
        """Proved lower bound on the overhead within the budget; below 0 if variants are cheaper."""
        figures = self.figures
        if figures is None or figures["lower_bound_us"] is None or not figures["base_cost_us"]:
            return None
        return float(figures["lower_bound_us"]) / float(figures["base_cost_us"]) - 1


def compare(graph: Graph, asked: Iterable[PlanOptions], processes: int) -> Generator[Cell]:
    """Cells in the order of completion; closing the generator terminates the processes.

    An error of a method is in its cell.
    """
    options = list(asked)
    for each in options:  # here, not in each process
        compile_method(each.method, linked=each.apply_link(graph).device.linked)
    context = multiprocessing.get_context("spawn")
    unrelated = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        min(processes, len(options) or 1),
        mp_context=context,
        initializer=_start_worker,
        initargs=(graph.to_json(),),
    )
    try:
        pending = {pool.submit(_cell, o): o for o in options}
        for future in as_completed(pending):
            o = pending[future]
            try:
                yield future.result()
            except BrokenProcessPool:
                why = "the process that planned it died"
                yield Cell(str(o.budget_), o.method, "failed", why=why)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            if child not in unrelated:
                child.terminate()


_graph: Graph | None = None


def _start_worker(document: str) -> None:
    """Parse the graph once per process, and leave Ctrl-C to the parent."""
    global _graph
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(1)
    _graph = parse_graph(document)


def _cell(options: PlanOptions) -> Cell:
    assert _graph is not None
    name, method = str(options.budget_), options.method
    try:
        made = plan(_graph, options)
    except InfeasibleBudgetError as error:
        least = error.min_feasible_bytes
        return Cell(name, method, "infeasible", least_bytes=least, why=str(error))
    except TimeLimitError as error:
        return Cell(name, method, "out of time", why=str(error))
    except Exception as error:  # the other cells continue
        return Cell(name, method, "failed", why=f"{type(error).__name__}: {error}")
    drawn = drawing(_graph, made)
    shared = graph_columns(_graph)
    columns = {key: value for key, value in drawn["map"].items() if key not in shared}
    packed = gzip.compress(json.dumps(columns, separators=(",", ":")).encode(), mtime=0)
    least = made.budget_bytes if name == "min" else None
    return Cell(name, method, "planned", drawn["figures"], least, base64.b64encode(packed).decode())
