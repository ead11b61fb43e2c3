"""The library that holds ops of ours for PyTorch's dispatcher."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from coop_plan.runtime.torch_internals.ops import OpOverload, schema_text

_library: Any = torch.library.Library("coop_plan", "DEF")  # type: ignore[no-untyped-call]


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    *,
    tags: Sequence[torch.Tag] = (),
    key: str = "CompositeExplicitAutograd",
) -> OpOverload:
    """An op that runs `run` for a dispatch key; its name may have an overload's behind a dot."""
    _library.define(name + schema, tags=tags)
    _library.impl(name, run, key)
    base, _, overload = name.partition(".")
    op: OpOverload = getattr(getattr(torch.ops.coop_plan, base), overload or "default")
    return op


Places = Sequence[torch.Tensor | None]

WRITERS: dict[OpOverload, Callable[..., Any]] = {}
"""What writes results of ops into places, which it is given first."""


def define_writer(
    schema: str, run: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> OpOverload:
    """An op named after `run`, which takes the places of its results first, if any."""
    name = run.__name__.removeprefix("_")
    op = define(name, schema, lambda *args: run((), *args), tags=tags)
    WRITERS[op] = run
    return op


def slices(count: int, step: int) -> Iterator[slice]:
    """Of so many elements, so many at a time: for an op that computes in parts."""
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def name_and_arguments(original: OpOverload) -> tuple[str, str]:
    """An op's name without namespace and overload, and its schema behind the first parenthesis."""
    name, _, rest = schema_text(original).partition("(")
    return name.partition("::")[2].partition(".")[0], rest
