"""What `benchmarks.gpu_step` checks, each a function of (device, small) that gives a `Result`."""

import contextlib
import copy
import fcntl
import gc
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.models import UNet
from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.device.arena import process_bytes, reset_peak

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-6
NOISE = 4
"""A step may differ from the joint graph's by so many times what that differs from itself."""
MEGA = 1e6
SLACK_BYTES = 64 << 20
"""What a process may take beside its tensors: PyTorch rounds blocks, cuBLAS has a workspace."""

Task = tuple[nn.Module, Callable[[nn.Module, torch.Tensor], torch.Tensor], torch.Tensor]
"""A model, the loss of a batch, a batch; on the CPU."""
Row = dict[str, Any]
Result = tuple[list[Row], list[str]]
"""Figures ready for JSON, one row a mode; and what did not hold, in words."""


def causal(name: str, config: Any, batch: int, tokens: int, bf16: bool = False) -> Task:
    """A language model of transformers that is given ids and says the next."""
    import transformers

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            logits = model(ids).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten())

    model = getattr(transformers, name)(config).train()
    return model, loss, torch.randint(0, config.vocab_size, (batch, tokens))


def gpt2(small: bool, bf16: bool = False, dropout: float = 0.1) -> Task:
    """12 layers of width 768, a batch of 8 x 512 tokens."""
    from transformers import GPT2Config

    given: dict[str, Any] = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    given |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    given |= {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100} if small else {}
    return causal("GPT2LMHeadModel", GPT2Config(**given), *((4, 64) if small else (8, 512)), bf16)


def sizes(width: int, inner: int, layers: int, heads: int, words: int) -> dict[str, int]:
    """As transformers calls them."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": words,
    }


TINY = sizes(64, 128, 2, 4, 100)


def llama(small: bool) -> Task:
    """The sizes of Llama-3.2-1B: 1.24 B parameters in bf16, one sequence of 4096 tokens."""
    from transformers import LlamaConfig

    given = TINY if small else sizes(2048, 8192, 16, 32, 128_256)
    heads = 2 if small else 8
    config = LlamaConfig(
        use_cache=False, tie_word_embeddings=True, num_key_value_heads=heads, **given
    )
    model, loss, ids = causal("LlamaForCausalLM", config, 1, 64 if small else 4096)
    return model.to(torch.bfloat16), loss, ids


def bert_large(small: bool) -> Task:
    """24 layers of width 1024, a batch of 16 x 512 tokens, bf16 autocast."""
    from transformers import BertConfig

    config = BertConfig(**(TINY if small else sizes(1024, 4096, 24, 16, 30_522)))
    return causal("BertForMaskedLM", config, *((2, 64) if small else (16, 512)), bf16=True)


def resnet50(small: bool) -> Task:
    """A batch of 64 x 224 x 224 in channels_last, as it is trained on GPUs."""
    from transformers import ResNetConfig, ResNetForImageClassification

    tiny = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
    given: dict[str, Any] = {"num_labels": 100, **(tiny if small else {})}

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(images), device=images.device) % 100
        return nn.functional.cross_entropy(model(pixel_values=images).logits, labels)

    model = ResNetForImageClassification(ResNetConfig(**given)).train()
    images = torch.randn((2, 3, 64, 64) if small else (64, 3, 224, 224))
    # The pretended device of the tests computes on the CPU, which packs weights of this layout.
    layout = torch.contiguous_format if small else torch.channels_last
    return model.to(memory_format=layout), loss, images.to(memory_format=layout)  # type: ignore[call-overload]


def unet(small: bool) -> Task:
    """Two levels down and up, a batch of 16 x 416 x 608 pixels."""

    def loss(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        labels = torch.zeros(len(pixels), *pixels.shape[2:], dtype=torch.long, device=pixels.device)
        made: torch.Tensor = model(pixels=pixels, labels=labels)
        return made

    return (
        UNet(8 if small else 32),
        loss,
        torch.randn((2, 3, 32, 32) if small else (16, 3, 416, 608)),
    )


TASKS: dict[str, Callable[[bool], Task]] = {
    "gpt2-fp32": gpt2,
    "gpt2-bf16": lambda small: gpt2(small, bf16=True),
    "resnet50": resnet50,
    "llama-1b": llama,
    "bert-large": bert_large,
    "unet": unet,
}


ROOM = "COOP_GPU_ROOM"
"""Environment variable with a file that checks share; who needs all the memory has it alone."""

LOCK = "COOP_GPU_LOCK"
"""Environment variable with the file that says whose turn the device is."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The device for oneself: checks plan side by side, and nothing disturbs what one times."""
    if LOCK not in os.environ:
        yield
        return
    with Path(os.environ[LOCK]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def bytes_and_peak(device: str) -> tuple[int, int]:
    """Bytes on the device as they were asked for, now and at the highest since it was reset."""
    if device == "cpu":
        return process_bytes()
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]


def now(device: str) -> float:
    """Seconds, once the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(device: str, task: Task, mode: str, steps: int, micro: int = 1, **compiled: Any) -> Row:
    """As `_train`, with deterministic kernels; where there are none, with others from here on."""
    try:
        return _train(device, task, mode, steps, micro, **compiled)
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        print(f"{mode}: {str(error).split('.')[0]}", flush=True)
    return _train(device, task, mode, steps, micro, **compiled)


def _train(device: str, task: Task, mode: str, steps: int, micro: int = 1, **compiled: Any) -> Row:
    """Train a copy of the model by SGD: the row of a mode, and the numbers it came to.

    `micro` backwards go into each step of the optimizer. `host` is the time until everything was
    handed to the device.
    """
    torch._dynamo.reset()  # with the arena of the mode before
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    model, batch = copy.deepcopy(task[0]).to(device), task[2].to(device)
    resident = sum(t.nbytes for t in {*model.parameters(), *model.buffers(), batch})

    def step(batch: torch.Tensor) -> torch.Tensor:
        return task[1](model, batch)

    # A code object of its own: Dynamo would take what another mode compiled.
    step.__code__ = step.__code__.replace(co_name=f"step_{time.monotonic_ns()}")
    run: Any = torch.compile(step, dynamic=False, fullgraph=True, **compiled) if compiled else step
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    clear_reports()
    losses, seconds, host, peaks = [], [], [], []
    for number in range(steps):
        arena = reports()[0].planned_arena_bytes if reports() else 0
        before = bytes_and_peak(device)[0] - arena
        reset_peak() if device == "cpu" else torch.cuda.reset_peak_memory_stats()
        with alone() if number else contextlib.nullcontext():  # the first one compiles
            began = now(device)
            for _ in range(micro):
                loss = run(batch)
                loss.backward()
            host.append(time.perf_counter() - began)
            seconds.append(now(device) - began)
        peaks.append(resident + bytes_and_peak(device)[1] - before)
        losses.append(loss.detach().cpu())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    numbers = [*losses, *(value.cpu() for value in model.state_dict().values())]
    row = {"mode": mode, "numbers": numbers, "seconds": statistics.median(seconds[2:])}
    row |= {"host": statistics.median(host[2:]), "peak": peaks[-1], "first_peak": peaks[0]}
    report = reports()[0] if reports() else None
    if report is not None:
        row |= {
            "budget": report.budget_bytes,
            "arena": report.measured_arena_bytes,
            "planned": report.planned_overhead,
            "in_step": report.measured_overhead,
            "outside": report.outside_bytes,
            "own_peak": report.measured_peak_bytes,
            "arena_as_planned": report.measured_arena_bytes == report.planned_arena_bytes,
            "recomputed": report.plan.recomputed_ops,
            "swapped": report.plan.swapped_bytes,
            "copies": sum(step.do in ("offload", "prefetch") for step in report.plan.steps),
            "ops": len(report.graph.ops),
            "profiled_s": report.profile_seconds,
            "planned_s": report.plan_seconds,
            "compiled_s": report.compile_seconds,
        }
    return row


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest, relative to its tensor's largest number or 1; 0: equal to the last bit."""
    apart = [(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in apart)


def held(row: Row, *references: Row, tolerance: float = TOLERANCE) -> list[str]:
    """What of a step's promises did not hold; its numbers must be those of one reference."""
    row["difference"] = min(difference(row["numbers"], one["numbers"]) for one in references)
    promises = {
        "numbers": row["difference"] <= tolerance,
        "arena": row["arena_as_planned"],
        "outside": row["outside"] == 0,
        "peak by our counters": row["own_peak"] <= row["budget"],
        "peak by PyTorch's": row["peak"] <= row["budget"],
    }
    return [f"{row['mode']}: {what}" for what, holds in promises.items() if not holds]


def model(name: str, device: str, small: bool, micro: int = 1) -> Result:
    """One model in eager, as the joint graph op by op, and under budgets."""
    torch.manual_seed(0)
    task, steps = TASKS[name](small), 4 if small else 8
    eager = train(device, task, "eager", steps, micro)
    joint = train(device, task, "joint", steps, micro, backend="aot_eager")
    joint["difference"] = difference(joint["numbers"], eager["numbers"])  # not demanded
    rows, faults, tolerance = [eager, joint], [], TOLERANCE
    if torch.is_deterministic_algorithms_warn_only_enabled():
        # Where kernels have no order of their own, two runs of the same code tell how far they go.
        again = train(device, task, "joint again", steps, micro, backend="aot_eager")
        again["difference"] = difference(again["numbers"], joint["numbers"])
        tolerance = max(TOLERANCE, NOISE * again["difference"])
        rows.append(again)
    references = list(rows)
    for budget in ("100%", "60%", "40%", "min"):
        mode, options = f"coop {budget}", {"budget": budget}
        try:
            row = train(device, task, mode, steps, micro, backend="coop", options=options)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, InfeasibleBudgetError):
                raise
            rows.append({"mode": mode, "said": str(error.inner_exception).splitlines()[0]})
            continue
        faults += held(row, *references, tolerance=tolerance)
        rows.append(row)
    for row in rows:
        row.pop("numbers", None)
    return rows, faults


def accumulation(device: str, small: bool) -> Result:
    """Two backwards into the same gradients, under the same budgets."""
    return model("gpt2-bf16", device, small, micro=2)


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Attention(nn.Module):
    """Four heads of 64 between two linear layers; `mask` hides a quarter of the keys."""

    def __init__(self, kernel: SDPBackend, mask: bool, dropout: float) -> None:
        super().__init__()
        self.kernel, self.dropout = kernel, dropout
        self.inward, self.outward = nn.Linear(256, 768), nn.Linear(256, 256)
        self.mask: torch.Tensor | None
        hidden = torch.zeros(128, 128, dtype=torch.bfloat16)
        hidden[:, 96:] = float("-inf")
        self.register_buffer("mask", hidden if mask else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inward(x).view(len(x), 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernel):
            y = nn.functional.scaled_dot_product_attention(q, k, v, self.mask, self.dropout)
        made: torch.Tensor = self.outward(y.transpose(1, 2).flatten(2))
        return made


def attention(device: str, small: bool) -> Result:
    """Each kernel with and without a mask and dropout, its output recomputed at `min`."""
    rows: list[Row] = []
    faults: list[str] = []
    for name, mask, dropout in itertools.product(KERNELS, (False, True), (0.0, 0.1)):
        mode = f"{name}{', mask' * mask}{', dropout' * (dropout > 0)}"
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        net = nn.Sequential(*(Attention(KERNELS[name], mask, dropout) for _ in range(3)))
        task: Task = (
            net.to(torch.bfloat16),
            lambda net, x: net(x).float().square().mean(),
            torch.randn(4 if small else 16, 128, 256, dtype=torch.bfloat16),
        )
        try:
            eager = train(device, task, mode, 4)
        except RuntimeError:
            rows.append({"mode": mode, "said": "PyTorch has no such kernel for these inputs"})
            continue
        joint = train(device, task, mode, 4, backend="aot_eager")
        row = train(device, task, mode, 4, backend="coop", options={"budget": "min"})
        faults += held(row, eager, joint)
        rows.append(row)
    for row in rows:
        row.pop("numbers", None)
    return rows, faults


def fraction(device: str, small: bool) -> Result:
    """The first step too, compiling included, where the process may have the budget alone."""
    torch.manual_seed(0)
    task, total = TASKS["gpt2-bf16"](small), torch.cuda.mem_get_info()[1]
    resident = sum(t.nbytes for t in {*task[0].parameters(), *task[0].buffers()})
    options = {"budget": "60%"}
    free = train(device, task, "60%", 4, backend="coop", options=options)
    # The optimizer's step has the gradients too; a budget of the step does not know of them.
    limit = free["budget"] + resident + SLACK_BYTES
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    options = {"budget": str(free["budget"])}
    row = train(device, task, "60%, enforced", 4, backend="coop", options=options)
    row["reserved"] = torch.cuda.memory_reserved()
    faults = [] if row["reserved"] <= limit else ["reserved memory above the limit"]
    for each in (free, row):
        each.pop("numbers")
    return [free, row], faults


def graph(device: str, small: bool) -> Result:
    """Forward and backward of a step as a CUDA graph, and steps between its replays."""
    torch.manual_seed(0)
    rows, faults = [train(device, gpt2(small, dropout=0.0), "eager", 8)], []
    rows[0].pop("numbers")
    for budget, dropout in (("100%", 0.0), ("80%", 0.0), ("100%", 0.1)):
        row, wrong = _replayed(device, small, budget, dropout)
        rows.append(row)
        faults += [f"{row['mode']}: {fault}" for fault in wrong]
    return rows, faults


def _replayed(device: str, small: bool, budget: str, dropout: float) -> tuple[Row, list[str]]:
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model, loss_of, batch = gpt2(small, dropout=dropout)
    model, batch = model.to(device), batch.to(device)

    def plain(batch: torch.Tensor) -> Any:
        return loss_of(model, batch)

    step = torch.compile(plain, backend="coop", dynamic=False, options={"budget": budget})
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            loss = step(batch)
            loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    expected = [tensor.detach().cpu() for tensor in (loss, *gradients)]
    model.zero_grad()
    del loss, gradients  # with the autograd graph, which belongs to the side stream
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = step(batch)
        loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for tensor in found:
        tensor.zero_()
    with alone():
        began = now(device)
        for _ in range(10):
            captured.replay()
        seconds = (now(device) - began) / 10
    mode = f"coop {budget}{', dropout' * (dropout > 0)}, replayed"
    row: Row = {"mode": mode, "seconds": seconds}
    if dropout:
        first = found[0].item()
        captured.replay()
        drawn = 0 < abs(found[0].item() - first) < 1
        return row, [] if drawn else ["dropout of two replays"]
    row["difference"] = difference([tensor.cpu() for tensor in found], expected)
    other = torch.randint_like(batch, 100)
    batch.copy_(other)
    captured.replay()
    replayed = found[0].item()
    row["new inputs"] = abs(replayed - plain(batch).item())
    faults = [] if row["difference"] <= TOLERANCE else ["numbers of the replay"]
    return row, faults + ([] if row["new inputs"] <= 1e-5 else ["a replay with new inputs"])


def peers(device: str, small: bool) -> Result:
    """Step times at the peaks that peers reach: checkpointed layers, Inductor with its budget."""
    import torch._functorch.config as functorch

    torch.manual_seed(0)
    task, rows = TASKS["gpt2-bf16"](small), []
    checkpointed = copy.deepcopy(task[0])
    checkpointed.gradient_checkpointing_enable()  # type: ignore[operator]
    rows.append(train(device, task, "eager", 8))
    rows.append(train(device, (checkpointed, *task[1:]), "layers checkpointed", 8))
    rows.append(train(device, task, "inductor", 8, backend="inductor"))
    with functorch.patch(activation_memory_budget=0.5):
        rows.append(train(device, task, "inductor, budget 0.5", 8, backend="inductor"))
    for peer in rows[1:]:
        mode, options = f"coop at the peak of {peer['mode']}", {"budget": str(peer["peak"])}
        try:
            rows.append(train(device, task, mode, 8, backend="coop", options=options))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            rows.append({"mode": mode, "said": str(error.inner_exception).splitlines()[0]})
    for row in rows:
        row.pop("numbers", None)
    return rows, []


def run(command: list[str]) -> Result:
    """A command's own verdict, with the end of what it said."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
    row = {"mode": " ".join(Path(part).name for part in command[:4]), "said": said}
    return [row], [] if done.returncode == 0 else [f"exit code {done.returncode}"]


def device_tests(device: str, small: bool) -> Result:
    """The tests of the CUDA path, on the device."""
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return run([sys.executable, "-m", "pytest", "tests/runtime/test_cuda_device.py", *plain])


def sanitizer(device: str, small: bool) -> Result:
    """A small training run under compute-sanitizer."""
    mine = [sys.executable, "-m", "benchmarks.gpu_step", "--small", "--only", "gpt2-bf16"]
    return run(["compute-sanitizer", "--error-exitcode", "9", *mine])


def one_model(name: str) -> Callable[[str, bool], Result]:
    return lambda device, small: model(name, device, small)


CHECKS: dict[str, Callable[[str, bool], Result]] = {
    **{name: one_model(name) for name in TASKS},
    "accumulation": accumulation,
    "attention": attention,
    "graph": graph,
    "fraction": fraction,
    "peers": peers,
    "device-tests": device_tests,
    "sanitizer": sanitizer,
}
