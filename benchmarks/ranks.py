"""Ranks that train together over gloo, each within its budget and with eager's numbers.

    python -m benchmarks.ranks [--ranks 2 4] [--starts 20] [--budget 60%]

Every start uses new processes. One cache is warm from the second start on, in turn that of rank 0
and that of the last rank; the others are cold. A line reports one start. The first start and failed
ones list each rank's measured peak and budget in bytes, its longest step and the part of that in
which it waited for another rank's plan, in seconds, and whether its numbers are equal. In `padded`
each rank draws its own lengths, and the function has a collective. Beyond two ranks DDP is compared
with `aot_eager`: it fills its buckets in the order of the gradients, and that order decides the
order of the sums. A start fails if numbers differ, a peak is above its budget, or a rank waited in
vain or longer than the other ranks' longest step without its waits. Exits 1 if a start fails.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from coop_plan.runtime.distributed import sharing

ROOT = Path(__file__).parents[1]
SIZE = 96
STEPS = 4


class Block(nn.Module):
    """Unit of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.wide, self.narrow = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """The loss of a few blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def ddp(compiled: Callable[[nn.Module], Any] | None) -> tuple[nn.Module, Any]:
    """The compiled module within DDP."""
    model = Net()
    called = DistributedDataParallel(model if compiled is None else compiled(model))
    return model, called


def fsdp(compiled: Callable[[nn.Module], Any] | None) -> tuple[nn.Module, Any]:
    """FSDP2 by block, compiled around."""
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, model if compiled is None else compiled(model)


class Padded(Net):
    """The sum of the ranks' losses, as an op of the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        total: torch.Tensor = functional.all_reduce(loss, "sum", dist.group.WORLD)  # type: ignore[arg-type]
        return total


def padded(compiled: Callable[[nn.Module], Any] | None) -> tuple[nn.Module, Any]:
    """A collective in the graph."""
    model = Padded()
    return model, model if compiled is None else compiled(model)


class Waits:
    """Seconds of each step, and those in which it waited for a result of another rank."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self._waited = 0.0
        self._wait = sharing._wait
        sharing._wait = self._timed

    def _timed(self, *arguments: Any) -> bytes:
        began = time.monotonic()
        try:
            return self._wait(*arguments)
        finally:
            self._waited += time.monotonic() - began

    @contextmanager
    def step(self) -> Iterator[None]:
        began, before = time.monotonic(), self._waited
        yield
        self.steps.append((time.monotonic() - began, self._waited - before))


waits = Waits()
WAYS = {"ddp": ddp, "fsdp2": fsdp, "padded": padded}
LENGTHS = (256, 384, 512)


def train(model: nn.Module, called: Any, rank: int) -> list[torch.Tensor]:
    """Losses, gradients and parameters of a few steps."""
    torch.manual_seed(10 + rank)
    lengths = random.Random(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    left: list[torch.Tensor] = []
    waits.steps.clear()
    for _ in range(STEPS):
        optimizer.zero_grad()
        length = lengths.choice(LENGTHS) if isinstance(model, Padded) else max(LENGTHS)
        with waits.step():
            loss = called(torch.randn(length, SIZE))
            loss.backward()
        left += [loss.detach(), *(whole(p.grad).clone() for p in model.parameters())]
        optimizer.step()
    return left + [whole(p).detach().clone() for p in model.parameters()]


def whole(value: Any) -> torch.Tensor:
    """The whole tensor, gathered from all ranks if it is sharded."""
    made: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return made


def one_rank(rank: int, count: int, folder: Path, budget: str) -> int:
    """Train eager and compiled in this process; print the figures of this rank."""
    from coop_plan import runtime

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.optimize_ddp = False
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    options, wrong = {"budget": budget}, 0
    for name, make in WAYS.items():
        twin = "aot_eager" if name == "ddp" and count > 2 else None
        reference = None if twin is None else lambda m: torch.compile(m, backend="aot_eager")
        expected = train(*make(reference), rank)
        torch._dynamo.reset()
        runtime.clear_reports()
        found = train(*make(lambda m: torch.compile(m, backend="coop", options=options)), rank)
        equal = all(map(torch.equal, found, expected))
        reports = [report for report in runtime.reports() if report.steps_run]
        last = max(reports, key=lambda report: len(report.graph.ops))  # of one graph, or of all
        within = last.measured_peak_bytes <= last.budget_bytes
        longest = [max(waits.steps), max(took - waited for took, waited in waits.steps)]
        of_all: list[Any] = [None] * count
        dist.all_gather_object(of_all, longest[1])
        (took, waited), most = longest[0], max(of_all)
        wrong += not equal or not within or waited > most or bool(sharing._given_up)
        figures = f"{last.measured_peak_bytes} {last.budget_bytes} {last.plan.recomputed_ops}"
        figures += f" {took:.1f} {waited:.1f}"
        print(name, rank, figures, "equal" if equal else "DIFFERENT", flush=True)
        torch._dynamo.reset()
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def start(count: int, budget: str, caches: list[Path]) -> tuple[bool, list[str]]:
    """Start all ranks once; returns whether all held, and their output."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(count):
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            environment["XDG_CACHE_HOME"] = str(caches[rank])
            command = [sys.executable, "-m", "benchmarks.ranks", "--rank", str(rank)]
            command += ["--ranks", str(count), "--folder", folder, "--budget", budget]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
            processes.append(process)
        ended = [process.communicate(timeout=600) for process in processes]
    fine = not any(process.returncode for process in processes)
    lines = [line for out, _ in ended for line in out.splitlines()]
    if not fine:
        lines += [line for _, error in ended for line in error.splitlines()[-8:]]
    return fine, lines


def cold(folder: Path, built: Path) -> Path:
    """A cache with the compiled extension alone."""
    (folder / "coop-plan").mkdir(parents=True)
    (folder / "coop-plan" / built.name).symlink_to(built)
    return folder


def main() -> int:
    """Returns 1 unless every start held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        (count,) = arguments.ranks
        return one_rank(arguments.rank, count, arguments.folder, arguments.budget)
    from coop_plan.runtime.device import build

    built = Path(build.arena().__file__).parent
    broken = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in arguments.ranks:
            warm = cold(folder / f"warm {count}", built)
            for number in range(arguments.starts):
                fresh = [cold(folder / f"{count} {number} {r}", built) for r in range(count)]
                at = 0 if number % 2 else count - 1
                fresh[at] = warm
                fine, lines = start(count, arguments.budget, fresh)
                broken += not fine
                print(f"{count} ranks, start {number}:", "holds" if fine else "BROKEN", flush=True)
                if number == 0 or not fine:
                    print(*lines, sep="\n", flush=True)
                for path in set(fresh) - {warm}:
                    shutil.rmtree(path)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
