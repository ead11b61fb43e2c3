"""Offline capture: traces a step for an absent device, in a child process.

In the child, PyTorch sees one fake CUDA device (`runtime/device/fake_cuda_device.cpp`). PyTorch
detects devices once, at import, so the library is loaded before; the caller's process is not
affected. The child imports the user's module, builds the model and traces the step with fake
tensors on that device, and counts an iteration of eager PyTorch if asked. It allocates no memory
for the model.
"""

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from coop_plan.runtime.errors import CaptureError, RuntimeRefusalError
from coop_plan.runtime.kernels import GraphKind, Kernels
from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.runtime.offline_capture.eager_parts import EagerMemory, held_padding
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.schemas import Graph, InvalidInputError, Outputs, parse_graph

SOURCE = Path(__file__).parents[1] / "device" / "fake_cuda_device.cpp"

CHILD_PROGRAM = """
import ctypes, sys
for library in sys.argv[1:]:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
from coop_plan.runtime.offline_capture.fake_device import serve_captures
serve_captures()
"""
"""Program of the child; its arguments are libraries."""


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A step to capture, and the device.

    `target` is `package.module:function`, called with `batch` and `length` if they are set.
    The states of `optimizer` are in the captured graph (`optimizer_state`) unless `states` is false
    or `eager` true; that counts an eager iteration. Graphs are captured over each of `kernels`,
    with `split` one with split regions, and with `chunks` one with heads in chunks (`graphs_of`).
    If it `accumulates`, earlier micro-batches have left gradients. In an `iteration` updates of
    `optimizer` are ops.
    """

    target: str
    spec: DeviceSpec
    batch: int | None = None
    length: int | None = None
    optimizer: OptimizerSpec | None = None
    states: bool = True
    eager: bool = False
    kernels: tuple[Kernels, ...] = ("eager",)
    split: Outputs | None = None
    accumulates: bool = False
    chunks: bool = False
    iteration: bool = False


class CaptureResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Captured graphs, or an error; `invalid` is true if the input causes the error.

    `eager` is the memory of the eager iteration, if that was requested.
    """

    graphs: dict[GraphKind, str] = {}
    eager: EagerMemory | None = None
    error: str = ""
    invalid: bool = False


class Captured(NamedTuple):
    """Captured graphs, and the memory of the eager iteration if that was requested.

    `graphs` has one over each of the requested kernels, `graph` is the first.
    """

    graphs: dict[GraphKind, Graph]
    eager: EagerMemory | None

    @property
    def graph(self) -> Graph:
        """The graph over the first of the requested kernels."""
        return next(iter(self.graphs.values()))


class OfflineCapture:
    """Captures in child processes, one per kind of device, that end with the context."""

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "OfflineCapture":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.communicate()
        self._children.clear()

    def capture(self, request: CaptureRequest) -> Captured:
        """The graphs of a step on an absent device.

        Raises:
            InvalidInputError: no such module or function, or not such a result.
            CaptureError: the step cannot be captured.
            BuildError: the library could not be compiled.
        """
        child = self._child(request.spec)
        assert child.stdin is not None
        assert child.stdout is not None
        with tempfile.TemporaryDirectory(prefix="coop-plan-") as folder:
            request_path, response_path = Path(folder, "request"), Path(folder, "response")
            request_path.write_bytes(msgspec.json.encode(request))
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(os.fsencode(folder) + b"\n")
                child.stdin.flush()
                child.stdout.readline()
            if not response_path.exists():
                del self._children[request.spec.kind]
                raise CaptureError(
                    f"'{request.target}' cannot be captured for {request.spec.name}: the process"
                    f" that traced it ended with {child.wait()}"
                )
            found = msgspec.json.decode(response_path.read_bytes(), type=CaptureResponse)
        if found.error:
            raise (InvalidInputError if found.invalid else CaptureError)(found.error)
        graphs = {
            kernels: parse_graph(graph, source="captured graph")
            for kernels, graph in found.graphs.items()
        }
        return Captured(graphs, found.eager)

    def _child(self, spec: DeviceSpec) -> "subprocess.Popen[bytes]":
        if spec.kind not in self._children:
            command = [sys.executable, "-c", CHILD_PROGRAM, *map(str, preload_libraries(spec))]
            path = os.pathsep.join(map(os.path.abspath, sys.path))
            self._children[spec.kind] = subprocess.Popen(  # noqa: S603
                command,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._children[spec.kind]


def capture_for(request: CaptureRequest) -> Graph:
    """The graph of a step on an absent device; errors are those of `OfflineCapture.capture`."""
    with OfflineCapture() as captures:
        return captures.capture(request).graph


def preload_libraries(spec: DeviceSpec) -> list[Path]:
    """Libraries that the child loads before PyTorch, in order."""
    if spec.kind == "cpu":
        return []
    from coop_plan.runtime.device import build

    folder = build.torch_folder() / "lib"
    if (folder / "libtorch_cuda.so").exists():
        # A CUDA build registers its own hooks, guards and kernels, which need a driver.
        raise CaptureError(
            f"a step is captured for {spec.name} with PyTorch's CPU build, and this one is built"
            " for CUDA: install torch from https://download.pytorch.org/whl/cpu with coop-plan"
            " in an environment of its own, or capture without --device on the device itself"
        )
    fake_device = build.compiled(SOURCE, "no_device", [SOURCE.with_suffix(".h")])
    return [folder / "libc10.so", folder / "libtorch_cpu.so", fake_device]


def serve_captures() -> None:
    """Main function of the child: folders with a request come by stdin, one line each.

    A line of stdout answers that the response is in the folder. Other output goes to stderr.
    """
    done = os.fdopen(os.dup(1), "wb")
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        folder = Path(os.fsdecode(line.rstrip(b"\n")))
        request = msgspec.json.decode((folder / "request").read_bytes(), type=CaptureRequest)
        try:
            response = _capture(request)
        except InvalidInputError as error:
            response = CaptureResponse(error=str(error), invalid=True)
        except RuntimeRefusalError as error:
            response = CaptureResponse(error=str(error))
        (folder / "response").write_bytes(msgspec.json.encode(response))
        done.write(b"\n")
        done.flush()


def _capture(request: CaptureRequest) -> CaptureResponse:
    import torch

    from coop_plan.runtime.capture.joint_graph import RUNTIME
    from coop_plan.runtime.capture.joint_graph import Captured as CapturedJoint
    from coop_plan.runtime.gradients.capture_adjust import (
        BESIDE,
        HELD,
        MemoryEnvironment,
        consumable,
        sizes,
        with_held,
    )
    from coop_plan.runtime.offline_capture.constant_values import ConstantValues
    from coop_plan.runtime.offline_capture.eager_memory import StorageLog, count_eager
    from coop_plan.runtime.offline_capture.meta_kernels import register_meta_kernels
    from coop_plan.runtime.offline_capture.roofline import Roofline
    from coop_plan.runtime.offline_capture.target import graphs_of, load_target, user_failure
    from coop_plan.runtime.torch_internals.fakes import (
        FakeTensorMode,
        convertible_modules,
        copyable_fakes,
        legacy_constructors_on,
        pretend_cuda,
        skip_truncated_normal,
    )

    kind = request.spec.kind
    if kind == "cuda":
        pretend_cuda(request.spec.name, request.spec.memory_bytes)
    register_meta_kernels()

    def pretended() -> contextlib.ExitStack:
        """The context in which the user's code builds its model, and runs it in eager."""
        stack = contextlib.ExitStack()
        for context in (
            torch.device(kind),
            fake,
            values,
            copyable_fakes(),
            convertible_modules(),
            skip_truncated_normal(),
            legacy_constructors_on(torch.device(kind)),
        ):
            stack.enter_context(context)
        return stack

    fake, values = FakeTensorMode(), ConstantValues()
    log = StorageLog(kind) if request.eager else None
    with pretended(), log or contextlib.nullcontext():
        step, args = load_target(request.target, request.batch, request.length)
    model = Roofline(request.spec)

    optimizer = request.optimizer
    in_backward = optimizer is not None and optimizer.update == "backward"
    adjusted = not request.iteration and (in_backward or request.accumulates)
    wanted = request.iteration or (request.states and log is None)

    def environment(captured: CapturedJoint) -> MemoryEnvironment:
        if in_backward:
            return MemoryEnvironment(consumed=frozenset(consumable(captured)))
        return with_held(captured, held_padding(kind, len(sizes(captured))))

    def captured() -> dict[GraphKind, Graph]:
        gc.disable()  # it frees nothing of a trace, and takes a tenth of its time
        try:
            return graphs_of(
                step,
                args,
                name=request.target.rpartition(":")[2],
                model=model,
                optimizer=optimizer if wanted else None,
                environment=environment if adjusted else None,
                kernels=request.kernels,
                split=request.split,
                chunks=request.chunks,
                iteration=request.iteration,
            )
        finally:
            gc.enable()

    # Under a default device, Dynamo traces PyTorch's Python mode for it at every call of the step:
    # half of a large model's capture time. Only steps without explicit devices need it.
    try:
        graphs = captured()
    except CaptureError:
        with torch.device(kind):
            graphs = captured()
    eager = None
    if log is not None:
        try:
            with pretended():
                eager = count_eager(
                    *(log, step, args, optimizer, model.resident_bytes),
                    accumulates=request.accumulates,
                )
        except (InvalidInputError, CaptureError):
            raise
        except Exception as error:
            raise user_failure(request.target, error) from error
        residents = (t for t in graphs["eager"].tensors if t.resident)
        beside = (BESIDE, RUNTIME)  # not in eager, but for the libraries' memory
        kept = sum(
            t.bytes for t in residents if t.name not in beside and not t.name.startswith(HELD)
        )
        eager = msgspec.structs.replace(eager, resident_bytes=kept + model.resident_bytes)
    texts = {kernels: graph.to_json() for kernels, graph in graphs.items()}
    return CaptureResponse(graphs=texts, eager=eager)
