"""
Random questions to every method: each ends in a verified plan or in a documented error.

    python -m benchmarks.questions --count 5000 --first 0

A question is a small graph with variants (approximate ones, ones that cannot run, ones that omit
outputs), in-place pairs of any sizes, overwritten tensors, a link and a budget. An answer is
"plan", "infeasible" or "time limit"; all else is a failure, printed with its seed. Plans are
verified again, and held against the budget.
"""

import random
import time
from collections import Counter
from typing import Any

from benchmarks.report import Column, Report, parser
from coop_plan.planner import (
    METHODS,
    InfeasibleBudgetError,
    PlanOptions,
    TimeLimitError,
    find_faults,
    plan,
)
from coop_plan.schemas import Graph, parse_graph

SIZES = (0, 1, 3, 8, 8, 16, 24, 64)
"""Bytes of tensors and workspaces."""

COSTS = (0.0, 0.5, 1.0, 1.0, 2.0, 10.0, 50.0)
"""Costs of ops and variants, µs."""


class _Draft:
    """Tensors and ops of a graph, drawn op by op."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.tensors: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.readable = [self.tensor("input"), self.tensor("parameter")]
        """Tensors that default variants may read."""
        self.masks: list[int] = []
        """Tensors that only variants make and read."""

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def tensor(self, kind: str) -> int:
        size = self.draw.choice(SIZES)
        self.tensors.append({"id": len(self.tensors), "bytes": size, "kind": kind})
        return len(self.tensors) - 1

    def pairs(self, inputs: list[int], outputs: list[int]) -> list[list[int]]:
        every = [[out, t] for out in outputs for t in dict.fromkeys(inputs)]
        return self.draw.sample(every, min(len(every), 2)) if self.chance(0.4) else []

    def variant(self, number: int, op: dict[str, Any], masks: list[int]) -> dict[str, Any]:
        """A variant that may read masks, make masks, and omit inputs and outputs."""
        inputs = [t for t in op["inputs"] if self.chance(0.7)]
        inputs += self.draw.sample(self.masks, min(len(self.masks), int(self.chance(0.5))))
        outputs = [t for t in op["outputs"] if self.chance(0.85)]
        outputs += [t for t in masks if self.chance(0.6)]
        self.draw.shuffle(outputs)
        return {
            "name": f"v{number}",
            "cost_us": self.draw.choice(COSTS),
            "workspace_bytes": self.draw.choice(SIZES) if self.chance(0.4) else 0,
            "inputs": inputs,
            "outputs": outputs,
            "inplace": self.pairs(inputs, outputs),
            "approximate": self.chance(0.25),
        }

    def op(self, phase: str, outputs: int) -> None:
        draw = self.draw
        inputs = draw.sample(self.readable, min(len(self.readable), draw.choice((0, 1, 1, 2, 3))))
        made = [
            self.tensor("output" if self.chance(0.12) else "activation") for _ in range(outputs)
        ]
        op = {
            "id": len(self.ops),
            "name": "op",
            "phase": phase,
            "inputs": inputs,
            "outputs": made,
            "cost_us": draw.choice(COSTS),
            "workspace_bytes": draw.choice(SIZES) if self.chance(0.3) else 0,
            "recomputable": not self.chance(0.1),
            "rng": self.chance(0.08),
            "mutates": inputs[:1] if self.chance(0.08) else [],
            "inplace": self.pairs(inputs, made),
        }
        masks = [self.tensor("activation")] if self.chance(0.3) else []
        count = draw.choice((0, 0, 1, 2))
        op["variants"] = [self.variant(number, op, masks) for number in range(count)]
        self.masks += {t for v in op["variants"] for t in v["outputs"] if t in masks}
        self.readable += made
        self.ops.append(op)


def random_graph(draw: random.Random, max_ops: int = 9) -> Graph:
    """A valid graph of up to `max_ops` ops."""
    draft = _Draft(draw)
    count = draw.randint(1, max_ops)
    for number in range(count):
        draft.op("forward" if number < count // 2 else "backward", draw.choice((0, 1, 1, 1, 2)))
    rates = (0, 0, 1e6, 4e6)
    device = {name: draw.choice(rates) for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")}
    schema = "coop-plan/graph/1"
    return parse_graph(
        {"schema": schema, "device": device, "tensors": draft.tensors, "ops": draft.ops}
    )


def question(seed: int, max_ops: int = 9) -> tuple[Graph, dict[str, Any]]:
    """A graph and options other than method and time limit."""
    draw = random.Random(seed)
    graph = random_graph(draw, max_ops)
    resident = sum(t.bytes for t in graph.tensors if t.resident)
    budgets = (
        "min",
        f"{draw.randint(30, 110)}%",
        f"{draw.randint(30, 110)}%",
        resident + draw.randint(1, 200),
        draw.randint(1, 100),
    )
    return graph, {
        "budget": draw.choice(budgets),
        "alignment": draw.choice((1, 1, 8, 512)),
        "outputs": draw.choice(("outside", "arena", "gradients")),
        "host_budget": draw.choice((None, None, 0, 16, 100)),
        "link": draw.choice((None, None, 0, 2_000_000)),
        "seed": draw.randint(0, 3),
    }


def answer(seed: int, method: str, time_limit: float | None, max_ops: int = 9) -> str:
    """The kind of answer; raises on a failure."""
    graph, fields = question(seed, max_ops)
    options = PlanOptions.of(fields | {"method": method, "time_limit": time_limit})
    try:
        made = plan(graph, options)
    except InfeasibleBudgetError as error:
        assert error.met_bytes is not None and error.met_bytes > error.budget_bytes
        return "infeasible"
    except TimeLimitError:
        assert time_limit is not None
        return "time limit"
    assert not find_faults(graph, made)
    if options.budget.kind == "bytes":
        assert made.peak_bytes <= options.budget.value
    return "plan"


def time_limit(seed: int, method: str, seconds: float) -> float | None:
    """`seconds` for methods that run to their limit, and for every second question of others."""
    return seconds if METHODS[method].anytime or seed % 2 else None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=5000, help="questions")
    options.add_argument("--first", type=int, default=0, help="seed of the first question")
    options.add_argument("--max-ops", type=int, default=9, help="ops of a graph, at most")
    options.add_argument("--seconds", type=float, default=1.0, help="time limit of anytime methods")
    options.add_argument("--methods", nargs="+", default=list(METHODS), help="methods asked")
    asked = options.parse_args()
    answers = {method: Counter[str]() for method in asked.methods}
    begin = time.monotonic()
    for seed in range(asked.first, asked.first + asked.count):
        for method in asked.methods:
            try:
                limit = time_limit(seed, method, asked.seconds)
                kind = answer(seed, method, limit, asked.max_ops)
            except Exception as error:
                kind = "failed"
                print(f"seed {seed}, {method}: {type(error).__name__}: {error}", flush=True)
            answers[method][kind] += 1
        if (seed + 1) % 100 == 0:
            print(f"{seed + 1} done after {time.monotonic() - begin:.0f} s", flush=True)
    kinds = ("plan", "infeasible", "time limit", "failed")
    title = f"questions of seeds {asked.first} to {asked.first + asked.count - 1}"
    report = Report("method", *(Column(kind) for kind in kinds), title=title)
    for method, counts in answers.items():
        report.add(method=method, **{kind: counts[kind] for kind in kinds})
    report.finish(asked.csv)


if __name__ == "__main__":
    main()
