"""Guarantees of steps on a device, each checked by a function of (device, small)."""

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.tasks import TASKS, Task, gpt2
from benchmarks.gpu.training import (
    TOLERANCE,
    Result,
    Row,
    alone,
    difference,
    fresh,
    held,
    now,
    train,
    within,
)

ROOT = Path(__file__).parents[2]
NOISE = 4
"""Allowed difference from the joint graph, as a multiple of its own between two runs."""
SLACK_BYTES = 64 << 20
"""Bytes of a process beyond its tensors: PyTorch rounds blocks, cuBLAS has a workspace."""


def model(name: str, device: str, small: bool, micro: int = 1) -> Result:
    """One model in eager, as the joint graph op by op, and under budgets."""
    torch.manual_seed(0)
    task, steps = TASKS[name](small), 4 if small else 8
    eager = train(device, task, "eager", steps, micro)
    joint = train(device, task, "joint", steps, micro, backend="aot_eager")
    joint["difference"] = difference(joint["numbers"], eager["numbers"])  # not demanded
    rows, faults, tolerance = [eager, joint], [], TOLERANCE
    if torch.is_deterministic_algorithms_warn_only_enabled():
        # Without deterministic kernels, two runs of the same code give the tolerance.
        again = train(device, task, "joint again", steps, micro, backend="aot_eager")
        again["difference"] = difference(again["numbers"], joint["numbers"])
        tolerance = max(TOLERANCE, NOISE * again["difference"])
        rows.append(again)
    references = list(rows)
    for budget in ("100%", "60%", "40%", "min"):
        row = within(device, task, f"coop {budget}", steps, micro, budget=budget)
        faults += [] if "note" in row else held(row, *references, tolerance=tolerance)
        rows.append(row)
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
        except RuntimeError as error:
            note = f"PyTorch has no such kernel for these inputs: {str(error).splitlines()[0]}"
            rows.append({"mode": mode, "note": note})
            continue
        joint = train(device, task, mode, 4, backend="aot_eager")
        row = train(device, task, mode, 4, backend="coop", options={"budget": "min"})
        faults += held(row, eager, joint)
        rows.append(row)
    return rows, faults


def fraction(device: str, small: bool) -> Result:
    """Training, the compiling first step included, in a process that may use only the budget.

    With less, PyTorch's own error is raised, and later steps are not affected.
    """
    torch.manual_seed(0)
    task, total = TASKS["gpt2-bf16"](small), torch.cuda.mem_get_info()[1]
    resident = sum(t.nbytes for t in {*task[0].parameters(), *task[0].buffers()})
    rows, faults = [within(device, task, "60%", 4, budget="60%")], []
    budget = rows[0]["budget"]
    # The optimizer's step has the gradients too; a budget of the step does not know of them.
    enough = budget + resident + SLACK_BYTES
    for mode, limit in (("too little", enough - SLACK_BYTES - budget // 10), ("enforced", enough)):
        fresh(device)
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            row = within(device, task, f"60%, {mode}", 4, budget=str(budget))
            row["reserved"] = torch.cuda.memory_reserved()
            faults += [] if limit == enough else ["trained where it should not have"]
            faults += [] if row["reserved"] <= limit else ["reserved memory above the limit"]
        except torch.OutOfMemoryError as error:
            row = {"mode": f"60%, {mode}", "note": str(error).splitlines()[0]}
            faults += ["out of memory where the budget fits"] if limit == enough else []
        rows.append(row)
    return rows, faults


def graph(device: str, small: bool) -> Result:
    """Forward and backward of a step as a CUDA graph, and steps between its replays."""
    torch.manual_seed(0)
    rows, faults = [train(device, gpt2(small, dropout=0.0), "eager", 8)], []
    for budget, dropout in (("100%", 0.0), ("80%", 0.0), ("100%", 0.1)):
        row, wrong = _replayed(device, small, budget, dropout)
        rows.append(row)
        faults += [f"{row['mode']}: {fault}" for fault in wrong]
    return rows, faults


def _replayed(device: str, small: bool, budget: str, dropout: float) -> tuple[Row, list[str]]:
    fresh(device)
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


def replayed(name: str, device: str, small: bool) -> Result:
    """Steps that CUDA graphs run (`cuda_graphs`): equal to the last bit to those that Python runs.

    `paid` is the time beyond that at 100 %, of steps that run in the same way. Dropout is off, as
    recomputed random ops run without graphs.
    """
    torch.manual_seed(0)
    task = gpt2(small, torch.bfloat16, dropout=0.0) if name == "gpt2-bf16" else TASKS[name](small)
    rows, faults = [train(device, task, "eager", 8)], []
    rows.append(train(device, task, "joint", 8, backend="aot_eager"))
    if not small:  # no kernels of Inductor on a pretended device
        rows.append(train(device, task, "inductor", 8, backend="inductor"))
    inductor_s, most = rows[-1]["seconds"], dict[bool, float]()
    for budget, graphs in itertools.product(("100%", "60%", "40%"), (False, True)):
        mode = f"coop {budget}{', graphs' * graphs}"
        row = within(device, task, mode, 8, budget=budget, cuda_graphs=graphs)
        rows.append(row)
        if "note" in row:
            continue
        row["paid"] = row["seconds"] / most.setdefault(graphs, row["seconds"]) - 1
        row["to_inductor"] = row["seconds"] / inductor_s
        faults += [fault for fault in held(row, *rows[:2]) if not fault.endswith("by PyTorch's")]
        if row["peak"] > row["budget"] + SLACK_BYTES:  # a capture takes workspaces of cuBLAS
            faults.append(f"{mode}: peak by PyTorch's")
        if (row["replayed"] < 6) is graphs:  # the timed ones
            faults.append(f"{mode}: {row['replayed']} of 8 steps were replayed")
    return rows, faults


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
        mode = f"coop at the peak of {peer['mode']}"
        rows.append(within(device, task, mode, 8, budget=str(peer["peak"])))
    return rows, []


def run(command: list[str]) -> Result:
    """Verdict of a command by its exit code, with the end of its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    note = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
    row = {"mode": " ".join(Path(part).name for part in command[:4]), "note": note}
    return [row], [] if done.returncode == 0 else [f"exit code {done.returncode}"]


def device_tests(device: str, small: bool) -> Result:
    """The tests of the CUDA path, on the device."""
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests = [f"tests/runtime/test_{name}.py" for name in ("cuda_device", "graph_replay")]
    return run([sys.executable, "-m", "pytest", *tests, *plain])


SMALL = [sys.executable, "-m", "benchmarks.gpu_step", "--small", "--only", "gpt2-bf16"]


def sanitizer(device: str, small: bool) -> Result:
    """A small training run under compute-sanitizer."""
    return run(["compute-sanitizer", "--error-exitcode", "9", *SMALL])


def settings(device: str, small: bool) -> Result:
    """A small GPT-2 under other settings of PyTorch's allocator."""
    rows: list[Row] = []
    faults: list[str] = []
    for value in ("expandable_segments:True", "backend:cudaMallocAsync"):
        made, wrong = run(["env", f"PYTORCH_ALLOC_CONF={value}", *SMALL])
        rows += made
        faults += [f"{value}: {fault}" for fault in wrong]
    return rows, faults


def cudnn_benchmark(device: str, small: bool) -> Result:
    """ResNet-50 with cuDNN's benchmark mode requested by the user."""
    torch.backends.cudnn.benchmark = True
    return model("resnet50", device, small)


CHECKS: dict[str, Callable[[str, bool], Result]] = {
    **{name: partial(model, name) for name in TASKS},
    "accumulation": accumulation,
    "attention": attention,
    "graph": graph,
    **{f"cuda-graphs-{name}": partial(replayed, name) for name in ("gpt2-bf16", "resnet50")},
    "fraction": fraction,
    "peers": peers,
    "settings": settings,
    "tried": cudnn_benchmark,
    "device-tests": device_tests,
    "sanitizer": sanitizer,
}
