"""Device specs for offline capture: built in, or from a file.

The figures of the built-in devices (`devices.json`) are the dense peaks of the vendors' data
sheets, and the total memory that PyTorch reports, which is less than the nominal size.
"""

import functools
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coop_plan.schemas import InvalidInputError
from coop_plan.schemas._parse import Model, parse

BUILT_IN = Path(__file__).with_name("devices.json")

CONTEXT_BYTES = 512 << 20
"""Approximate memory of a CUDA context."""

Rate = Annotated[float, Meta(gt=0, le=1e18)]
Share = Annotated[float, Meta(gt=0, le=1)]


class DeviceSpec(Model, frozen=True, kw_only=True):
    """Parameters of the cost model (`roofline.py`) for a device; `source` cites the figures.

    Attributes:
        flops: peak operations per second by dtype of PyTorch, or `tf32` for float32 products where
            PyTorch allows it. Other dtypes run as float32.
        bytes_per_s: memory bandwidth.
        link_bytes_per_s: bandwidth to the host, each way; 0: no link.
        host_bytes_per_s: memory bandwidth of the host, where updates may run; 0: they may not.
        launch_us: least time of an op.
        matmul_share, convolution_share, attention_share, memory_share: fraction of the peak that
            ops of a class reach.
        matmul_workspace_bytes: cuBLAS's workspace, allocated once (NVIDIA, "cuBLAS",
            CUBLAS_WORKSPACE_CONFIG: `:4096:2:16:8`, on Hopper 32 MiB).
        context_bytes: memory of the driver, which no step can use; in published runs 0.5 to 1.3 GB
            on CUDA, and 512 MiB if this is None.
    """

    name: str = ""
    source: str = ""
    kind: Literal["cuda", "cpu"]
    memory_bytes: Annotated[int, Meta(gt=0, lt=2**60)]
    flops: dict[str, Rate]
    bytes_per_s: Rate
    link_bytes_per_s: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    host_bytes_per_s: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    launch_us: Annotated[float, Meta(ge=0, le=1e6)] = 3.0
    matmul_share: Share = 0.75
    convolution_share: Share = 0.5
    attention_share: Share = 0.5
    memory_share: Share = 0.85
    matmul_workspace_bytes: Annotated[int, Meta(ge=0, lt=2**60)] = 8_519_680
    context_bytes: Annotated[int, Meta(ge=0, lt=2**60)] | None = None

    @property
    def context(self) -> int:
        """Bytes of the driver's context."""
        if self.context_bytes is not None:
            return self.context_bytes
        return CONTEXT_BYTES if self.kind == "cuda" else 0

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError("flops has no float32, the fallback of other dtypes")


@functools.cache
def built_in() -> dict[str, DeviceSpec]:
    """The built-in devices by name."""
    return {
        name: msgspec.structs.replace(spec, name=name)
        for name, spec in msgspec.json.decode(
            BUILT_IN.read_bytes(), type=dict[str, DeviceSpec]
        ).items()
    }


def device(name: str) -> DeviceSpec:
    """The built-in device of that name, or the device in the JSON file at that path.

    Raises:
        InvalidInputError: no such device or file, or the file holds no device spec.
    """
    if name in built_in():
        return built_in()[name]
    try:
        content = Path(name).read_bytes()
    except (OSError, ValueError):
        known = ", ".join(built_in())
        raise InvalidInputError(
            f"'{name}' is neither a built-in device ({known}) nor a device file"
        ) from None
    spec = parse(DeviceSpec, content, name)
    return msgspec.structs.replace(spec, name=spec.name or Path(name).stem)
