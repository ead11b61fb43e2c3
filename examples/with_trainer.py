"""transformers' Trainer within a memory budget; TRL's trainers take the same callback."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import coop_plan
from coop_plan.runtime.integrations.trainer import Budget

torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=64, use_cache=False)
tokens = torch.randint(0, 256, (32, 64))
model = GPT2LMHeadModel(config)
trainer = Trainer(
    model,
    TrainingArguments("build/trainer", max_steps=4, save_strategy="no", report_to=[], use_cpu=True),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[Budget("50%")],
)
print("loss", trainer.train().training_loss)
print(*coop_plan.reports())
