"""Two stages of a pipeline, each with a budget of its own: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import coop_plan

BUDGETS = ("70%", "min")  # by stage; the first one holds more micro-batches at once

dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
stage = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU())])
stage.compile(backend="coop", options={"budget": BUDGETS[rank]})
schedule = Schedule1F1B(
    PipelineStage(stage, rank, count, torch.device("cpu")), 4, nn.functional.mse_loss
)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
x, target = torch.randn(8192, 512), torch.randn(8192, 512)
for _ in range(5):
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
report = coop_plan.reports()[-1]
within = report.measured_peak_bytes <= report.budget_bytes
print(f"rank {rank}: {report.name}, within its budget: {within}", flush=True)
dist.destroy_process_group()
