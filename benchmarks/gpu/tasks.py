"""Models that train on a device, full size or small."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models import UNet

Task = tuple[nn.Module, Callable[[nn.Module, torch.Tensor], torch.Tensor], torch.Tensor]
"""A model, the loss of a batch, a batch; on the CPU."""


def causal(
    name: str, config: Any, batch: int, tokens: int, half: torch.dtype | None = None
) -> Task:
    """A causal language model of transformers; `half` is autocast's dtype."""
    import transformers

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, half, enabled=half is not None):
            logits = model(ids).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten())

    model = getattr(transformers, name)(config).train()
    return model, loss, torch.randint(0, config.vocab_size, (batch, tokens))


def gpt2(small: bool, half: torch.dtype | None = None, dropout: float = 0.1) -> Task:
    """12 layers of width 768, a batch of 8 x 512 tokens."""
    from transformers import GPT2Config

    given: dict[str, Any] = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    given |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    given |= {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100} if small else {}
    return causal("GPT2LMHeadModel", GPT2Config(**given), *((4, 64) if small else (8, 512)), half)


def sizes(width: int, inner: int, layers: int, heads: int, words: int) -> dict[str, int]:
    """Sizes by the names of transformers."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": words,
    }


TINY = sizes(64, 128, 2, 4, 100)


def llama(small: bool) -> Task:
    """The sizes of Llama-3.2-1B: 1.24 B parameters in bf16, one sequence of 4096 tokens."""
    from transformers import LlamaConfig

    given = TINY if small else sizes(2048, 8192, 16, 32, 128_256)
    heads = 2 if small else 8
    config = LlamaConfig(
        use_cache=False, tie_word_embeddings=True, num_key_value_heads=heads, **given
    )
    model, loss, ids = causal("LlamaForCausalLM", config, 1, 64 if small else 4096)
    return model.to(torch.bfloat16), loss, ids


def llama_of(layers: int, small: bool) -> Task:
    """The sizes of Llama-3-8B but for its depth, bf16, one sequence of 8192 tokens."""
    from transformers import LlamaConfig

    given = TINY if small else sizes(4096, 14336, layers, 32, 128_256)
    given = given | {"num_hidden_layers": layers}
    config = LlamaConfig(use_cache=False, num_key_value_heads=2 if small else 8, **given)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return causal("LlamaForCausalLM", config, 1, 64 if small else 8192)
    finally:
        torch.set_default_dtype(torch.float32)


def bert_large(small: bool) -> Task:
    """24 layers of width 1024, a batch of 16 x 512 tokens, bf16 autocast."""
    from transformers import BertConfig

    config = BertConfig(**(TINY if small else sizes(1024, 4096, 24, 16, 30_522)))
    return causal("BertForMaskedLM", config, *((2, 64) if small else (16, 512)), torch.bfloat16)


def resnet50(small: bool) -> Task:
    """A batch of 64 x 224 x 224 in channels_last, as it is trained on GPUs."""
    from transformers import ResNetConfig, ResNetForImageClassification

    tiny = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
    given: dict[str, Any] = {"num_labels": 100, **(tiny if small else {})}

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(images), device=images.device) % 100
        return nn.functional.cross_entropy(model(pixel_values=images).logits, labels)

    model = ResNetForImageClassification(ResNetConfig(**given)).train()
    images = torch.randn((2, 3, 64, 64) if small else (64, 3, 224, 224))
    # The pretended device of the tests computes on the CPU, which packs weights of this layout.
    layout = torch.contiguous_format if small else torch.channels_last
    return model.to(memory_format=layout), loss, images.to(memory_format=layout)  # type: ignore[call-overload]


def unet(small: bool) -> Task:
    """Two levels down and up, a batch of 16 x 416 x 608 pixels."""

    def loss(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        labels = torch.zeros(len(pixels), *pixels.shape[2:], dtype=torch.long, device=pixels.device)
        made: torch.Tensor = model(pixels=pixels, labels=labels)
        return made

    return (
        UNet(8 if small else 32),
        loss,
        torch.randn((2, 3, 32, 32) if small else (16, 3, 416, 608)),
    )


TASKS: dict[str, Callable[[bool], Task]] = {
    "gpt2-fp32": gpt2,
    "gpt2-bf16": lambda small: gpt2(small, torch.bfloat16),
    "resnet50": resnet50,
    "llama-1b": llama,
    "bert-large": bert_large,
    "unet": unet,
}
