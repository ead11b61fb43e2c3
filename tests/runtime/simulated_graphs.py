"""CUDA graphs of the pretended device: `torch.cuda.CUDAGraph` as far as the runtime uses it.

A capture records ops and copies by their addresses, and leaves no trace in memory: as on a device,
nothing has run. A replay runs them at these addresses, which must still be those of a live arena,
of a live graph's pool, or of a storage that was alive at the capture. Work of a capture is on the
captured stream or on one that it waits for. Random ops draw from states that the graph has
registered, at offsets from those that the states have at the replay.
"""

import ctypes
import itertools
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from coop_plan.runtime.device import cuda
from coop_plan.runtime.torch_internals.ops import elements_spanned, storage_reference

_blocks = weakref.WeakSet()
_graphs = weakref.WeakSet()
_pools = set()  # to which a capture allocates
_state = {"capturing": None, "library": None, "stream": None, "waits": 0}


def use(library, stream):
    """Capture from a pretended device with this library and this class of streams."""
    _state.update(library=library, stream=stream)
    library.pretended_unjoined.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    for function in (library.pretended_unjoined, library.pretended_calls, library.pretended_pool):
        function.restype = ctypes.c_int64
    begin = cuda.Block.__init__

    def block(self, *given):
        begin(self, *given)
        _blocks.add(self)

    cuda.Block.__init__ = block


def is_capturing():
    return _state["capturing"] is not None


def empty_cache():
    assert not _pools, "captures_underway.empty() INTERNAL ASSERT FAILED"


def end_pool(device, pool):
    assert device == 0
    _pools.remove(pool)


def set_sync_debug_mode(mode):
    _state["waits"] = {"default": 0, "warn": 1}.get(mode, mode)
    _state["library"].pretended_tell_waits(_state["waits"])


def get_sync_debug_mode():
    return _state["waits"]


class Place:
    """A tensor's memory: its address, and what has to be alive for it to be there."""

    def __init__(self, tensor):
        self.address, self.dtype = tensor.data_ptr(), tensor.dtype
        self.layout = tuple(tensor.shape), tensor.stride()
        self.bytes = elements_spanned(tensor) * tensor.element_size()
        inside = (block for block in _blocks if self.within(block.address, block.size))
        self.block = next(map(weakref.ref, inside), None)
        self.storage = storage_reference(tensor)

    def within(self, begin, size):
        return begin <= self.address and self.address + self.bytes <= begin + size

    def check(self):
        if self.bytes == 0 or (self.block is not None and self.block() is not None):
            return
        assert self.block is None, "a graph is replayed in an arena that was freed"
        if any(self.within(*pool) for graph in list(_graphs) for pool in graph.pool_blocks):
            return
        storage = self.storage()
        assert storage is not None, "a graph reads memory that was freed"
        assert self.within(storage.data_ptr(), storage.nbytes()), "a graph reads memory that moved"

    def value(self):
        """A tensor at this address."""
        device = torch.device("cuda", 0)
        memory = torch._C._construct_storage_from_data_pointer(self.address, device, self.bytes)
        return torch.empty(0, dtype=self.dtype, device=device).set_(memory, 0, *self.layout)


def placed(value):
    if not isinstance(value, torch.Tensor):
        return value
    return Place(value) if value.device.type == "cuda" else value.clone()


def at_place(value):
    return value.value() if isinstance(value, Place) else value


class Recorder(TorchDispatchMode):
    """Records the ops of a capture, and what their arguments were before."""

    def __init__(self, graph):
        super().__init__()
        self.graph, self.ops, self.overwritten = graph, [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert _state["stream"].current is self.graph.stream, f"{op} runs on another stream"
        schema = op._schema
        where = tree_map(placed, (args, kwargs))
        given = list(zip(schema.arguments, where[0], strict=False))
        given += [(a, where[1][a.name]) for a in schema.arguments if a.name in kwargs]
        written = tree_flatten([value for argument, value in given if argument.is_write])[0]
        written = [place for place in written if isinstance(place, Place)]
        for place in written:
            before = ctypes.string_at(place.address, place.bytes) if place.bytes else b""
            self.overwritten.append((place, before))
        for place in tree_flatten(where)[0]:  # a copy that did not run has left any indices
            if isinstance(place, Place) and place.block is not None and place.dtype == torch.int64:
                ctypes.memset(place.address, 0, place.bytes)
        calls = _state["library"].pretended_calls(self.graph.number)
        philox = torch.cuda.default_generators[0].philox
        offset = philox.offset
        made = op(*args, **kwargs)
        drawn = (philox, offset) if philox.offset != offset else None
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        sets = any(isinstance(value, torch.UntypedStorage) for value in tree_flatten(args)[0])
        if not (is_view or sets or "empty" in schema.name):
            results = None if written else tree_map(placed, made)
            self.ops.append((calls, op, where, results, drawn))
        return made


class CUDAGraph:
    """As PyTorch's."""

    numbers = itertools.count(1)

    def __init__(self):
        self.number, self.recorder, self.pool_blocks = next(self.numbers), None, []
        self.drawn = {}  # how far a replay moves each state on
        _graphs.add(self)

    def __del__(self):
        _state["library"].pretended_free_pool(self.number)

    def register_generator_state(self, generator):
        assert not is_capturing(), "Cannot register the state during capturing stage."
        self.drawn[generator.philox] = 0

    def capture_begin(self, pool=None, capture_error_mode="global"):
        stream = _state["stream"]
        assert stream.current is not stream.default, "the default stream cannot be captured"
        assert not is_capturing(), "a capture within a capture"
        self.stream, self.pool = stream.current, pool
        _pools.add(pool)
        self.register_generator_state(torch.cuda.default_generators[0])
        self.offsets = {philox: philox.offset for philox in self.drawn}
        for philox in self.drawn:
            philox.offset, philox.graph = 0, self.number
        self.memory = [(b, ctypes.string_at(b.address, b.size)) for b in list(_blocks)]
        self.recorder = Recorder(self)
        _state["capturing"] = self
        _state["library"].pretended_capture(self.number)
        self.recorder.__enter__()

    def capture_end(self):
        assert _state["stream"].current is self.stream
        library, calls = _state["library"], _state["library"].pretended_calls(self.number)
        self.recorder.__exit__(None, None, None)
        library.pretended_capture(0)
        _state["capturing"] = None
        for place, before in reversed(self.recorder.overwritten):
            ctypes.memmove(place.address, before, place.bytes)
        for block, before in self.memory:
            ctypes.memmove(block.address, before, block.size)
        del self.memory, self.recorder.overwritten
        count = library.pretended_pool(self.number, None, 0)
        found = (ctypes.c_int64 * (2 * count))()
        library.pretended_pool(self.number, found, count)
        self.pool_blocks = list(zip(found[::2], found[1::2], strict=True))
        for address, size in self.pool_blocks:
            ctypes.memset(address, 0xFF, size)  # NaN until a replay
        if library.pretended_invalid():  # and the states stay in the capture
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        unjoined = library.pretended_unjoined(self.number, self.stream.cuda_stream)
        if unjoined:
            raise RuntimeError(f"CUDA error: capturing stream has unjoined work ({unjoined})")
        _pools.remove(self.pool)
        for philox, offset in self.offsets.items():
            self.drawn[philox] = philox.offset
            philox.offset, philox.graph = offset, 0
        self.ops, self.calls = self.recorder.ops, calls

    def replay(self):
        _state["library"].pretended_replaying(1)
        try:
            with torch.no_grad():
                self._run()
        finally:
            _state["library"].pretended_replaying(0)

    def _run(self):
        library, done = _state["library"], 0
        generator = torch.cuda.default_generators[0]
        current, begins = generator.graphsafe_get_state(), {}
        for philox, count in self.drawn.items():
            assert philox.graph == 0, "a state is in a capture"
            begins[philox] = philox.offset
            philox.offset += count
        for calls, op, where, made, drawn in self.ops:
            library.pretended_replay(self.number, done, calls)
            done = calls
            for place in tree_flatten((where, made))[0]:
                if isinstance(place, Place):
                    place.check()
            args, kwargs = tree_map(at_place, where)
            if drawn is not None:
                state = generator.clone_state()
                state.philox.seed = drawn[0].seed
                state.philox.offset = begins[drawn[0]] + drawn[1]
                generator.graphsafe_set_state(state)
            found = op(*args, **kwargs)
            generator.graphsafe_set_state(current)
            if made is not None:
                places, values = tree_flatten(made)[0], tree_flatten(found)[0]
                for place, value in zip(places, values, strict=True):
                    if isinstance(place, Place):
                        place.value().copy_(value)
        library.pretended_replay(self.number, done, self.calls)
