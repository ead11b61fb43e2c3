"""A loop of Accelerate's within a memory budget: whole iterations, the updates in the plan."""

import torch
from accelerate import Accelerator
from torch import nn

import coop_plan
from coop_plan.runtime.integrations.accelerate import plan_iterations

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU())])
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.utils.data.DataLoader(torch.randn(5 * 512, 64), batch_size=512)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
iteration = plan_iterations(
    accelerator, lambda batch: model(batch).square().mean(), optimizer, "50%", clip_norm=0.1
)
for batch in batches:
    with accelerator.accumulate(model):
        for loss in iteration(batch):  # in place of the backward, clipping and the optimizer's step
            print("loss", loss.item())
print(*coop_plan.reports())
