"""LoRA by PEFT within a memory budget: the adapters are trained, the model is not."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import coop_plan

torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=64, use_cache=False)
model = get_peft_model(
    GPT2LMHeadModel(config).train(),
    LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"),
)
model.compile(backend="coop", options={"budget": "50%"})
optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
for _ in range(4):
    tokens = torch.randint(0, 256, (16, 64))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())
print(*coop_plan.reports())
