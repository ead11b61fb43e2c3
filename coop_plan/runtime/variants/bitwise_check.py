"""Cache of bitwise-equality checks on synthetic inputs, in memory and with the profiles on disk."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from coop_plan.runtime.cache.profiles import session
from coop_plan.runtime.capture.profiler import persistent_key
from coop_plan.runtime.torch_internals.fakes import real_mode

Result = TypeVar("Result")

_results: dict[object, Any] = {}


def cached_check(
    check: str,
    op_signature: tuple[object, ...],
    kind: type[Result],
    run_check: Callable[[], Result],
) -> Result:
    """The result of a check of an op (`profiler.signature`); `run_check` runs if none is cached."""
    key = (check, *op_signature)
    if key not in _results:
        name = persistent_key(op_signature)
        cache = None if name is None else session()
        record = None if cache is None else cache.get(f"{check} {name}")
        if record is not None:
            with contextlib.suppress(msgspec.MsgspecError):  # damaged: checked again and replaced
                _results[key] = msgspec.json.decode(record, type=kind)
        if key not in _results:
            with real_mode():
                _results[key] = run_check()
            if cache is not None:
                cache.put(f"{check} {name}", msgspec.json.encode(_results[key]).decode())
    result: Result = _results[key]
    return result


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors of one dtype have equal bits, signs of zero and NaN included."""
    first, second = (values.contiguous().flatten().view(torch.uint8) for values in (a, b))
    return first.equal(second)


def all_bitwise_equal(results: Sequence[Any], expected: Sequence[Any]) -> bool:
    """True if two lists of tensors have equal bits, and None at the same places."""
    return all(
        a is b if a is None or b is None else bitwise_equal(a, b)
        for a, b in zip(results, expected, strict=True)
    )
