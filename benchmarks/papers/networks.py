"""The networks of the papers, full size, each a training step for `coop-plan capture --device`.

Each function takes a batch and returns the step and its arguments. Transformers, ResNet, Swin and
MobileNet are those of the transformers library, with random weights; the others are written here
from their papers. Losses are cross entropies.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Made = tuple[Callable[..., Tensor], tuple[Tensor, ...]]

CLASSES = 1000


def _of(name: str, head: str, **config: Any) -> Any:
    import transformers

    made = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, f"{name}{head}")(made).train()


def _text(model: Any, batch: int, length: int) -> Made:
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return (lambda ids: model(input_ids=ids, labels=ids).loss), (ids,)


def _image(model: nn.Module, batch: int, *size: int, of_library: bool = False) -> Made:
    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        out: Any = model(pixels)
        return F.cross_entropy(out.logits if of_library else out, labels)

    return step, (torch.zeros(batch, 3, *size), torch.zeros(batch, dtype=torch.int64))


def _dense(model: nn.Module, batch: int, *size: int) -> Made:
    """A class for each pixel."""

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(pixels), labels)

    return step, (torch.zeros(batch, 3, *size), torch.zeros(batch, *size, dtype=torch.int64))


# Transformers. Those of Coop's time make their attention's scores, as its framework did.

EAGER = {"attn_implementation": "eager"}


def bert_large(batch: int = 16) -> Made:
    """BERT-Large, 512 tokens, in float32."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    return _text(_of("Bert", "ForMaskedLM", intermediate_size=4096, **sizes, **EAGER), batch, 512)


def gpt2(batch: int = 8) -> Made:
    """GPT-2, 12 layers, 1024 tokens, in float32."""
    return _text(_of("GPT2", "LMHeadModel", use_cache=False, **EAGER), batch, 1024)


def gpt3_2_7b(batch: int = 1) -> Made:
    """GPT-3 2.7B, 2048 tokens, in float32."""
    sizes = {"n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048}
    return _text(_of("GPT2", "LMHeadModel", use_cache=False, **sizes, **EAGER), batch, 2048)


def llama3_8b(batch: int = 1) -> Made:
    """Llama-3-8B, 8192 tokens, in bfloat16."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    model = _of("Llama", "ForCausalLM", **sizes, **heads, use_cache=False)
    return _text(model.to(torch.bfloat16), batch, 8192)


def swin_t(batch: int = 64) -> Made:
    """Swin-T, 224 x 224."""
    model = _of("Swin", "ForImageClassification", num_labels=CLASSES)
    return _image(model, batch, 224, 224, of_library=True)


class BiLstm(nn.Module):
    """Two bidirectional layers over embedded words, and a classifier."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30_000, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.embedding(ids))[0]
        scores: Tensor = self.head(hidden[:, -1])
        return scores


def bilstm(batch: int = 512) -> Made:
    """BiLSTM, 64 tokens."""
    model = BiLstm()

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids), labels)

    ids = torch.zeros(batch, 64, dtype=torch.int64)
    return step, (ids, torch.zeros(batch, dtype=torch.int64))


# Convolutions.


def resnet50(batch: int = 115) -> Made:
    """ResNet-50, 224 x 224."""
    return _image(
        _of("ResNet", "ForImageClassification", num_labels=CLASSES),
        *(batch, 224, 224),
        of_library=True,
    )


def resnet101(batch: int = 64) -> Made:
    """ResNet-101, 224 x 224."""
    model = _of("ResNet", "ForImageClassification", num_labels=CLASSES, depths=[3, 4, 23, 3])
    return _image(model, batch, 224, 224, of_library=True)


def mobilenet(batch: int = 64) -> Made:
    """MobileNet V1, 224 x 224."""
    model = _of("MobileNetV1", "ForImageClassification", num_labels=CLASSES)
    return _image(model, batch, 224, 224, of_library=True)


def _conv(inputs: int, outputs: int, size: Any = 3, **rest: Any) -> list[nn.Module]:
    """Convolution, normalization, ReLU; the borders are padded."""
    rest.setdefault("padding", size // 2 if isinstance(size, int) else (size[0] // 2, size[1] // 2))
    return [
        nn.Conv2d(inputs, outputs, size, bias=False, **rest),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


VGG19 = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def _plain_stages(stages: tuple[tuple[int, int], ...]) -> list[list[nn.Module]]:
    """VGG's stages before their poolings: convolutions with bias, no normalization."""
    made, inputs = [], 3
    for width, count in stages:
        stage: list[nn.Module] = []
        for _ in range(count):
            stage += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        made.append(stage)
    return made


def vgg19(batch: int = 64) -> Made:
    """VGG-19, 224 x 224."""
    layers: list[nn.Module] = []
    for stage in _plain_stages(VGG19):
        layers += [*stage, nn.MaxPool2d(2)]
    head: list[nn.Module] = [nn.Flatten()]
    for inputs in (512 * 7 * 7, 4096):
        head += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return _image(nn.Sequential(*layers, *head, nn.Linear(4096, CLASSES)), batch, 224, 224)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(*_conv(inputs, outputs), *_conv(outputs, outputs))


UNET_WIDTHS = (64, 128, 256, 512, 1024)


class UNet(nn.Module):
    """U-Net with normalization and bilinear upsampling by transposed convolutions."""

    def __init__(self, classes: int = 2, widths: tuple[int, ...] = UNET_WIDTHS) -> None:
        super().__init__()
        self.down = nn.ModuleList(_double(i, o) for i, o in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in pairs)
        self.join = nn.ModuleList(_double(2 * o, o) for _, o in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = up(x)
            x = F.pad(x, (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2]))
            x = join(torch.cat([skip, x], 1))
        scores: Tensor = self.head(x)
        return scores


def unet(batch: int = 16) -> Made:
    """U-Net, 460 x 608."""
    return _dense(UNet(), batch, 460, 608)


def unet_416(batch: int = 8) -> Made:
    """U-Net, 416 x 608."""
    return _dense(UNet(), batch, 416, 608)


class UNetPlusPlus(nn.Module):
    """Nested U-Net (Zhou et al., DLMIA 2018): node (i, j) joins all (i, <j) and (i + 1, j − 1)."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        w = (32, 64, 128, 256, 512)
        self.nodes = nn.ModuleDict()
        for j in range(5):
            for i in range(5 - j):
                inputs = (w[i - 1] if i else 3) if j == 0 else w[i] * j + w[i + 1]
                self.nodes[f"{i}-{j}"] = _double(inputs, w[i])
        self.head = nn.Conv2d(w[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: dict[tuple[int, int], Tensor] = {}
        for j in range(5):
            for i in range(5 - j):
                if j == 0:
                    x = F.max_pool2d(x, 2) if i else x
                else:
                    up = F.interpolate(made[i + 1, j - 1], scale_factor=2, mode="bilinear")
                    x = torch.cat([*(made[i, k] for k in range(j)), up], 1)
                x = made[i, j] = self.nodes[f"{i}-{j}"](x)
        scores: Tensor = self.head(x)
        return scores


def unet_plus_plus(batch: int = 16) -> Made:
    """U-Net++, 416 x 608."""
    return _dense(UNetPlusPlus(), batch, 416, 608)


class Fcn8(nn.Module):
    """FCN-8s on VGG-16 (Long et al., CVPR 2015)."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*stage) for stage in _plain_stages(VGG16))
        wide = [nn.Conv2d(512, 4096, 7, padding=3), nn.ReLU(inplace=True), nn.Dropout2d()]
        then = [nn.Conv2d(4096, 4096, 1), nn.ReLU(inplace=True), nn.Dropout2d()]
        self.middle = nn.Sequential(*wide, *then)
        self.score = nn.ModuleList(nn.Conv2d(i, classes, 1) for i in (256, 512, 4096))

    def forward(self, x: Tensor) -> Tensor:
        size, kept = x.shape[2:], []
        for stage in self.stages:
            x = F.max_pool2d(stage(x), 2)
            kept.append(x)
        x = self.score[2](self.middle(x))
        for score, skip in ((self.score[1], kept[3]), (self.score[0], kept[2])):
            x = F.interpolate(x, skip.shape[2:], mode="bilinear") + score(skip)
        return F.interpolate(x, size, mode="bilinear")


def fcn8(batch: int = 8) -> Made:
    """FCN8, 416 x 608."""
    return _dense(Fcn8(), batch, 416, 608)


class SegNet(nn.Module):
    """SegNet: VGG-16 without its end, and its mirror image, unpooled by the indices."""

    def __init__(self, classes: int = 12) -> None:
        super().__init__()
        widths = [width for width, _ in VGG16]
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        for i, (width, count) in enumerate(VGG16):
            before = widths[i - 1] if i else 3
            after = widths[i - 1] if i else widths[0]
            same: list[nn.Module] = []
            for _ in range(count - 1):
                same += _conv(width, width)
            self.down.append(nn.Sequential(*_conv(before, width), *same))
            back: list[nn.Module] = []
            for _ in range(count - 1):
                back += _conv(width, width)
            self.up.append(nn.Sequential(*back, *_conv(width, after)))
        self.head = nn.Conv2d(widths[0], classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[tuple[Tensor, torch.Size]] = []
        for down in self.down:
            x = down(x)
            size = x.shape
            x, places = F.max_pool2d(x, 2, return_indices=True)
            kept.append((places, size))
        for up, (places, size) in zip(reversed(self.up), reversed(kept), strict=True):
            x = up(F.max_unpool2d(x, places, 2, output_size=size[2:]))
        scores: Tensor = self.head(x)
        return scores


def segnet(batch: int = 8) -> Made:
    """SegNet, 416 x 608."""
    return _dense(SegNet(), batch, 416, 608)


class DenseLayer(nn.Module):
    """A bottleneck of DenseNet: normalization first; its output joins its input."""

    def __init__(self, inputs: int, growth: int = 32) -> None:
        super().__init__()
        first = [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
        first += [nn.Conv2d(inputs, 4 * growth, 1, bias=False)]
        second = [nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True)]
        second += [nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)]
        self.layers = nn.Sequential(*first, *second)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


def densenet121(batch: int = 64) -> Made:
    """DenseNet-121, 224 x 224."""
    layers: list[nn.Module] = [*_conv(3, 64, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for stage, count in enumerate((6, 12, 24, 16)):
        for _ in range(count):
            layers.append(DenseLayer(width))
            width += 32
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        if stage < 3:
            layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
    return _image(nn.Sequential(*layers), batch, 224, 224)


class Branches(nn.Module):
    """Concatenated outputs of parallel branches of one input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _chain(inputs: int, *layers: tuple[int, Any] | tuple[int, Any, dict[str, Any]]) -> nn.Module:
    made: list[nn.Module] = []
    for width, size, *rest in layers:
        made += _conv(inputs, width, size, **(rest[0] if rest else {}))
        inputs = width
    return nn.Sequential(*made)


def _split(inputs: int, *before: tuple[int, Any]) -> nn.Module:
    ends = Branches(*(_chain(before[-1][0], (384, size)) for size in ((1, 3), (3, 1))))
    return nn.Sequential(_chain(inputs, *before), ends)


def inception_v3(batch: int = 64) -> Made:
    """Inception-v3 without its auxiliary classifier, 299 x 299."""
    halve: dict[str, Any] = {"stride": 2, "padding": 0}
    stem = _chain(3, (32, 3, halve), (32, 3, {"padding": 0}), (64, 3))
    more = _chain(64, (80, 1), (192, 3, {"padding": 0}))
    layers: list[nn.Module] = [stem, nn.MaxPool2d(3, 2), more, nn.MaxPool2d(3, 2)]
    width = 192

    def pooled(outputs: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), _chain(width, (outputs, 1)))

    for outputs in (32, 64, 64):
        three = _chain(width, (64, 1), (96, 3), (96, 3))
        five = _chain(width, (48, 1), (64, 5))
        layers.append(Branches(_chain(width, (64, 1)), five, three, pooled(outputs)))
        width = 224 + outputs
    three = _chain(width, (64, 1), (96, 3), (96, 3, halve))
    layers.append(Branches(_chain(width, (384, 3, halve)), three, nn.MaxPool2d(3, 2)))
    width = 768
    for w in (128, 160, 160, 192):
        seven = _chain(width, (w, 1), (w, (1, 7)), (192, (7, 1)))
        twice = _chain(width, (w, 1), (w, (7, 1)), (w, (1, 7)), (w, (7, 1)), (192, (1, 7)))
        layers.append(Branches(_chain(width, (192, 1)), seven, twice, pooled(192)))
    first = _chain(width, (192, 1), (320, 3, halve))
    second = _chain(width, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, halve))
    layers.append(Branches(first, second, nn.MaxPool2d(3, 2)))
    for width in (1280, 2048):
        split = _split(width, (384, 1)), _split(width, (448, 1), (384, 3))
        layers.append(Branches(_chain(width, (320, 1)), *split, pooled(192)))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(2048, CLASSES)]
    return _image(nn.Sequential(*layers), batch, 299, 299)


def _shuffle_branch(inputs: int, width: int, outputs: int, size: int, stride: int) -> nn.Module:
    """A choice of SPOS's block: kernels of 3, 5 or 7; 0 is the Xception block, three times 3."""

    def depthwise(channels: int, kernel: int, step: int) -> list[nn.Module]:
        made = _conv(channels, channels, kernel, stride=step, groups=channels)
        return made[:2]  # no ReLU

    if size:
        first, last = _conv(inputs, width, 1), _conv(width, outputs, 1)
        return nn.Sequential(*first, *depthwise(width, size, stride), *last)
    layers: list[nn.Module] = []
    for before, after, step in ((inputs, width, stride), (width, width, 1), (width, outputs, 1)):
        layers += [*depthwise(before, 3, step), *_conv(before, after, 1)]
    return nn.Sequential(*layers)


class ShuffleBlock(nn.Module):
    """A block of SPOS: half of the channels pass, or at a stride of 2 are halved in size."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        own = inputs if stride == 2 else inputs // 2
        self.stride = stride
        self.main = _shuffle_branch(own, half, outputs - own, size, stride)
        narrow = _conv(inputs, inputs, 3, stride=2, groups=inputs)[:2]
        self.side = nn.Sequential(*narrow, *_conv(inputs, inputs, 1)) if stride == 2 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.side is not None:
            return torch.cat([self.side(x), self.main(x)], 1)
        batch, channels, height, width = x.shape
        pairs = x.view(batch, channels // 2, 2, height, width)  # shuffled as they are split
        return torch.cat([pairs[:, :, 0], self.main(pairs[:, :, 1])], 1)


def spos(batch: int = 256) -> Made:
    """SPOS (Guo et al., ECCV 2020): one path of its supernet, 224 x 224, all choices in turn."""
    layers: list[nn.Module] = _conv(3, 16, 3, stride=2)
    inputs = 16
    for outputs, count in ((64, 4), (160, 4), (320, 8), (640, 4)):
        for i in range(count):
            size = (3, 5, 7, 0)[i % 4]
            layers.append(ShuffleBlock(inputs, outputs, size, 1 if i else 2))
            inputs = outputs
    layers += [*_conv(inputs, 1024, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return _image(nn.Sequential(*layers, nn.Linear(1024, CLASSES)), batch, 224, 224)
