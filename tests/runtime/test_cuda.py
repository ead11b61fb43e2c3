"""The CUDA path without a CUDA device: its parts by themselves, and whole on a pretended one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import coop_plan
from coop_plan import runtime
from coop_plan.runtime.capture.joint_graph import _device_of_step, _hook_cuda_allocator
from coop_plan.runtime.capture.profiler import _with_forward_state
from coop_plan.runtime.device import cuda
from coop_plan.runtime.execute.rng_state import CpuGenerator, CudaGenerator, default_generator
from tests.params import slow_after
from tests.runtime import simulated_cuda

ROOT = Path(__file__).parents[2]

cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch is built for CUDA")


@pytest.fixture(scope="session")
def library():
    """The pretended device, compiled once into the user's cache."""
    return simulated_cuda.library()


def run(*arguments):
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    return done.returncode, done.stdout + done.stderr


@cpu_build
@pytest.mark.parametrize(
    "module", ["test_cuda_device.py", "test_cuda_iterations.py", "test_graph_replay.py"]
)
@pytest.mark.parametrize("marked", slow_after(1, ["not slow", "slow"]))
def test_steps_on_a_pretended_device(library, cache, module, marked):
    tests = Path(__file__).with_name(module)
    plain = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marked)
    code, said = run("tests.runtime.simulated_cuda", library, "pytest", tests, *plain)
    assert code == 0, said
    assert re.search(r"\b[1-9]\d* passed", said), said


@cpu_build
@pytest.mark.parametrize(
    ("check", "row"),
    slow_after(
        1,
        [
            ("update", ""),
            ("gpt2-bf16", r"coop min .* none"),
            ("cuda-graphs-resnet50", r"coop 60%, graphs .* none"),
        ],
    ),
)
def test_the_benchmark_on_a_pretended_device(library, cache, check, row):
    pytest.importorskip("transformers")
    small = ("--small", "--only", check)
    code, said = run("tests.runtime.simulated_cuda", library, "benchmarks.gpu_step", *small)
    assert code == 0, said
    assert "all held" in said
    assert re.search(row, said), said


def test_each_check_of_the_benchmark_has_a_process_of_its_own(cache, tmp_path):
    """One that crashes, here for want of CUDA, costs itself alone."""
    pytest.importorskip("transformers")
    small = ("--device", "cpu", "--small", "--checks", "graph,gpt2-fp32")
    code, said = run("benchmarks.gpu_step", *small, "--json", tmp_path / "found.json")
    assert code == 1, said
    found = json.loads((tmp_path / "found.json").read_text())["checks"]
    crashed, done = sorted(found, key=lambda check: not check["faults"])
    assert crashed["check"] == "graph"
    assert crashed["faults"] == ["exit code 1, no result"]
    assert done["faults"] == []
    assert [row["mode"] for row in done["rows"]][:3] == ["eager", "joint", "coop 100%"]


def test_the_benchmark_without_a_device_says_so(cache, monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert run("benchmarks.gpu_step") == (2, "no CUDA device here: nothing was checked\n")


@cpu_build
def test_a_pytorch_without_cuda_is_named():
    with pytest.raises(runtime.BuildError, match=r"could not be hooked: .*libc10_cuda"):
        cuda.install_allocator()


def graph_on(*devices):
    """A graph with an input on each device, in fake mode."""
    graph = fx.Graph()
    with FakeTensorMode():
        for i, device in enumerate(devices):
            graph.placeholder(f"x{i}").meta["val"] = torch.empty(2, device=device)
    graph.output(())
    return fx.GraphModule({}, graph)


def test_the_device_of_a_step(monkeypatch):
    monkeypatch.setattr(cuda, "install_allocator", lambda: None)
    monkeypatch.setattr(cuda, "capturing", lambda: False)
    assert _device_of_step(graph_on("cpu", "cpu")) == torch.device("cpu")
    assert _device_of_step(graph_on("cpu", "cuda:1")) == torch.device("cuda:1")
    with pytest.raises(runtime.CaptureError, match="x0 on cuda:0, x2 on cuda:1"):
        _device_of_step(graph_on("cuda:0", "cpu", "cuda:1"))
    with pytest.raises(runtime.CaptureError, match="not on meta"):
        _device_of_step(graph_on("meta"))
    monkeypatch.setattr(cuda, "capturing", lambda: True)
    with pytest.raises(runtime.CaptureError, match="run the step once before"):
        _hook_cuda_allocator()


class Philox:
    """As a CUDA generator: refuses an offset that is not a multiple of four."""

    def __init__(self):
        self.manual_seed(7)

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0
        self.offset = offset

    def draw(self):
        self.offset += 4
        return hash((self.seed, self.offset))


def test_a_cuda_generator_draws_again_from_its_offset():
    philox = Philox()
    generator = CudaGenerator(philox)
    philox.draw()
    before = generator.state()
    assert before == (7, 4)
    drawn = [philox.draw(), philox.draw()]
    for seed in (7, 8):  # the user may seed between the forward and the backward
        if seed != 7:
            philox.manual_seed(seed)
        present = generator.state()
        generator.set(before)
        assert [philox.draw(), philox.draw()] == drawn
        generator.set(present)
        assert generator.state() == present


def test_the_cpus_generator_draws_again_from_its_state():
    generator = default_generator(torch.device("cpu"))
    assert isinstance(generator, CpuGenerator)
    before = generator.state()
    drawn = torch.rand(3)
    generator.set(before)
    assert torch.equal(torch.rand(3), drawn)


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def device(monkeypatch):
    """A device whose current stream and capture the test sets, with a log of what was asked."""
    log = []
    memory = SimpleNamespace(
        data_ptr=lambda: 512, record_stream=lambda stream: log.append(f"{stream.name} uses it")
    )
    state = SimpleNamespace(log=log, stream=Stream("a", log), capturing=False)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: memory)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def test_a_stream_waits_for_the_last_that_used_the_block(device):
    first, second = device.stream, Stream("b", device.log)
    block = cuda.Block(4096, 0)
    for stream in (first, first, second, second, first):
        device.stream = stream
        block.use()
    assert device.log == ["b waits for a", "b uses it", "a waits for b", "a uses it"]


def test_a_captured_block_is_kept_and_nothing_waits(device, monkeypatch):
    kept = []
    monkeypatch.setattr(cuda, "_captured", kept)
    block = cuda.Block(4096, 0)
    device.stream, device.capturing = Stream("b", device.log), True
    block.use()
    block.use()
    assert device.log == []
    assert block.captured
    assert kept == [block]


class Event:
    """Its moment is the number of events before it, ms; done when the test says."""

    made = 0
    done = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.moment = Event.made
        Event.made += 1

    def query(self):
        return self.moment < Event.done

    def elapsed_time(self, other):
        return other.moment - self.moment


def test_times_are_split_by_kind_once_the_device_is_through(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", 0)
    clock = cuda.Clock(0)
    for _ in range(2):
        clock.begin()
        for kind in (cuda.COMPUTE, cuda.OTHER, cuda.RECOMPUTE, cuda.COMPUTE, cuda.OTHER):
            clock.mark(kind)
        clock.end()
    assert clock.read() is None
    monkeypatch.setattr(Event, "done", 5)
    assert clock.read() == (2000.0, 1000.0)
    assert clock.read() is None
    clock.begin()
    clock.mark(cuda.COMPUTE)  # of a step that is dropped
    monkeypatch.setattr(Event, "done", 11)
    device.capturing = True
    assert clock.read() is None
    device.capturing = False
    assert clock.read() == (2000.0, 1000.0)
    device.capturing = True
    clock.begin()
    clock.mark(cuda.COMPUTE)
    clock.end()
    assert clock.read() is None
    assert Event.made == 11


def test_only_a_capture_refuses_random_ops(device):
    cuda.reject_captured_recompute(["aten.native_dropout.default"])
    device.capturing = True
    cuda.reject_captured_recompute([])
    with pytest.raises(runtime.CudaGraphError, match=r"2 random ops \(aten.native_dropout"):
        cuda.reject_captured_recompute(["aten.native_dropout.default"] * 2)


def test_steps_on_the_cpu_have_no_cuda_graphs(caplog):
    """They are told so once; what cannot have the option refuses it."""
    model = torch.nn.Linear(4, 4)
    step = coop_plan.train_step(lambda x: model(x).sum(), "100%", cuda_graphs=True)
    for _ in range(3):
        step(torch.ones(2, 4)).backward()
    assert caplog.text.count("cuda_graphs has no effect on the CPU") == 1
    with pytest.raises(runtime.OptionsError, match="cuda_graphs must be true or false"):
        coop_plan.train_step(model, "100%", cuda_graphs=1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(runtime.OptionsError, match="runs without CUDA graphs"):
        coop_plan.train_iteration(model, optimizer, "100%", cuda_graphs=True)


def test_stand_ins_of_efficient_attention_lie_where_its_forward_leaves_them():
    """Its backward reads the seed on the CPU; on the device it ended the process."""
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    with FakeTensorMode():
        heads = [torch.empty(2, 4, 64, 64, device="cuda") for _ in range(4)]
        rows, number = torch.empty(2, 4, 64, device="cuda"), torch.empty((), device="cuda")
        given = (*heads, None, heads[0], rows, number.long(), number.long(), 0.1, [True] * 4)
        made = _with_forward_state(backward, given)
    places = [value.device.type for value in made if isinstance(value, torch.Tensor)]
    assert places == ["cuda"] * 6 + ["cpu"] * 2
