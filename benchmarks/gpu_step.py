"""The checks of the runtime on a CUDA device, each in a process of its own.

    make gpu-bundle    # here: into .gpu/, what the machine with the device lacks
    pip install --no-index --no-deps --target /tmp/site .gpu/*.whl    # there, without a network
    cp -r benchmarks tests pyproject.toml /tmp/site; cd /tmp/site
    python3 -m benchmarks.gpu_step --json results.json

Models (GPT-2 in fp32 and bf16, ResNet-50 in channels_last, Llama with 1.2 B parameters, BERT-Large,
a U-Net) train in eager, as AOTAutograd's joint graph op by op, and under budgets. A step of ours
must give the losses and parameters of eager or of the joint graph: to the last bit, or, where
PyTorch has no deterministic kernel, within what two runs of the joint graph differ, and the table
says where. Its arena must be the planned one and nothing lie outside; its peak, by our counters and
by PyTorch's, be within the budget. `benchmarks.gpu` has these checks and the others. They plan side
by side, and one at a time is on the device while steps are timed or ops measured.

Exits 1 when something did not hold, 2 without a CUDA device.
"""

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import checks
from benchmarks.gpu.checks import ROOT
from benchmarks.gpu.comparisons import COMPARISONS
from benchmarks.gpu.loops import LOOPS
from benchmarks.gpu.training import MEGA, TURNS, Row, alone, memory
from coop_plan.runtime.capture import profiler
from coop_plan.runtime.device.arena import process_bytes

CHECKS = checks.CHECKS | LOOPS | COMPARISONS
LIMIT_S = 300
"""A check that takes longer on a device is stopped and counts as failed."""

CHECKS_AT_ONCE = 9

GIB = {
    "gpt2-fp32": 11,
    "gpt2-bf16": 10,
    "accumulation": 10,
    "resnet50": 8,
    "llama-1b": 30,
    "bert-large": 38,
    "unet": 22,
    "methods": 38,
    "roofline": 34,
    "peers": 14,
    "graph": 16,
    "swap": 10,
    "batches": 10,
    "fraction": 8,
    "tried": 8,
    "largest": 34,
}
"""What a check takes of the device at most, about."""

LITTLE = 2
"""And all others."""


def show(name: str, rows: list[Row]) -> None:
    """The rows of one check as a table on stdout."""
    table = Table(title=f"{name}: forward and backward of one step")
    heads = ("mode", "peak MB", "first MB", "budget MB", "arena MB", "step ms", "host ms")
    for head in (*heads, "x eager", "x joint", "planned", "in step", "difference"):
        table.add_column(head, justify="left" if head == "mode" else "right")

    def told(row: Row, key: str, form: str, factor: float = 1.0) -> str:
        return "" if row.get(key) is None else format(row[key] * factor, form)

    timed = [row for row in rows if "seconds" in row]
    for row in timed:
        figures = [told(row, key, ".2f", 1 / MEGA) for key in ("peak", "first_peak")]
        figures += [told(row, key, ".2f", 1 / MEGA) for key in ("budget", "arena")]
        figures += [told(row, key, ".2f", 1e3) for key in ("seconds", "host")]
        figures += [f"{row['seconds'] / base['seconds']:.3f}" for base in timed[:2]]
        figures += [""] * (2 - len(timed[:2]))
        figures += [told(row, key, ".1%") for key in ("planned", "in_step")]
        apart = row.get("difference")
        table.add_row(
            row["mode"], *figures, "" if apart is None else f"{apart:.1e}" if apart else "none"
        )
    if timed:
        Console(width=150).print(table)
    for row in rows:
        if "said" in row:
            print(f"{name}, {row['mode']}: {row['said']}")


def _in_turn(measure: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*given: Any) -> Any:
        with alone():
            return measure(*given)

    return measured


def one(name: str, device: str, small: bool) -> dict[str, Any]:
    """Run a check in this process."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    profiler._measure = _in_turn(profiler._measure)
    process_bytes()  # from here on every allocation on the CPU is counted
    # `largest` waits for the others to be gone by itself.
    with contextlib.nullcontext() if name == "largest" else memory(fcntl.LOCK_SH):
        rows, faults = CHECKS[name](device, small)
    for row in rows:
        row.pop("numbers", None)
    show(name, rows)
    return {"check": name, "rows": rows, "faults": faults}


class Apart:
    """A check in a process of its own: a crash costs that check alone."""

    def __init__(self, name: str, given: list[str], folder: Path) -> None:
        self.name, self.began = name, time.monotonic()
        self._result, self._log = folder / f"{name}.json", folder / f"{name}.log"
        command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu_step"]
        command += ["--only", name, *given, "--json", str(self._result)]
        turn = {TURNS: str(folder), "OMP_NUM_THREADS": "2"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | turn, stdout=log, stderr=subprocess.STDOUT
            )

    def found(self, limit_s: float | None) -> dict[str, Any] | None:
        """What it has found; None: it goes on."""
        code, faults = self._process.poll(), []
        if code is None:
            if limit_s is None or time.monotonic() - self.began < limit_s:
                return None
            self._process.kill()
            faults = [f"stopped after {limit_s} s"]
        print(self._log.read_text(), flush=True)
        took = round(time.monotonic() - self.began, 1)
        if not faults and self._result.exists():
            found: dict[str, Any] = json.loads(self._result.read_text())["checks"][0]
            return {**found, "took_s": took}
        faults = faults or [f"exit code {code}, no result"]
        return {"check": self.name, "rows": [], "faults": faults, "took_s": took}


def side_by_side(
    names: list[str], given: list[str], limit_s: float | None, room: float
) -> Iterator[dict[str, Any]]:
    """What each check found, as they end; no more at once than have room (GiB) together."""
    waiting, running = list(names), list[Apart]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            free = room - sum(GIB.get(check.name, LITTLE) for check in running)
            for name in list(waiting):
                need = min(room, GIB.get(name, LITTLE))
                if need <= free and len(running) < CHECKS_AT_ONCE:
                    waiting.remove(name)
                    running.append(Apart(name, given, Path(folder)))
                    free -= need
            for check in list(running):
                if (found := check.found(limit_s)) is not None:
                    running.remove(check)
                    yield found
            time.sleep(0.1)


def main() -> int:
    """Run the checks; the exit code says whether all held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checks", default=",".join(CHECKS), help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--only", choices=CHECKS, help="one check, in this process")
    parser.add_argument("--device", choices=("cuda", "cpu"), help=argparse.SUPPRESS)  # for tests
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)  # for tests
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else arguments.checks.split(",")
    if unknown := set(names) - {*CHECKS}:
        parser.error(f"no such checks: {', '.join(unknown)}")
    if arguments.device is None and not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 2
    device = arguments.device or "cuda"
    told = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    began, found = time.perf_counter(), []
    given = [f"--device={device}", *(["--small"] if arguments.small else [])]
    results: Iterable[dict[str, Any]] = (one(name, device, arguments.small) for name in names)
    if not arguments.only:
        cuda = device == "cuda"
        room = torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 64.0
        results = side_by_side(names, given, LIMIT_S if cuda else None, room)
    for each in results:
        found.append(each)
        if arguments.json:  # after each: what is done is kept
            about = {"device": told, "torch": torch.__version__, "checks": found}
            arguments.json.write_text(json.dumps(about, indent=1))
    faults = [f"{each['check']}: {fault}" for each in found for fault in each["faults"]]
    took = f"{told}, PyTorch {torch.__version__}, {time.perf_counter() - began:.0f} s"
    print("\n  ".join([f"{took}; NOT HELD:", *faults]) if faults else f"{took}; all held")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
