"""A training loop within a memory budget; the numbers are eager's to the last bit."""

from pathlib import Path

import torch
from torch import nn

import coop_plan

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(lambda x: model(x).square().mean(), backend="coop", options={"budget": "70%"})
for _ in range(5):
    loss = step(torch.randn(2048, 512))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())
report = coop_plan.reports()[0]
report.show()
Path("graph.json").write_text(report.graph.to_json())
Path("plan.json").write_text(report.plan.to_json())
