"""Devices that a step can be captured for without having them: built in, or from a file.

The figures of the built-in ones (`devices.json`) are dense peaks of the vendors' data sheets and
the memory that PyTorch reports in total, which is less than the nominal size.
"""

import functools
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coop_plan.schemas import InvalidInputError
from coop_plan.schemas._parse import Model, parse

BUILT_IN = Path(__file__).with_name("devices.json")

Rate = Annotated[float, Meta(gt=0, le=1e18)]
Share = Annotated[float, Meta(gt=0, le=1)]


class DeviceSpec(Model, frozen=True, kw_only=True):
    """A device as the cost model (`roofline.py`) sees it; `source` says whose figures these are.

    `flops` are peaks per second by type: a type of PyTorch, or `tf32`, in which float32 products
    run where PyTorch allows it. What is not named runs as float32. `bytes_per_s` is the memory's
    bandwidth, `link_bytes_per_s` that to the host, each way; 0: no link. No op takes less than
    `launch_us`. The `*_share` are what an op reaches of its peak: matrix products, convolutions,
    fused attention, and what is bound by memory. `matmul_workspace_bytes` is what cuBLAS takes once
    and keeps (NVIDIA, "cuBLAS", CUBLAS_WORKSPACE_CONFIG: `:4096:2:16:8`, on Hopper 32 MiB).
    """

    name: str = ""
    source: str = ""
    kind: Literal["cuda", "cpu"]
    memory_bytes: Annotated[int, Meta(gt=0, lt=2**60)]
    flops: dict[str, Rate]
    bytes_per_s: Rate
    link_bytes_per_s: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    launch_us: Annotated[float, Meta(ge=0, le=1e6)] = 3.0
    matmul_share: Share = 0.75
    convolution_share: Share = 0.5
    attention_share: Share = 0.5
    memory_share: Share = 0.85
    matmul_workspace_bytes: Annotated[int, Meta(ge=0, lt=2**60)] = 8_519_680

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError("flops has no float32, which other types fall back to")


@functools.cache
def built_in() -> dict[str, DeviceSpec]:
    """The devices that have a name, by that."""
    return {
        name: msgspec.structs.replace(spec, name=name)
        for name, spec in msgspec.json.decode(
            BUILT_IN.read_bytes(), type=dict[str, DeviceSpec]
        ).items()
    }


def device(name: str) -> DeviceSpec:
    """The device of that name, or of the JSON file there.

    Raises:
        InvalidInputError: neither, or the file does not hold a device.
    """
    if name in built_in():
        return built_in()[name]
    try:
        content = Path(name).read_bytes()
    except (OSError, ValueError):
        known = ", ".join(built_in())
        raise InvalidInputError(
            f"no device and no device file '{name}'; the devices are {known}"
        ) from None
    spec = parse(DeviceSpec, content, name)
    return msgspec.structs.replace(spec, name=spec.name or Path(name).stem)
