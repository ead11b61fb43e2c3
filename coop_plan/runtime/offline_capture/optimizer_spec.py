"""Name and options of an optimizer whose memory is counted; needs no PyTorch."""

import msgspec

OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw8bit", "adafactor", "lion", "muon")
"""Optimizers whose states and temporaries are known (`optimizers.py`)."""

UPDATES = ("foreach", "fused", "plain", "backward")
"""Ways to run an update: PyTorch's three, and one per parameter as soon as its gradient exists."""


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer, and how it runs.

    Attributes:
        name: one of `OPTIMIZERS`.
        masters: parameters of fewer bits have float32 copies, which it updates.
        update: one of `UPDATES`; None is PyTorch's default, foreach on CUDA and plain on the CPU.
        ema: an exponential moving average of what it updates is kept.
        clip_norm: gradients are clipped to a norm before the update.
    """

    name: str
    masters: bool = False
    update: str | None = None
    ema: bool = False
    clip_norm: bool = False
