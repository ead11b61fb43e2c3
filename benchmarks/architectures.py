"""Real architectures trained under budgets beside eager.

    python -m benchmarks.architectures [--only NAME ...] [--budgets 60% 40% min] [--variants]
        [--csv FILE]

Three steps of AdamW each. Losses, parameters, buffers, gradients and the stream of random numbers
must equal eager's to the last bit. A budget below the smallest feasible one is replaced by that,
marked `*`. With `--variants`, each budget is there a second time with operator variants, marked
`+`. Exits 1 when anything differs, or memory was not used as planned.
"""

import argparse
import copy
import csv
import itertools
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.models import ARCHITECTURES, Batch, Step, StepOf
from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime import clear_reports, reports
from coop_plan.schemas import format_bytes

STEPS = 3

EQUAL = "equal"
OWN_PATH = "equal to its own path"
"""The model's code asks whether it is being compiled, and computes something else then: the result
equals eager autograd on that path, to which Dynamo's backend `eager` leads."""


@dataclass
class Row:
    """One architecture under one budget; sizes in bytes."""

    architecture: str
    budget: str
    result: str = ""
    ops: int = 0
    peak: int = 0
    planned_arena: int = 0
    measured_arena: int = 0
    outside: int = 0
    planned_overhead: float = 0.0
    measured_overhead: float = 0.0
    seconds: float = 0.0
    held: bool = False


@dataclass
class Trained:
    """What three steps leave behind."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    random_state: Tensor

    def differences(self, other: "Trained") -> list[str]:
        """Names of what is not equal bit for bit."""
        found = [f"loss {i}" for i in range(STEPS) if not _same(self.losses[i], other.losses[i])]
        found += [name for name in self.state if not _same(self.state[name], other.state[name])]
        for name, gradient in self.gradients.items():
            if not _same(gradient, other.gradients[name]):
                found.append(f"gradient of {name}")
        if not _same(self.random_state, other.random_state):
            found.append("random numbers")
        return found


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def train(model: nn.Module, step: Step, batch: Batch) -> Trained:
    """Three steps from one seed."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach().clone())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Trained(losses, gradients, model.state_dict(), torch.get_rng_state())


class Comparison:
    """One architecture, trained in eager once and then under budgets."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.origin: nn.Module
        self.step_of: StepOf
        self.origin, self.step_of, self.batch = ARCHITECTURES[name]()
        eager = copy.deepcopy(self.origin)
        self.expected = train(eager, self.step_of(eager), self.batch)

    def under(self, budget: str, *, variants: bool = False) -> Row:
        """Train under `budget`, or the smallest feasible one where that is larger."""
        began = time.perf_counter()
        row = Row(self.name, budget + "+" * variants)
        try:
            try:
                found = self._compiled("coop", options={"budget": budget, "variants": variants})
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, InfeasibleBudgetError):
                    raise
                row.budget += "*"
                found = self._compiled("coop", options={"budget": "min", "variants": variants})
        except Exception as error:  # of any kind: the others shall run
            row.result = f"{type(error).__name__}: {error}"
            return row
        differences = self.expected.differences(found)
        row.result = EQUAL if not differences else f"differs: {', '.join(differences)}"
        report = reports()[-1]
        if differences and not self._compiled("eager").differences(found):
            row.result = OWN_PATH
        row.ops = len(report.graph.ops)
        row.peak, row.outside = report.peak_bytes, report.outside_bytes
        row.planned_arena = report.planned_arena_bytes
        row.measured_arena = report.measured_arena_bytes
        row.planned_overhead = report.planned_overhead
        row.measured_overhead = report.measured_overhead or 0.0
        row.seconds = time.perf_counter() - began
        row.held = (
            row.result in (EQUAL, OWN_PATH)
            and row.peak <= report.budget_bytes
            and report.measured_peak_bytes <= report.budget_bytes
            and row.outside == 0
            and row.planned_arena == row.measured_arena
        )
        return row

    def _compiled(self, backend: str, options: Any = None) -> Trained:
        torch._dynamo.reset()
        model = copy.deepcopy(self.origin)
        step = torch.compile(
            self.step_of(model), backend=backend, fullgraph=True, dynamic=False, options=options
        )
        return train(model, step, self.batch)


def show(rows: Sequence[Row]) -> None:
    """The rows as a table on stdout."""
    table = Table()
    heads = ("architecture", "budget", "ops", "peak", "planned arena", "measured arena", "outside")
    for head in (*heads, "planned overhead", "in-step overhead", "bitwise"):
        left = head in ("architecture", "budget", "bitwise")
        table.add_column(head, justify="left" if left else "right")
    for row in rows:
        table.add_row(
            *(row.architecture, row.budget, str(row.ops), format_bytes(row.peak)),
            *(format_bytes(row.planned_arena), format_bytes(row.measured_arena)),
            *(f"{row.outside} B", f"{row.planned_overhead:.1%}", f"{row.measured_overhead:.1%}"),
            row.result.splitlines()[0][:60],
        )
    Console(width=160).print(table)


def main() -> int:
    """Run the comparison; the exit code says whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(ARCHITECTURES))
    parser.add_argument("--budgets", nargs="+", default=["60%", "40%", "min"])
    parser.add_argument("--variants", action="store_true", help="with operator variants, too")
    parser.add_argument("--threads", type=int, default=1, help="two contend on a shared machine")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", module="torch")  # of Dynamo's, about the models' code
    rows: list[Row] = []
    for name in arguments.only or ARCHITECTURES:
        comparison = Comparison(name)
        ways = (False, True) if arguments.variants else (False,)
        for budget, variants in itertools.product(arguments.budgets, ways):
            clear_reports()
            rows.append(comparison.under(budget, variants=variants))
            mark = "" if rows[-1].held else "  NOT HELD"
            print(f"{name} {rows[-1].budget}: {rows[-1].result}{mark}", file=sys.stderr, flush=True)
    show(rows)
    if any(row.budget.endswith("*") for row in rows):
        print("*: below the smallest feasible budget, which was taken instead")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
