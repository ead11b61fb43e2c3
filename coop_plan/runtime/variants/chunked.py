"""Chunked variants of ops: some independent slices at a time, with less memory.

Their workspace is that of one chunk, and a result may overwrite an argument that is sliced along
the same dimensions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coop_plan.runtime.capture.graph_builder import GraphBuilder
from coop_plan.runtime.capture.op_variants import OpVariant, VariantTable
from coop_plan.runtime.capture.profiler import (
    fake_values,
    profile_op,
    signature,
    synthetic_arguments,
)
from coop_plan.runtime.op_profile import OpProfile
from coop_plan.runtime.torch_internals.ops import OpOverload, argument_names, tree_flatten
from coop_plan.runtime.variants.bitwise_check import all_bitwise_equal, cached_check
from coop_plan.runtime.variants.chunked_ops import (
    CHUNKED_OPS,
    SLICE_SPECS,
    SliceSpec,
    pack_layouts,
    slice_counts,
)
from coop_plan.runtime.variants.inplace_outputs import has_layout, run_into_copies

NAME = "parts"

CHUNK_COUNTS = 2, 8
"""Numbers of chunks with which an op is profiled."""

MAX_RELATIVE_BYTES = 0.9
"""Largest peak of a variant, relative to that of the default and of each variant before it."""

MIN_INPLACE_SHARE = 0.1
"""Smallest size of a result that may overwrite an argument, relative to the largest result."""

CHANNEL_BLOCK = 8
"""Chunks of channels are multiples of this: oneDNN's blocks of channels are not split."""

InplacePairs = tuple[tuple[int, int], ...]
"""Positions of results, and of the tensor arguments that they may overwrite."""


def add_chunked_variants(builder: GraphBuilder, table: VariantTable) -> None:
    """Add the chunked variants of the ops in `SLICE_SPECS` that take less memory at once."""
    ops = zip(list(builder.ops), builder.op_fields, builder.profiles, strict=True)
    for node, fields, profile in ops:
        if not isinstance(node.target, OpOverload) or node.target not in SLICE_SPECS:
            continue
        args, kwargs = fake_values((node.args, node.kwargs))
        call = _OpCall(node.target, args, kwargs, profile)
        sizes = {t: builder.tensors[t]["bytes"] for t in (*fields["inputs"], *fields["outputs"])}
        lowest_bytes = _bytes_at_once(sizes, fields["inplace"], profile)
        for name, chunk_args, variant, pairs in call.variants(builder.names[node]):
            inplace = table.inplace_pairs(node, pairs)
            chunked_bytes = _bytes_at_once(sizes, inplace, variant)
            if chunked_bytes > MAX_RELATIVE_BYTES * lowest_bytes:
                continue
            lowest_bytes = chunked_bytes
            given = (*chunk_args, *node.args)
            variant_node = table.add_node(node, CHUNKED_OPS[node.target], given, node.kwargs)
            table.add(node, name, OpVariant(variant_node, variant), inplace=inplace)


def _bytes_at_once(
    sizes: Mapping[int, int], inplace: Sequence[Sequence[int]], profile: OpProfile
) -> int:
    """Working set of a variant, if as many results as possible overwrite an input."""
    shared: dict[int, int] = {}
    for result, source in inplace:
        if result not in shared and source not in shared.values():
            shared[result] = source
    return sum(sizes.values()) + profile.workspace_bytes - sum(sizes[t] for t in shared)


@dataclass(frozen=True)
class _OpCall:
    """A call of an ATen op, with fake tensors as arguments, and its profile."""

    target: OpOverload
    args: Any
    kwargs: Any
    profile: OpProfile

    def variants(self, op: str) -> Iterator[tuple[str, Any, OpProfile, InplacePairs]]:
        """Exact chunked variants: name, leading arguments, profile, in-place pairs."""
        outputs = self.profile.outputs
        if any(o and (o.alias >= 0 or o.duplicate_of >= 0) for o in outputs):
            return
        layouts = pack_layouts(
            [None if o is None else (list(o.shape), list(o.stride)) for o in outputs]
        )
        pairs = self._inplace_pairs()
        found = set[str]()
        for name, chunk in self._chunk_sizes():
            if name in found:
                continue
            chunk_args = chunk, layouts
            args = (*chunk_args, *self.args)
            variant = profile_op(CHUNKED_OPS[self.target], args, self.kwargs, f"{op}_{name}")
            if variant.outputs == outputs and self._is_exact(chunk_args, variant, pairs):
                found.add(name)
                yield name, chunk_args, variant, pairs

    @property
    def _spec(self) -> SliceSpec:
        return SLICE_SPECS[self.target]

    def _sliced_arguments(self) -> dict[str, torch.Tensor]:
        """The arguments that are sliced, by name."""
        names = argument_names(self.target)
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        return {name: given[name] for name in self._spec.arguments if given.get(name) is not None}

    def _chunk_sizes(self) -> Iterator[tuple[str, list[int]]]:
        """Candidates: variant name, and slices per chunk along each dimension.

        Of each name the first exact candidate is used.
        """
        given, along = self._sliced_arguments(), self._spec.arguments
        if any(max(along[name]) >= value.dim() for name, value in given.items()):
            return
        slices = slice_counts(self._spec, given)
        for name, value in given.items():
            sizes = [value.shape[dim] for dim in along[name]]
            if any(size not in (1, n) for size, n in zip(sizes, slices, strict=True)):
                return
        sliced_results = [
            o is not None and d is not None
            for o, d in zip(self.profile.outputs, self._spec.results, strict=True)
        ]
        for chunks in CHUNK_COUNTS:
            chunk, count = [], 1
            for n in slices:
                step = -(-n // max(1, chunks // count)) or 1
                chunk.append(step)
                count *= -(-n // step)
            # Several chunks, with a slice for each thread.
            many = count > 1 and math.prod(chunk) >= torch.get_num_threads()
            for channels, is_split in self._channel_chunks(chunks):
                if (many and any(sliced_results)) or is_split:
                    yield f"{NAME}-{chunks}", [*(chunk if many else slices), *channels]

    def _channel_chunks(self, chunks: int) -> list[tuple[list[int], bool]]:
        """Candidates: channels per chunk of the sums ([0]: all), and True if that splits them."""
        if self._spec.sums is None:
            return [([], False)]
        given = dict(zip(argument_names(self.target), self.args, strict=False)) | self.kwargs
        (count,) = slice_counts(self._spec.sums, given)
        whole = [([0], False)]
        plain = given["groups"] == 1 and not given["transposed"] and given["output_mask"][1]
        step = -(-count // chunks // CHANNEL_BLOCK) * CHANNEL_BLOCK
        return [([step], True), *whole] if plain and 0 < step < count else whole

    def _inplace_pairs(self) -> InplacePairs:
        """Results with the layout of an argument that is sliced along the same dimensions."""
        outputs = self.profile.outputs
        largest = max(o.bytes for o in outputs if o is not None)
        flat = tree_flatten((self.args, self.kwargs))[0]
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        found = []
        for result, output in enumerate(outputs):
            if output is None or output.bytes < MIN_INPLACE_SHARE * largest:
                continue
            for name, value in self._sliced_arguments().items():
                same = self._spec.arguments[name] == self._spec.results[result]
                if same and has_layout(value, output):
                    position = next(i for i, tensor in enumerate(tensors) if tensor is value)
                    found.append((result, position))
        return tuple(found)

    def _is_exact(self, chunk_args: Any, variant: OpProfile, pairs: InplacePairs) -> bool:
        """Check on synthetic inputs: results bitwise equal to the op's, also in place."""
        target, args = CHUNKED_OPS[self.target], (*chunk_args, *self.args)

        def run_check() -> bool:
            given, named = synthetic_arguments(self.target, self.args, self.kwargs)
            expected = tree_flatten(self.target(*given, **named))[0]
            if not all_bitwise_equal(
                tree_flatten(target(*chunk_args, *given, **named))[0], expected
            ):
                return False
            for outs in _disjoint_rounds(pairs):
                arguments = (*chunk_args, *given), named
                results, allocations = run_into_copies(target, arguments, outs)
                if allocations != variant.allocations_except(outs):
                    return False
                if not all_bitwise_equal(results, expected):
                    return False
            return True

        key = signature(target, args, self.kwargs)
        return cached_check(f"alike in {pairs}", key, bool, run_check)


def _disjoint_rounds(pairs: InplacePairs) -> list[dict[int, int]]:
    """Partition of the pairs into rounds; no round uses a result or an argument twice."""
    rounds: list[dict[int, int]] = []
    for result, argument in pairs:
        free = (r for r in rounds if result not in r and argument not in r.values())
        found = next(free, None)
        if found is None:
            rounds.append(found := {})
        found[result] = argument
    return rounds
