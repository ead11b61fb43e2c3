"""The checks of the runtime on a CUDA device, each in a process of its own, under eight minutes.

    make gpu-bundle    # here: into .gpu/, what the machine with the device lacks
    pip install --no-index --no-deps --target /tmp/site .gpu/*.whl    # there, without a network
    cp -r benchmarks tests pyproject.toml /tmp/site; cd /tmp/site
    python3 -m benchmarks.gpu_step --json results.json

Models (GPT-2 in fp32 and bf16, ResNet-50 in channels_last, Llama with 1.2 B parameters, BERT-Large,
a U-Net) train in eager, as AOTAutograd's joint graph op by op, and under budgets. A step of ours
must give the losses and parameters of eager or of the joint graph: to the last bit, or, where
PyTorch has no deterministic kernel, within 1e-6, and the table says where. Its arena must be the
planned one and nothing lie outside; its peak, by our counters and by PyTorch's, be within the
budget. The other checks are described in `benchmarks.gpu_checks`.

Exits 1 when something did not hold, 2 without a CUDA device.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_checks import CHECKS, MEGA, ROOT, Row
from coop_plan.runtime.device.arena import process_bytes

LIMIT_S = 150
"""A check that takes longer on a device is stopped and counts as failed."""


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


def one(name: str, device: str, small: bool) -> dict[str, Any]:
    """Run a check in this process."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    process_bytes()  # from here on every allocation on the CPU is counted
    rows, faults = CHECKS[name](device, small)
    show(name, rows)
    return {"check": name, "rows": rows, "faults": faults}


def apart(name: str, given: list[str], limit_s: float | None) -> dict[str, Any]:
    """Run a check in a process of its own: a crash costs that check alone."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.gpu_step", "--only", name, *given]
        try:
            done = subprocess.run(
                [*command, "--json", str(result)], cwd=ROOT, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return {"check": name, "rows": [], "faults": [f"stopped after {limit_s} s"]}
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())["checks"][0]
            return found
        return {"check": name, "rows": [], "faults": [f"exit code {done.returncode}, no result"]}


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
    for name in names:
        if arguments.only:
            found.append(one(name, device, arguments.small))
        else:
            found.append(apart(name, given, LIMIT_S if device == "cuda" else None))
        if arguments.json:  # after each: what is done is kept
            about = {"device": told, "torch": torch.__version__, "checks": found}
            arguments.json.write_text(json.dumps(about, indent=1))
    faults = [f"{each['check']}: {fault}" for each in found for fault in each["faults"]]
    took = f"{told}, PyTorch {torch.__version__}, {time.perf_counter() - began:.0f} s"
    print("\n  ".join([f"{took}; NOT HELD:", *faults]) if faults else f"{took}; all held")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
