"""AOTAutograd's cache with entries of ours: the metadata of a trace, without compiled code.

AOTAutograd makes the entry, and the part of the key that has the graph and its inputs. The part for
Inductor is left out, which takes a second to import. The folder of AOTAutograd's own entries is not
used: files there are unpickled without a check of their owner.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import fx
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._inductor.output_code import OutputCode
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack

from coop_plan.runtime.torch_internals.tracing import patch_lock

NAMESPACES = ("aten", "prims")
"""Ops whose gradients and decompositions are PyTorch's own, so that its version determines them."""


class CodeSlot(OutputCode):
    """Place of a forward or backward in an entry; it is written to disk without its code."""

    def __init__(self, run: Callable[[list[Any]], Any] | None = None) -> None:
        self.run = run
        self._boxed_call = True  # in the instance: Dynamo's wrapper copies its attributes

    def __call__(self, inputs: Any) -> Any:
        assert self.run is not None
        return self.run(inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CodeSlot, ()

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """The code is set after the entry was found, by the planner of its graph."""


def slot_compiler(compiler: Callable[..., Callable[[list[Any]], Any]]) -> Any:
    """A compiler for AOTAutograd, which asks its cache before."""
    kind: Any = SerializableAOTDispatchCompiler
    return kind(CodeSlot, lambda module, inputs: CodeSlot(compiler(module, inputs)))


@dataclass(frozen=True)
class TraceStore:
    """Store of entries: `find(key, inputs)`, with fake inputs, and `save(entry)` after a miss.

    `find` returns None if there is no entry.
    """

    find: Callable[[str, Sequence[Any]], Any]
    save: Callable[[Any], None]


_store: ContextVar[TraceStore | None] = ContextVar("traces", default=None)


@contextlib.contextmanager
def keep_traces(store: TraceStore) -> Iterator[None]:
    """Use a store in place of AOTAutograd's folder for traces with `slot_compiler`.

    Assumed: `try_load` calls `autograd_cache_key` with graph, inputs and configuration first, then
    `_lookup` with the key first and the inputs fourth, and takes an exception as a miss; `save`
    gets the key and the entry; an entry has `compiled_fw` and `compiled_bw`, with a code in
    `result` if entries are bundled; a backward is compiled in the same call if it is not lazy.
    """
    cache: Any = autograd_cache.AOTAutogradCache
    of_module: Any = autograd_cache
    key_of, lookup, save = of_module.autograd_cache_key, cache._lookup, cache.save

    def our_key(gm: Any, inputs: Any, config: Any, *rest: Any) -> Any:
        if _store.get() is None:  # another thread, of Inductor
            return key_of(gm, inputs, config, *rest)
        with autograd_cache.sanitize_gm_for_cache(gm):
            autograd_cache.check_cacheable(gm)
            return autograd_cache.AOTAutogradCachePickler(gm).get_hash((gm, inputs, config)), []

    def our_lookup(key: str, local: bool, remote: bool, inputs: Any, *rest: Any) -> Any:
        ours = _store.get()
        if ours is None:
            return lookup(key, local, remote, inputs, *rest)
        found = ours.find(key, inputs)
        return None if found is None else (found, b"")

    def our_save(key: str, entry: Any, remote: bool) -> None:
        ours = _store.get()
        if ours is None:
            save(key, entry, remote)
        elif entry.compiled_bw is not None and not _added_guards():
            entry.aot_joint_graph_str = None  # for logs
            entry.aot_forward_graph_str = entry.aot_backward_graph_str = None
            ours.save(entry)

    changes = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
    with patch_lock, torch._functorch.config.patch(changes):
        token = _store.set(store)
        of_module.autograd_cache_key = our_key
        cache._lookup, cache.save = staticmethod(our_lookup), staticmethod(our_save)
        try:
            yield
        finally:
            of_module.autograd_cache_key = key_of
            cache._lookup, cache.save = staticmethod(lookup), staticmethod(save)
            _store.reset(token)


def _added_guards() -> bool:
    """True if the trace holds only while some inputs are, or are not, the same tensor."""
    return bool(TracingContext.get().guards_context.aotautograd_guards)


def slots_of(entry: Any) -> tuple[CodeSlot, CodeSlot]:
    """The places of the forward and the backward in an entry."""
    return entry.compiled_fw.result, entry.compiled_bw.result


def trace_settings() -> list[str]:
    """Settings of this thread by which an equal graph has another joint graph."""
    devices = ("cpu", "cuda")
    sdp: Any = torch.backends.cuda
    values = [
        torch.get_default_dtype(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
        torch.is_autocast_cache_enabled(),
        torch.is_inference_mode_enabled(),
        *(sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled()),
        *(sdp.math_sdp_enabled(), sdp.cudnn_sdp_enabled()),
        torch.backends.cudnn.enabled,
        sorted(torch._functorch.config.save_config_portable().items()),
    ]
    return [str(value) for value in values]


def depends_only_on_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """True if the joint graph of Dynamo's `gm` is determined by code, inputs and PyTorch.

    False for constants, ops of other libraries, tensor subclasses, modes and hooks, which
    AOTAutograd's key does not have in full; and for ranks, which trace together.
    """
    strict = torch._functorch.config.strict_autograd_cache or torch._dynamo.config.strict_precompile
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if strict or hooks is not None or _get_current_function_mode_stack():
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    if TracingContext.try_get() is None:  # a step that a thread derives when it runs
        return False
    if not all(type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor) for value in inputs):
        return False
    modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return all(_is_known(module, node) for module in modules for node in module.graph.nodes)


def _is_known(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return isinstance(getattr(module, str(node.target), None), fx.GraphModule)
    target = node.target
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target).partition(".")[0] in NAMESPACES
    return not isinstance(target, HigherOrderOperator) or target is tag_activation_checkpoint
