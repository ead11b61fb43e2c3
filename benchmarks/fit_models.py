"""Models of published memory figures, for `benchmarks.fits`: written from their configurations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

LORA_RANK, LORA_DROPOUT = 8, 0.05
BLOCK = 64
"""4-bit numbers that share a float32 scale (bitsandbytes' default)."""

HEAD_ROWS = 128
"""Positions whose logits LitGPT computes at once when it fine-tunes."""


class OldSoftmax(torch.autograd.Function):
    """Softmax over a dimension, or its logarithm, whose backward keeps the input, too.

    That of PyTorch before 1.11 did (pull request 65242).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, logarithm: bool) -> Tensor:
        found = (torch.log_softmax if logarithm else torch.softmax)(x, dim)
        ctx.save_for_backward(x, found)
        ctx.dim, ctx.logarithm = dim, logarithm
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, found = ctx.saved_tensors
        aten = torch.ops.aten
        backward = aten._log_softmax_backward_data if ctx.logarithm else aten._softmax_backward_data
        return backward(gradients[0], found, ctx.dim, x.dtype), None, None


def old_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of transformers as matrix products, with the softmax of PyTorch before 1.11."""
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(OldSoftmax.apply(scores, -1, False), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class RMSNorm(nn.Module):
    """Root mean square norm, op by op as in LitGPT."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(x.dtype)


@torch.library.custom_op("coop_benchmarks::unpack", mutates_args=())
def unpack(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of two 4-bit numbers a byte: 16 even levels from -1 to 1, times a block's scale."""
    numbers = torch.stack((packed >> 4, packed & 15), 1).flatten()
    levels = torch.linspace(-1, 1, 16, device=packed.device)[numbers.long()]
    return (levels.view(-1, BLOCK) * scales[:, None]).to(dtype).flatten()


@unpack.register_fake
def _(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(2 * packed.numel(), dtype=dtype)


def dequantized(packed: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    """Weights for a product with `like`, through a copy in float16.

    bitsandbytes 0.41 quantizes from float16, so it unpacks to float16, and casts that.
    """
    return unpack(packed, scales, torch.float16).to(like.dtype).view(-1, like.shape[-1])


class FourBitProduct(torch.autograd.Function):
    """Product with packed weights; it saves its input, as bitsandbytes 0.41 does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, packed, scales)
        return F.linear(x, dequantized(packed, scales, x), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, packed, scales = ctx.saved_tensors
        return gradients[0] @ dequantized(packed, scales, x), None, None, None


class FourBitLinear(nn.Module):
    """A frozen linear layer of the shape of another, with 4-bit weights."""

    def __init__(self, origin: nn.Linear) -> None:
        super().__init__()
        count = origin.weight.numel()
        self.register_buffer("packed", torch.zeros(count // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.ones(count // BLOCK))
        self.bias = origin.bias

    def forward(self, x: Tensor) -> Tensor:
        return FourBitProduct.apply(x, self.packed, self.scales, self.bias)  # type: ignore[no-any-return]


def in_four_bits(model: nn.Module) -> None:
    """Replace the linear layers in a model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, FourBitLinear(child))


class LoraAttention(nn.Module):
    """Causal attention with rotary positions, and LoRA for queries and values."""

    def __init__(self, width: int, heads: int, rotary: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.down = nn.Parameter(torch.zeros(2 * LORA_RANK, width))
        self.up = nn.Parameter(torch.zeros(2, width, LORA_RANK))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        low = F.linear(F.dropout(x, LORA_DROPOUT), self.down)
        adapted = [F.linear(part, up) for part, up in zip(low.chunk(2, -1), self.up, strict=True)]
        # Its backward keeps the source, as LitGPT's does.
        columns = torch.arange(3 * width, device=x.device).view(3, width)[::2].flatten()
        changed = x.new_zeros(batch, length, 3 * width).index_copy(
            2, columns, torch.cat(adapted, -1)
        )
        qkv = self.qkv(x) + changed * 2
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part, rest = x[..., : self.rotary], x[..., self.rotary :]
        first, second = part.chunk(2, -1)
        turned = part * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((turned.to(x.dtype), rest), -1)


class LoraBlock(nn.Module):
    """A layer of Llama (`gated`), or of GPT-NeoX with attention and MLP side by side."""

    def __init__(self, width: int, heads: int, hidden: int, rotary: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.attention = LoraAttention(width, heads, rotary, bias=not gated)
        self.norms = nn.ModuleList(RMSNorm(width) if gated else nn.LayerNorm(width) for _ in "12")
        self.wide = nn.ModuleList(
            nn.Linear(width, hidden, bias=not gated) for _ in range(1 + gated)
        )
        self.narrow = nn.Linear(hidden, width, bias=not gated)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = self.norms
        if not self.gated:
            return self._mlp(second(x)) + self.attention(first(x), cos, sin) + x  # type: ignore[no-any-return]
        x = x + self.attention(first(x), cos, sin)
        return x + self._mlp(second(x))

    def _mlp(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.narrow(F.gelu(self.wide[0](x)))  # type: ignore[no-any-return]
        return self.narrow(F.silu(self.wide[0](x)) * self.wide[1](x))  # type: ignore[no-any-return]


class LoraTransformer(nn.Module):
    """Language model of LitGPT with LoRA; returns the loss, head and loss by rows."""

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        width: int,
        heads: int,
        hidden: int,
        rotary: float = 1.0,
        gated: bool = True,
    ) -> None:
        super().__init__()
        turned = int(rotary * width / heads)
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            LoraBlock(width, heads, hidden, turned, gated) for _ in range(layers)
        )
        self.norm = RMSNorm(width) if gated else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.turned = turned
        self.logits: list[Tensor] = []
        """A loop has them in a variable until the next step; the graph of a step does not."""
        self.to(torch.bfloat16)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".down", ".up")))

    def forward(self, ids: Tensor) -> Tensor:
        rates = 10000 ** -(torch.arange(0, self.turned, 2, device=ids.device) / self.turned)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), rates).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        logits = [self.head(part) for part in x.split(HEAD_ROWS, 1)]
        # Lightning's Fabric converts a model's outputs to float32 (`HalfPrecision.convert_output`).
        logits = [part.float() for part in logits]
        logits[-1] = logits[-1][:, :-1]
        if not torch.compiler.is_compiling():
            self.logits = logits
        wanted = ids[:, 1:].split(HEAD_ROWS, 1)
        losses = [
            F.cross_entropy(part.flatten(0, 1), row.flatten(), reduction="none")
            for part, row in zip(logits, wanted, strict=True)
        ]
        return torch.cat(losses).mean()


def convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, dilation: int = 1
) -> nn.Module:
    """A convolution of the same size, a norm, and a ReLU in place."""
    padding = size // 2 * dilation
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding, dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    """Residual block of a ResNet: two convolutions of 3 x 3, or a bottleneck."""

    def __init__(
        self, inputs: int, width: int, bottleneck: bool, stride: int, dilation: int
    ) -> None:
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        parts = (
            [
                convolution(inputs, width, 1),
                convolution(width, width, 3, stride, dilation),
                convolution(width, outputs, 1),
            ]
            if bottleneck
            else [
                convolution(inputs, width, 3, stride, dilation),
                convolution(width, outputs, 3, 1, dilation),
            ]
        )
        parts[-1] = parts[-1][:2]  # type: ignore[index]
        self.parts = nn.Sequential(*parts)
        self.other: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.other = convolution(inputs, outputs, 1, stride)[:2]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.parts(x) + self.other(x), inplace=True)


class DilatedFCN(nn.Module):
    """FCN of MMSegmentation: a ResNet of output stride 8 with a deep stem, an auxiliary head.

    It was trained by `DistributedDataParallel`, which has a copy of all gradients in its buckets.
    """

    buckets: Tensor

    def __init__(self, depths: Sequence[int], bottleneck: bool, classes: int = 19) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(3, 32, 3, 2),
            convolution(32, 32, 3),
            convolution(32, 64, 3),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages, at = nn.ModuleList(), 64
        for stage, depth in enumerate(depths):
            width, blocks = 64 << stage, []
            for number in range(depth):
                stride = 2 if stage == 1 and number == 0 else 1
                # The first block of a dilated stage has half the dilation.
                dilation = max(1, (1 << max(0, stage - 1)) >> (number == 0))
                blocks.append(Residual(at, width, bottleneck, stride, dilation))
                at = width * (4 if bottleneck else 1)
            self.stages.append(nn.Sequential(*blocks))
        inner, third = (512, at // 2) if bottleneck else (128, at // 2)
        self.convolutions = nn.Sequential(convolution(at, inner, 3), convolution(inner, inner, 3))
        self.joined = convolution(at + inner, inner, 3)
        self.classes = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(inner, classes, 1))
        self.auxiliary = nn.Sequential(
            convolution(third, inner // 2, 3),
            nn.Dropout2d(0.1),
            nn.Conv2d(inner // 2, classes, 1),
        )
        self.register_buffer("buckets", torch.zeros(sum(p.numel() for p in self.parameters())))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, found = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        main = self.classes(self.joined(torch.cat((x, self.convolutions(x)), 1)))
        return self._loss(main, labels) + 0.4 * self._loss(self.auxiliary(found[2]), labels)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        large = F.interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=False)
        scores = OldSoftmax.apply(large, 1, True)
        return F.nll_loss(scores, labels, ignore_index=255, reduction="none").mean()


class EncoderBlock(nn.Module):
    """A layer of torchvision's vision transformer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in "12")
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = self.attention(normed, normed, normed, need_weights=False)[0] + x
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """torchvision's ViT-L/16 with ten classes, on images of 224 x 224."""

    def __init__(self) -> None:
        super().__init__()
        width = 1024
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.Sequential(*[EncoderBlock(width, 16, 4096) for _ in range(24)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])  # type: ignore[no-any-return]
