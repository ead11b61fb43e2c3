"""A machine with one CUDA device, pretended: enough of `torch.cuda` for the runtime's CUDA path.

    python -m tests.runtime.simulated_cuda LIBRARY MODULE [ARGUMENT ...]

runs a module's `main()` there. The C++ side is tests/runtime/simulated_cuda.cpp, CUDA graphs are
those of tests/runtime/simulated_graphs.py. What it cannot show is what only a device does: its
kernels and its asynchrony.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_name("simulated_cuda.cpp")


def library():
    """The compiled C++ side; half a minute, once per cache folder."""
    from coop_plan.runtime.device import build

    header = Path(build.__file__).with_name("fake_cuda_device.h")
    return build.compiled(SOURCE, "pretend_cuda", [header])


def load(path):
    """The library; PyTorch must find it when it is imported."""
    assert "torch" not in sys.modules
    folder = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    return ctypes.CDLL(str(path))


class Stream:
    """A number; what waits for what is in the library's `pretended_wait`."""

    numbers = itertools.count()
    default: "Stream"
    current: "Stream"

    def __init__(self, device=None):
        self.cuda_stream = next(self.numbers)

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


Stream.default = Stream.current = Stream()


@contextlib.contextmanager
def stream(chosen):
    """As `torch.cuda.stream`, for all threads."""
    before, Stream.current = Stream.current, chosen
    try:
        yield
    finally:
        Stream.current = before


class Event:
    """The time at which the CPU was there."""

    def __init__(self, enable_timing=False):
        self.moment = None

    def record(self, stream=None):
        self.moment = time.perf_counter_ns()

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.moment - self.moment) / 1e6


class Philox(ctypes.Structure):
    """The state of a generator, as simulated_cuda.cpp has it."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("seed", "offset", "graph")]

    def __hash__(self):
        return ctypes.addressof(self)


class Generator:
    """As PyTorch's: a pointer to a state. Random ops draw from that of the `default` one."""

    default: "Generator"

    def __init__(self, library, is_capturing, philox):
        self.library, self.is_capturing, self.philox = library, is_capturing, philox
        self.device = "cuda:0"

    def refuse_capture(self):
        assert not self.is_capturing(), "not during a capture"

    def graphsafe_get_state(self):
        return Generator(self.library, self.is_capturing, self.philox)

    def graphsafe_set_state(self, other):
        self.philox = other.philox
        if self is Generator.default:
            self.library.pretended_draw_from(ctypes.byref(self.philox))

    def clone_state(self):
        self.refuse_capture()
        philox = Philox(self.philox.seed, self.philox.offset)
        return Generator(self.library, self.is_capturing, philox)

    def manual_seed(self, seed):
        self.refuse_capture()
        self.philox.seed, self.philox.offset = seed, 0

    def initial_seed(self):
        self.refuse_capture()
        return self.philox.seed

    def get_offset(self):
        self.refuse_capture()
        return self.philox.offset

    def set_offset(self, offset):
        self.refuse_capture()
        assert offset % 4 == 0, "offset must be a multiple of 4"
        self.philox.offset = offset

    def get_state(self):
        import torch

        return torch.tensor([self.initial_seed(), self.get_offset()]).view(torch.uint8)

    def set_state(self, state):
        import torch

        seed, offset = state.view(torch.int64).tolist()
        self.manual_seed(seed)
        self.set_offset(offset)


def pretend(path):
    """Make this process believe it; there is no way back."""
    pretended = load(path)
    pretended.pretended_statistic.restype = ctypes.c_int64
    import torch

    from coop_plan.runtime.device import copy_engines
    from coop_plan.runtime.device.cuda import bytes_of
    from coop_plan.runtime.torch_internals import cuda as library
    from tests.runtime import simulated_graphs

    library.CUDA_LIBRARY = Path(path)
    simulated_graphs.use(pretended, Stream)
    Generator.default = Generator(pretended, simulated_graphs.is_capturing, Philox())
    Generator.default.graphsafe_set_state(Generator.default)

    def memory_stats(_=None):
        current, peak = map(pretended.pretended_statistic, (0, 1))
        return {"requested_bytes.all.current": current, "requested_bytes.all.peak": peak}

    found = SimpleNamespace(name="Pretended", total_memory=2**30, major=9, minor=0)
    replacements = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device": lambda _: contextlib.nullcontext(),
        "device_count": lambda: 1,
        "Stream": Stream,
        "stream": stream,
        "current_stream": lambda _=None: Stream.current,
        "Event": Event,
        "_sleep": lambda _: None,
        "synchronize": lambda _=None: None,
        "empty_cache": simulated_graphs.empty_cache,
        "graph_pool_handle": lambda: (0, next(Stream.numbers)),
        "CUDAGraph": simulated_graphs.CUDAGraph,
        "is_current_stream_capturing": simulated_graphs.is_capturing,
        "set_sync_debug_mode": simulated_graphs.set_sync_debug_mode,
        "get_sync_debug_mode": simulated_graphs.get_sync_debug_mode,
        "default_generators": (Generator.default,),
        "manual_seed_all": Generator.default.manual_seed,
        "get_rng_state": lambda _=None: Generator.default.get_state(),
        "set_rng_state": lambda state, _=None: Generator.default.set_state(state),
        "get_device_properties": lambda _=None: found,
        "get_device_name": lambda _=None: found.name,
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda _=None: pretended.pretended_reset(),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_endAllocateToPool = simulated_graphs.end_pool
    torch._C._cuda_releasePool = lambda device, pool: None
    copy_engines.pinned = lambda size: torch.empty(size, dtype=torch.uint8)
    torch.UntypedStorage.clone = lambda storage: bytes_of(storage).clone().untyped_storage()
    torch.Tensor.record_stream = lambda tensor, stream: None


if __name__ == "__main__":
    name, path, module, *arguments = sys.argv
    pretend(path)
    sys.argv = [name, *arguments]
    sys.exit(importlib.import_module(module).main())
