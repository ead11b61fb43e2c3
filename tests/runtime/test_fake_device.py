"""A step captured for a device that is not there is the one captured here, but for its costs."""

import random
from collections import Counter

import msgspec
import pytest
import torch

from benchmarks.models import ARCHITECTURES
from coop_plan.planner import plan
from coop_plan.runtime import CaptureError
from coop_plan.runtime.device import build
from coop_plan.runtime.offline_capture import calibrate
from coop_plan.runtime.offline_capture.devices import DeviceSpec, built_in, device
from coop_plan.runtime.offline_capture.fake_device import (
    CaptureRequest,
    OfflineCapture,
    capture_for,
)
from coop_plan.runtime.offline_capture.fit import fit
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.offline_capture.target import capture, capture_target
from coop_plan.runtime.torch_internals.fakes import FakeTensorMode
from coop_plan.schemas import Compute, InvalidInputError
from tests.params import slow_after
from tests.runtime.test_fit_budget import SOURCE as FIT_SOURCE

cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch is built for CUDA")

SOURCE = """
import torch
from torch import nn

def good(batch=8):
    convolution = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    head = [nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 16 * 16, 32), nn.GELU(), nn.LayerNorm(32)]
    model = nn.Sequential(*convolution, *head)
    return (lambda x: model(x).square().mean()), (torch.randn(batch, 3, 16, 16),)

def huge():
    model = nn.Sequential(*[nn.Linear(1 << 17, 1 << 17, bias=False) for _ in range(3)]).float()
    return (lambda x: model(x).sum()), (torch.ones(4, 1 << 17),)

def truncated():
    model = nn.Linear(4, 4)
    nn.init.trunc_normal_(model.weight, std=0.02)
    return (lambda x: model(x).sum()), (torch.ones(2, 4),)

def looks(): return (lambda x: x.sum()), (torch.ones(int(torch.rand(3).sum()), requires_grad=True),)

def chooses():
    model = nn.Linear(4, 4)
    def step(x):
        y = model(x)
        return y.sum() if y.sum() > 0 else y.mean()
    return step, (torch.ones(2, 4),)

def leaves_the_device_open():
    model = nn.Linear(4, 4)
    return (lambda x: (model(x) + torch.arange(4.0)).sum()), (torch.ones(2, 4),)

def looks_where_it_is():
    model = nn.Linear(4, 4)
    def step(x):
        y = model(x)
        return (y.tanh() if torch.arange(4.0).device.type == "cuda" else y.exp()).sum()
    return step, (torch.ones(2, 4),)

def copies():
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(1)]
    model = nn.TransformerEncoder(layers[0], 2)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return (lambda x: model(x).sum()), (torch.ones(2, 4, 8),)

def recurs():
    model = nn.GRU(8, 8, batch_first=True)
    return (lambda x: model(x)[0].sum()), (torch.ones(2, 3, 8),)

def casts():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Linear(4, 4).to(device)
    def step(x):
        with torch.autocast(device, torch.bfloat16):
            return model(x).float().sum()
    return step, (torch.ones(2, 4, device=device),)

def asks():
    model = nn.Linear(4, 4)
    if torch.cuda.get_device_properties(0).total_memory < 20 << 30:
        raise ValueError("too small")
    return (lambda x: model(x).sum()), (torch.ones(2, 4),)

def calls():
    cuda = torch.cuda
    cuda.set_device(0)
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    cuda.manual_seed_all(1)
    free, total = cuda.mem_get_info()
    assert free <= total == cuda.get_device_properties(0).total_memory
    assert cuda.get_device_capability() >= (8, 0)
    model = nn.Linear(4, 4).cuda()
    cuda.synchronize()
    assert cuda.max_memory_allocated() == cuda.memory_reserved() == 0
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record()
    copies = cuda.Stream(priority=-1)
    copies.wait_stream(cuda.current_stream())
    with cuda.device(0), cuda.stream(copies):
        batch = torch.ones(2, 4).cuda(non_blocking=True)
    batch.record_stream(cuda.current_stream())
    end.record(copies)
    copies.record_event(end).synchronize()
    assert end.query() and begin.elapsed_time(end) >= 0
    return (lambda x: model(x).sum()), (torch.ones(2, 4, device="cuda:0"),)

def trainer_arguments():
    from transformers import TrainingArguments
    given = TrainingArguments("out", bf16=True, report_to=[])
    model = nn.Linear(4, 4).to(given.device)
    return (lambda x: model(x).sum()), (torch.ones(2, 4).to(given.device),)

def lacks():
    model = nn.Linear(8, 5)
    lengths = torch.full((2,), 7), torch.full((2,), 3)
    def step(x, y):
        return nn.functional.ctc_loss(model(x).log_softmax(-1), y, *lengths)
    return step, (torch.ones(7, 2, 8), torch.ones(2, 3, dtype=torch.int64))

def by_size():
    weight = nn.Parameter(torch.Tensor(4, 4))
    return (lambda x: (x @ weight).sum()), (torch.ones(2, 4),)

def elsewhere():
    model = nn.Linear(4, 4).to("cpu")
    return (lambda x: model(x).sum()), (torch.ones(2, 4),)

def routes(deterministic=False):
    torch.use_deterministic_algorithms(deterministic)
    model, where = nn.Linear(8, 8), torch.arange(16) % 4
    def step(x):
        h = model(x).relu()
        rows = h.new_zeros(4, 8).index_add(0, where, h)
        rows = rows + h.new_zeros(4, 8).scatter_add(0, where[:, None].expand(16, 8), h)
        rows = rows.index_put((where,), h, accumulate=True).relu()
        order = where.cumsum(0)
        best = rows.sum(1).cumsum(0).topk(2).indices
        return h[best].sigmoid().sum() + rows.sigmoid().sum() + (h * order[:, None]).sum()
    return step, (torch.ones(16, 8),)

def routes_deterministically(): return routes(True)

def has_kernels():
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Mish(), nn.RMSNorm(4))
    return (lambda x: model(x).sum()), (torch.ones(2, 4),)

def network(name):
    from benchmarks.models import ARCHITECTURES
    model, step_of, batch = ARCHITECTURES[name]()
    return step_of(model), (batch,)

def unet(): return network("unet")
def gpt2(): return network("gpt2")
def bert(): return network("bert")
def resnet(): return network("resnet")
def swin(): return network("swin")
def distilbert(): return network("distilbert")

def raises():
    model = nn.Linear(4, 4)
    def step(x):
        if model.out_features != 5:
            raise ValueError("five, please")
        return model(x).sum()
    return step, (torch.ones(2, 4),)
"""


@pytest.fixture
def user_module(importable):
    return importable("away_steps", SOURCE)


def facts(graph):
    """What does not depend on where a graph was captured: ops, edges, sizes."""
    sizes = Counter((t.kind, t.bytes) for t in graph.tensors if t.name != "runtime")
    return [(op.name, op.phase, op.inputs, op.outputs, op.rng) for op in graph.ops], sizes


@cpu_build
def test_for_a_device_as_on_the_cpu(user_module):
    here = capture_target(f"{user_module}:good")
    away = capture_for(CaptureRequest(target=f"{user_module}:good", spec=device("a100-80gb")))
    assert facts(away) == facts(here)
    assert away.device.kind == "cuda"
    assert away.device.memory_bytes == built_in()["a100-80gb"].memory_bytes
    assert plan(away, "min").peak_bytes <= plan(away, "100%").peak_bytes


@cpu_build
def test_nothing_is_allocated(user_module):
    """Three layers of 64 GiB, of which parameters, gradients and AdamW's two buffers are there."""
    asked = CaptureRequest(target=f"{user_module}:huge", spec=device("h200"), optimizer=ADAMW)
    graph = capture_for(asked)
    layer = 4 << 34
    kinds = Counter()
    for tensor in graph.tensors:
        kinds[tensor.kind] += tensor.bytes
    assert kinds["parameter"] == 3 * layer
    assert [t.bytes for t in graph.tensors if t.kind == "output"].count(layer) == 3
    assert [t.bytes for t in graph.tensors if t.name == "adamw"] == [6 * layer]


@cpu_build
def test_the_device_is_the_default_only_for_steps_that_leave_it_open(user_module):
    """Dynamo is twice as slow under a default device, and a step on a device has none."""
    asked = CaptureRequest(target=f"{user_module}:leaves_the_device_open", spec=device("l4"))
    made = next(op for op in capture_for(asked).ops if "arange" in op.name)
    assert made.cost_us == device("l4").launch_us  # on the CPU it would take nothing
    asked = CaptureRequest(target=f"{user_module}:looks_where_it_is", spec=device("l4"))
    assert "aten.exp.default" in [op.name for op in capture_for(asked).ops]


@cpu_build
@pytest.mark.parametrize(
    ("function", "op", "count"),
    [
        ("copies", "layer_norm.default", 4),
        ("recurs", "aten._thnn_fused_gru_cell.default", 3),
        ("casts", "aten._to_copy.default", 3),
        ("asks", "aten.addmm.default", 1),
        ("calls", "aten.addmm.default", 1),
        ("trainer_arguments", "aten.addmm.default", 1),
    ],
)
def test_what_pytorch_does_on_cuda_alone(user_module, function, op, count):
    """Layers that are copied, cells of a GRU, autocast, and who asks whether there is CUDA."""
    graph = capture_for(CaptureRequest(target=f"{user_module}:{function}", spec=device("l4")))
    ops = [made.name for made in graph.ops if made.phase == "forward" and made.name.endswith(op)]
    assert len(ops) >= count


@cpu_build
def test_ops_that_add_in_any_order_run_once(user_module):
    """A row that is chosen by their result is the same when it is chosen again."""
    spec = device("l4")
    graph = capture_for(CaptureRequest(target=f"{user_module}:routes", spec=spec))
    once = {op.name for op in graph.ops if not op.recomputable}
    assert {"aten.index_add.default", "aten.scatter_add.default", "aten.cumsum.default"} <= once
    assert once & {"aten.index_put.default", "aten._unsafe_index_put.default"}
    assert not {"aten.relu.default", "aten.topk.default", "aten.addmm.default"} & once
    counts = [op.recomputable for op in graph.ops if op.name == "aten.cumsum.default"]
    assert sorted(counts) == [False, True]  # integers add to the same sum in any order
    runs = Counter(step.op for step in plan(graph, "min").steps if isinstance(step, Compute))
    assert all(runs[op.id] == 1 for op in graph.ops if not op.recomputable)

    asked = CaptureRequest(target=f"{user_module}:routes_deterministically", spec=spec)
    assert all(op.recomputable for op in capture_for(asked).ops)


REAL = ("unet", "gpt2", "bert", "resnet", "swin", "distilbert")


@pytest.mark.parametrize("name", slow_after(2, REAL))
def test_real_networks_as_on_the_cpu(name):
    """The same ops, edges and sizes as where the tensors are real."""
    model, step_of, batch = ARCHITECTURES[name]()
    here = capture(step_of(model), (batch,))
    with FakeTensorMode():
        model, step_of, batch = ARCHITECTURES[name]()
        step = step_of(model)
    assert facts(capture(step, (batch,), model=Roofline(CPU))) == facts(here)


ATTENTION = {
    "aten._safe_softmax.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._softmax_backward_data.default",
    "aten.add.Tensor",
    "aten.bmm.default",
    "aten.clone.default",
    "aten.mul.Scalar",
    "aten.native_dropout.default",
    "aten.native_dropout_backward.default",
}
"""Of attention with dropout, which is one kernel on CUDA, and one op after the other on the CPU."""


@cpu_build
@pytest.mark.parametrize("name", slow_after(2, REAL))
def test_real_networks_for_a_device_as_on_the_cpu(user_module, name):
    here = capture_target(f"{user_module}:{name}")
    away = capture_for(CaptureRequest(target=f"{user_module}:{name}", spec=device("a100-80gb")))
    if name in ("unet", "resnet", "swin"):
        assert facts(away) == facts(here)
        return
    ours, theirs = (Counter(op.name for op in graph.ops) for graph in (away, here))
    assert (ours - theirs).keys() | (theirs - ours).keys() <= ATTENTION

    def lasting(graph):
        sizes = Counter((t.kind, t.bytes) for t in graph.tensors if t.name != "runtime")
        return {key: count for key, count in sizes.items() if key[0] != "activation"}

    assert lasting(away) == lasting(here)


@cpu_build
def test_what_is_one_kernel_on_cuda_is_one_op(user_module):
    """The CPU build of PyTorch has them for the CPU alone, and takes them apart elsewhere."""
    graph = capture_for(CaptureRequest(target=f"{user_module}:has_kernels", spec=device("l4")))
    names = {op.name.split(".")[1] for op in graph.ops}
    assert {"silu_backward", "mish_backward", "_fused_rms_norm_backward"} <= names


def test_a_calibrated_device_is_the_one_that_was_measured(monkeypatch):
    """Of ops that take what a roofline says, calibration finds peaks and shares again."""
    there = DeviceSpec(
        kind="cpu",
        memory_bytes=2**30,
        flops={"float32": 4e11, "bfloat16": 8e11},
        bytes_per_s=1e12,
        launch_us=2.0,
        matmul_share=0.5,
        convolution_share=0.25,
        attention_share=0.125,
        memory_share=0.5,
    )

    def modelled(target, args, kwargs):
        with args[0].fake_mode:
            return Roofline(there).profile(target, args, kwargs, target(*args, **kwargs))

    monkeypatch.setattr(calibrate, "profile_op", modelled)
    found = calibrate.calibrate("cpu", "here")
    assert found.launch_us == 2
    assert found.bytes_per_s == pytest.approx(5e11)
    assert found.flops == pytest.approx({"float32": 2e11, "bfloat16": 4e11})
    assert (found.matmul_share, found.memory_share) == (1, 1)
    assert (found.convolution_share, found.attention_share) == (0.5, 0.25)
    read = msgspec.json.decode(msgspec.json.encode(found), type=DeviceSpec)
    assert read == found


def test_built_in_devices_name_their_sources():
    assert all(spec.source for spec in built_in().values())


ADAMW = OptimizerSpec(name="adamw")

CPU = DeviceSpec(
    name="one", kind="cpu", memory_bytes=2**30, flops={"float32": 1e9}, bytes_per_s=1e9, launch_us=1
)


def test_parameters_drawn_within_bounds(user_module):
    """A draw that is repeated until it holds asks for values, which are not there."""
    asked = CaptureRequest(target=f"{user_module}:truncated", spec=CPU)
    assert capture_for(asked).ops[0].name == "aten.addmm.default"


def fake_step(run, *shapes, dtype=torch.float32, spec=CPU, **options):
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return capture(run, inputs, model=Roofline(spec), **options)


def cost_of(graph, name):
    return next(op.cost_us for op in graph.ops if name in op.name)


def test_a_pytorch_built_for_cuda_is_refused_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(build, "torch_folder", lambda: tmp_path)
    with pytest.raises(CaptureError, match=r"captured for l4 with PyTorch's CPU build.*whl/cpu"):
        capture_for(CaptureRequest(target="away_steps:good", spec=device("l4")))


def test_an_op_costs_its_operations_its_bytes_or_a_launch():
    product = msgspec.structs.replace
    fast = product(CPU, bytes_per_s=1e15, matmul_share=0.5)
    graph = fake_step(lambda a, b: (a @ b).sin().sum(), (64, 32), (32, 16), spec=fast)
    assert cost_of(graph, "aten.mm") == pytest.approx(2 * 64 * 32 * 16 / 0.5e9 * 1e6)
    assert cost_of(graph, "aten.sin") == 1
    slow = product(CPU, memory_share=0.5)
    graph = fake_step(lambda a: a.sin().sum(), (64, 32), spec=slow)
    assert cost_of(graph, "aten.sin") == pytest.approx(2 * 64 * 32 * 4 / 0.5e9 * 1e6)


@cpu_build
@pytest.mark.parametrize("update", ["plain", "backward"])
def test_the_largest_batch_beside_an_optimizer_fits(update, importable, tmp_path):
    """Its states are counted once, and no tensor of the captured graphs."""
    importable("heavy", FIT_SOURCE)
    flops = {"float32": 1e11}
    card = DeviceSpec(
        kind="cuda", memory_bytes=13 << 20, context_bytes=0, flops=flops, bytes_per_s=1e10
    )
    path = tmp_path / "card.json"
    path.write_bytes(msgspec.json.encode(card))

    def row(batch, **options):
        asked = {"optimizer": "adamw", "update": update, "margin": 0, **options}
        (found,) = fit("heavy:deep", [str(path)], batch, **asked)
        return found

    found = row(16, batches=True)
    assert found["error"] is None
    largest = found["largest"]["one extra forward"]["batch"]
    assert largest > 16
    assert row(largest)["within"] is not None


@cpu_build
@pytest.mark.parametrize("options", [{"accumulate": True}, {"update": "backward"}])
def test_what_takes_a_gradient_costs_its_bytes_on_the_device(options, importable):
    """Such ops had the bandwidth of a host: a GPU's step of one row was nine times as long."""
    importable("heavy", FIT_SOURCE)

    def seconds(**given):
        (row,) = fit("heavy:deep", ["a100-80gb"], 2, optimizer="adamw", **given)
        return row["keep_all"]["cost_us"]

    assert seconds() < seconds(**options) < 1.5 * seconds()


@cpu_build
@pytest.mark.parametrize(("name", "batch"), [("deep", 512), ("deep", 2), ("convolution", 8)])
def test_keep_all_takes_no_more_than_eager_on_cuda(name, batch, importable):
    """The update of each optimizer included.

    If that is eager's peak, the arena's gap may be smaller than one temporary, and lie beside it.
    """
    importable("heavy", FIT_SOURCE)
    with OfflineCapture() as captures:
        for optimizer in (None, "momentum", "adamw", "adafactor", "muon"):
            request = CaptureRequest(
                target=f"heavy:{name}",
                spec=device("a100-80gb"),
                batch=batch,
                optimizer=optimizer and OptimizerSpec(name=optimizer),
                eager=True,
            )
            found = captures.capture(request)
            graph, eager = found.graph, found.eager
            made = plan(graph, "100%", method="keep-all", outputs="gradients")
            beside = 512  # a scalar of the graph
            if eager.update and eager.update.total > eager.step.total:
                beside += made.arena_bytes - eager.update.gradients
            assert eager.with_plan(graph, made, rests=False) <= eager.peak_bytes + beside
            assert beside <= 1536


UNREAD = """
import torch
from torch import nn

def __getattr__(name):
    if not name.startswith("of_"):
        raise AttributeError(name)
    drops, width = map(int, name[3:].split("_"))
    def step_of_sizes(batch):
        layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.Dropout(0.1))]
        model = nn.Sequential(*layers[: 3 + drops])
        model.register_parameter("unread", nn.Parameter(torch.zeros(width)))
        return (lambda x: model[0:](x).square().mean()), (torch.randn(batch, 32),)
    return step_of_sizes
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["cpu", pytest.param("a100-80gb", marks=cpu_build)])
def test_parameters_that_the_step_does_not_read_lie_outside_it(kind, seed, importable):
    """Those as large as the runtime's own memory in the step, such as generator states, did not."""
    draw = random.Random(seed)
    drops, width = draw.randint(0, 3), draw.choice([64, 5000, 100_000])
    importable("unread", UNREAD)
    spec = CPU if kind == "cpu" else device(kind)
    request = CaptureRequest(target=f"unread:of_{drops}_{width}", spec=spec, batch=8, eager=True)
    with OfflineCapture() as captures:
        outside = captures.capture(request).eager.outside_step(rests=kind == "cpu")
    assert outside == pytest.approx(4 * width, abs=2048)


def test_cublas_has_a_workspace_on_cuda_alone():
    model = Roofline(CPU)
    model.uses_matmul = True
    assert model.resident_bytes == 0
    there = Roofline(device("a100-80gb"))
    there.uses_matmul = True
    assert there.resident_bytes > 0


def test_what_is_broadcast_is_read_once():
    graph = fake_step(lambda a, b: (a * b).sum(), (64, 32), (1, 32))
    moved = (64 * 32 * 2 + 32) * 4
    assert cost_of(graph, "aten.mul") == pytest.approx(moved / 0.85e9 * 1e6)


@pytest.mark.parametrize(
    ("optimizer", "kept", "each"),
    [
        ("sgd", (), 0),
        ("momentum", (), 2),
        ("adamw", ("masters",), 12),
        ("sgd", ("masters",), 4),
        ("sgd", ("ema",), 2),
        ("adamw", ("masters", "ema"), 16),
        ("lion", (), 2),
        ("adamw8bit", (), 8),
    ],
)
def test_an_optimizers_state(optimizer, kept, each):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16), False)
            self.trained = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

        def forward(self, x):
            return (self.frozen * self.trained * x).sum()

    with FakeTensorMode():
        model, x = Model(), torch.ones(8)
    spec = OptimizerSpec(name=optimizer, **dict.fromkeys(kept, True))
    graph = capture(model, [x], model=Roofline(CPU), optimizer=spec)
    assert graph.tensors[-1].bytes == 8 * each


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (
            "looks",
            InvalidInputError,
            "reads a tensor.s value in .*away_steps.py, line 20 .*without",
        ),
        ("chooses", CaptureError, "cannot be captured: .*away_steps.py, line 2"),
        ("raises", CaptureError, r"it raises ValueError\('five, please'\) \(.*away_steps.py, line"),
    ],
)
def test_what_cannot_be_captured_is_named_with_its_place(user_module, function, error, said):
    with pytest.raises(error, match=said):
        capture_for(CaptureRequest(target=f"{user_module}:{function}", spec=CPU))


@cpu_build
def test_a_tensor_of_sizes_is_on_the_device(user_module):
    """`torch.Tensor(4, 4)` knows no default device."""
    graph = capture_for(CaptureRequest(target=f"{user_module}:by_size", spec=device("l4")))
    assert sorted(t.kind for t in graph.tensors[:2]) == ["input", "parameter"]
    assert graph.ops[0].name == "aten.mm.default"


@cpu_build
def test_tensors_of_two_devices_are_named(user_module):
    with pytest.raises(CaptureError, match=r"same device.*away_steps\.py, line .*with \.to\("):
        capture_for(CaptureRequest(target=f"{user_module}:elsewhere", spec=device("l4")))


@cpu_build
def test_a_recurrent_layer_is_captured_without_a_word(user_module, capfd):
    capture_for(CaptureRequest(target=f"{user_module}:recurs", spec=device("l4")))
    assert capfd.readouterr().err == ""


@cpu_build
def test_an_op_that_cuda_alone_has_is_named(user_module):
    with pytest.raises(CaptureError, match=r"ctc_loss.* no kernel for fake .*away_steps.py, line"):
        capture_for(CaptureRequest(target=f"{user_module}:lacks", spec=device("l4")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "device.json: not JSON"),
        (b'{"kind": "\xff"}', "device.json: not JSON: the text is not UTF-8"),
        (b'{"kind": "tpu"}', "device.json#/kind: "),
        (b'{"kind": "cpu", "memory_bytes": NaN}', "device.json#/memory_bytes: NaN"),
        (b'{"kind": "cpu", "memory_bytes": 1, "flops": {}, "bytes_per_s": 1}', "no float32"),
    ],
)
def test_a_bad_device_file_is_named(tmp_path, content, said):
    path = tmp_path / "device.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=said):
        device(str(path))


def test_a_device_of_ones_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(CPU, name="")))
    assert device(str(path)) == msgspec.structs.replace(CPU, name="mine")
    with pytest.raises(InvalidInputError, match=r"neither a built-in device \(a100-80gb"):
        device("a100")
