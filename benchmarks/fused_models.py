"""Full-size networks in bf16 whose steps `benchmarks.fused_modelled` models on a device.

Each function returns a step and its arguments, as `coop-plan capture` takes them:

    coop-plan capture benchmarks.fused_models:llama --device h100-80gb --kernels fused -o graph.json
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Target = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def _classified(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class RMSNorm(nn.Module):
    """Root mean square norm, op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).to(x.dtype)


class LlamaBlock(nn.Module):
    """Attention with rotary positions and a gated network, after RMS norms."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (_heads(part(y), self.heads) for part in (self.query, self.key, self.value))
        q, k = (each * cos + _turned(each) * sin for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        made: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return made


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Llama(nn.Module):
    """Decoder of 32 000 words."""

    def __init__(self, layers: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.words, self.size = nn.Embedding(32_000, width), width // heads
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, inner) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, 32_000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        rates = 1e4 ** (-torch.arange(0, self.size, 2, device=ids.device) / self.size)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return _classified(self.head(self.norm(x))[:, :-1], ids[:, 1:])


class Block(nn.Module):
    """Attention and a network with GELU; layer norms before them, or after them."""

    def __init__(self, width: int, *, causal: bool = False, before: bool = True) -> None:
        super().__init__()
        self.heads, self.causal, self.before = width // 64, causal, before
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU("tanh" if causal else "none")

    def _mixed(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made

    def forward(self, x: Tensor) -> Tensor:
        parts = (self._mixed, lambda y: self.down(self.gelu(self.up(y))))
        for norm, part in zip(self.norms, parts, strict=True):
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return x


class Transformer(nn.Module):
    """Decoder like GPT-2, or encoder like BERT."""

    def __init__(self, layers: int, width: int, words: int, length: int, *, causal: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        blocks = (Block(width, causal=causal, before=causal) for _ in range(layers))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return _classified(self.head(self.norm(self.blocks(x))), ids)


class ViT(nn.Module):
    """Encoder of image patches of 16 x 16 pixels."""

    def __init__(self, layers: int, width: int, pixels: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (pixels // 16) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.positions
        return _classified(self.head(self.norm(self.blocks(x))[:, 0]), _labels(pixels))


def _labels(pixels: Tensor) -> Tensor:
    return torch.arange(len(pixels), device=pixels.device)


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """Three convolutions with batch norms, and a skip connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [
                _normed(inputs, width, 1),
                _normed(width, width, 3, stride),
                _normed(width, 4 * width, 1),
            ]
        )
        same = inputs == 4 * width and stride == 1
        self.skip = nn.Identity() if same else _normed(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.parts[1](F.relu(self.parts[0](x))))
        return F.relu(self.parts[2](y) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, blocks, inputs = _normed(3, 64, 7, 2), [], 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            for i in range(depth):
                blocks.append(Bottleneck(inputs, 64 << stage, 2 if stage and not i else 1))
                inputs = 256 << stage
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.blocks(F.max_pool2d(F.relu(self.stem(pixels)), 3, 2, 1))
        return _classified(self.head(x.mean((2, 3))), _labels(pixels))


class Residual(nn.Module):
    """Two convolutions after group norms and SiLU, and a skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)])
        self.parts = nn.ModuleList(
            [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)]
        )
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, part in zip(self.norms, self.parts, strict=True):
            y = part(F.silu(norm(y)))
        made: Tensor = y + self.skip(x)
        return made


class UNet(nn.Module):
    """Levels down and up again, with skip connections, that reproduces its input."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(map(Residual, [width, *widths], widths))
        self.halve = nn.ModuleList(nn.Conv2d(each, each, 3, 2, 1) for each in widths)
        self.middle = Residual(widths[-1], widths[-1])
        above = [widths[-1], *widths[::-1]]
        self.widen = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, 1, 1)
            for inputs, outputs in zip(above, widths[::-1], strict=False)
        )
        self.up = nn.ModuleList(Residual(2 * each, each) for each in widths[::-1])
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        x, kept = self.first(pixels), []
        for down, halve in zip(self.down, self.halve, strict=True):
            kept.append(down(x))
            x = halve(kept[-1])
        x = self.middle(x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = widen(F.interpolate(x, scale_factor=2.0))
            x = up(torch.cat((x, kept.pop()), 1))
        return F.mse_loss(self.last(x).float(), pixels.float())


def _step(make: Callable[..., nn.Module], example: Tensor, *sizes: Any, **options: Any) -> Target:
    """The step of a model with bf16 parameters; `example` is a batch."""
    model = make(*sizes, **options).to(torch.bfloat16).train()
    return (lambda batch: model(batch)), (example,)


def _pixels(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def llama() -> Target:
    """8 layers of width 2048, 4 x 2048 tokens."""
    return _step(Llama, _ids(4, 2048), 8, 2048, 16, 5504)


def gpt2() -> Target:
    """12 layers of width 768, 8 x 1024 tokens."""
    return _step(Transformer, _ids(8, 1024), 12, 768, 50_257, 1024, causal=True)


def vit() -> Target:
    """ViT-B/16, 64 images of 224 x 224 pixels."""
    return _step(ViT, _pixels(64, 3, 224, 224), 12, 768, 224)


def bert() -> Target:
    """24 layers of width 1024, 16 x 512 tokens."""
    return _step(Transformer, _ids(16, 512), 24, 1024, 30_522, 512, causal=False)


def resnet() -> Target:
    """ResNet-50, 64 images of 224 x 224 pixels."""
    return _step(ResNet, _pixels(64, 3, 224, 224))


def unet() -> Target:
    """U-Net of width 128, 8 images of 256 x 256 pixels."""
    return _step(UNet, _pixels(8, 3, 256, 256), 128, 4)


NETWORKS = {
    "llama": "Llama, 8 x 2048",
    "gpt2": "GPT-2, 12 x 768",
    "vit": "ViT-B/16",
    "bert": "BERT-Large",
    "resnet": "ResNet-50",
    "unet": "U-Net, 128",
}
"""Names in tables, by function."""
