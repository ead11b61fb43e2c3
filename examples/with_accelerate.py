"""A loop of Accelerate's within a memory budget."""

import torch
from accelerate import Accelerator
from torch import nn

import coop_plan
from coop_plan.runtime.integrations.accelerate import budget_plugin


class Net(nn.Module):
    """A loss to learn nothing from."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, batch):
        """The loss of a batch."""
        return self.net(batch).square().mean()


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=1024)
accelerator = Accelerator(cpu=True, dynamo_plugin=budget_plugin("50%"))
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for batch in batches:
    loss = model(batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())
print(*coop_plan.reports())
