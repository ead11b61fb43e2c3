"""Two processes train one model, each within its own budget: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import coop_plan

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU())])
model = DistributedDataParallel(torch.compile(model, backend="coop", options={"budget": "70%"}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(5):
    loss = model(torch.randn(1024, 512)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
report = coop_plan.reports()[0]
within = report.measured_peak_bytes <= report.budget_bytes
print(f"rank {dist.get_rank()}: loss {loss.item():.3g}, within its budget: {within}", flush=True)
dist.destroy_process_group()
