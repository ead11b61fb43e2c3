"""
Operator variants, off and on, at budgets: `python -m benchmarks.variants ../shared/data/graphs`.

Step times (ms) of verified plans: variants and recomputation chosen jointly, with the proved bound
(`auto`). `--halves` adds variants alone (every op runs once) and recomputation alone (default
variants). MONeT's own published solutions are evaluated in the same profiles. `--leave-one-out`
adds the step without each kind of variant, in the same time. `--headline` compares with MONeT's
headline instead (3 times less memory at 16 % at most): the step at a third of the memory of keeping
everything, in two accountings.
"""

from collections import Counter
from pathlib import Path

from benchmarks.report import Report, parser
from coop_plan.planner import InfeasibleBudgetError, TimeLimitError, plan
from coop_plan.schemas import Compute, Graph, Plan, load_graph

MONET: dict[str, dict[float, float]] = {
    "monet_resnet50_b184": {10: 914.5, 9: 924.9, 8: 937.9, 7: 951.8, 6: 974.5, 5: 993.8},
    "monet_unet_b11": {10: 1108.5, 9: 1132.8, 8: 1153.2, 7: 1171.2, 6: 1215.3, 5: 1286.3},
    "monet_vgg16_b176": {10: 1323.6, 9: 1328.7, 8: 1382.9, 7: 1438.2, 6: 1490.8, 5.5: 1539.7},
}
"""By graph and budget (GiB), ms: MONeT's published solutions (utsaslab/MONeT), up to a day each."""


def without(graph: Graph, *, kinds: tuple[str, ...] = (), again: bool = True) -> Graph:
    """The graph without variants whose names begin with one of `kinds`, and with every op once."""
    ops = [
        op.model_copy(
            update={
                "variants": [v for v in op.variants if not v.name.startswith(kinds)],
                "recomputable": op.recomputable and again,
            }
        )
        for op in graph.ops
    ]
    return graph.model_copy(update={"ops": ops})


DEFAULTS = "default variants"
"""Keep-everything as profiled: an activation's gradient reads the activation's input."""

OUTPUTS = "gradients from outputs"
"""As PyTorch: the input is not kept if the gradient can read the activation's output."""


def by_outputs(graph: Graph) -> Graph:
    """The graph without variants, whose gradients read outputs if they can (MONeT's `output`)."""
    ops = []
    for op in graph.ops:
        variant = next((v for v in op.variants if v.name == "output"), op)
        fields = ("inputs", "outputs", "cost_us", "workspace_bytes", "inplace")
        ops.append(
            op.model_copy(update={f: getattr(variant, f) for f in fields} | {"variants": []})
        )
    return graph.model_copy(update={"ops": ops})


def headline(graph: Graph, accounting: str, seconds: float) -> list[str]:
    """Returns memory of keep-everything (GiB), a third of it, our overhead and its bound there.

    Parameters, inputs, gradients of parameters and workspaces are counted, at the best placement.
    """
    everything = graph if accounting == DEFAULTS else by_outputs(graph)
    kept = plan(everything, "100%", method="keep-all", alignment=1, outputs="arena")
    third = kept.peak_bytes / 3 / 2**30
    made = planned(graph, third, "auto", seconds)
    cells = [accounting, f"{kept.peak_bytes / 2**30:.2f}", f"{third:.2f}", "-", "-"]
    if made is not None:
        cells[3] = f"{made.cost_us / kept.cost_us - 1:.1%}"
        bound = made.lower_bound_us
        cells[4] = "-" if bound is None else f"{max(0.0, bound / kept.cost_us - 1):.1%}"
    return cells


def planned(graph: Graph, gib: float, method: str, seconds: float) -> Plan | None:
    """Plan at a budget in GiB, outputs in the arena, alignment 1; None if none was found."""
    budget = int(gib * 2**30)
    try:
        return plan(graph, budget, method=method, time_limit=seconds, alignment=1, outputs="arena")
    except (InfeasibleBudgetError, TimeLimitError):
        return None


def ms(made: Plan | None) -> str:
    """The step time of a plan."""
    return "-" if made is None else f"{made.cost_us / 1e3:.1f}"


def kinds_of(made: Plan) -> dict[str, int]:
    """Runs of each kind of variant; kinds are names without numbers."""
    names = (step.variant for step in made.steps if isinstance(step, Compute))
    return dict(sorted(Counter(name.rstrip("0123456789") for name in names if name).items()))


def main() -> None:
    command = parser(__doc__)
    command.add_argument("graphs", type=Path)
    command.add_argument("--only", choices=MONET, action="append")
    command.add_argument("--budgets", type=float, nargs="*", help="GiB")
    command.add_argument("--seconds", type=float, default=150.0, help="of each plan")
    command.add_argument("--halves", action="store_true", help="variants alone, recompute alone")
    command.add_argument("--leave-one-out", action="store_true", help="without each kind")
    command.add_argument("--headline", action="store_true", help="at a third of the memory")
    asked = command.parse_args()
    names, seconds = asked.only or list(MONET), asked.seconds
    if asked.headline:
        heads = ["keeping everything", "GiB", "a third", "overhead there", "at least"]
        report = Report("graph", *heads, progress=True)
        for name in names:
            graph = load_graph(asked.graphs / f"{name}.json")
            for accounting in (DEFAULTS, OUTPUTS):
                cells = headline(graph, accounting, seconds)
                report.add(graph=name, **dict(zip(heads, cells, strict=True)))
        report.finish(asked.csv)
        return
    halves = ["variants alone", "recompute alone"] * asked.halves
    left_out = ["without each kind"] * asked.leave_one_out
    heads = ["graph", "GiB", "MONeT", "both", "bound", "gap %", *halves, "variants chosen"]
    report = Report(*heads, *left_out, progress=True)
    for name in names:
        graph = load_graph(asked.graphs / f"{name}.json")
        for gib in asked.budgets or MONET[name]:
            made = planned(graph, gib, "auto", seconds)
            bound = made.lower_bound_us if made is not None else None
            row = {
                "graph": name,
                "GiB": f"{gib:g}",
                "MONeT": MONET[name].get(gib),
                "both": ms(made),
            }
            if made is not None and bound is not None:
                row |= {"bound": f"{bound / 1e3:.1f}"}
                row |= {"gap %": f"{(made.cost_us / bound - 1) * 100:.2f}"}
            if asked.halves:
                alone = planned(without(graph, again=False), gib, "coop-offline", seconds)
                none = planned(without(graph, kinds=("",)), gib, "coop-offline", seconds)
                row |= {"variants alone": ms(alone), "recompute alone": ms(none)}
            chosen = {} if made is None else kinds_of(made)
            row["variants chosen"] = ", ".join(f"{kind} {count}" for kind, count in chosen.items())
            if asked.leave_one_out:
                rest = {
                    kind: planned(without(graph, kinds=(kind,)), gib, "coop-offline", seconds)
                    for kind in chosen
                }
                row[left_out[0]] = ", ".join(f"{kind} {ms(plan)}" for kind, plan in rest.items())
            report.add(**row)
    report.finish(asked.csv)


if __name__ == "__main__":
    main()
