"""Replaces a product with the classes and its cross entropy in a joint graph by ops in chunks.

The logits of a language model, (tokens, classes), are often the largest tensor of a step, and a
step has them several times. In chunks they are computed again twice.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.cache.profiles import profile_session
from coop_plan.runtime.capture.graph_builder import GETITEM
from coop_plan.runtime.capture.profiler import (
    RANDOM_PERIOD,
    fake_values,
    signature,
    synthetic_arguments,
)
from coop_plan.runtime.torch_internals.joint_graphs import is_primal
from coop_plan.runtime.torch_internals.ops import (
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    TO_COPY,
    UNTAGGED_VIEWS,
    storage_key,
)
from coop_plan.runtime.variants.bitwise_check import all_bitwise_equal, cached_check
from coop_plan.runtime.variants.linear_cross_entropy_ops import (
    INPUT_GRADIENT,
    LOSS,
    WEIGHT_GRADIENT,
    run_whole,
)
from coop_plan.schemas.units import Budget

CHUNKS = 64
"""Number of chunks, if so many have eager's bits; else fewer, of twice the size, and so on.

Sizes are powers of two: of products of other sizes fewer have the bits of the whole.
"""

CHECKED_COPIES = 5
"""Matrices of the logits' size that a comparison of bits has at once, at most.

It also has a copy of the weights, and their gradient.
"""

EVEN_ROWS = 64
"""On one thread, multiples of these rows are made by the same kernels, whatever their number.

On two threads the last rows may have other bits than in a product of fewer, 777 on each processor
that was tried, 512 and 1 024 on one of them.
"""

MIN_ROWS, MIN_CLASSES = 16, 64
"""Least size of a chunk: products of smaller matrices are slow."""

_aten = torch.ops.aten
_SAME = (*UNTAGGED_VIEWS, _aten.detach.default, _aten.alias.default)
"""Ops whose result has the elements of their argument in order."""

_CAST_OPTIONS = {"dtype", "layout", "device"}


@dataclass(frozen=True)
class Head:
    """A product with the classes, its cross entropy, and their gradients in a joint graph.

    Attributes:
        product: makes the logits.
        softmax: the log-softmax of the logits, in the dtype of the loss.
        loss: `nll_loss_forward`.
        backward: `nll_loss_backward`.
        by_input, by_weight, by_bias: make the gradients of the product's arguments, if those have
            one.
        inside: all ops from the product to the gradients, without those that make them.
        kept: rows that the loss reads, as the ops in chunks have it.
    """

    product: fx.Node
    softmax: fx.Node
    loss: fx.Node
    backward: fx.Node
    by_input: fx.Node | None
    by_weight: fx.Node | None
    by_bias: fx.Node | None
    inside: frozenset[fx.Node]
    kept: list[int]

    @property
    def products_again(self) -> int:
        """Number of times that chunks compute the product again."""
        return (self.by_input is not None) + (self.by_weight is not None)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments that all ops in chunks have: matrices, bias, target, options of the loss."""
        *bias, hidden, matrix = self.product.args
        _, target, _, *options = self.loss.args
        return hidden, matrix, bias[0] if bias else None, target, *options, self.kept


def heads_of(module: fx.GraphModule) -> list[Head]:
    """The heads of a joint graph that can run in chunks.

    The logits must be read by the loss alone, and the loss have no weights of classes.
    """
    found = module.graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default)
    return [head for loss in found if (head := _head_of(loss)) is not None]


def chunk_heads_beyond(module: fx.GraphModule, budget: Budget) -> bool:
    """Chunk the heads, as `chunk_heads` does, if a budget cannot hold one of them.

    It would hold the inputs of the step, the logits and their softmax. Then no op on whole logits
    is measured.
    """
    heads = heads_of(module)
    if budget.kind != "bytes" or not heads:
        return False
    inputs = (node.meta["val"] for node in module.graph.nodes if is_primal(node))
    bytes_of = {
        storage_key(value): _storage_bytes(value)
        for value in inputs
        if isinstance(value, torch.Tensor)
    }
    room = int(budget.value) - sum(bytes_of.values())
    needs = (
        _storage_bytes(h.product.meta["val"]) + _storage_bytes(h.softmax.meta["val"]) for h in heads
    )
    return max(needs) > room and chunk_heads(module, room=room)


def _storage_bytes(value: torch.Tensor) -> int:
    return int(value.untyped_storage().nbytes())


@profile_session()
def chunk_heads(module: fx.GraphModule, *, checked: bool = True, room: int | None = None) -> bool:
    """Replace each head of a joint graph by ops in chunks, in place; False if there is none.

    A head of whose chunks none has the bits of the whole is left. For an absent device bits are not
    `checked`: it gets as many chunks as it can have. With `room` in bytes, bits are compared
    on as many rows as it holds, on one thread and if rows are even (`EVEN_ROWS`).
    """

    def sizes_of(head: Head) -> tuple[int, int] | None:
        return _chunk_sizes(head, room) if checked else _smallest_sizes(head)

    sizes = [(head, sizes_of(head)) for head in heads_of(module)]
    for head, chunk in sizes:
        if chunk is not None:
            _replace(head, *chunk)
    return any(chunk is not None for _, chunk in sizes)


def _head_of(loss: fx.Node) -> Head | None:
    args: Any = loss.args
    output, target, weight, reduction, ignore_index = args
    softmax = _without(output, _SAME[-2:])
    if weight is not None or softmax.target is not LOG_SOFTMAX:
        return None
    logits, dim, half_to_float = softmax.args
    exact = softmax.meta["val"].dtype in (torch.float32, torch.float64)
    if logits.meta["val"].dim() != 2 or dim not in (1, -1) or half_to_float or not exact:
        return None
    inside = {softmax, loss}
    product: Any = logits
    cut: fx.Node | None = None
    while product.target in _SAME or _is_cast(product) or _is_copy(product) or _is_cut(product):
        if _is_cut(product):
            if cut is not None or product.meta["val"].shape[2] != logits.meta["val"].shape[1]:
                return None
            cut = product
        inside.add(product)
        product = product.args[0]
    products = (_aten.mm.default, _aten.addmm.default)
    if product.target not in products or product.kwargs or product.meta["val"].dim() != 2:
        return None
    if product.meta["val"].shape[1] != logits.meta["val"].shape[1]:
        return None
    inside.add(product)
    readers = [*_readers(softmax, _SAME[-2:], inside)]
    backward = next((r for r in readers if r.target is _aten.nll_loss_backward.default), None)
    gradient = next((r for r in readers if r.target is LOG_SOFTMAX_BACKWARD), None)
    if backward is None or gradient is None or {*readers} != {loss, backward, gradient}:
        return None
    if backward.args[2:6] != (target, None, reduction, ignore_index):
        return None
    if gradient.args[0] is not backward or {*backward.users} != {gradient}:
        return None
    inside |= {backward, gradient}
    through = *_SAME, TO_COPY, _aten.t.default, _aten.slice_backward.default
    ends = [*_readers(gradient, through, inside)]
    sewn = [node for node in inside if node.target is _aten.slice_backward.default]
    if [node.args[1:] for node in sewn] != ([] if cut is None else [_cut_arguments(cut)]):
        return None
    users = {user for node in inside - {loss} for user in node.users}
    if not users <= inside | {*ends}:
        return None
    made = {_gradient_kind(end, product, inside): end for end in ends}
    if None in made or len(made) != len(ends) or not made.keys() & {"input", "weight"}:
        return None
    if "bias" in made and "weight" not in made:
        return None
    return Head(
        *(product, softmax, loss, backward),
        *(made.get("input"), made.get("weight"), made.get("bias")),
        frozenset(inside),
        [] if cut is None else _kept_rows(cut),
    )


def _without(node: Any, targets: Sequence[Any]) -> Any:
    """The node below a chain of ops."""
    while node.target in targets:
        node = node.args[0]
    return node


def _is_cast(node: fx.Node) -> bool:
    """True if an op changes the dtype alone."""
    if node.target is not TO_COPY or not node.kwargs.keys() <= _CAST_OPTIONS:
        return False
    given, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(given.device == made.device and given.layout == made.layout)


def _is_copy(node: fx.Node) -> bool:
    plain = {"memory_format": torch.contiguous_format}
    return node.target is _aten.clone.default and node.kwargs in ({}, plain)


def _is_cut(node: fx.Node) -> bool:
    """True if an op takes some rows of each text: (texts, rows, classes), the second dimension."""
    if (
        node.target is not _aten.slice.Tensor
        or len(node.args) < 3
        or node.args[4:] not in ((), (1,))
    ):
        return False
    return node.meta["val"].dim() == 3 and node.args[1] in (1, -2)


def _cut_arguments(cut: fx.Node) -> tuple[Any, ...]:
    """Arguments of the `slice_backward` of a cut, without the gradient."""
    whole = cut.all_input_nodes[0].meta["val"]
    end = cut.args[3] if len(cut.args) > 3 else sys.maxsize
    return [*whole.shape], *cut.args[1:3], end, 1


def _kept_rows(cut: fx.Node) -> list[int]:
    begin: Any = cut.args[2]
    rows, kept = cut.all_input_nodes[0].meta["val"].shape[1], cut.meta["val"].shape[1]
    return [rows, range(rows)[begin:].start, kept]


def _readers(node: fx.Node, through: Sequence[Any], passed: set[fx.Node]) -> Iterator[fx.Node]:
    """Readers of a node, also through these ops, which are added to `passed`."""
    for user in node.users:
        if user.target in through and (user.target is not TO_COPY or _is_cast(user)):
            passed.add(user)
            yield from _readers(user, through, passed)
        else:
            yield user


def _gradient_kind(end: fx.Node, product: fx.Node, inside: set[fx.Node]) -> str | None:
    """The argument of the product whose gradient an op makes from that of the logits."""
    arguments: Any = product.args
    *_, hidden, matrix = arguments
    given: Any = end.args[0]
    if given not in inside or end.kwargs:
        return None
    value, whole = given.meta["val"], product.meta["val"]
    plain = value.shape == whole.shape and value.dtype == hidden.meta["val"].dtype
    if end.target is _aten.mm.default:
        other: Any = end.args[1]
        if plain and other.target is _aten.t.default and other.args[0] is matrix:
            return "input"
        turned = given.target is _aten.t.default and value.shape == whole.shape[::-1]
        same = _without(other, _SAME[-2:]) is _without(hidden, _SAME[-2:])
        return "weight" if turned and same and value.dtype == whole.dtype else None
    if end.target is _aten.sum.dim_IntList and plain and [*end.args[1:]] == [[0], True]:
        return "bias" if len(product.args) == 3 else None
    return None


def _chunk_sizes(head: Head, room: int | None) -> tuple[int, int] | None:
    """Rows and classes of the largest number of chunks with eager's bits; None if none has them."""
    dtype, fakes = head.softmax.meta["val"].dtype, fake_values(head.arguments)
    row_sizes, class_sizes = _sizes_of(head)
    rows, classes = head.product.meta["val"].shape
    unit = EVEN_ROWS
    if room is not None and rows % unit == 0 and torch.get_num_threads() == 1:
        hidden, matrix, bias, target, *options, _ = fakes
        held = (room - 2 * _storage_bytes(matrix)) // (CHECKED_COPIES * classes * dtype.itemsize)
        held = max(held, 2 * min(row_sizes, default=0), unit) // unit * unit
        held = min(rows, held)
        fakes = hidden[:held], matrix, bias, target[:held], *options, []
        row_sizes = [size for size in row_sizes if size < held]

    def run_check() -> list[int]:
        made, _ = synthetic_arguments(LOSS, (*fakes, dtype, MIN_ROWS), {})
        given: Any = made[: len(fakes)]
        hidden, _, _, target, reduction, *_ = given
        torch.arange(len(target), out=target).mul_(RANDOM_PERIOD).remainder_(classes)
        gradient = torch.ones((), dtype=dtype, device=hidden.device)
        gradient = gradient if reduction else gradient.repeat(len(target))
        *forward, by_input, by_weight, by_bias = run_whole(gradient, given, dtype)
        total = forward[1]

        def rows_equal(size: int) -> bool:
            made = (
                LOSS(*given, dtype, size)[:2],
                INPUT_GRADIENT(gradient, *given, total, dtype, size),
            )
            return all_bitwise_equal((*made[0], made[1]), (*forward, by_input))

        def classes_equal(size: int) -> bool:
            if head.by_weight is None:
                return True
            made = WEIGHT_GRADIENT(gradient, *given, total, *sums, dtype, size)
            return all_bitwise_equal(made, (by_weight, by_bias))

        chunk_rows = next(filter(rows_equal, row_sizes), 0)
        sums = LOSS(*given, dtype, chunk_rows)[2:] if chunk_rows else ()
        chunk_classes = next(filter(classes_equal, class_sizes), None) if chunk_rows else None
        return [] if chunk_classes is None else [chunk_rows, chunk_classes]

    key = signature(LOSS, (*fakes, dtype, row_sizes, class_sizes), {})
    found = cached_check("chunks alike", key, list[int], run_check)
    return (found[0], found[1]) if found else None


def _smallest_sizes(head: Head) -> tuple[int, int] | None:
    """Rows and classes of the largest number of chunks."""
    rows, classes = _sizes_of(head)
    return (rows[0], classes[0]) if rows and classes else None


def _sizes_of(head: Head) -> tuple[list[int], list[int]]:
    """Rows and classes of chunks to try, from the smallest on; frozen weights need no classes."""
    rows, classes = head.product.meta["val"].shape
    of_classes = [0] if head.by_weight is None else _sizes(classes, MIN_CLASSES)
    return _sizes(rows, MIN_ROWS), of_classes


def _sizes(count: int, least: int) -> list[int]:
    powers = (1 << i for i in range(count.bit_length()))
    return [size for size in powers if least <= size < count <= size * CHUNKS]


def _replace(head: Head, rows: int, classes: int) -> None:
    """Replace a head by ops in chunks of so many rows and classes."""
    graph, given = head.product.graph, head.arguments
    dtype = head.softmax.meta["val"].dtype
    gradient, total = head.backward.args[0], head.backward.args[6]

    def insert(at: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        with graph.inserting_before(at):
            made = graph.call_function(target, args)
        made.meta = at.meta | {"val": value}
        return made

    value = head.softmax.meta["val"]
    with value.fake_mode:
        sums = value.new_empty((len(value), 1)), value.new_empty((len(value), 1))
    loss = insert(head.loss, LOSS, (*given, dtype, rows), (*head.loss.meta["val"], *sums))
    head.loss.replace_all_uses_with(loss)
    if head.by_input is not None:
        args = gradient, *given, total, dtype, rows
        made = insert(head.by_input, INPUT_GRADIENT, args, head.by_input.meta["val"])
        head.by_input.replace_all_uses_with(made)
        graph.erase_node(head.by_input)
    if head.by_weight is not None:
        parts = [part for part in (head.by_weight, head.by_bias) if part is not None]
        first = min(parts)
        read = [insert(first, GETITEM, (loss, 2 + i), sums[i]) for i in range(2)]
        args = gradient, *given, total, *read, dtype, classes
        values = [part.meta["val"] for part in parts]
        made = insert(first, WEIGHT_GRADIENT, args, (*values, None)[:2])
        for i, part in enumerate(parts):
            part.replace_all_uses_with(insert(first, GETITEM, (made, i), values[i]))
            graph.erase_node(part)
    for node in reversed(graph.nodes):
        if node in head.inside:
            graph.erase_node(node)
