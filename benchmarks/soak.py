"""Soak test of the runtime: two threads train for minutes, and resident memory must stay flat.

    python -m benchmarks.soak [--minutes 30] [--budget min]

Each thread trains a model and an eager twin: random lengths, evaluation without `no_grad`, raised
exceptions, kept gradients, a model called twice for one loss, forked children that allocate. Exits
1 if a number differs from eager's, a child fails, or resident memory grew by more than a tenth from
the second third of the time to the last.
"""

import argparse
import copy
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

LENGTHS = (8, 16, 24, 48)
WIDTH = 64
GROWTH = 1.1


class Net(nn.Sequential):
    """A model without dropout, since threads share one stream of random numbers."""

    def __init__(self) -> None:
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        super().__init__(*layers)


def resident_bytes() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fork_a_child() -> bool:
    """True if a forked child allocates and exits."""
    child = os.fork()
    if child == 0:
        torch.empty(1 << 16).fill_(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def watched(seed: int, budget: str, until: float, faults: list[str]) -> None:
    """Train, and append an exception to `faults`."""
    try:
        train(seed, budget, until, faults)
    except BaseException as error:
        faults.append(f"thread {seed}: {type(error).__name__}: {error}")
        raise


def train(seed: int, budget: str, until: float, faults: list[str]) -> None:
    """Train in one thread; differences are appended to `faults`."""
    source, torch_source = random.Random(seed), torch.Generator().manual_seed(seed)
    eager = Net()
    planned = copy.deepcopy(eager)
    compiled = torch.compile(planned, backend="coop", options={"budget": budget})
    pairs: list[tuple[Net, Callable[[torch.Tensor], torch.Tensor]]] = [
        (eager, eager),
        (planned, compiled),
    ]
    kept: list[list[torch.Tensor]] = []
    steps = 0
    while time.monotonic() < until and not faults:
        x = torch.randn(source.choice(LENGTHS), WIDTH, generator=torch_source)
        kind = source.choice(("plain", "plain", "evaluate", "throw", "keep", "twice", "fork"))
        outcome = []
        for model, step in pairs:
            model.zero_grad()
            if kind == "evaluate":
                outcome.append(step(x).detach())
                continue
            try:
                loss = step(x).square().mean()
                if kind == "throw":
                    raise ValueError("on purpose")
                if kind == "twice":
                    loss = loss + step(x + 1).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
            except ValueError:
                continue
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            outcome.append(torch.cat([gradient.flatten() for gradient in gradients]))
            if kind == "keep":
                kept = [*kept[-3:], gradients]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad  # type: ignore[operator]
        if kind == "fork" and not fork_a_child():
            faults.append(f"thread {seed}, step {steps}: a forked child failed")
        if len(outcome) == 2 and not torch.equal(*outcome):
            faults.append(f"thread {seed}, step {steps}: '{kind}' differs from eager")
        steps += 1
    print(f"thread {seed}: {steps} steps", flush=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--budget", default="min")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # PyTorch's list of backends is not thread-safe while it is filled.
    torch.compile(Net(), backend="coop", options={"budget": arguments.budget})
    began = time.monotonic()
    until, faults = began + 60 * arguments.minutes, list[str]()
    threads = [
        threading.Thread(target=watched, args=(seed, arguments.budget, until, faults))
        for seed in (1, 2)
    ]
    for thread in threads:
        thread.start()
    seen: list[tuple[float, int]] = []
    while any(thread.is_alive() for thread in threads):
        seen.append((time.monotonic() - began, resident_bytes()))
        time.sleep(1)
    third = (until - began) / 3
    early = [size for at, size in seen if third <= at < 2 * third]
    late = [size for at, size in seen if at >= 2 * third]
    if early and late:
        before, after = statistics.median(early), statistics.median(late)
        print(f"resident: {before / 1e6:.1f} MB, at last {after / 1e6:.1f} MB")
        if after > GROWTH * before:
            faults.append("resident memory grew")
    for fault in faults:
        print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
