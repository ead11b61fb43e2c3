"""What was tried of ops on stand-in data: of this process, and kept with the profiles."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from coop_plan.runtime.cache.profiles import session
from coop_plan.runtime.capture.profiler import lasting
from coop_plan.runtime.torch_internals.fakes import real_world

Found = TypeVar("Found")

_found: dict[object, Any] = {}


def tried(
    what: str, key: tuple[object, ...], kind: type[Found], attempt: Callable[[], Found]
) -> Found:
    """What `attempt` finds out about ops of a signature (`profile.signature`), if nobody knows."""
    known_by = (what, *key)
    if known_by not in _found:
        name = lasting(key)
        cache = None if name is None else session()
        record = None if cache is None else cache.get(f"{what} {name}")
        if record is not None:
            with contextlib.suppress(msgspec.MsgspecError):  # damaged: what is tried replaces it
                _found[known_by] = msgspec.json.decode(record, type=kind)
        if known_by not in _found:
            with real_world():
                _found[known_by] = attempt()
            if cache is not None:
                cache.put(f"{what} {name}", msgspec.json.encode(_found[known_by]).decode())
    found: Found = _found[known_by]
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one type hold the same, signs of zero and NaN included."""
    first, second = (values.contiguous().flatten().view(torch.uint8) for values in (a, b))
    return first.equal(second)
