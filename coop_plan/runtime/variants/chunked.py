"""Variants that run an op for some of its slices at a time, where that takes less memory.

What they need beside arguments and results is that of a part, and each result may lie in the place
of an argument that is cut as it is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coop_plan.runtime.variants.registry import Offers, Other
from coop_plan.runtime.capture.graph_builder import GraphBuilder
from coop_plan.runtime.capture.op_profile import OpProfile
from coop_plan.runtime.variants.inplace_outputs import lies_alike, written_over
from coop_plan.runtime.variants.chunked_ops import CUTS, IN_PARTS, Cut, packed, slices_of
from coop_plan.runtime.capture.profiler import fakes, profile, signature, stand_in_arguments
from coop_plan.runtime.variants.bitwise_check import same_bits, tried
from coop_plan.runtime.torch_internals.ops import OpOverload, argument_names, tree_flatten

NAME = "parts"

SHARES = 2, 8
"""In how many parts an op is tried."""

WORTH = 0.9
"""A variant is offered if it takes at most this part of what each before it takes at once."""

SMALL = 0.1
"""Results below this part of the largest are not put into places."""

CHANNELS = 8
"""A multiple of this many are taken at once: oneDNN's blocks of them stay whole."""

Pairs = tuple[tuple[int, int], ...]
"""Results and the tensor arguments in whose places they may lie, by position."""


def offer_parts(builder: GraphBuilder, offers: Offers) -> None:
    """Give ops in the builder's graph variants that run them in parts."""
    ops = zip(list(builder.ops), builder.op_fields, builder.profiles, strict=True)
    for node, fields, facts in ops:
        if not isinstance(node.target, OpOverload) or node.target not in CUTS:
            continue
        args, kwargs = fakes((node.args, node.kwargs))
        called = _Called(node.target, args, kwargs, facts)
        sizes = {t: builder.tensors[t]["bytes"] for t in (*fields["inputs"], *fields["outputs"])}
        need = _need(sizes, fields["inplace"], facts)
        for name, own, variant, pairs in called.in_parts(builder.names[node]):
            inplace = offers.places(node, pairs)
            less = _need(sizes, inplace, variant)
            if less > WORTH * need:
                continue
            need = less
            given = (*own, *node.args)
            other = offers.beside(node, IN_PARTS[node.target], given, node.kwargs)
            offers.add(node, name, Other(other, variant), inplace=inplace)


def _need(sizes: Mapping[int, int], inplace: Sequence[Sequence[int]], facts: OpProfile) -> int:
    """The bytes that a variant takes at once, at least."""
    shared: dict[int, int] = {}
    for made, source in inplace:
        if made not in shared and source not in shared.values():
            shared[made] = source
    return sum(sizes.values()) + facts.workspace_bytes - sum(sizes[t] for t in shared)


@dataclass(frozen=True)
class _Called:
    """One of ATen's ops with its arguments, fake tensors among them, and its profile."""

    target: OpOverload
    args: Any
    kwargs: Any
    facts: OpProfile

    def in_parts(self, op: str) -> Iterator[tuple[str, Any, OpProfile, Pairs]]:
        """Each way to run it in parts: its name, its first arguments, its profile, its pairs."""
        outputs = self.facts.outputs
        if any(o and (o.alias >= 0 or o.twin >= 0) for o in outputs):
            return
        layouts = packed([None if o is None else (list(o.shape), list(o.stride)) for o in outputs])
        pairs = self._pairs()
        found = set[str]()
        for name, part in self._parts():
            if name in found:
                continue
            own = part, layouts
            variant = profile(IN_PARTS[self.target], (*own, *self.args), self.kwargs, f"{op}_{name}")
            if variant.outputs == outputs and self._alike(own, variant, pairs):
                found.add(name)
                yield name, own, variant, pairs

    @property
    def _cut(self) -> Cut:
        return CUTS[self.target]

    def _cuts(self) -> dict[str, torch.Tensor]:
        """The arguments that are cut, by name."""
        names = argument_names(self.target)
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        return {name: given[name] for name in self._cut.arguments if given.get(name) is not None}

    def _parts(self) -> Iterator[tuple[str, list[int]]]:
        """
        How many slices along each dimension to take at once, by name; none cannot be cut.

        Of one name the first that gives the same results is enough.
        """
        given, along = self._cuts(), self._cut.arguments
        if any(max(along[name]) >= value.dim() for name, value in given.items()):
            return
        slices = slices_of(self._cut, given)
        for name, value in given.items():
            sizes = [value.shape[dim] for dim in along[name]]
            if any(size not in (1, n) for size, n in zip(sizes, slices, strict=True)):
                return
        made = [
            o is not None and d is not None
            for o, d in zip(self.facts.outputs, self._cut.results, strict=True)
        ]
        for share in SHARES:
            part, count = [], 1
            for n in slices:
                step = -(-n // max(1, share // count)) or 1
                part.append(step)
                count *= -(-n // step)
            many = count > 1 and math.prod(part) >= torch.get_num_threads()  # a slice for each
            for channels, cut in self._channels(share):
                if (many and any(made)) or cut:
                    yield f"{NAME}-{share}", [*(part if many else slices), *channels]

    def _channels(self, share: int) -> list[tuple[list[int], bool]]:
        """How many channels of sums to take at once, and whether these are fewer than all."""
        if self._cut.sums is None:
            return [([], False)]
        given = dict(zip(argument_names(self.target), self.args, strict=False)) | self.kwargs
        (count,) = slices_of(self._cut.sums, given)
        whole = [([0], False)]
        plain = given["groups"] == 1 and not given["transposed"] and given["output_mask"][1]
        step = -(-count // share // CHANNELS) * CHANNELS
        return [([step], True), *whole] if plain and 0 < step < count else whole

    def _pairs(self) -> Pairs:
        """The results that lie as an argument does that is cut as they are."""
        outputs = self.facts.outputs
        largest = max(o.bytes for o in outputs if o is not None)
        flat = tree_flatten((self.args, self.kwargs))[0]
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        found = []
        for result, output in enumerate(outputs):
            if output is None or output.bytes < SMALL * largest:
                continue
            for name, value in self._cuts().items():
                same = self._cut.arguments[name] == self._cut.results[result]
                if same and lies_alike(value, output):
                    position = next(i for i, tensor in enumerate(tensors) if tensor is value)
                    found.append((result, position))
        return tuple(found)

    def _alike(self, own: Any, variant: OpProfile, pairs: Pairs) -> bool:
        """Whether results in parts are the op's own to the bit, wherever they lie."""
        target, args = IN_PARTS[self.target], (*own, *self.args)

        def attempt() -> bool:
            given, named = stand_in_arguments(self.target, self.args, self.kwargs)
            expected = tree_flatten(self.target(*given, **named))[0]
            if not _same(tree_flatten(target(*own, *given, **named))[0], expected):
                return False
            for over in _rounds(pairs):
                made, taken = written_over(target, ((*own, *given), named), over)
                if taken != variant.allocated_beside(over) or not _same(made, expected):
                    return False
            return True

        key = signature(target, args, self.kwargs)
        return tried(f"alike in {pairs}", key, bool, attempt)


def _rounds(pairs: Pairs) -> list[dict[int, int]]:
    """All pairs, several at a time: each result and each argument is in one of them at most."""
    rounds: list[dict[int, int]] = []
    for result, argument in pairs:
        free = (r for r in rounds if result not in r and argument not in r.values())
        found = next(free, None)
        if found is None:
            rounds.append(found := {})
        found[result] = argument
    return rounds


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return all(
        a is b if a is None or b is None else same_bits(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )
