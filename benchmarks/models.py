"""Real architectures built from configs, small and with random weights; nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]
StepOf = Callable[[nn.Module], Step]
Built = tuple[nn.Module, StepOf, Batch]
"""A model, a function that returns its training step (or a copy's), and a batch."""

VOCABULARY = 64
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def own_loss(model: nn.Module) -> Step:
    """The loss that a model makes of its batch."""

    def step(batch: Batch) -> Tensor:
        out = model(**batch)
        loss: Tensor = out if isinstance(out, Tensor) else out.loss
        return loss

    return step


def of(name: str, head: str, batch: Batch, **config: Any) -> Built:
    """The transformers model of class `name + head`, with its own loss."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    made = getattr(transformers, f"{name}Config")(**config)
    model = getattr(transformers, f"{name}{head}")(made).train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # the default, which is logged: that breaks the graph
    return model, own_loss, batch


def text(name: str, head: str, **config: Any) -> Built:
    """A model of token ids, the second sequence shorter than the others."""
    ids = torch.randint(3, VOCABULARY, (4, 32))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    sizes = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    return of(name, head, batch, **{**sizes, **special, **config})


def causal(name: str, **config: Any) -> Built:
    return text(name, "ForCausalLM", **config)


def llama_like(name: str, **config: Any) -> Built:
    return causal(name, num_key_value_heads=2, **config)


def masked(name: str, **config: Any) -> Built:
    return text(name, "ForMaskedLM", **config)


def translating(name: str, **config: Any) -> Built:
    return text(name, "ForConditionalGeneration", decoder_start_token_id=1, **config)


def image(name: str, **config: Any) -> Built:
    """A classifier of images, ten classes."""
    batch = {"pixel_values": torch.randn(16, 3, 32, 32), "labels": torch.arange(16) % 10}
    kind = {"num_labels": 10, "problem_type": "single_label_classification"}
    return of(name, "ForImageClassification", batch, **kind, **config)


def patches(name: str, **config: Any) -> Built:
    return image(name, image_size=32, patch_size=8, **SMALL, **config)


def bart() -> Built:
    halves = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    sizes = {f"{half}_{k}": v for half in ("encoder", "decoder") for k, v in halves.items()}
    return translating("Bart", d_model=32, **sizes)


def clip() -> Built:
    tower = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **SMALL}
    eye = {"image_size": 32, "patch_size": 8, **SMALL}
    ids = torch.randint(3, VOCABULARY, (8, 16))
    batch = {"input_ids": ids, "pixel_values": torch.randn(8, 3, 32, 32)}
    model, _, batch = of("CLIP", "Model", batch, text_config=tower, vision_config=eye)
    return model, lambda model: lambda batch: model(**batch, return_loss=True).loss, batch


def whisper() -> Built:
    halves = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    sizes = {f"{half}_{k}": v for half in ("encoder", "decoder") for k, v in halves.items()}
    lengths = {"max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 8}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    labels = torch.randint(3, VOCABULARY, (8, 16))
    batch = {"input_features": torch.randn(8, 8, 64), "labels": labels}
    config = {"vocab_size": VOCABULARY, "d_model": 32, "dropout": 0.1, "use_cache": False}
    return of("Whisper", "ForConditionalGeneration", batch, **config, **sizes, **lengths, **special)


def wav2vec2() -> Built:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
    position = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    rest = {"num_feat_extract_layers": 2, "mask_time_prob": 0.0, "layerdrop": 0.0, **SMALL}
    batch = {"input_values": torch.randn(4, 1600)}
    model, _, batch = of("Wav2Vec2", "Model", batch, **convolutions, **position, **rest)
    model.freeze_feature_encoder()  # type: ignore[operator]  # as in fine-tuning

    def step_of(
        model: nn.Module,
    ) -> Step:  # its own losses look at the data, which breaks the graph
        return lambda batch: model(**batch).last_hidden_state.square().mean()

    return model, step_of, batch


class Recurrent(nn.Module):
    """Token ids through two recurrent layers."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = kind(32, 32, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embedding(ids))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def recurrent(kind: Callable[..., nn.Module]) -> Built:
    ids = torch.randint(3, VOCABULARY, (8, 16))
    return Recurrent(kind), own_loss, {"ids": ids}


class UNet(nn.Module):
    """Two levels down and up, with skips; BatchNorm, dropout, resizing."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, width), self.block(width, 2 * width)])
        self.middle = self.block(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join = nn.ModuleList([self.block(4 * width, 2 * width), self.block(3 * width, width)])
        self.head = nn.Conv2d(width, 5, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(True)]
        last = [nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
        return nn.Sequential(*first, nn.Dropout2d(0.1), *last)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        first = self.down[0](pixels)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.up(self.middle(nn.functional.avg_pool2d(second, 2)))
        x = self.join[0](torch.cat([x, second], 1))
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return nn.functional.cross_entropy(
            self.head(self.join[1](torch.cat([x, first], 1))), labels
        )


def unet() -> Built:
    labels = torch.randint(0, 5, (2, 32, 32))
    return UNet(), own_loss, {"pixels": torch.randn(2, 3, 32, 32), "labels": labels}


T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4}
STAGES = {"hidden_sizes": [16, 16, 32], "depths": [2, 2, 2], "embedding_size": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, Callable[[], Built]] = {
    "gpt2": lambda: text("GPT2", "LMHeadModel"),
    "bert": lambda: masked("Bert"),
    "llama": lambda: llama_like("Llama"),
    "t5": lambda: translating("T5", **T5),
    "vit": lambda: patches("ViT", hidden_dropout_prob=0.1),
    "swin": lambda: image(
        "Swin", image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4],
        window_size=4, drop_path_rate=0.2,
    ),
    "resnet": lambda: image("ResNet", **STAGES, layer_type="bottleneck"),
    "convnext": lambda: image("ConvNext", hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 2, 1]),
    "unet": unet,
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "mobilenet-v2": lambda: image("MobileNetV2", depth_multiplier=0.35, image_size=32),
    "albert": lambda: masked("Albert", embedding_size=16, hidden_dropout_prob=0.1),
    "distilbert": lambda: masked("DistilBert", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "electra": lambda: masked("Electra", embedding_size=16),
    "deberta-v2": lambda: masked(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    "fnet": lambda: text("FNet", "ForMaskedLM"),
    "opt": lambda: causal("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "bloom": lambda: causal("Bloom", hidden_dropout=0.1),
    "gpt-neox": lambda: causal("GPTNeoX"),
    "mistral": lambda: llama_like("Mistral", sliding_window=8),
    "qwen2": lambda: llama_like("Qwen2"),
    # in float64, a token whose window is all padding makes eager's loss NaN
    "gemma2": lambda: llama_like("Gemma2", head_dim=8, sliding_window=16),
    "mixtral": lambda: llama_like("Mixtral", num_local_experts=4),
    "qwen2-moe": lambda: llama_like("Qwen2Moe", shared_expert_intermediate_size=32, **MOE),
    "mamba": lambda: causal("Mamba", state_size=8, use_associative_scan=False),
    "mamba-scan": lambda: causal("Mamba", state_size=8),
    "mamba2": lambda: causal("Mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=1),
    "bart": bart,
    "swinv2": lambda: image(
        "Swinv2", image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4],
        window_size=4,
    ),
    "mobilevit": lambda: image(
        "MobileViT", image_size=32, hidden_sizes=[16, 24, 32], num_attention_heads=2,
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    ),
    "regnet": lambda: image("RegNet", **STAGES, groups_width=8),
    "clip": clip,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
}  # fmt: skip
