"""Checks of the runtime on a CUDA device, each in its own process.

    make gpu-bundle    # here: into .gpu/, the packages that the GPU machine lacks
    pip install --no-index --no-deps --target /tmp/site .gpu/*.whl    # there, without a network
    cp -r benchmarks tests pyproject.toml /tmp/site; cd /tmp/site
    python3 -m benchmarks.gpu_step --json results.json

Models (GPT-2 in fp32 and bf16, ResNet-50 in channels_last, Llama with 1.2 B parameters, BERT-Large,
a U-Net) train in eager, as AOTAutograd's joint graph op by op, and under budgets. A planned step
must give the losses and parameters of eager or of the joint graph to the last bit. If PyTorch has
no deterministic kernel, it must stay within the difference of two runs of the joint graph; the
table says so. Its arena must be the planned one, with nothing outside; its peak, by our counters
and by PyTorch's, must be within the budget. `benchmarks.gpu` has all checks. They plan in parallel;
one at a time uses the device while steps are timed or ops measured.

Exits 1 if a check did not hold, 2 without a CUDA device.
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

from benchmarks.gpu import checks
from benchmarks.gpu.checks import ROOT
from benchmarks.gpu.comparisons import COMPARISONS
from benchmarks.gpu.loops import LOOPS
from benchmarks.gpu.training import TURNS, Row, alone, memory
from benchmarks.report import Column, Report, scaled
from coop_plan.runtime.capture import profiler
from coop_plan.runtime.device.arena import process_bytes

CHECKS = checks.CHECKS | LOOPS | COMPARISONS
LIMIT_S = 390
"""Time limit of a check on a device; a longer one is stopped and counts as failed."""

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
    "cuda-graphs-gpt2-bf16": 10,
    "cuda-graphs-resnet50": 8,
    "swap": 10,
    "batches": 10,
    "fraction": 8,
    "tried": 8,
    "largest": 34,
    "update": 12,
}
"""Device memory of each check, about."""

OTHER_GIB = 2
"""Device memory of any other check."""

SECONDS = {"cuda-graphs-gpt2-bf16": 250, "cuda-graphs-resnet50": 270}
"""Time of a check, modelled: 65 s for kernels of the planner, 70 to 90 s for Inductor, 15 s for
each planned row, 20 s for the others."""

OTHER_SECONDS = 150
"""Time of any other check."""


def estimated_s(names: list[str], room: float) -> float:
    """Modelled time of checks that run at once within `room` GiB."""
    each = {name: SECONDS.get(name, OTHER_SECONDS) for name in names}
    full = sum(seconds * GIB.get(name, OTHER_GIB) for name, seconds in each.items()) / room
    return max(full, *each.values())


MB, MS = scaled(1e-6, ".2f"), scaled(1e3, ".2f")
COLUMNS = (
    *("mode", Column("peak", "peak MB", MB), Column("first_peak", "first MB", MB)),
    *(Column("budget", "budget MB", MB), Column("arena", "arena MB", MB)),
    *(Column("seconds", "step ms", MS), Column("host", "host ms", MS)),
    *(Column("to_eager", "x eager", ".3f"), Column("to_joint", "x joint", ".3f")),
    *(Column("planned", form=".1%"), Column("in_step", form=".1%")),
    *(Column("to_inductor", "x inductor", ".3f"), Column("paid", form=".1%")),
    Column("difference", form=lambda apart: f"{apart:.1e}" if apart else "none"),
)


def show(name: str, rows: list[Row]) -> None:
    """Print the rows of one check."""
    report = Report(*COLUMNS, title=f"{name}: forward and backward of one step")
    timed = [row for row in rows if "seconds" in row]
    for row in timed:
        bases = zip(("to_eager", "to_joint"), timed, strict=False)
        report.add(**row, **{field: row["seconds"] / base["seconds"] for field, base in bases})
    if timed:
        report.finish()
    for row in rows:
        if "note" in row:
            print(f"{name}, {row['mode']}: {row['note']}")


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
    # `largest` waits itself until the others have ended.
    with contextlib.nullcontext() if name == "largest" else memory(fcntl.LOCK_SH):
        rows, faults = CHECKS[name](device, small)
    for row in rows:
        row.pop("numbers", None)
    show(name, rows)
    return {"check": name, "rows": rows, "faults": faults}


class Apart:
    """A check in its own process: a crash fails that check alone."""

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
        """Result of the check; None while it runs."""
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
    """Yields results as checks end; those that run at once fit into `room` GiB together."""
    waiting, running = list(names), list[Apart]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            free = room - sum(GIB.get(check.name, OTHER_GIB) for check in running)
            for name in list(waiting):
                need = min(room, GIB.get(name, OTHER_GIB))
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
    """Returns 1 unless every check held, 2 without a device."""
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
    device_name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    began, found = time.perf_counter(), []
    given = [f"--device={device}", *(["--small"] if arguments.small else [])]
    results: Iterable[dict[str, Any]] = (one(name, device, arguments.small) for name in names)
    if not arguments.only:
        cuda = device == "cuda"
        room = torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 64.0
        print(f"{len(names)} checks, about {estimated_s(names, room):.0f} s", flush=True)
        results = side_by_side(names, given, LIMIT_S if cuda else None, room)
    for each in results:
        found.append(each)
        if arguments.json:  # after each, so that finished checks are kept
            about = {"device": device_name, "torch": torch.__version__, "checks": found}
            arguments.json.write_text(json.dumps(about, indent=1))
    faults = [f"{each['check']}: {fault}" for each in found for fault in each["faults"]]
    took = f"{device_name}, PyTorch {torch.__version__}, {time.perf_counter() - began:.0f} s"
    print("\n  ".join([f"{took}; NOT HELD:", *faults]) if faults else f"{took}; all held")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
