"""What the README shows is what its commands print, and its code is that of examples/."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from coop_plan.schemas import load_plan
from tests.runtime.ranks import cache_with_extension

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
MARK = "@"

pytestmark = pytest.mark.timeout(1200)  # commands start and profile slowly on a busy machine

VOLATILE = (
    r"(?<=^planning time   ).*",
    r"(?<=^time         ).*",
    r"(?<=^location: /plans/)[\w-]+",  # a key names the planner's version
    r"(?<=^content-length: ).*",
    r"(?<=^traceparent: ).*",
)
"""What differs from one machine, run or version to another."""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def console(word):
    """The commands of the one console block with `word` in a command, with what they print."""
    [text] = [b for b in blocks("console") if any(word in c for c, _ in commands(b))]
    return commands(text)


def commands(block):
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.rstrip("\n").split("\n")
        count = 1 + next(i for i, line in enumerate(lines) if not line.endswith("\\"))
        yield "\n".join(lines[:count]), stable("\n".join(lines[count:]))


def stable(text):
    """The lines without what is volatile, each without spaces at its end."""
    lines = [line.rstrip() for line in text.splitlines()]
    for pattern in VOLATILE:
        lines = [re.sub(pattern, "…", line) for line in lines]
    return [line for line in lines if line and not line.startswith("compiling the planner's")]


@pytest.fixture
def clone(tmp_path):
    """A folder with the examples, and an environment whose `coop-plan` is that of this checkout."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    entry = "import sys; from coop_plan.api.cli.main import main; main()"
    programs = {"python": '"$@"', "coop-plan": f'-c {shlex.quote(entry)} "$@"'}
    for name, arguments in programs.items():
        program = binaries / name
        program.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}\n")
        program.chmod(0o755)
    cache = tmp_path / "cache"
    if find_spec("torch") is not None:
        cache_with_extension(cache)
    environment = os.environ | {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(cache),
        "PYTHONWARNINGS": "ignore",  # PyTorch's own
    }
    return tmp_path, environment


def play(steps, clone):
    """Run the commands in one shell and compare what each prints and how it ends."""
    folder, environment = clone
    status = f"echo; echo '{MARK}' $status"
    script = ["exec 2>&1", "status=0"]
    for command, _ in steps:
        script += ["(exit $status)", command, "status=$?", status]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = re.findall(rf"(.*?)^{MARK} (\d+)\n", done.stdout, re.DOTALL | re.MULTILINE)
    assert len(answers) == len(steps), done.stdout
    followed = [command for command, _ in steps[1:]] + [""]
    for (command, shown), (printed, code), after in zip(steps, answers, followed, strict=True):
        assert stable(printed) == shown, command
        if after != "echo $?":
            assert code == "0", command


def test_every_block_is_one_that_a_test_runs():
    fences = re.findall(r"^```(\w*)\n.*?^```", TEXT, re.DOTALL | re.MULTILINE)
    assert sorted(fences) == ["console"] * 5 + ["python"] * 2 + ["sh"]
    for word in ("train.py", "capture", "echo $?", "serve", "place"):
        assert console(word)


@pytest.mark.parametrize("name", ["train.py", "train_step.py"])
def test_the_code_shown_is_that_of_the_examples(name):
    assert f"](examples/{name})" in TEXT
    text = (ROOT / "examples" / name).read_text()
    if name == "train.py":
        assert text.partition('"""\n\n')[2] == blocks("python")[0]


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_the_training_loop_prints_the_loss_and_report_shown(clone):
    """Three commands lead to a budgeted run and its picture; the installation is the fixture's."""
    (install, _), (train, (loss, *report)), (show, _) = console("train.py")
    assert install == "pip install '.[torch]'"
    folder, environment = clone
    done = [
        subprocess.run(
            shlex.split(command),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for command in (train, show)
    ]
    printed, picture = done[0].stdout.splitlines(), done[1].stderr.splitlines()
    assert float(printed[0].split()[1]) == pytest.approx(float(loss.split()[1]), rel=1e-6)
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed[1:]]
    shown = [re.split(r"\s{2,}", line.strip()) for line in report]
    assert [(row[0], len(row)) for row in rows] == [(row[0], len(row)) for row in shown]
    found = {row[0]: row[1:] for row in rows}
    assert found["outside the plan"] == ["0 B"]
    assert float(found["peak"][1].split()[0]) <= float(found["budget"][0].split()[0])
    assert re.fullmatch(r"map.html: [\d,]+ bytes", picture.pop())
    assert (folder / "map.html").stat().st_size


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_capture_plan_and_verify_print_what_is_shown(clone):
    play(list(console("capture")), clone)


def test_a_plan_is_drawn_explained_and_compared_as_shown(clone):
    """All lines of the block but that of `fit`, which tests/api/test_fit.py has."""
    folder, environment = clone
    [block] = [b for b in blocks("sh") if "coop-plan show" in b]
    lines = [line for line in block.splitlines() if " fit " not in line]
    assert len(lines) == 3
    planned = "coop-plan examples/graph.json --budget 50% -o plan.json"
    script = "\n".join(["set -e", planned, *lines])
    subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True)
    assert (folder / "map.html").stat().st_size
    assert (folder / "methods.html").stat().st_size


def test_a_budget_that_cannot_be_met_ends_as_shown(clone):
    steps = list(console("echo $?"))
    play(steps, clone)
    assert steps[-1] == ("echo $?", ["3"])


def test_placement_prints_and_writes_what_is_shown(clone):
    pytest.importorskip("matplotlib")
    play(list(console("place")), clone)
    assert (clone[0] / "map.html").stat().st_size


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_service_answers_as_shown(clone):
    pytest.importorskip("uvicorn")
    [(serve, shown), (request, answer)] = console("serve")
    assert shown == []
    folder, environment = clone
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = shlex.split(serve.removesuffix("&").replace("8000", port))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        await_answer(f"http://127.0.0.1:{port}/healthz", server)
        patient = request.replace("curl", "curl -H 'Prefer: wait=600'").replace("8000", port)
        asked = ["bash", "-c", patient]
        done = subprocess.run(
            asked, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
    finally:
        server.terminate()
        server.wait(60)
    heads = [line for line in stable(done.stdout) if not line.startswith(("date", "server"))]
    assert sorted(heads) == sorted(answer)
    assert load_plan(folder / "plan.json").budget_bytes


def await_answer(address, server):
    """Wait until the address answers; fail when the server has ended."""
    while True:
        try:
            with urllib.request.urlopen(address, timeout=60):
                return
        except urllib.error.URLError:
            assert server.poll() is None, "the server has ended"
            time.sleep(0.1)


def test_the_python_shown_runs(clone):
    folder, environment = clone
    code = blocks("python")[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.split()) == 2
