"""Process groups."""

from typing import Any

import torch
from torch._library.fake_class_registry import FakeScriptObject


def first_rank(group: str) -> int:
    """The lowest global rank of the process group that c10d knows by a name."""
    c10d: Any = torch.distributed.distributed_c10d
    return min(torch.distributed.get_process_group_ranks(c10d._resolve_process_group(group)))


def is_object(value: object) -> bool:
    """Whether a value of a traced graph stands for an object that is neither tensor nor number."""
    return isinstance(value, FakeScriptObject)


def real_object(value: Any) -> Any:
    """What such a value stands for. Assumed: it is in `real_obj`."""
    return value.real_obj


def group_name(value: Any) -> str:
    """The name of the process group that a value of a traced graph stands for.

    Assumed: it is the name, the group, or a `FakeScriptObject` that stands for the group.
    """
    group = real_object(value) if is_object(value) else value
    return str(getattr(group, "group_name", group))


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there."""
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(tensor)
    return waited


def group_of_all() -> str | None:
    """The name of the process group of all ranks; None where this process is alone."""
    if ranks() == 1:
        return None
    world: Any = torch.distributed.group.WORLD
    return str(world.group_name)


def ranks() -> int:
    """Of this job."""
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    return 1 if alone else torch.distributed.get_world_size()


def default_store() -> Any:
    """The store by which the ranks of this job found each other."""
    return torch.distributed.distributed_c10d._get_default_store()
