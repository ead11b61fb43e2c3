"""Micro-batches that wait for the last one of their iteration."""

from typing import Any

from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.torch_internals.ops import tensor_versions, tree_flatten


class WaitingBatches:
    """Micro-batches of an iteration so far, each with the number that its loss is divided by."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, int]] = []
        self._before: list[tuple[list[Any], list[int]]] = []
        """Leaves of each micro-batch when it came, and their versions."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, batch: Any, count: int) -> None:
        """Have a micro-batch wait."""
        leaves, _ = tree_flatten(batch)
        self._kept.append((batch, count))
        self._before.append((leaves, tensor_versions(leaves)))

    def take(self) -> list[tuple[Any, int]]:
        """All micro-batches, which wait no more.

        Raises:
            RuntimeRefusalError: one was overwritten while it waited.
        """
        kept, before = self._kept, self._before
        self.clear()
        for number, ((batch, _), (leaves, then)) in enumerate(zip(kept, before, strict=True)):
            now, _ = tree_flatten(batch)
            if [*map(id, now)] != [*map(id, leaves)] or tensor_versions(now) != then:
                raise RuntimeRefusalError(
                    f"micro-batch {number} of {len(kept)} was overwritten while it waited for the"
                    " last one of its iteration: have the loop and its loader make new tensors for"
                    " each batch"
                )
        return kept

    def clear(self) -> None:
        """Have no micro-batch wait."""
        self._kept, self._before = [], []
