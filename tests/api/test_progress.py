"""Long work on a pseudo-terminal shows its progress with a time left, and none of it in a pipe."""

import os
import pty
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from coop_plan.api.cli.progress import _time

ROOT = Path(__file__).parents[2]
GRAPH = str(ROOT / "examples" / "graph.json")
ENTRY = "import sys; from coop_plan.api.cli.main import main; main()"
CODES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\r")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")

COMMANDS = [
    pytest.param(
        [GRAPH, "--budget", "50%", "--method", "auto", "--time-limit", "4"], "of 4 s", id="auto"
    ),
    pytest.param(["explain", GRAPH], "of the peak", id="explain"),
    pytest.param(["compare", GRAPH, "--budgets", "80%,50%"], "of 6 plans", id="compare"),
    pytest.param(
        ["fit", "examples.train_step:example", "--device", "rtx4090"],
        "capturing at batch",
        id="fit",
        marks=[needs_torch, pytest.mark.slow],
    ),
    pytest.param(
        ["capture", "examples.train_step:example", "-o", "-"],
        "profiling",
        id="capture",
        marks=[needs_torch, pytest.mark.slow],
    ),
    pytest.param(
        ["calibrate", "-o", "-"],
        "measuring",
        id="calibrate",
        marks=[needs_torch, pytest.mark.slow],
    ),
]

FIRST_STEP = """
import torch
from torch import nn
from coop_plan.planner import progress
progress.SECONDS_A_LINE = 0.0
model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())])
step = torch.compile(lambda x: model(x).sum(), backend="coop", options={"budget": "70%"})
step(torch.randn(256, 64)).backward()
"""


def on_terminal(arguments, folder, entry=ENTRY):
    """Return code, and what a command writes to a terminal that is its stderr."""
    if find_spec("torch") is not None:
        from tests.runtime.ranks import cache_with_extension

        cache_with_extension(folder)
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-c", entry, *arguments],
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    return process.wait(), CODES.sub(b"", seen).decode(errors="replace")


@pytest.mark.parametrize(("arguments", "words"), COMMANDS)
def test_long_work_shows_its_progress_on_a_terminal(arguments, words, tmp_path):
    code, seen = on_terminal(arguments, tmp_path)
    assert code == 0, seen[-2000:]
    assert words in seen
    if "--time-limit" in arguments:
        assert re.search(r"\d of 4 s, \d s left", seen)


@needs_torch
def test_a_first_step_logs_its_progress_and_its_duration(tmp_path):
    """With no least time between lines; `tests/planner/test_progress.py` has that."""
    code, seen = on_terminal([], tmp_path, FIRST_STEP)
    assert code == 0, seen[-2000:]
    assert re.search(r"profiling \d+ ops: about \d+ s left", seen)
    assert re.search(r"step 0: compiled in \d+ s", seen)


@pytest.mark.parametrize(
    "asked",
    [
        ["--budget", "50%", "--method", "auto", "--time-limit", "3"],
        ["explain", GRAPH],
        ["compare", GRAPH, "--budgets", "80%"],
    ],
    ids=lambda asked: asked[0].lstrip("-"),
)
def test_a_pipe_gets_no_progress(asked):
    if asked[0].startswith("-"):
        asked = [GRAPH, *asked]
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, *asked], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert [line for line in done.stderr.splitlines() if "kernels" not in line] == []


def test_the_time_left_is_that_of_the_limit_or_of_the_share():
    assert _time(12.0, 1.0, 60.0) == "12 of 60 s, 48 s left"
    assert _time(70.0, None, 60.0) == "70 of 60 s, 0 s left"
    assert _time(10.0, 0.25, None) == "10 s, about 30 s left"
    assert _time(10.0, None, None) == "10 s"
