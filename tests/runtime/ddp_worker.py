"""One of two processes that train under DistributedDataParallel, in eager and compiled."""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from coop_plan import runtime

OPTIONS = {"budget": "min"}


class Net(nn.Module):  # Dynamo runs a Sequential that is compiled in place as eager
    def __init__(self):
        super().__init__()
        layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))]
        self.all = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), *layers, nn.Linear(64, 4))

    def forward(self, x):
        return self.all(x)


def make():
    torch.manual_seed(0)
    return Net()


def train(model, called, rank):
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        for last in (False, True):
            x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
            ddp = called if isinstance(called, DistributedDataParallel) else model
            if last:
                F.cross_entropy(called(x), y).backward()
            else:
                with ddp.no_sync():
                    F.cross_entropy(called(x), y).backward()
        optimizer.step()
    return model.state_dict()


def main(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    eager = DistributedDataParallel(make(), bucket_cap_mb=0.02)
    expected = copy.deepcopy(train(eager, eager, rank))
    for order in ("compiled in DDP", "DDP compiled"):
        model = make()
        if order == "compiled in DDP":
            model.compile(backend="coop", options=OPTIONS)
        view = order == "DDP compiled"
        ddp = called = DistributedDataParallel(
            model, bucket_cap_mb=0.02, gradient_as_bucket_view=view
        )
        if order == "DDP compiled":
            called = torch.compile(ddp, backend="coop", options=OPTIONS)
        found = train(ddp, called, rank)
        assert found.keys() == expected.keys(), order
        assert all(torch.equal(found[name], value) for name, value in expected.items()), order
        reports = runtime.reports()
        assert sum(report.steps_run for report in reports) == 8, order
        assert all(report.plan.recomputed_ops > 0 for report in reports), order
        assert all(report.outside_bytes == 0 for report in reports), order
        runtime.clear_reports()
        torch._dynamo.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
