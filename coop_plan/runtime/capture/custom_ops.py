"""Registration of custom ops in the dispatcher library `coop_plan`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from coop_plan.runtime.torch_internals.ops import OpOverload, schema_text

_library: Any = torch.library.Library("coop_plan", "DEF")  # type: ignore[no-untyped-call]


def define_op(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    *,
    tags: Sequence[torch.Tag] = (),
    key: str = "CompositeExplicitAutograd",
) -> OpOverload:
    """Register `kernel` as an op for a dispatch key; `name` may be `op.overload`."""
    _library.define(name + schema, tags=tags)
    _library.impl(name, kernel, key)
    base, _, overload = name.partition(".")
    op: OpOverload = getattr(getattr(torch.ops.coop_plan, base), overload or "default")
    return op


BOXED_KERNELS: dict[OpOverload, Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]] = {}
"""Kernels by op that take the op's inputs, one list of tensors, and clear the list."""


COMPOSED_KERNELS: dict[OpOverload, Callable[..., Any]] = {}
"""Kernels by op that consist of other ops on tensors alone: a cost model adds those up."""


OutTensors = Sequence[torch.Tensor | None]
"""Tensors to write the first results of an op into; None: the op allocates the result."""

OUT_KERNELS: dict[OpOverload, Callable[..., Any]] = {}
"""Kernels by op that take output tensors first, and write the op's results into them."""


def define_out_op(
    schema: str, kernel: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> OpOverload:
    """Register an op named after `kernel`, which takes a sequence of output tensors first."""
    name = kernel.__name__.removeprefix("_")
    op = define_op(name, schema, lambda *args: kernel((), *args), tags=tags)
    OUT_KERNELS[op] = kernel
    return op


def chunk_slices(count: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most `step` elements that cover `count` elements."""
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def name_and_schema(original: OpOverload) -> tuple[str, str]:
    """An op's name without namespace and overload, and its schema after the first parenthesis."""
    name, _, rest = schema_text(original).partition("(")
    return name.partition("::")[2].partition(".")[0], rest
