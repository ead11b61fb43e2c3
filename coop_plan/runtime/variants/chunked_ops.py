"""ATen's ops run for some slices of their arguments at a time, with the same numbers.

Of many an op the slices along a dimension are independent: heads of an attention, samples of a
convolution, channels of a batch norm. Some of them take a part of the scratch of all; and once they
are computed, nobody reads their slices again, so that a result may lie in the place of an argument.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coop_plan.runtime.capture.custom_ops import define, name_and_arguments, slices
from coop_plan.runtime.torch_internals.ops import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    OpOverload,
    argument_names,
)

Dims = tuple[int, ...]
Region = tuple[slice, ...]
Layout = tuple[list[int], list[int]]
"""Sizes and strides."""


@dataclass(frozen=True)
class Cut:
    """How an op falls into slices that are independent.

    Attributes:
        arguments: by name, the dimensions along which each is cut; where its size there is 1, all
            slices share it. The first has all slices.
        results: of each result the dimensions along which it is; None is a sum over all slices,
            which is made before the others, by the op's `output_mask`.
        sums: how these fall into slices themselves, if they do; what is None there comes with the
            first.
        dense: whether slices are copied, for a kernel that is another one where memory has gaps.
        count: the argument that says how many slices there are.
    """

    arguments: Mapping[str, Dims]
    results: tuple[Dims | None, ...]
    dense: bool = False
    count: str = ""
    sums: "Cut | None" = None


def _along(dims: Dims, *names: str) -> dict[str, Dims]:
    return dict.fromkeys(names, dims)


_HEADS, _SAMPLES, _CHANNELS = (0, 1), (0,), (1,)
_OF_CHANNELS = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")
_SUMS = (_SAMPLES, None, None)

_aten = torch.ops.aten
CUTS: Mapping[OpOverload, Cut] = {
    CPU_ATTENTION: Cut(_along(_HEADS, "query", "key", "value", "attn_mask"), (_HEADS, _HEADS)),
    CPU_ATTENTION_BACKWARD: Cut(
        _along(_HEADS, "query", "key", "value", "grad_out", "out", "logsumexp", "attn_mask"),
        (_HEADS, _HEADS, _HEADS),
    ),
    _aten.convolution.default: Cut(_along(_SAMPLES, "input"), (_SAMPLES,)),
    _aten.convolution_backward.default: Cut(
        _along(_SAMPLES, "input", "grad_output"),
        _SUMS,
        sums=Cut(_along(_CHANNELS, "input", "weight"), (None, _CHANNELS, None)),
    ),
    _aten.native_batch_norm_backward.default: Cut(
        _along(_CHANNELS, "input", "grad_out") | _along((0,), *_OF_CHANNELS),
        (_CHANNELS, (0,), (0,)),
        dense=True,
    ),
    _aten.native_group_norm_backward.default: Cut(
        _along(_SAMPLES, "input", "grad_out", "mean", "rstd"), _SUMS, count="N"
    ),
    _aten.native_layer_norm_backward.default: Cut(
        _along(_SAMPLES, "input", "grad_out", "mean", "rstd"), _SUMS
    ),
    _aten.native_dropout_backward.default: Cut(
        _along(_SAMPLES, "grad_output", "mask"), (_SAMPLES,)
    ),
}


@dataclass(frozen=True)
class PartOp:
    """An op of ours that runs one of ATen's in parts.

    Before the arguments of that one it takes `part`, how many slices along each dimension are
    computed at once, then of its sums if these can be cut (0: they are not), and `layouts`
    (`packed`).
    """

    original: OpOverload
    cut: Cut

    def run(self, places: Sequence[torch.Tensor | None], *args: Any, **named: Any) -> Any:
        """The results; each that has one of `places` is written there."""
        part, layouts, *rest = args
        given = dict(zip(argument_names(self.original), rest, strict=False)) | named
        made = [*places, *[None] * (len(self.cut.results) - len(places))]
        laid, depth = _unpacked(layouts), len(next(iter(self.cut.arguments.values())))
        mask = given.get("output_mask")
        if mask is not None and None in self.cut.results:
            own = [here and d is not None for here, d in zip(mask, self.cut.results, strict=True)]
            rest = [here and not there for here, there in zip(mask, own, strict=True)]
            self._sum(given | {"output_mask": rest}, part[depth:], made, laid)
            given["output_mask"] = own
        if mask is None or any(given["output_mask"]):
            self._run(self.cut, given, part[:depth], made, laid)
        return made[0] if len(made) == 1 else tuple(made)

    def _sum(
        self,
        given: dict[str, Any],
        part: Sequence[int],
        made: list[torch.Tensor | None],
        layouts: Sequence[Layout | None],
    ) -> None:
        """Make the sums over all slices, as the op's mask says."""
        if not any(given["output_mask"]):
            return
        if self.cut.sums is not None and all(part):
            self._run(self.cut.sums, given, part, made, layouts)
            return
        for i, value in enumerate(self.original(**given)):
            made[i] = value if given["output_mask"][i] else made[i]

    def _run(
        self,
        cut: Cut,
        given: dict[str, Any],
        part: Sequence[int],
        made: list[torch.Tensor | None],
        layouts: Sequence[Layout | None],
    ) -> None:
        """Make what is cut, a part at a time."""
        cuts = [
            (name, given[name], dims)
            for name, dims in cut.arguments.items()
            if given.get(name) is not None
        ]
        for region in regions(cut, given, part):
            for name, value, dims in cuts:
                piece = _narrowed(value, dims, region)
                given[name] = piece.contiguous() if cut.dense else piece
            if cut.count:
                given[cut.count] = region[-1].stop - region[-1].start
            pieces = self.original(**given)
            self._put(cut, (pieces,) if len(made) == 1 else pieces, region, made, layouts)
            del pieces  # before the next
            if cut is self.cut.sums:
                mask = zip(given["output_mask"], cut.results, strict=True)
                given["output_mask"] = [here and d is not None for here, d in mask]
                if not any(given["output_mask"]):
                    return

    def _put(
        self,
        cut: Cut,
        pieces: Sequence[torch.Tensor | None],
        region: Region,
        made: list[torch.Tensor | None],
        layouts: Sequence[Layout | None],
    ) -> None:
        """Write the slices of one region into what is `made`, which the first of them allocates."""
        for i, (piece, dims, layout) in enumerate(zip(pieces, cut.results, layouts, strict=True)):
            if piece is None or layout is None:
                continue
            if dims is None:
                made[i] = piece
                continue
            into = made[i]
            if into is None:
                into = torch.empty_strided(*layout, dtype=piece.dtype, device=piece.device)
                made[i] = into
            _narrowed(into, dims, region).copy_(piece)


def slices_of(cut: Cut, given: Mapping[str, Any]) -> list[int]:
    """How many slices there are along each dimension; `given` are arguments by name."""
    name, dims = next(iter(cut.arguments.items()))
    return [int(given[name].shape[dim]) for dim in dims]


def regions(cut: Cut, given: Mapping[str, Any], part: Sequence[int]) -> Iterator[Region]:
    """The parts, as a slice for each dimension."""
    sizes = zip(slices_of(cut, given), part, strict=True)
    return itertools.product(*itertools.starmap(slices, sizes))


def _narrowed(value: torch.Tensor, dims: Dims, region: Region) -> torch.Tensor:
    for dim, part in zip(dims, region, strict=True):
        if value.shape[dim] > 1:
            value = value.narrow(dim, part.start, part.stop - part.start)
    return value


def packed(layouts: Sequence[Layout | None]) -> list[int]:
    """Layouts as numbers: of each result its number of dimensions, sizes and strides, or -1."""
    found: list[int] = []
    for layout in layouts:
        found += [-1] if layout is None else [len(layout[0]), *layout[0], *layout[1]]
    return found


def _unpacked(numbers: Sequence[int]) -> list[Layout | None]:
    found: list[Layout | None] = []
    at = 0
    while at < len(numbers):
        count, at = numbers[at], at + 1
        if count < 0:
            found.append(None)
            continue
        sizes, strides = list(numbers[at : at + count]), list(numbers[at + count : at + 2 * count])
        found.append((sizes, strides))
        at += 2 * count
    return found


def _define(original: OpOverload, cut: Cut) -> tuple[OpOverload, PartOp]:
    """The op's name is the original's, and `_in_parts`."""
    op = PartOp(original, cut)
    name, arguments = name_and_arguments(original)

    def run(*args: Any, **named: Any) -> Any:
        return op.run([None] * len(cut.results), *args, **named)

    return define(f"{name}_in_parts", f"(int[] part, int[] layouts, {arguments}", run), op


IN_PARTS: Mapping[OpOverload, OpOverload]
"""By op of ATen's the one that runs it in parts."""
PART_OPS: Mapping[OpOverload, PartOp]
"""What that one does."""
_defined = {original: _define(original, cut) for original, cut in CUTS.items()}
IN_PARTS = {original: target for original, (target, _) in _defined.items()}
PART_OPS = dict(_defined.values())
