"""The command: what it prints, what it writes, how it ends."""

import contextlib
import errno
import gzip
import io
import json
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coop_plan.api.cli.compare_cells import Cell
from coop_plan.api.cli.output import print_plan
from coop_plan.planner import Progress, plan
from coop_plan.planner.inspect.drawing import drawing
from coop_plan.schemas import (
    Compute,
    Free,
    Offload,
    Prefetch,
    TensorRead,
    Wait,
    Write,
    load_graph,
    load_plan,
)
from tests.support import make_graph, make_plan


def test_a_plan_starts_from_another(run, folder):
    assert run("graph.json", "--budget", "70%", "-o", "known.json")[0] == 0
    known = json.loads((folder / "known.json").read_text())
    options = ("--budget", "70%", "--from", "known.json", "--json")
    code, out, _ = run("graph.json", "--method", "coop", *options)
    assert code == 0
    assert json.loads(out)["cost_us"] <= known["cost_us"]
    example = str(Path(__file__).parents[2] / "examples" / "graph.json")
    code, _, err = run(example, *options)
    assert code == 2
    assert "known.json#/graph: wrong-graph: the plan is for graph sha256:" in err
    code, _, err = run("graph.json", *options, "--server", "http://localhost:1")
    assert (code, "--from is for plans made here" in err) == (2, True)


def test_alone_it_prints_its_help(run):
    assert run() == run("--help")
    assert run()[0] == 0


def test_the_shell_completes_as_documented():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert 'eval "$(_COOP_PLAN_COMPLETE=bash_source coop-plan)"' in page
    asked = {"COMP_WORDS": "coop-plan comp", "COMP_CWORD": "1"}
    asked["_COOP_PLAN_COMPLETE"] = "bash_complete"
    script = "from coop_plan.api.cli.main import main; main()"
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["plain,compare"]


def test_plans_without_a_subcommand_and_the_plan_passes_verify(run, folder):
    code, out, err = run("graph.json", "--budget", "330", "--alignment", "1", "-o", "plan.json")
    assert (code, err) == (0, "")
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines())
    assert rows["budget"].startswith("330 B")
    assert rows["recomputed ops"].endswith("of 9")
    assert set(rows) >= {"peak", "arena", "overhead", "fragmentation", "planning time"}
    plan = load_plan("plan.json")
    assert plan.peak_bytes <= 330
    assert plan.recomputed_ops > 0
    code, out, _ = run("verify", "graph.json", "plan.json")
    assert code == 0
    assert out.startswith("valid: ")


def test_a_bound_below_the_cost_of_default_variants_is_not_clamped(capsys):
    """A cheaper variant makes the overhead negative, and its bound with it."""
    op = {"inputs": [0], "outputs": [1], "cost_us": 10.0}
    fast = op | {"name": "fast", "cost_us": 4.0}
    graph = make_graph({0: ("input", 8), 1: ("output", 8)}, [op | {"variants": [fast]}])
    made = plan(graph, "100%", method="auto", time_limit=20)
    print_plan(made, 1)
    out = capsys.readouterr().out
    assert re.search(r"overhead +-60.00%\n.*overhead at least +-60.00%", out, re.DOTALL)
    cell = Cell("100%", "auto", "planned", drawing(graph, made)["figures"])
    assert cell.bound == pytest.approx(-0.6)
    print_plan(made.model_copy({"lower_bound_us": 10.0 - 1e-9}), 1)
    assert re.search(r"overhead at least +0.00%", capsys.readouterr().out)


def test_json_is_the_plan_or_with_an_output_file_its_figures(run):
    code, out, _ = run("graph.json", "--budget", "100%", "--json")
    assert code == 0
    assert json.loads(out)["steps"]
    code, out, _ = run("graph.json", "--budget", "100%", "--json", "-o", "plan.json")
    assert code == 0
    figures = json.loads(out)
    assert "steps" not in figures
    assert figures["overhead"] == 0.0
    assert figures["schema"] == "coop-plan/plan/1"


def test_graph_from_stdin_and_plan_to_stdout(run, folder, monkeypatch):
    text = (folder / "graph.json").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    code, out, _ = run("-", "--budget", "min", "-o", "-")
    assert code == 0
    assert json.loads(out)["schema"] == "coop-plan/plan/1"


def test_methods_lists_each_method_with_its_switches(run):
    code, out, _ = run("methods")
    assert code == 0
    for name in ("keep-all", "coop", "coop-offline", "dtr", "dte", "--ablate sliding-window"):
        assert name in out


def test_an_infeasible_budget_has_its_bound_and_the_blocking_op(run, folder):
    asked = ("graph.json", "--budget", "200", "--alignment", "1")
    for limit in ((), ("--time-limit", "0.001")):
        code, out, err = run(*asked, *limit, "-o", "plan.json")
        assert (code, out) == (3, "")
        assert err.count("\n") == 1
        assert "no schedule at all one below" in err
    assert not (folder / "plan.json").exists()
    code, out, _ = run(*asked, "--json")
    assert code == 3
    answer = json.loads(out)
    assert answer["min_feasible_bytes"] is None
    assert 200 < answer["budget_lower_bound_bytes"] <= answer["met_bytes"]
    assert answer["blocking_op_name"]
    code, out, err = run(*asked, "--smallest", "--json")
    answer = json.loads(out)
    least = answer["min_feasible_bytes"]
    assert code == 3
    assert f"the smallest it can meet is {least} bytes" in err
    assert answer["budget_lower_bound_bytes"] <= least <= answer["met_bytes"]
    assert run("graph.json", "--budget", least, "--alignment", "1")[0] == 0
    assert run("graph.json", "--budget", least - 1, "--alignment", "1")[0] == 3


BAD_GRAPHS = {
    "broken JSON": (lambda g: "{", ""),
    "not UTF-8": (lambda g: b"\xff\xfe\x00", ""),
    "another schema": (lambda g: g.update(schema="coop-plan/graph/2"), "#/schema"),
    "unknown tensor id": (lambda g: g["ops"][2].update(inputs=[77]), "#/ops/2/inputs/0"),
    "cycle": (lambda g: g["ops"][0].update(inputs=[8]), "#/ops/0/inputs/0"),
    "produced twice": (lambda g: g["ops"][3].update(outputs=[1]), "#/ops/3/outputs/0"),
    "duplicated id": (lambda g: g["tensors"][2].update(id=0), "#/tensors/2/id"),
    "negative size": (lambda g: g["tensors"][1].update(bytes=-1), "#/tensors/1/bytes"),
    "not a number": (lambda g: g["ops"][1].update(cost_us=float("nan")), "#/ops/1/cost_us"),
    "missing field": (lambda g: g.pop("ops"), "#/ops"),
    "unknown field": (lambda g: g["ops"][0].update(cost=1), "#/ops/0/cost"),
}


@pytest.mark.parametrize("fault", BAD_GRAPHS)
def test_a_bad_graph_ends_in_one_line_with_the_place(fault, run, folder, document):
    spoil, place = BAD_GRAPHS[fault]
    result = spoil(document)
    text = result if isinstance(result, (str, bytes)) and fault != "missing field" else None
    text = json.dumps(document) if text is None else text
    (folder / "graph.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = run("graph.json", "--budget", "50%", "-o", "plan.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"coop-plan: error: graph.json{place}: ")
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["graph.json"], "--budget"),
        (["graph.json", "--budget", "0"], "must be above zero"),
        (["graph.json", "--budget", "0.6"], "write a share as 60%"),
        (["graph.json", "--budget", "12 bananas"], "12GiB"),
        (["graph.json", "--budget", "-1"], "'-1'"),
        (["graph.json", "--budget", "nan"], "'nan'"),
        (["graph.json", "--budget", "50%", "--method", "magic"], "coop-offline"),
        (["graph.json", "--budget", "50%", "--alignment", "3"], "power of two"),
        (["graph.json", "--budget", "50%", "--ablate", "magic"], "no switch 'magic'"),
        (["graph.json", "--budget", "50%", "--time-limit", "-1"], "--time-limit"),
        (["graph.json", "--budget", "50%", "--time-limit", "nan"], "--time-limit"),
        (["graph.json", "--budget", "50%", "--time-limit", "inf"], "--time-limit"),
        (["graph.json", "--budget", "50%", "--time-limit", "1e308"], "--time-limit"),
        (["graph.json", "--budget", "50%", "--seed", "-1"], "--seed"),
        (["graph.json", "--budget", "9" * 20 + "%"], "--budget"),
        (["place", "b.csv", "--seed", "-1"], "--seed"),
        (["place", "b.csv", "--time-limit", "nan"], "--time-limit"),
        (["serve", "--max-time-limit", "nan"], "--max-time-limit"),
        (["--budget", "50%"], "Missing argument 'GRAPH'"),
        (["verfy", "graph.json", "plan.json"], "did you mean 'verify'"),
        (["verify", "-", "-"], "only one of GRAPH and PLAN"),
        (["graph.json", "--budget", "50%", "--outputs", "nowhere"], "--outputs"),
        (["graph.json", "--budget", "50%", "--nope"], "--nope"),
        (["graph.json", "--budget", "50%", "--link", "25"], "--link: '25' is 25 bytes per second"),
        (
            ["graph.json", "--budget", "50%", "--method", "optimal", "--relax"],
            "--relax is for checkmate, not for optimal",
        ),
        (["none.json", "--budget", "50%"], "none.json"),
        (["verify", "graph.json"], "PLAN"),
    ],
)
def test_wrong_usage_ends_with_2_in_one_line(arguments, expected, run):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


@pytest.mark.parametrize("place", [".", "none/plan.json", "graph.json/plan.json"])
def test_a_place_that_cannot_be_written_is_refused_before_planning(place, run):
    code, out, err = run("graph.json", "--budget", "50%", "-o", place)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "folder" in err


@pytest.mark.parametrize("place", ["socket", "", "x" * 300, "loop", "/dev/fd/999"])
def test_a_name_that_no_file_can_have_is_refused(place, run, folder):
    """A socket would be replaced by the file that is renamed to its name."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    (folder / "loop").symlink_to("loop")
    code, out, err = run("graph.json", "--budget", "100%", "-o", place)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert (folder / "socket").is_socket()
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("place", ["pipe", "to_pipe"])
def test_a_pipe_is_written_to_and_read_from_as_it_is(place, run, folder):
    os.mkfifo(folder / "pipe")
    (folder / "to_pipe").symlink_to("pipe")
    with ThreadPoolExecutor() as pool:
        written = pool.submit(Path("pipe").read_bytes)
        assert run("graph.json", "--budget", "100%", "-o", place)[0] == 0
        assert json.loads(written.result())["steps"]
        pool.submit(Path("pipe").write_bytes, Path("graph.json").read_bytes())
        assert run("floor", place) == run("floor", "graph.json")
    assert (folder / "pipe").is_fifo()


def test_open_files_and_devices_are_written_as_by_other_tools(run, folder):
    assert run("graph.json", "--budget", "100%", "-o", "/dev/null")[0] == 0
    assert Path("/dev/null").is_char_device()
    with Path("log").open("wb", buffering=0) as log:
        log.write(b"before\n")
        assert run("graph.json", "--budget", "100%", "-o", f"/dev/fd/{log.fileno()}")[0] == 0
        log.write(b"after\n")
    before, made, after = Path("log").read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert json.loads(made)["steps"]


def test_gzip_is_read_wherever_a_graph_or_a_plan_is(run, folder, monkeypatch):
    run("graph.json", "--budget", "100%", "-o", "plan.json")
    for name in ("graph.json", "plan.json"):
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    assert run("verify", "graph.json.gz", "plan.json.gz")[0] == 0
    assert load_plan("plan.json.gz") == load_plan("plan.json")
    packed = io.BytesIO(Path("graph.json.gz").read_bytes())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(packed))
    assert run("verify", "-", "plan.json")[0] == 0
    Path("cut.gz").write_bytes(Path("graph.json.gz").read_bytes()[:-9])
    code, _, err = run("cut.gz", "--budget", "100%")
    assert (code, err.count("\n")) == (2, 1)
    assert "cut.gz: cannot be unpacked" in err


FILES = {
    "plan": (lambda: Path("made.json").read_bytes(), "a coop-plan plan"),
    "graph": (lambda: Path("graph.json").read_bytes(), "a coop-plan graph"),
    "trace": (lambda: b'{"nodes": []}', "an execution trace of PyTorch"),
    "kineto": (lambda: b'{"traceEvents": [{"ph": "X", "ts": NaN}]}', "a Kineto trace"),
    "events": (lambda: b'[{"ph": "X"}]', "a Kineto trace"),
    "snapshot": (lambda: pickle.dumps([1]), "a pickle"),
    "chakra": (lambda: b"\t\n\x050.0.4\x0c\x08\x02\x12\x05first", "a Chakra trace in protobuf"),
    "chakra nodes": (lambda: b'{"nodes": [{"Id": 1, "NodeType": 4}]}', "a Chakra trace in JSON"),
    "chakra lines": (
        lambda: b'{"version": "0.0.4"}{"id": "1", "name": "mm", "type": "COMP_NODE"}',
        "a Chakra trace in JSON",
    ),
    "chakra list": (lambda: b'[{}, {"id": 1, "data_deps": []}]', "a Chakra trace in JSON"),
    "tar": (lambda: gzip.compress(b"et.json".ljust(257, b"\0") + b"ustar\0"), "an archive"),
    "marked": (lambda: b"\xef\xbb\xbf" + Path("graph.json").read_bytes(), "a coop-plan graph"),
    "wide": (lambda: Path("made.json").read_text().encode("utf-16"), "a coop-plan plan"),
    "buffers": (lambda: b"id,lower,upper,size\na,0,2,5\n", "a CSV file of buffers"),
    "inclusive": (lambda: b"buffer, size, start, end\na,5,0,1\n", "a CSV file of buffers"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_another_kind_is_named_for_what_it_is(kind, run, folder):
    run("graph.json", "--budget", "100%", "-o", "made.json")
    content, name = FILES[kind]
    Path("file").write_bytes(content())
    questions = [
        ("graph marked", "a graph", ["file", "--budget", "50%"]),
        ("graph marked", "a graph", ["verify", "file", "graph.json"]),
        ("plan wide", "a plan", ["verify", "graph.json", "file"]),
        ("trace snapshot", "an execution trace", ["import", "file", "-o", "x"]),
        (
            "kineto events",
            "a Kineto trace",
            ["import", "graph.json", "--kineto", "file", "-o", "x"],
        ),
        ("buffers inclusive", "a CSV file of buffers", ["place", "file"]),
    ]
    for fitting, wanted, arguments in questions:
        if kind not in fitting.split():
            code, out, err = run(*arguments)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert f"file: {name}" in err
            assert f", not {wanted}: " in err


def test_progress_without_a_terminal_is_a_line_each_ten_seconds_at_most(run, monkeypatch):
    now = 100.0
    monkeypatch.setattr("coop_plan.api.cli.progress.time.monotonic", lambda: now)

    def slow(*arguments, progress, **options):
        nonlocal now
        for second in range(1, 26):
            now = 100.0 + second
            progress(Progress(f"step {second}", second / 50))
        return plan(*arguments, **options)

    monkeypatch.setattr("coop_plan.planner.planning.plan", slow)
    code, _, err = run("graph.json", "--budget", "100%")
    assert (code, err.splitlines()) == (0, ["10 s: step 10 (20%)", "20 s: step 20 (40%)"])


def test_a_link_is_followed_and_a_mode_kept(run, folder):
    (folder / "below").mkdir()
    plan = folder / "below" / ("x" * 250)  # the temporary file beside it has a name of its own
    plan.write_text("old")
    plan.chmod(0o640)
    (folder / "link").symlink_to(plan)
    assert run("graph.json", "--budget", "100%", "-o", "link")[0] == 0
    assert (folder / "link").is_symlink()
    assert stat.S_IMODE(plan.stat().st_mode) == 0o640
    assert load_plan(plan).steps


def test_a_full_disk_ends_in_one_line(run, folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    code, out, err = run("graph.json", "--budget", "100%", "-o", "plan.json")
    assert (code, out, err) == (
        1,
        "",
        "coop-plan: error: plan.json cannot be written: No space left on device\n",
    )
    assert [path.name for path in folder.iterdir()] == ["graph.json"]


@pytest.mark.parametrize(
    ("redirection", "code", "expected"),
    [
        ("--budget 100% --json > /dev/full", 1, "stdout cannot be written: No space left"),
        ("--budget 100% > /dev/full", 1, "stdout cannot be written: No space left"),
        ("--budget 100% >&-", 1, "stdout cannot be written: it is closed"),
    ],
)
def test_a_stdout_that_takes_nothing_ends_in_one_line(redirection, code, expected, folder):
    command = f"{sys.executable} -c 'from coop_plan.api.cli.main import main; main()' graph.json"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        f"{command} {redirection}",
        shell=True,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert expected in done.stderr


@pytest.mark.parametrize("arguments", [["-", "--budget", "50%"], ["place", "-"]])
def test_a_closed_stdin_is_an_error(arguments, run, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "stdin" in err


def test_verify_reads_a_plan_from_stdin_and_holds_it_against_a_budget(run, folder, monkeypatch):
    run("graph.json", "--budget", "330", "--alignment", "1", "-o", "plan.json")
    text = (folder / "plan.json").read_bytes()
    for budget, expected in ((None, 0), ("330", 0), ("1GiB", 0), ("250", 1)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        option = [] if budget is None else ["--budget", budget]
        code, _, err = run("verify", "graph.json", "-", *option)
        assert code == expected
        assert ("over-budget" in err) == (expected == 1)


def test_a_plan_of_an_interrupted_search_is_written_and_the_code_is_130(run, folder, monkeypatch):
    """A method may take Ctrl-C as "enough"; a script must still see that it was interrupted."""

    def enough(*arguments, **options):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return plan(*arguments, **options)

    monkeypatch.setattr("coop_plan.planner.planning.plan", enough)
    # A shell that starts the tests in the background lets them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = run("graph.json", "--budget", "100%", "-o", "plan.json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, err.count("\n")) == (130, 1)
    assert load_plan("plan.json").steps


def test_verify_refuses_a_plan_of_another_graph_and_a_truncated_one(run, folder, chain, document):
    run("graph.json", "--budget", "330", "--alignment", "1", "-o", "plan.json")
    other = make_graph({0: ("input", 1), 1: ("output", 1)}, [{"inputs": [0], "outputs": [1]}])
    (folder / "other.json").write_text(other.to_json())
    code, out, err = run("verify", "other.json", "plan.json")
    assert (code, out) == (2, "")
    assert "wrong-graph" in err
    text = (folder / "plan.json").read_text()
    (folder / "cut.json").write_text(text[: len(text) // 2])
    code, out, err = run("verify", "graph.json", "cut.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("coop-plan: error: cut.json: not JSON")
    plan = json.loads(text)
    plan["steps"] = plan["steps"][:-2]
    (folder / "short.json").write_text(json.dumps(plan))
    code, out, err = run("verify", "graph.json", "short.json")
    assert (code, out) == (1, "")
    assert "short.json#/" in err


def test_an_old_plan_survives_a_failed_run(run, folder):
    (folder / "plan.json").write_text("old")
    assert run("graph.json", "--budget", "1", "-o", "plan.json")[0] == 3
    assert (folder / "plan.json").read_text() == "old"
    assert run("graph.json", "--budget", "100%", "-o", "plan.json")[0] == 0
    load_plan("plan.json")
    assert sorted(p.name for p in folder.iterdir()) == ["graph.json", "plan.json"]


def test_an_interruption_ends_with_130_and_leaves_nothing(folder):
    """A graph that takes seconds, interrupted after the command is under way."""
    tensors = {0: ("input", 1)} | dict.fromkeys(range(1, 4001), ("activation", 100))
    ops = [{"inputs": [t - 1], "outputs": [t]} for t in range(1, 2001)]
    ops += [{"inputs": [t - 1, 4001 - t], "outputs": [t]} for t in range(2001, 4001)]
    (folder / "big.json").write_text(make_graph(tensors, ops).to_json())
    script = (  # a shell starts what it puts into the background with SIGINT ignored
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from coop_plan.api.cli.main import main; print(flush=True); main()"
    )
    command = [sys.executable, "-c", script, "big.json", "--budget", "min", "-o", "plan.json"]
    environment_root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": environment_root},
    ) as child:
        try:
            assert child.stdout.readline() == b"\n"
            time.sleep(0.5)
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=600)
        finally:
            child.kill()
    assert child.returncode == 130
    assert err.decode().strip() == "coop-plan: error: interrupted"
    assert sorted(p.name for p in folder.iterdir()) == ["big.json", "graph.json"]


def test_capture_profiles_a_function_and_the_graph_can_be_planned(
    run, folder, monkeypatch, own_cache
):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(folder)
    (folder / "train_step.py").write_text(
        "import torch\n"
        "def example():\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))\n"
        "    return lambda x: model(x).relu().sum(), (torch.ones(8, 32),)\n"
    )
    code, _, err = run("capture", "train_step:example", "-o", "model.json")
    assert code == 0, err
    assert load_graph("model.json").ops
    assert run("model.json", "--budget", "min")[0] == 0


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("nonsense", "package.module:function"),
        ("no_such_module:f", "no_such_module"),
        ("json:no_such_function", "no_such_function"),
        ("json:dumps", "missing a required argument: 'obj'"),
    ],
)
def test_a_bad_capture_target_ends_in_one_line(target, expected, run, folder):
    pytest.importorskip("torch")
    code, out, err = run("capture", target, "-o", "model.json")
    assert code in (1, 2)
    assert (out, err.count("\n")) == ("", 1)
    assert expected in err
    assert not (folder / "model.json").exists()


def test_a_store_that_cannot_be_opened_ends_in_one_line(run, folder):
    pytest.importorskip("uvicorn")
    code, out, err = run("serve", "--store", "graph.json/plans")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "graph.json/plans cannot be opened" in err


def test_what_is_moved_to_the_host_is_printed(capsys):
    """Bytes, their place there, and what compute waits for, by cause."""
    graph = make_graph(
        {0: ("input", 8), 1: ("activation", 2048), 2: ("output", 8)},
        [{"inputs": [0], "outputs": [1]}, {"inputs": [1], "outputs": [2]}],
        device={"d2h_bytes_per_s": 1e6, "h2d_bytes_per_s": 2e6},
    )
    made = Write(buffer=1, tensor=1, offset=0, bytes=2048)
    left = Write(buffer=3, tensor=2, offset=None, bytes=8)
    steps = [
        Compute(op=0, reads=[TensorRead(tensor=0)], writes=[made]),
        *(Offload(buffer=1, host_offset=0), Wait(buffer=1), Free(buffers=[1])),
        *(Prefetch(buffer=2, tensor=1, offset=0, bytes=2048, from_=1), Wait(buffer=2)),
        *(Compute(op=1, reads=[2], writes=[left]), Free(buffers=[2])),
    ]
    print_plan(make_plan(graph, steps), 2)
    text = capsys.readouterr().out
    assert "swapped         4.00 KiB, both ways together" in text
    assert "host arena      2.00 KiB  (2048 bytes)" in text
    assert "stalls          1.02 ms for prefetches, 2.05 ms for offloads" in text
