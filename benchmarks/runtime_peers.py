"""Peak and time of a training step: eager, checkpointing, PyTorch's memory budget, and coop.

    python -m benchmarks.runtime_peers [--model llama] [--rounds 5] [--budgets 10] [--csv FILE]

All modes train the same model in lockstep, so a noisy machine slows them equally. Times are the
process's CPU times, and ratios are to eager's step of the same round; both are medians over the
rounds. `us an op` divides the time by the runs of ops, recomputations included; the peers count the
ops of the joint graph. With `--model chain` it is the fixed cost of an op.

The peak of a step is the most that the process allocates between the start of its forward and the
end of its backward, counted by the arena's allocator: gradients included, parameters not; an arena
counts whole.

Modes: `eager`; `joint`: AOTAutograd's joint graph op by op (backend aot_eager); `checkpoint`:
torch.utils.checkpoint on every layer; `memory budget`: backend aot_eager_decomp_partition with
torch._functorch.config.activation_memory_budget; `coop`: at 100 %, at the peaks the others reach,
and at even steps down to the smallest feasible budget. Exits 1 if a coop step exceeds its budget,
differs from eager in a bit, or misses the slots of its plan.
"""

import argparse
import contextlib
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.demo import build_model, loss_of
from benchmarks.report import Column, Report, parser, scaled
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.execute.arena_pool import release
from coop_plan.runtime.reports import StepReport
from coop_plan.schemas import Compute

Step = Callable[[], torch.Tensor]


def llama(layers: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Any], Any]:
    """Llama of width 256 with 8 heads, batch 4 x 256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=8,
        intermediate_size=688,
        num_hidden_layers=layers,
        vocab_size=2000,
        max_position_embeddings=256,
        use_cache=False,
    )
    ids = torch.randint(0, 2000, (4, 256))
    return LlamaForCausalLM(config).train(), loss_of, ids


def gpt2(layers: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Any], Any]:
    """GPT-2 of the demo: width 256, batch 4 x 256, dropout 0.1."""
    return build_model(layers, 256, 256), loss_of, torch.randint(0, 2000, (4, 256))


def resnet50(_: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Any], Any]:
    """ResNet-50, batch 4 of 128 x 128 pixels, 100 classes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=100)).train()
    return model, _image_loss, torch.randn(4, 3, 128, 128)


def _image_loss(model: torch.nn.Module) -> Any:
    def loss(images: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(images))
        return torch.nn.functional.cross_entropy(model(pixel_values=images).logits, labels)

    return loss


class Chain(torch.nn.Module):
    """Pointwise ops on 64 numbers, one after the other."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.ops = ops
        self.start = torch.nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the last op's result."""
        x = x + self.start
        for _ in range(self.ops // 2):
            x = torch.sin(x) * 1.01
        return x.sum()


def chain(_: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Any], Any]:
    """Chain of 300 tiny ops."""
    return Chain(300), lambda model: lambda x: model(x), torch.rand(64)


MODELS = {"llama": llama, "gpt2": gpt2, "resnet50": resnet50, "chain": chain}


@dataclass
class Trainer:
    """One mode: its own copy of the model, and the figures of its steps."""

    mode: str
    model: torch.nn.Module
    run: Callable[[Any], torch.Tensor]
    random_state: torch.Tensor
    limit: int | None = None
    """Largest allowed peak in bytes."""
    report: StepReport | None = None
    compile_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def step(self, batch: Any, *, counted: bool = False) -> None:
        """One step with this mode's own stream of random numbers; `counted` takes its peak."""
        torch.set_rng_state(self.random_state)
        if counted:
            release()  # a resting arena may be in memory, in part, or not
        before, _ = process_bytes()
        reset_peak()
        began = time.process_time()
        loss = self.run(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.seconds.append(time.process_time() - began)
        if counted:
            self.peak = process_bytes()[1] - before
        self.losses.append(loss.detach().clone())
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.random_state = torch.get_rng_state()


@contextlib.contextmanager
def _memory_budget(share: float | None) -> Iterator[None]:
    import torch._functorch.config

    with torch._functorch.config.patch(activation_memory_budget=1.0 if share is None else share):
        yield


class Comparison:
    """All modes of one model, created one by one, then trained in lockstep."""

    def __init__(self, model: str, layers: int, rounds: int) -> None:
        torch.manual_seed(0)
        self.origin, self.loss_of, self.batch = MODELS[model](layers)
        self.random_state = torch.get_rng_state()
        self.rounds = rounds
        self.trainers: list[Trainer] = []

    def add(self, mode: str, *, share: float | None = None, **compiled: Any) -> Trainer:
        """Add a mode and run its first step, which compiles."""
        model = copy.deepcopy(self.origin)
        if mode == "checkpoint":
            model.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        run = self.loss_of(model)
        if compiled:
            # Its own code object: otherwise Dynamo reuses the code compiled for another mode.
            run.__code__ = run.__code__.replace(co_name=f"loss_{len(self.trainers)}")
            run = torch.compile(run, dynamic=False, **compiled)
        trainer = Trainer(mode, model, run, self.random_state)
        clear_reports()
        began = time.process_time()
        with _memory_budget(share):
            trainer.step(self.batch)
        trainer.compile_seconds = time.process_time() - began
        trainer.seconds.clear()
        if reports():
            (trainer.report,) = reports()
        trainer.step(self.batch, counted=True)  # a warm step
        trainer.seconds.clear()
        self.trainers.append(trainer)
        return trainer

    def coop(self, mode: str, budget: int | str) -> Trainer:
        """Add our mode; a budget in bytes excludes the bytes allocated before the step."""
        before = next((t.report.resident_bytes for t in self.trainers if t.report is not None), 0)
        asked = budget + before if isinstance(budget, int) else budget
        trainer = self.add(mode, backend="coop", options={"budget": asked})
        assert trainer.report is not None
        trainer.limit = trainer.report.budget_bytes - trainer.report.resident_bytes
        return trainer

    def lockstep(self) -> None:
        """Train all modes round by round."""
        for _ in range(self.rounds):
            for trainer in self.trainers:
                trainer.step(self.batch)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a record per mode: bytes, seconds, ratios."""
        eager = self.trainers[0]
        ops = next(len(t.report.graph.ops) for t in self.trainers if t.report is not None)
        rows = []
        for trainer in self.trainers:
            ratios = [own / base for own, base in zip(trainer.seconds, eager.seconds, strict=True)]
            states = zip(
                trainer.model.state_dict().values(), eager.model.state_dict().values(), strict=True
            )
            same = all(map(torch.equal, trainer.losses, eager.losses))
            row: dict[str, Any] = {
                "mode": trainer.mode,
                "peak_bytes": trainer.peak,
                "limit_bytes": trainer.limit,
                "step_seconds": statistics.median(trainer.seconds),
                "step_ratio_to_eager": statistics.median(ratios),
                "compile_seconds": trainer.compile_seconds,
                "bitwise": same and all(torch.equal(a, b) for a, b in states),
            }
            runs = ops
            if trainer.report is not None:
                runs = sum(isinstance(step, Compute) for step in trainer.report.plan.steps)
                names = ("planned_overhead", "measured_overhead", "outside_bytes")
                row |= {name: getattr(trainer.report, name) for name in names}
            row["seconds_an_op"] = row["step_seconds"] / runs
            rows.append(row)
        return rows


def compare(arguments: argparse.Namespace) -> Comparison:
    """Create the modes and train them."""
    found = Comparison(arguments.model, arguments.layers, arguments.rounds)
    process_bytes()  # from here on every allocation is counted
    found.add("eager")
    found.add("joint", backend="aot_eager")
    peers = []
    if getattr(found.origin, "supports_gradient_checkpointing", False):
        peers.append(found.add("checkpoint"))
    for share in arguments.shares:
        mode = f"memory budget {share:.1f}"
        peers.append(found.add(mode, share=share, backend="aot_eager_decomp_partition"))
    full = found.coop("coop 100%", "100%")
    least = found.coop("coop min", "min")
    for peer in peers:
        if least.peak < peer.peak < full.peak:
            found.coop(f"coop at {peer.mode}", peer.peak)
    assert full.limit is not None
    assert least.limit is not None
    for k in range(1, arguments.budgets - 1):
        share = k / (arguments.budgets - 1)
        found.coop(f"coop {k}", round(full.limit + share * (least.limit - full.limit)))
    found.lockstep()
    return found


MB = scaled(1e-6, ".2f")
COLUMNS = (
    "mode",
    Column("peak_bytes", "peak MB", MB),
    Column("limit_bytes", "at most", MB),
    Column("step_seconds", "step s", ".3f"),
    Column("step_ratio_to_eager", "x eager", ".3f"),
    Column("seconds_an_op", "us an op", scaled(1e6, ".2f")),
    Column("planned_overhead", "planned", ".1%"),
    Column("measured_overhead", "in step", ".1%"),
    Column("compile_seconds", "compile s", ".1f"),
    Column("bitwise", form=lambda equal: "equal" if equal else "different"),
    Column("outside_bytes", ""),
)


def main() -> int:
    """Returns 1 unless every coop step held."""
    command = parser(__doc__)
    command.add_argument("--model", choices=MODELS, default="llama")
    command.add_argument("--layers", type=int, default=8, help="of llama and gpt2")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--budgets", type=int, default=10, help="of coop, 100%% to min")
    command.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    command.add_argument("--threads", type=int, default=1, help="two contend on a shared machine")
    arguments = command.parse_args()
    torch.set_num_threads(arguments.threads)
    report = Report(*COLUMNS, title=f"{arguments.model}: one step, gradients included")
    for row in sorted(compare(arguments).rows(), key=lambda row: -row["peak_bytes"]):
        report.add(**row)
    report.finish(arguments.csv)
    held = all(
        row["bitwise"] and row["peak_bytes"] <= row["limit_bytes"] and not row["outside_bytes"]
        for row in report.rows
        if row["limit_bytes"] is not None
    )
    if not held:
        print("NOT HELD: see the table", file=sys.stderr)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
