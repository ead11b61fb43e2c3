"""Micro-batches within a memory budget: `train_step` insists on a plan, `strict` on the budget."""

import torch
from torch import nn

import coop_plan

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(256, 256), nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = coop_plan.train_step(lambda x: model(x).square().mean(), "60%", strict=True)
for _ in range(3):
    for _ in range(4):
        step(torch.randn(1024, 256)).backward()
    optimizer.step()
    optimizer.zero_grad()
[report] = coop_plan.reports()
print(f"{report.measured_peak_bytes} of {report.budget_bytes} bytes")
