"""Offline capture: traces a step for an absent device, in a child process.

In the child, PyTorch sees one fake CUDA device (`runtime/device/fake_cuda_device.cpp`). PyTorch
detects devices once, at import, so the library is loaded before; the caller's process is not
affected. The child imports the user's module, builds the model and traces the step with fake
tensors on that device. It allocates no memory for the model.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.schemas import Graph, InvalidInputError, parse_graph

SOURCE = Path(__file__).parents[1] / "device" / "fake_cuda_device.cpp"

CHILD_PROGRAM = """
import ctypes, sys
for library in sys.argv[3:]:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
from coop_plan.runtime.offline_capture.fake_device import serve_capture
serve_capture(*sys.argv[1:3])
"""
"""Program of the child; its arguments are the files of request and response, then libraries."""


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A step to capture, and the device.

    `target` is `package.module:function`, called with `batch` if that is set. For `optimizer` and
    `masters` see `offline_capture.optimizer_state`.
    """

    target: str
    spec: DeviceSpec
    batch: int | None = None
    optimizer: str | None = None
    masters: bool = False


class CaptureResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A captured graph, or an error; `invalid` is true if the input causes the error."""

    graph: str = ""
    error: str = ""
    invalid: bool = False


def capture_for(request: CaptureRequest) -> Graph:
    """The graph of a step on an absent device, captured in a child process.

    Raises:
        InvalidInputError: no such module or function, or not such a result.
        CaptureError: the step cannot be captured.
        BuildError: the library could not be compiled.
    """
    with tempfile.TemporaryDirectory(prefix="coop-plan-") as folder:
        request_path, response_path = Path(folder, "request"), Path(folder, "response")
        request_path.write_bytes(msgspec.json.encode(request))
        command = [sys.executable, "-c", CHILD_PROGRAM, str(request_path), str(response_path)]
        command += map(str, preload_libraries(request.spec))
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        ended = subprocess.run(  # noqa: S603
            command, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr.fileno(), check=False
        )
        if not response_path.exists():
            raise CaptureError(
                f"'{request.target}' cannot be captured for {request.spec.name}: the process that"
                f" traced it ended with {ended.returncode}"
            )
        found = msgspec.json.decode(response_path.read_bytes(), type=CaptureResponse)
    if found.error:
        raise (InvalidInputError if found.invalid else CaptureError)(found.error)
    return parse_graph(found.graph, source="captured graph")


def preload_libraries(spec: DeviceSpec) -> list[Path]:
    """Libraries that the child loads before PyTorch, in order."""
    if spec.kind == "cpu":
        return []
    from coop_plan.runtime.device import build

    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "lib"
    if (folder / "libtorch_cuda.so").exists():
        # A CUDA build registers its own hooks, guards and kernels, which need a driver.
        raise CaptureError(
            f"a step is captured for {spec.name} with PyTorch's CPU build, and this one is built"
            " for CUDA: install torch from https://download.pytorch.org/whl/cpu with coop-plan"
            " in an environment of its own, or capture without --device on the device itself"
        )
    fake_device = build.compiled(
        SOURCE, "no_device", [SOURCE.with_suffix(".h")], link=("c10", "torch_cpu")
    )
    return [folder / "libc10.so", folder / "libtorch_cpu.so", fake_device]


def serve_capture(request_path: str, response_path: str) -> None:
    """Main function of the child: read the request from a file, write the response to another."""
    request = msgspec.json.decode(Path(request_path).read_bytes(), type=CaptureRequest)
    try:
        response = CaptureResponse(graph=_capture(request).to_json())
    except InvalidInputError as error:
        response = CaptureResponse(error=str(error), invalid=True)
    except CaptureError as error:
        response = CaptureResponse(error=str(error))
    Path(response_path).write_bytes(msgspec.json.encode(response))


def _capture(request: CaptureRequest) -> Graph:
    import torch

    from coop_plan.runtime.offline_capture.constant_values import ConstantValues
    from coop_plan.runtime.offline_capture.meta_kernels import register_gru_cells
    from coop_plan.runtime.offline_capture.roofline import Roofline
    from coop_plan.runtime.offline_capture.target import capture, load_target
    from coop_plan.runtime.torch_internals.fakes import (
        FakeTensorMode,
        convertible_modules,
        copyable_fakes,
        legacy_constructors_on,
        pretend_cuda,
        skip_truncated_normal,
    )

    if request.spec.kind == "cuda":
        pretend_cuda(request.spec.name, request.spec.memory_bytes)
        register_gru_cells()
    with (
        torch.device(request.spec.kind),
        FakeTensorMode(),
        ConstantValues(),
        copyable_fakes(),
        convertible_modules(),
        skip_truncated_normal(),
        legacy_constructors_on(torch.device(request.spec.kind)),
    ):
        step, args = load_target(request.target, request.batch)

    def captured() -> Graph:
        return capture(
            step,
            args,
            name=request.target.rpartition(":")[2],
            model=Roofline(request.spec),
            optimizer=request.optimizer,
            masters=request.masters,
        )

    # Under a default device, Dynamo traces PyTorch's Python mode for it at every call of the step:
    # half of a large model's capture time. Only steps without explicit devices need it.
    try:
        return captured()
    except CaptureError:
        with torch.device(request.spec.kind):
            return captured()
