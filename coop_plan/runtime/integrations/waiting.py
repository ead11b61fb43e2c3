"""Micro-batches that wait for the last one of their iteration."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from coop_plan.runtime.errors import RuntimeRefusalError


class WaitingBatches:
    """Micro-batches of an iteration so far, each with the number that its loss is divided by."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, int]] = []
        self._leaves: list[list[tuple[Any, int]]] = []
        """Leaves of each micro-batch when it came, each with its version."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, batch: Any, count: int) -> None:
        """Have a micro-batch wait."""
        self._kept.append((batch, count))
        self._leaves.append([(leaf, _version(leaf)) for leaf in tree_leaves(batch)])

    def take(self) -> list[tuple[Any, int]]:
        """All micro-batches, which wait no more.

        Raises:
            RuntimeRefusalError: one was overwritten while it waited.
        """
        kept, before = self._kept, self._leaves
        self.clear()
        for number, ((batch, _), leaves) in enumerate(zip(kept, before, strict=True)):
            now = [(id(leaf), _version(leaf)) for leaf in tree_leaves(batch)]
            if now != [(id(leaf), version) for leaf, version in leaves]:
                raise RuntimeRefusalError(
                    f"micro-batch {number} of {len(kept)} was overwritten while it waited for the"
                    " last one of its iteration: have the loop and its loader make new tensors for"
                    " each batch"
                )
        return kept

    def clear(self) -> None:
        """Have no micro-batch wait."""
        self._kept, self._leaves = [], []


def _version(value: Any) -> int:
    """Number of the writes to a tensor; 0 if PyTorch does not count them."""
    counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if counted else 0
