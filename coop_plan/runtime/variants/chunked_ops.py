"""Custom ops that run ATen ops in chunks of independent slices, with bitwise equal results.

Slices along a dimension are independent in many ops: heads of an attention, samples of a
convolution, channels of a batch norm. A chunk takes less workspace than all slices. The slices of a
computed chunk are not read again, so that a result may overwrite an argument.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coop_plan.runtime.capture.custom_ops import chunk_slices, define_op, name_and_schema
from coop_plan.runtime.torch_internals.ops import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    OpOverload,
    argument_names,
)

Dims = tuple[int, ...]
Region = tuple[slice, ...]
Layout = tuple[list[int], list[int]]
"""Sizes and strides of a result."""


@dataclass(frozen=True)
class SliceSpec:
    """The dimensions along which an op's arguments and results are sliced.

    Attributes:
        arguments: sliced dimensions by argument name. An argument of size 1 there is shared by all
            slices. The first argument has all slices.
        results: sliced dimensions of each result. None is a sum over all slices, which is computed
            before the others, selected by the op's `output_mask`.
        sums: slices of these sums, if they have any; a None in it is computed with the first chunk.
        dense: True if slices are copied, because the kernel differs for strided memory.
        count: the name of the argument that is the number of slices.
    """

    arguments: Mapping[str, Dims]
    results: tuple[Dims | None, ...]
    dense: bool = False
    count: str = ""
    sums: "SliceSpec | None" = None


def _along(dims: Dims, *names: str) -> dict[str, Dims]:
    return dict.fromkeys(names, dims)


_HEADS, _SAMPLES, _CHANNELS = (0, 1), (0,), (1,)
_OF_CHANNELS = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")
_SAMPLES_AND_SUMS = (_SAMPLES, None, None)

_aten = torch.ops.aten
SLICE_SPECS: Mapping[OpOverload, SliceSpec] = {
    CPU_ATTENTION: SliceSpec(
        _along(_HEADS, "query", "key", "value", "attn_mask"), (_HEADS, _HEADS)
    ),
    CPU_ATTENTION_BACKWARD: SliceSpec(
        _along(_HEADS, "query", "key", "value", "grad_out", "out", "logsumexp", "attn_mask"),
        (_HEADS, _HEADS, _HEADS),
    ),
    _aten.convolution.default: SliceSpec(_along(_SAMPLES, "input"), (_SAMPLES,)),
    _aten.convolution_backward.default: SliceSpec(
        _along(_SAMPLES, "input", "grad_output"),
        _SAMPLES_AND_SUMS,
        sums=SliceSpec(_along(_CHANNELS, "input", "weight"), (None, _CHANNELS, None)),
    ),
    _aten.native_batch_norm_backward.default: SliceSpec(
        _along(_CHANNELS, "input", "grad_out") | _along((0,), *_OF_CHANNELS),
        (_CHANNELS, (0,), (0,)),
        dense=True,
    ),
    _aten.native_group_norm_backward.default: SliceSpec(
        _along(_SAMPLES, "input", "grad_out", "mean", "rstd"), _SAMPLES_AND_SUMS, count="N"
    ),
    _aten.native_layer_norm_backward.default: SliceSpec(
        _along(_SAMPLES, "input", "grad_out", "mean", "rstd"), _SAMPLES_AND_SUMS
    ),
    _aten.native_dropout_backward.default: SliceSpec(
        _along(_SAMPLES, "grad_output", "mask"), (_SAMPLES,)
    ),
}


@dataclass(frozen=True)
class ChunkedKernel:
    """Kernel of a custom op that runs an ATen op in chunks.

    It takes two arguments before the original's. `chunk` is the number of slices per chunk along
    each dimension, then along those of the sums if they have slices (0: one chunk). `layouts` are
    the results' layouts (`pack_layouts`).
    """

    original: OpOverload
    spec: SliceSpec

    def run(self, outs: Sequence[torch.Tensor | None], *args: Any, **named: Any) -> Any:
        """The results; the i-th is written into `outs[i]` if that is a tensor."""
        chunk, layouts, *rest = args
        given = dict(zip(argument_names(self.original), rest, strict=False)) | named
        results = [*outs, *[None] * (len(self.spec.results) - len(outs))]
        depth = len(next(iter(self.spec.arguments.values())))
        layouts_by_result = _unpack_layouts(layouts)
        mask = given.get("output_mask")
        if mask is not None and None in self.spec.results:
            own = [here and d is not None for here, d in zip(mask, self.spec.results, strict=True)]
            rest = [here and not there for here, there in zip(mask, own, strict=True)]
            self._sum(given | {"output_mask": rest}, chunk[depth:], results, layouts_by_result)
            given["output_mask"] = own
        if mask is None or any(given["output_mask"]):
            self._run(self.spec, given, chunk[:depth], results, layouts_by_result)
        return results[0] if len(results) == 1 else tuple(results)

    def _sum(
        self,
        given: dict[str, Any],
        chunk: Sequence[int],
        results: list[torch.Tensor | None],
        layouts: Sequence[Layout | None],
    ) -> None:
        """Compute the sums over all slices that the op's mask selects."""
        if not any(given["output_mask"]):
            return
        if self.spec.sums is not None and all(chunk):
            self._run(self.spec.sums, given, chunk, results, layouts)
            return
        for i, value in enumerate(self.original(**given)):
            results[i] = value if given["output_mask"][i] else results[i]

    def _run(
        self,
        spec: SliceSpec,
        given: dict[str, Any],
        chunk: Sequence[int],
        results: list[torch.Tensor | None],
        layouts: Sequence[Layout | None],
    ) -> None:
        """Compute the sliced results, chunk by chunk."""
        sliced = [
            (name, given[name], dims)
            for name, dims in spec.arguments.items()
            if given.get(name) is not None
        ]
        for region in chunk_regions(spec, given, chunk):
            for name, value, dims in sliced:
                piece = _narrow(value, dims, region)
                given[name] = piece.contiguous() if spec.dense else piece
            if spec.count:
                given[spec.count] = region[-1].stop - region[-1].start
            pieces = self.original(**given)
            self._put(spec, (pieces,) if len(results) == 1 else pieces, region, results, layouts)
            del pieces  # freed before the next chunk
            if spec is self.spec.sums:
                mask = zip(given["output_mask"], spec.results, strict=True)
                given["output_mask"] = [here and d is not None for here, d in mask]
                if not any(given["output_mask"]):
                    return

    def _put(
        self,
        spec: SliceSpec,
        pieces: Sequence[torch.Tensor | None],
        region: Region,
        results: list[torch.Tensor | None],
        layouts: Sequence[Layout | None],
    ) -> None:
        """Copy one region's slices into `results`; the first region allocates them."""
        for i, (piece, dims, layout) in enumerate(zip(pieces, spec.results, layouts, strict=True)):
            if piece is None or layout is None:
                continue
            if dims is None:
                results[i] = piece
                continue
            result = results[i]
            if result is None:
                result = torch.empty_strided(*layout, dtype=piece.dtype, device=piece.device)
                results[i] = result
            _narrow(result, dims, region).copy_(piece)


def slice_counts(spec: SliceSpec, given: Mapping[str, Any]) -> list[int]:
    """Number of slices along each dimension; `given` are arguments by name."""
    name, dims = next(iter(spec.arguments.items()))
    return [int(given[name].shape[dim]) for dim in dims]


def chunk_regions(
    spec: SliceSpec, given: Mapping[str, Any], chunk: Sequence[int]
) -> Iterator[Region]:
    """The chunks, as one slice for each dimension."""
    sizes = zip(slice_counts(spec, given), chunk, strict=True)
    return itertools.product(*itertools.starmap(chunk_slices, sizes))


def _narrow(value: torch.Tensor, dims: Dims, region: Region) -> torch.Tensor:
    for dim, chunk in zip(dims, region, strict=True):
        if value.shape[dim] > 1:
            value = value.narrow(dim, chunk.start, chunk.stop - chunk.start)
    return value


def pack_layouts(layouts: Sequence[Layout | None]) -> list[int]:
    """Layouts as integers: number of dimensions, sizes and strides of each result, or -1."""
    found: list[int] = []
    for layout in layouts:
        found += [-1] if layout is None else [len(layout[0]), *layout[0], *layout[1]]
    return found


def _unpack_layouts(numbers: Sequence[int]) -> list[Layout | None]:
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


def _define(original: OpOverload, spec: SliceSpec) -> tuple[OpOverload, ChunkedKernel]:
    """Register the chunked op `<original>_in_parts`."""
    op = ChunkedKernel(original, spec)
    name, arguments = name_and_schema(original)

    def run(*args: Any, **named: Any) -> Any:
        return op.run([None] * len(spec.results), *args, **named)

    return define_op(f"{name}_in_parts", f"(int[] part, int[] layouts, {arguments}", run), op


_defined = {original: _define(original, spec) for original, spec in SLICE_SPECS.items()}
CHUNKED_OPS: Mapping[OpOverload, OpOverload]
CHUNKED_OPS = {original: target for original, (target, _) in _defined.items()}
"""The chunked op of each ATen op."""
CHUNKED_KERNELS: Mapping[OpOverload, ChunkedKernel] = dict(_defined.values())
"""The kernel of each chunked op."""
