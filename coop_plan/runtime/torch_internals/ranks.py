"""Process groups."""

from typing import Any

import torch
from torch._library.fake_class_registry import FakeScriptObject


def first_rank(group: str) -> int:
    """The lowest global rank of the process group that c10d knows by a name."""
    c10d: Any = torch.distributed.distributed_c10d
    return min(torch.distributed.get_process_group_ranks(c10d._resolve_process_group(group)))


def is_object(value: object) -> bool:
    """True if a value of a traced graph is a fake script object: neither tensor nor number."""
    return isinstance(value, FakeScriptObject)


def real_object(value: Any) -> Any:
    """The object behind a fake script object. Assumed: it is in `real_obj`."""
    return value.real_obj


def group_name(value: Any) -> str:
    """The name of the process group that a value of a traced graph stands for.

    Assumed: it is the name, the group, or a `FakeScriptObject` that stands for the group.
    """
    group = real_object(value) if is_object(value) else value
    return str(getattr(group, "group_name", group))


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a functional collective."""
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(tensor)
    return waited


def world_size() -> int:
    """Number of ranks of this job."""
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    return 1 if alone else torch.distributed.get_world_size()


def default_store() -> Any:
    """The store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()
