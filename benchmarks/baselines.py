"""`dtr` compared with the simulator of DTR's authors, on the traces of their logs.

    python -m benchmarks.baselines [FOLDER] [--graphs unet,lstm] [--simrd CHECKOUT/simrd]

Overheads in percent at shares of the traced peak. `published`: `simrd` with e* by equivalence
classes on the logs (`baselines.csv` of the data). `simrd`: the same program on our graph, if a
checkout of uwsampl/dtr-prototype is given. `bytes`: our `dtr` without addresses, as theirs.
`placed`: our `dtr` at addresses. A log records when Python released a tensor; a graph has only its
last read.
"""

import csv
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.plan_quality import DATA, TRACED_PEAKS
from benchmarks.report import Column, Report, parser
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Request
from coop_plan.planner.online.run import simulate_arena
from coop_plan.planner.online.state import Rule
from coop_plan.schemas import Graph, load_graph

REMAT_LIMIT = 3.0
"""Simrd stops when recomputation has taken this many times the step."""


def ours(problem: Problem, budget: int, *, gaps: bool) -> float | None:
    """Overhead of `dtr`; None if it does not fit."""
    request = Request(budget - problem.fixed_bytes)
    how = {"partition": False, "inplace": False, "whole_closure": False}
    try:
        run = simulate_arena(problem, request, Rule(), gaps=gaps, **how)
    except DoesNotFitError:
        return None
    return run.cost_us / problem.base_cost_us - 1


def simulated(simrd: ModuleType, graph: Graph, budget: int) -> float | None:
    """Overhead of the authors' simulator on our graph; None if it stops."""
    steps, program, values = simrd.parse.graph, simrd.parse.graph.Graph(), {}
    size = {tensor.id: tensor.bytes for tensor in graph.tensors}
    last = {t: at for at, op in enumerate(graph.ops) for t in (*op.outputs, *op.inputs)}
    outputs = [tensor.id for tensor in graph.tensors if tensor.kind == "output"]

    def add(name: str, cost: float, inputs: list[int], made: list[int]) -> None:
        sizes, plain = tuple(size[t] for t in made), (-1,) * len(made)
        names = tuple(f"t{t}" for t in made)
        arguments = tuple(values[t] for t in inputs)
        op, found = steps.GOp.make(program, arguments, cost, sizes, plain, name, names, {})
        values.update(zip(made, found, strict=True))
        program.schedule.append(steps.GCompute(op))

    residents = {tensor.id for tensor in graph.tensors if tensor.resident}
    for t in residents:
        add(steps.GOp.CONST_NAME, 0, [], [t])
        program.schedule.append(steps.GGet(values[t], pin=True))
    for at, op in enumerate(graph.ops):
        add(op.name, op.cost_us, op.inputs, op.outputs)
        over = {t for t in (*op.inputs, *op.outputs) if last[t] == at}
        released = sorted(over - residents - set(outputs))
        program.schedule += [steps.GRelease(values[t]) for t in released]
    program.schedule += [steps.GGet(values[t], pin=True) for t in outputs]
    base = sum(op.cost_us for op in graph.ops)
    runtime = simrd.runtime.RuntimeV2EagerOptimized(
        budget, simrd.heuristic.DTREqClass(), remat_limit=REMAT_LIMIT * base
    )
    try:
        program.get_closure()(runtime)
    except (MemoryError, simrd.runtime.RematExceededError):
        return None
    return float((runtime.clock - 1) / base - 1)  # its clock begins at 1


def main() -> None:
    command = parser(__doc__)
    command.add_argument("folder", nargs="?", type=Path, default=DATA, help="of graphs (*.json)")
    command.add_argument("--graphs", default=",".join(TRACED_PEAKS), help="names, by commas")
    command.add_argument("--simrd", type=Path, help="the folder `simrd` of uwsampl/dtr-prototype")
    args = command.parse_args()
    simrd = None
    if args.simrd:
        sys.path.insert(0, str(args.simrd))
        sys.setrecursionlimit(100_000)
        import simrd.heuristic
        import simrd.parse.graph
        import simrd.runtime
    with (args.folder.parent / "baselines.csv").open(newline="") as file:
        published = list(csv.DictReader(file))
    overheads = (Column(name, form=".2%") for name in ("simrd", "bytes", "placed"))
    report = Report("graph", "share", "published", *overheads)
    for name in args.graphs.split(","):
        graph = load_graph(str(args.folder / f"{name}.json"))
        problem = Problem.from_graph(graph, alignment=512, outputs="arena")
        for row in (row for row in published if row["graph"] == name):
            budget = int(float(row["share"]) * TRACED_PEAKS[name])
            report.add(
                graph=name,
                share=row["share"],
                published=row["simrd_dtr_eqclass"],
                simrd=simulated(simrd, graph, budget) if simrd else None,
                bytes=ours(problem, budget, gaps=False),
                placed=ours(problem, budget, gaps=True),
            )
    report.finish(args.csv)


if __name__ == "__main__":
    main()
