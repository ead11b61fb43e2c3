"""Real architectures trained under budgets, compared with eager bit for bit.

    python -m benchmarks.architectures [--only NAME ...] [--budgets 60% 40% min] [--variants]
        [--csv FILE]

Three steps of AdamW each. Losses, parameters, buffers, gradients and the stream of random numbers
must equal eager's to the last bit. A budget below the smallest feasible one is replaced by that,
marked `*`. With `--variants` each budget runs a second time with operator variants, marked `+`.
Exits 1 if anything differs or the measured arena is not the planned one.
"""

import copy
import itertools
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import ARCHITECTURES, Batch, Step, StepOf
from benchmarks.report import Column, Report, parser
from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime import clear_reports, reports
from coop_plan.schemas import format_bytes

STEPS = 3

EQUAL = "equal"
OWN_PATH = "equal to its own path"
"""The model's code computes something else while it is compiled: the result equals that of Dynamo's
backend `eager`, which is eager autograd on that path."""


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
    """Results of three steps."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    random_state: Tensor

    def differences(self, other: "Trained") -> list[str]:
        """Names of the results that are not equal bit for bit."""
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
    """Runs three steps from one seed."""
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
    """One architecture, trained in eager once, then under budgets."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.origin: nn.Module
        self.step_of: StepOf
        self.origin, self.step_of, self.batch = ARCHITECTURES[name]()
        eager = copy.deepcopy(self.origin)
        self.expected = train(eager, self.step_of(eager), self.batch)

    def under(self, budget: str, *, variants: bool = False) -> Row:
        """Trains under `budget`, or the smallest feasible one if that is larger."""
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
        except Exception as error:  # any error: the other rows still run
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


COLUMNS = (
    *("architecture", "budget", "ops"),
    *(Column(name, form=format_bytes) for name in ("peak", "planned_arena", "measured_arena")),
    Column("outside", form=format_bytes),
    Column("planned_overhead", form=".1%"),
    Column("measured_overhead", "in-step overhead", ".1%"),
    Column("result", "bitwise", lambda text: text.splitlines()[0][:60]),
    Column("held", ""),
    Column("seconds", ""),
)


def main() -> int:
    """Returns 1 unless every row held."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", metavar="NAME", choices=list(ARCHITECTURES))
    command.add_argument("--budgets", nargs="+", default=["60%", "40%", "min"])
    command.add_argument("--variants", action="store_true", help="also with operator variants")
    command.add_argument("--threads", type=int, default=1, help="two contend on a shared machine")
    arguments = command.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", module="torch")  # of Dynamo's, about the models' code
    report = Report(*COLUMNS)
    for name in arguments.only or ARCHITECTURES:
        comparison = Comparison(name)
        ways = (False, True) if arguments.variants else (False,)
        for budget, variants in itertools.product(arguments.budgets, ways):
            clear_reports()
            row = comparison.under(budget, variants=variants)
            report.add(**vars(row))
            mark = "" if row.held else "  NOT HELD"
            print(f"{name} {row.budget}: {row.result}{mark}", file=sys.stderr, flush=True)
    report.finish(arguments.csv)
    if any(row["budget"].endswith("*") for row in report.rows):
        print("*: below the smallest feasible budget, which was used instead")
    return 0 if all(row["held"] for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
