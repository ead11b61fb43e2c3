"""Rules of movable residents on the host, for the replay of a plan."""

from collections.abc import Iterator, Mapping

from coop_plan.planner.verifier.host import FOR_EVER, HostSlab
from coop_plan.planner.verifier.state import HOME, Place, Transfer
from coop_plan.schemas import Plan, Tensor


def home_faults(
    plan: Plan, tensors: Mapping[int, Tensor], slab: HostSlab
) -> Iterator[tuple[str, Place, str]]:
    """Add the homes to the slab; yields code, place and message of each fault.

    A home is of a movable resident, which has one home.
    """
    if len({home.tensor for home in plan.homes}) != len(plan.homes):
        yield "wrong-home", "/homes", "a tensor has two homes"
    for index, home in enumerate(plan.homes):
        place = ("/homes/", index)
        tensor = tensors.get(home.tensor)
        if tensor is None or not (tensor.resident and tensor.movable):
            message = f"tensor {home.tensor} is not a movable resident"
            yield "wrong-home", (place, "/tensor"), message
            continue
        for code, message in slab.add(FOR_EVER, home.host_offset, tensor.bytes):
            yield code, (place, "/host_offset"), message


def reads_home(tensor: int, pending: Mapping[int, Transfer], tensor_of: Mapping[int, int]) -> bool:
    """True if a prefetch in flight reads the home of a tensor."""
    return any(
        transfer.source == HOME and tensor_of[buffer] == tensor
        for buffer, transfer in pending.items()
    )
