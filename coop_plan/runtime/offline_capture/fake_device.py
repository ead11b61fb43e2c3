"""Capture for a device that is not there, in a process of its own.

That process believes in one CUDA device (`runtime/device/fake_cuda_device.cpp`). PyTorch asks once, when
it is imported, whether there is one, and never forgets it: so the library is loaded before, and the
caller's process keeps its own world. The user's module is imported, the model built and the step
traced with fake tensors on that device: nothing of the model is allocated.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.runtime.errors import CaptureError
from coop_plan.schemas import Graph, InvalidInputError, parse_graph

SOURCE = Path(__file__).parents[1] / "device" / "fake_cuda_device.cpp"

START = """
import ctypes, sys
for library in sys.argv[3:]:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
from coop_plan.runtime.offline_capture.fake_device import answer
answer(*sys.argv[1:3])
"""
"""Of the process, whose arguments are two files, question and answer, and libraries to load."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What to capture, for which device.

    `target` is `package.module:function`, which is given `batch` where that is set; the other two
    are as in `capture.state`.
    """

    target: str
    spec: DeviceSpec
    batch: int | None = None
    optimizer: str | None = None
    masters: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A graph, or why there is none, and whether that is the input's fault."""

    graph: str = ""
    error: str = ""
    invalid: bool = False


def capture_for(asked: Question) -> Graph:
    """The graph of a step on a device that is not there.

    Raises:
        InvalidInputError: no such module or function, or not such a result.
        CaptureError: the step cannot be captured.
        BuildError: the library could not be compiled.
    """
    with tempfile.TemporaryDirectory(prefix="coop-plan-") as folder:
        question, answered = Path(folder, "question"), Path(folder, "answer")
        question.write_bytes(msgspec.json.encode(asked))
        command = [sys.executable, "-c", START, str(question), str(answered)]
        command += map(str, libraries(asked.spec))
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        ended = subprocess.run(  # noqa: S603
            command, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr.fileno(), check=False
        )
        if not answered.exists():
            raise CaptureError(
                f"'{asked.target}' cannot be captured for {asked.spec.name}: the process that"
                f" traced it ended with {ended.returncode}"
            )
        found = msgspec.json.decode(answered.read_bytes(), type=Answer)
    if found.error:
        raise (InvalidInputError if found.invalid else CaptureError)(found.error)
    return parse_graph(found.graph, source="captured graph")


def libraries(spec: DeviceSpec) -> list[Path]:
    """What the process loads before PyTorch, in order."""
    if spec.kind == "cpu":
        return []
    from coop_plan.runtime.device import build

    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "lib"
    if (folder / "libtorch_cuda.so").exists():
        # It registers hooks, guards and kernels of its own, which look for a driver.
        raise CaptureError(
            f"a step is captured for {spec.name} with PyTorch's CPU build, and this one is built"
            " for CUDA: install torch from https://download.pytorch.org/whl/cpu beside coop-plan"
            " in an environment of its own, or capture without --device on the device itself"
        )
    ours = build.compiled(
        SOURCE, "no_device", [SOURCE.with_suffix(".h")], link=("c10", "torch_cpu")
    )
    return [folder / "libc10.so", folder / "libtorch_cpu.so", ours]


def answer(question: str, answered: str) -> None:
    """The process's work: read the question from one file, write the answer to the other."""
    asked = msgspec.json.decode(Path(question).read_bytes(), type=Question)
    try:
        made = Answer(graph=_capture(asked).to_json())
    except InvalidInputError as error:
        made = Answer(error=str(error), invalid=True)
    except CaptureError as error:
        made = Answer(error=str(error))
    Path(answered).write_bytes(msgspec.json.encode(made))


def _capture(asked: Question) -> Graph:
    import torch

    from coop_plan.runtime.offline_capture.meta_kernels import describe_cells
    from coop_plan.runtime.offline_capture.constant_values import KnownValues
    from coop_plan.runtime.offline_capture.roofline import Roofline
    from coop_plan.runtime.offline_capture.target import called, capture
    from coop_plan.runtime.torch_internals.fakes import (
        FakeTensorMode,
        believe_in_cuda,
        convertible_modules,
        copyable_fakes,
        nothing_drawn_twice,
        tensors_of_sizes,
    )

    if asked.spec.kind == "cuda":
        believe_in_cuda(asked.spec.name, asked.spec.memory_bytes)
        describe_cells()
    with (
        torch.device(asked.spec.kind),
        FakeTensorMode(),
        KnownValues(),
        copyable_fakes(),
        convertible_modules(),
        nothing_drawn_twice(),
        tensors_of_sizes(torch.device(asked.spec.kind)),
    ):
        step, args = called(asked.target, asked.batch)

    def captured() -> Graph:
        return capture(
            step,
            args,
            name=asked.target.rpartition(":")[2],
            model=Roofline(asked.spec),
            optimizer=asked.optimizer,
            masters=asked.masters,
        )

    # Under a default device Dynamo follows PyTorch's Python function for it at every call that the
    # step makes: half of a large model's time, needed only where a step leaves devices to it.
    try:
        return captured()
    except CaptureError:
        with torch.device(asked.spec.kind):
            return captured()
