"""Real architectures trained under budgets, compared with eager bit for bit.

    python -m benchmarks.architectures [--only NAME ...] [--budgets 60% 40% min] [--variants]
        [--kernels fused] [--csv FILE]

Three steps of AdamW each. Losses, parameters, buffers, gradients and the stream of random numbers
must equal eager's to the last bit. A budget below the smallest feasible one is replaced by that,
marked `*`. With `--variants` each budget runs a second time with operator variants, marked `+`.

With `--kernels fused`, all plans have fused kernels. They must equal those of 100 % to the last
bit. The loss and the gradients of the first step are compared with eager's in float32 and in
float64, relative to each one's largest element, and the random numbers bit for bit. Their errors in
float32, against eager's results in float64, may be a small multiple of eager's own errors. Peaks of
100 % and `min` are listed with those of eager kernels.
Exits 1 if anything differs or the measured arena is not the planned one.
"""

import contextlib
import copy
import itertools
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import ARCHITECTURES, Batch, Step, StepOf
from benchmarks.report import Column, Report, parser
from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.execute.first_plan import CaptureGraph, FirstPlan, Planner
from coop_plan.schemas import format_bytes
from coop_plan.schemas.graph import FUSED_NAME

STEPS = 3

EQUAL = "equal"
EQUAL_TO_ITSELF = "equal to itself"
"""The results equal those of 100 % to the last bit."""

SPLIT = "split"
"""Some regions run as parts: the distance is that of this step from eager's."""

TOLERANCE = 5e-6
"""Distance from eager of a float32 gradient, relative to its largest element. It may be larger if
eager's own error is: by `MOST_TIMES_EAGER`."""

TOLERANCE_IN_FLOAT64 = 1e-11
"""The same for a step in float64 that computes nothing in float32."""

MOST_TIMES_EAGER = 3
"""Most times the error of eager's float32 results that those of fused kernels may have."""

LEAST_ERROR = 1e-6
"""Least error taken for eager's: a few roundings of a float32 result."""

LEAST_SCALE = 1e-3
"""A gradient's scale is at least 1/1000 of the largest one's."""

ZERO_IN_FLOAT64 = 1e-10
"""A gradient is zero but for rounding if eager's in float64 is at most this share of the largest
one, such as that of a bias before a batch norm. The largest one's scale is its scale."""

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
    distance: float | None = None
    distance_in_float64: float | None = None
    error: float | None = None
    eager_error: float | None = None
    eager_peak: int | None = None
    held: bool = False


@dataclass
class Trained:
    """Results of three steps."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    random_state: Tensor
    first: dict[str, Tensor]
    """Loss and gradients of the first step."""

    def distance(self, other: "Trained", exact: "Trained") -> float:
        """Largest difference of the first step's loss and gradients, relative to each's scale.

        The scales are those of `exact`, eager's results in float64.
        """
        if not self.first.keys() == other.first.keys() == exact.first.keys():
            return float("inf")
        size = {name: value.abs().max().item() for name, value in exact.first.items()}
        largest = max(size[name] for name in size if name != LOSS)
        least = LEAST_SCALE * largest
        scale = {
            name: largest if each <= ZERO_IN_FLOAT64 * largest else max(each, least)
            for name, each in size.items()
        }
        return max(
            (self.first[name] - value).abs().max().item() / scale[name]
            for name, value in other.first.items()
        )

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


LOSS = "loss"
"""Name of the loss among the results of the first step."""


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def train(model: nn.Module, step: Step, batch: Batch) -> Trained:
    """Runs three steps from one seed."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[Tensor] = []
    first: dict[str, Tensor] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach().clone())
        gradients = {name: p.grad for name, p in model.named_parameters()}
        if not first:
            first = {name: g.clone() for name, g in gradients.items() if g is not None}
            first[LOSS] = losses[0]
        optimizer.step()
    return Trained(losses, gradients, model.state_dict(), torch.get_rng_state(), first)


class Narrow(TorchDispatchMode):
    """Notes in `found` that an op returns float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(made)
        self.found |= any(isinstance(v, Tensor) and v.dtype is torch.float32 for v in leaves)
        return made


@contextlib.contextmanager
def fused_kernels() -> Iterator[None]:
    """Take the plan over regions even if that with eager's kernels is better.

    At `min` it is that over split regions, if there are any and they need fewer bytes.
    """

    def fused(self: Planner, fused: Captured, _: Captured, split: CaptureGraph) -> FirstPlan:
        made = self.plan(fused)
        parts = split() if self.options.plan.budget.kind == "min" else None
        found = [made] if parts is None else [made, self.plan(parts)]
        return min(found, key=lambda each: each.plan.budget_bytes)

    original, Planner.better = Planner.better, fused  # type: ignore[method-assign]
    try:
        yield
    finally:
        Planner.better = original  # type: ignore[method-assign]


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
            found = self._within(row, budget, variants=variants)
        except Exception as error:  # any error: the other rows still run
            row.result = f"{type(error).__name__}: {error}"
            return row
        differences = self.expected.differences(found)
        row.result = EQUAL if not differences else f"differs: {', '.join(differences)}"
        self._add_report(row)
        if differences and not self._compiled("eager").differences(found):
            row.result = OWN_PATH
        row.seconds = time.perf_counter() - began
        row.held &= row.result in (EQUAL, OWN_PATH)
        return row

    def _within(self, row: Row, budget: str, **options: Any) -> Trained:
        try:
            return self._compiled("coop", options={"budget": budget, **options})
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, InfeasibleBudgetError):
                raise
        row.budget += "*"
        return self._compiled("coop", options={"budget": "min", **options})

    def _add_report(self, row: Row) -> None:
        report = reports()[-1]
        row.ops = len(report.graph.ops)
        row.peak, row.outside = report.peak_bytes, report.outside_bytes
        row.planned_arena = report.planned_arena_bytes
        row.measured_arena = report.measured_arena_bytes
        row.planned_overhead = report.planned_overhead
        row.measured_overhead = report.measured_overhead or 0.0
        row.held = (
            row.peak <= report.budget_bytes
            and report.measured_peak_bytes <= report.budget_bytes
            and row.outside == 0
            and row.planned_arena == row.measured_arena
        )

    def _compiled(self, backend: str, options: Any = None) -> Trained:
        torch._dynamo.reset()
        model = copy.deepcopy(self.origin)
        step = torch.compile(
            self.step_of(model), backend=backend, fullgraph=True, dynamic=False, options=options
        )
        with torch._dynamo.config.patch(allow_rnn=True):  # as backend `coop` sets it
            return train(model, step, self.batch)


def _regions() -> list[str]:
    """The fused regions of the last report's step, in order."""
    return [op.name for op in reports()[-1].graph.ops if op.name.startswith(FUSED_NAME)]


class FusedComparison(Comparison):
    """One architecture with fused kernels at 100 %, compared with eager, then under budgets."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        try:
            self.whole, self.own = self._compared()
            self.regions = _regions()
            origin, batch = self.origin, self.batch
            self.origin = copy.deepcopy(origin).double()
            self.batch = {
                name: value.double() if value.is_floating_point() else value
                for name, value in batch.items()
            }
            with Narrow() as narrow:
                wide = copy.deepcopy(self.origin)
                config = getattr(wide, "config", None)
                if hasattr(config, "_experts_implementation"):
                    config._experts_implementation = "eager"  # a grouped product takes no float64
                train(wide, self.step_of(wide), self.batch)
            self.narrow = narrow.found
            found, exact = self._compared()
            self.exact = exact
            self.origin, self.batch = origin, batch
            self.distance = self.whole.distance(self.own, exact)
            self.distance_in_float64 = found.distance(exact, exact)
            self.error = self.whole.distance(exact, exact)
            self.eager_error = self.own.distance(exact, exact)
        except Exception as error:  # any error: the other architectures still run
            self.failure: str | None = f"{type(error).__name__}: {error}"
        else:
            self.failure = None

    def _compared(self) -> tuple[Trained, Trained]:
        """Results of 100 %, and those of eager on the path that is compiled."""
        with fused_kernels():
            found = self._compiled("coop", options={"budget": "100%", "kernels": "fused"})
        own = self._compiled("eager")
        if not _same(found.random_state, own.random_state):
            raise ValueError("other random numbers than eager's")
        return found, own

    def under(self, budget: str, *, variants: bool = False) -> Row:
        began = time.perf_counter()
        row = Row(self.name, budget + "+" * variants)
        if self.failure is not None:
            row.result = self.failure
            return row
        row.distance, row.distance_in_float64 = self.distance, self.distance_in_float64
        row.error, row.eager_error = self.error, self.eager_error
        try:
            if budget in ("100%", "min"):
                self._compiled("coop", options={"budget": budget})
                row.eager_peak = reports()[-1].peak_bytes
            with fused_kernels():
                found = self._within(row, budget, variants=variants, kernels="fused")
        except Exception as error:  # any error: the other rows still run
            row.result = f"{type(error).__name__}: {error}"
            return row
        differences = self.whole.differences(found)
        row.result = EQUAL_TO_ITSELF
        if _regions() != self.regions:
            row.result = SPLIT
            row.distance = found.distance(self.own, self.exact)
        elif differences:
            row.result = f"differs from itself: {', '.join(differences)}"
        self._add_report(row)
        row.seconds = time.perf_counter() - began
        limit = TOLERANCE if self.narrow else TOLERANCE_IN_FLOAT64
        allowed = MOST_TIMES_EAGER * row.eager_error
        row.held &= (
            row.result in (EQUAL_TO_ITSELF, SPLIT)
            and row.distance < max(TOLERANCE, allowed)
            and row.distance_in_float64 < limit
            and row.error <= max(MOST_TIMES_EAGER * LEAST_ERROR, allowed)
            and reports()[-1].kernels == "fused"
        )
        return row


COLUMNS = (
    *("architecture", "budget", "ops"),
    *(Column(name, form=format_bytes) for name in ("peak", "planned_arena", "measured_arena")),
    Column("outside", form=format_bytes),
    Column("planned_overhead", form=".1%"),
    Column("measured_overhead", "in-step overhead", ".1%"),
    Column("result", "bitwise", lambda text: text.splitlines()[0][:60]),
    Column("distance", "from eager", ".1e"),
    Column("distance_in_float64", "in float64", ".1e"),
    Column("error", form=".1e"),
    Column("eager_error", form=".1e"),
    Column("eager_peak", form=format_bytes),
    Column("held", ""),
    Column("seconds", ""),
)


def main() -> int:
    """Returns 1 unless every row held."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", metavar="NAME", choices=list(ARCHITECTURES))
    command.add_argument("--budgets", nargs="+", default=["60%", "40%", "min"])
    command.add_argument("--variants", action="store_true", help="also with operator variants")
    command.add_argument("--kernels", choices=["eager", "fused"], default="eager")
    command.add_argument("--threads", type=int, default=1, help="two contend on a shared machine")
    arguments = command.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", module="torch")  # of Dynamo's, about the models' code
    report = Report(*COLUMNS)
    compared = FusedComparison if arguments.kernels == "fused" else Comparison
    for name in arguments.only or ARCHITECTURES:
        comparison = compared(name)
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
