"""Iterations of a small model, by the loop in eager and by `train_iteration`, compared."""

import torch
from torch import nn

import coop_plan
from coop_plan import runtime
from coop_plan.runtime.whole_iteration import updates

WIDTH = 24


def muon_and_adamw(parameters):
    """Muon for the matrices, AdamW for the rest."""
    given = [*parameters]
    matrices = torch.optim.Muon([p for p in given if p.dim() == 2], 1e-2)
    return [matrices, torch.optim.AdamW([p for p in given if p.dim() != 2], 1e-2)]


def adafactor(parameters):
    """A group for each dtype, whose epsilon it has."""
    groups = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return torch.optim.Adafactor([{"params": group} for group in groups.values()], 1e-2)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adafactor": adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "muon-adamw": muon_and_adamw,
}


def listed(optimizer):
    return optimizer if isinstance(optimizer, list) else [optimizer]


class Net(nn.Module):
    """Norms with running statistics, dropout, a weight that is read twice, one that is not used."""

    def __init__(self, depth=3, drop=0.2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.unused = nn.Linear(2, 2)
        self.drop = drop

    def forward(self, x):
        for block in self.blocks:
            x = nn.functional.dropout(self.norm(block(x)).tanh(), self.drop)
        return nn.functional.linear(x, self.blocks[0].weight.t())


def loss_of(model):
    def loss(batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    return loss


def batches_of(step, count, rows=32):
    generator = torch.Generator().manual_seed(step)
    return [
        (
            torch.randn(rows, WIDTH, generator=generator),
            torch.randint(0, WIDTH, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def preferring_host(patch):
    """Updates on the host seem to take no time, so that plans have them; returns the patch."""
    patch.setattr(updates, "host_us", lambda *_: 0.1)
    return patch


def runs_on_host(report):
    """The updates that the plan of a report runs on the host."""
    return [step.op for step in report.plan.steps if getattr(step, "variant", None) == "host"]


def eager(loss, optimizer, batches, clip_norm, scaler=None):
    """The losses and the norm of the loop."""
    optimizers = listed(optimizer)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for one in optimizers:
        one.zero_grad()
    losses = []
    for batch in batches:
        made = loss(batch)
        scaler.scale(made).backward()
        losses.append(made.detach())
    parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    norm = None
    if clip_norm is not None:
        for one in optimizers:
            scaler.unscale_(one)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    for one in optimizers:
        scaler.step(one)
        one.zero_grad()
    scaler.update()
    return losses, norm


def state_of(model, optimizer):
    """All that an iteration changes."""
    made = [*model.state_dict().values()]
    for parameter in model.parameters():
        for one in listed(optimizer):
            made += [v for v in one.state.get(parameter, {}).values() if torch.is_tensor(v)]
    return made


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def compared(optimizer, budget, count, clip_norm, *, steps=3, depth=3, model=Net, **options):
    """Train by the loop and by iterations; returns the last report."""
    torch._dynamo.reset()
    runtime.clear_reports()
    ours, theirs = model(depth), model(depth)
    mine, other = (
        OPTIMIZERS[optimizer](ours.parameters()),
        OPTIMIZERS[optimizer](theirs.parameters()),
    )
    optimizers = [*listed(mine), *listed(other)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in optimizers]
    given = {"method": "coop"} | options
    iteration = coop_plan.train_iteration(loss_of(ours), mine, budget, clip_norm=clip_norm, **given)
    for step in range(steps):
        batches = batches_of(step, count)
        torch.manual_seed(step)
        losses, norm = eager(loss_of(theirs), other, batches, clip_norm)
        torch.manual_seed(step)
        made = iteration(*batches)
        assert equal(made if count > 1 else [made], losses)
        assert equal(state_of(ours, mine), state_of(theirs, other))
        assert clip_norm is None or torch.equal(iteration.grad_norm, norm)
        assert all(p.grad is None for p in ours.parameters())
        (report,) = coop_plan.reports()
        assert report.measured_peak_bytes <= report.budget_bytes
        assert report.outside_bytes == 0
        for scheduler in schedulers:
            scheduler.step()
    assert report.steps_run == steps
    return report


def step_of(model, optimizer, budget="80%", **options):
    given = {"method": "coop"} | options
    return coop_plan.train_iteration(loss_of(model), optimizer, budget, **given)


def assert_within_budget(steps):
    """So many iterations were run as planned ones, each within its budget."""
    reports = coop_plan.reports()
    assert sum(report.steps_run for report in reports) == steps
    for report in reports:
        assert {op.phase for op in report.graph.ops} == {"forward", "backward", "optimizer"}
        assert report.outside_bytes == 0
        assert report.measured_peak_bytes <= report.budget_bytes


def in_float16(accelerator, init_scale):
    """Have an Accelerator train in float16 on the CPU, which it refuses by its arguments."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
