"""Data, sharded and tensor parallel training: eager's numbers, every rank within its budget."""

import gc
import logging
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from coop_plan import runtime
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.execute.arena_pool import release
from tests.runtime.ranks import together

HERE = "tests.runtime.test_distributed"
OPTIONS = {"backend": "coop", "options": {"budget": "min"}}


@pytest.mark.parametrize("name", ["with_ddp", "with_pipeline"])
def test_the_example_s_processes_are_within_their_budgets(name, tmp_path):
    example = Path(__file__).parents[2] / "examples" / f"{name}.py"
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", example)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(example.parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    # A line may hold both ranks' texts: `print` writes a text and its end apart.
    assert re.findall("within its budget: (True|False)", done.stdout) == ["True", "True"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


class Net(nn.Module):
    """The loss of a few blocks; one layer is of no use."""

    def __init__(self, unused):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.unused = nn.Linear(4, 4) if unused else None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(model, called, rank):
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = called(torch.randn(64, 32))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses + [p.detach().clone() for p in parameters]


def as_it_is(model):
    return model


def compiled(model):
    return torch.compile(model, **OPTIONS)


def in_place(model):
    model.compile(fullgraph=True, **OPTIONS)
    return model


def hooked(model, **options):
    ddp = DistributedDataParallel(model, **options)
    ddp.register_comm_hook(None, allreduce_hook)
    return ddp


def tensor_parallel(layout):
    """The blocks' hidden size is split; with `Shard(0)` the batch is, between them."""

    def wrap(model):
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            plan = {
                "wide": ColwiseParallel(input_layouts=layout),
                "narrow": RowwiseParallel(output_layouts=layout),
            }
            parallelize_module(block, mesh, plan)
        return model

    return wrap


def ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


def each_block(model, backend="coop", **options):
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, **options)
    return model


def blocks_sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train_by_blocks(rank, count):
    """(name, parallelism, compiled within it, compiled around it): three graphs an iteration."""
    warnings.simplefilter("ignore")
    torch._dynamo.config.optimize_ddp = False
    for name, wrap, inner, outer in [
        ("DDP", ddp(), lambda model: each_block(model, options=OPTIONS["options"]), as_it_is),
        ("FSDP2", blocks_sharded, as_it_is, compiled),
    ]:
        eager = wrap(each_block(Net(False), "aot_eager") if name == "DDP" else Net(False))
        expected = train(eager, eager, rank)
        runtime.clear_reports()
        model = wrap(inner(Net(False)))
        found = train(model, outer(model), rank)
        assert all(map(torch.equal, found, expected)), name
        whole = runtime.reports()[-1]
        assert "iteration of 3 graphs" in whole.name, name
        assert whole.plan.recomputed_ops > 0, name
        torch._dynamo.reset()


def train_all(rank, count):
    """(name, parallelism, compiled within it, compiled around it)."""
    warnings.simplefilter("ignore")
    unused = {"find_unused_parameters": True}
    torch._dynamo.config.optimize_ddp = False  # as this runtime sets it, for aot_eager too
    for name, wrap, inner, outer in [
        ("DDP, static graph", ddp(static_graph=True), in_place, as_it_is),
        ("DDP, static graph, compiled around", ddp(static_graph=True), as_it_is, compiled),
        ("DDP, unused parameters", ddp(**unused), compiled, as_it_is),
        ("DDP with a hook", lambda model: hooked(model, **unused), compiled, as_it_is),
        ("FSDP2", fully_shard, as_it_is, in_place),
        ("FSDP2, compiled within", fully_shard, in_place, as_it_is),
        ("tensor parallel", tensor_parallel(Replicate()), as_it_is, compiled),
        ("tensor parallel, rows sharded", tensor_parallel(Shard(0)), as_it_is, compiled),
    ]:
        has_unused = name in ("DDP, unused parameters", "DDP with a hook")
        eager = called = wrap(Net(has_unused))
        if name.startswith("DDP") and count > 2:
            # It lays out its buckets as gradients arrive, in a compiled backward all at once, and
            # more than two numbers are added in an order that the place in the bucket decides.
            eager = called = wrap(torch.compile(Net(has_unused), backend="aot_eager"))
        expected = train(eager, called, rank)
        model = wrap(inner(Net(has_unused)))
        found = train(model, outer(model), rank)
        assert all(map(torch.equal, found, expected)), name
        reports = runtime.reports()
        assert [report.steps_run for report in reports] == [3], name
        assert all(report.plan.recomputed_ops > 0 for report in reports), name
        assert all(report.outside_bytes == 0 for report in reports), name
        over = [report.measured_peak_bytes - report.budget_bytes for report in reports]
        assert max(over) <= 0, f"{name}: {over}"
        runtime.clear_reports()
        torch._dynamo.reset()
    train_by_blocks(rank, count)


@pytest.mark.parametrize("count", [2])
def test_parallel_training_on_processes(tmp_path, count):
    together(f"{HERE}:train_all", tmp_path / "run", count)


def peaks(wrap, rank):
    """Bytes of the allocator at the peak of each step, the shards and their gradients included."""
    gc.collect()
    release()
    before, _ = process_bytes()
    called = wrap(blocks_sharded(Net(False)))
    torch.manual_seed(10 + rank)
    found = []
    for _ in range(6):
        called.zero_grad()
        x = torch.randn(2048, 32)
        reset_peak()
        called(x).backward()
        del x
        found.append(process_bytes()[1] - before)
    return found, sum(p.to_local().nbytes for p in called.parameters())


def shard_within_budget(rank, count):
    """FSDP2 by block: within the budget from the second step on, counted from outside."""
    warnings.simplefilter("ignore")
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("coop-plan").addHandler(handler)
    eager, _ = peaks(as_it_is, rank)
    peak = max(eager)
    # With all outputs outside, 60 % of the bytes are below the least beside gloo's buffers.
    for budget, outputs in (
        ("60%", "outside"),
        (peak * 6 // 10, "gradients"),
        (peak * 3 // 4, "outside"),
    ):
        runtime.clear_reports()
        options = {"budget": budget, "outputs": outputs}
        wrap = partial(torch.compile, backend="coop", options=options)
        found, shards = peaks(wrap, rank)
        report = runtime.reports()[-1]
        assert "iteration of 3 graphs" in report.name
        assert budget in ("60%", report.budget_bytes)
        # The shards are no inputs of a step.
        assert max(found[1:]) <= report.budget_bytes + shards + 4096, (found, report)
        assert max(found[1:]) < peak
        if budget == "60%":  # the bytes that autograd passes on count in every moment
            assert report.budget_bytes + shards <= 0.66 * peak
        torch._dynamo.reset()
    options = {"budget": peak * 6 // 10}
    found, shards = peaks(partial(torch.compile, backend="coop", options=options), rank)
    report = runtime.reports()[-1]
    # What gloo's threads still hold beside the plan differs: up to two gathered blocks were seen.
    assert max(found[1:]) <= report.budget_bytes + shards + 2 * 65536, (found, report)
    assert max(found[1:]) < 0.68 * peak
    missed = {line for line in lines if "instead of its" in line}
    assert len(missed) == (report.budget_bytes > options["budget"])
    for line in missed:
        assert f"cannot meet a budget of {options['budget']} bytes" in line
        assert 'outputs="gradients" needs less' in line


@pytest.mark.flaky(reruns=2)  # what gloo's threads hold differs from run to run
def test_fsdp_by_blocks_keeps_its_budget_from_the_second_step_on(tmp_path):
    together(f"{HERE}:shard_within_budget", tmp_path / "run", 2)


def accumulate(budget):
    """Train DDP with two micro-batches a step; returns the report."""
    torch.manual_seed(0)
    model = Net(unused=False)
    model.compile(backend="coop", options={"budget": budget})
    called = DistributedDataParallel(model)
    for _ in range(4):
        model.zero_grad()
        with called.no_sync():
            called(torch.randn(512, 32)).backward()
        called(torch.randn(512, 32)).backward()
    torch._dynamo.reset()
    return runtime.reports()[-1]


def test_accumulation_in_ddp_below_the_least_runs_by_the_plan_of_the_least(alone, caplog):
    """DDP adds no gradient in place: the new ones and the held ones count, each once."""
    least = accumulate("min")
    assert 0 <= least.budget_bytes - least.measured_peak_bytes <= 4096
    caplog.clear()
    report = accumulate(least.budget_bytes - 4096)
    assert report.budget_bytes == least.budget_bytes
    assert report.measured_peak_bytes <= report.budget_bytes
    assert "needs at least" in caplog.text


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def test_checkpoints_around_sharded_blocks_have_a_reason(alone, caplog):
    model = torch.compile(blocks_sharded(Checkpointed(False)), **OPTIONS)
    model(torch.randn(8, 32)).backward()
    assert re.search(r"nothing was planned: .* \(.* Explanation: ", caplog.text)
