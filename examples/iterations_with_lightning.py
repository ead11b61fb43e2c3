"""Lightning's Trainer within a memory budget: whole iterations, the updates in the plan."""

import lightning
import torch
from torch import nn

import coop_plan
from coop_plan.runtime.integrations.lightning import IterationBudget


class Module(lightning.LightningModule):
    """A loss to learn nothing from."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU())])

    def training_step(self, batch, index):
        """The loss of a batch."""
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters())


torch.manual_seed(0)
model = Module()
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, accumulate_grad_batches=2, gradient_clip_val=0.1,
    callbacks=[IterationBudget("50%")],
)  # fmt: skip
batches = torch.utils.data.DataLoader(torch.randn(5 * 512, 64), batch_size=512)
trainer.fit(model, batches)
print("loss", trainer.callback_metrics["loss"].item())
print(*coop_plan.reports())
