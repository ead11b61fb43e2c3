"""Places of the inputs of CUDA graphs: tensors of the graphs' own, which calls copy theirs to."""

import torch

from coop_plan.runtime.errors import CudaGraphError


def is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def place_of(value: torch.Tensor) -> torch.Tensor:
    """A copy of an input, with its strides.

    Raises:
        CudaGraphError: no copy can have its layout.
    """
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise CudaGraphError(f"an input is a {type(value).__name__} of layout {value.layout}")
    place = torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=value.device
    )
    copy_to_place(value, place)
    return place


def copy_to_place(value: torch.Tensor, place: torch.Tensor) -> None:
    """Copy a tensor to its place; of dimensions that are expanded, the first index."""
    for dim, step in enumerate(place.stride()):
        if step == 0 and place.size(dim) > 1:
            value, place = value.narrow(dim, 0, 1), place.narrow(dim, 0, 1)
    place.copy_(value)


def has_layout(place: object, value: object) -> bool:
    """True if a value has the layout of its place, or is the same without one."""
    if isinstance(place, torch.Tensor) and isinstance(value, torch.Tensor):
        return (place.dtype, place.size(), place.stride(), place.device) == (
            *(value.dtype, value.size(), value.stride(), value.device),
        )
    return place is value
