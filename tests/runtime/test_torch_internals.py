"""What the runtime assumes of PyTorch's inside holds in the PyTorch installed here.

A failure names the version that broke it, and in words what.
"""

import ast
import contextlib
import ctypes
import inspect
import os
import pickle
import re
import threading
import tomllib
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher

from coop_plan.runtime.capture import tracing_rules
from coop_plan.runtime.device import build
from coop_plan.runtime.device.arena import Arena, Memory, Run, counted_bytes
from tests.runtime.forked import Forked

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def assumed(what):
    try:
        yield
    except Exception as error:
        raise AssertionError(f"PyTorch {torch.__version__} broke it: {what}") from error


with assumed("the names that runtime/torch_internals imports"):
    from coop_plan.runtime import torch_internals
    from coop_plan.runtime.torch_internals import (
        autograd,
        cuda,
        dynamo,
        dynamo_graphs,
        fakes,
        inductor,
        inductor_cpp,
        joint_graphs,
        kept_traces,
        ops,
        optimizers,
        partitioner,
        ranks,
        tracing,
    )


PRIVATE = {"__torch_dispatch__", "py_kernels", "compile_subgraph_reason", "pass_arg_as_tensor"}
"""Inside of PyTorch that no underscore shows."""


def private_names(source):
    """Names of PyTorch's inside that a source uses, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            of_torch = any(name.split(".")[0] == "torch" for name in names)
            if of_torch and any(part.startswith("_") for n in names for part in n.split(".")):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            hidden = node.attr.startswith("_") and not node.attr.startswith("__") and not own
            if hidden or node.attr in PRIVATE:
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch import _dynamo",
        "from torch.utils._pytree import tree_map",
        "torch._dynamo.config.allow_rnn = True",
        "values.untyped_storage()._cdata",
        "op.py_kernels",
    ],
)
def test_what_is_private_is_seen(line):
    assert list(private_names(line))


def test_nobody_else_names_the_inside_of_pytorch():
    frameworks = ROOT / "runtime/integrations/internals.py"
    sources = [p for p in (ROOT / "runtime").rglob("*.py") if p != frameworks]
    others = [p for p in sources if "torch_internals" not in p.parts]
    assert len(others) > 20
    found = [f"{p}:{line} {name}" for p in others for line, name in private_names(p.read_text())]
    assert found == []


LEVELS = (
    {"errors", "locks", "op_profile", "torch_internals", "cache"},
    {"device"},
    {"distributed"},
    {"capture"},
    {"variants", "fused"},
    {"execute", "gradients", "dynamic_shapes", "iteration"},
    {"backend", "whole_iteration", "offline_capture", "inductor_budget"},
    {"integrations", "train_step"},
)
"""Folders and files of the runtime from the ground up."""


def test_no_import_goes_up_in_the_runtime():
    """Each folder imports from its own level and below; files without a level are exempt."""
    rank = {name: level for level, names in enumerate(LEVELS) for name in names}
    for path in (ROOT / "runtime").rglob("*.py"):
        top, *_ = path.relative_to(ROOT / "runtime").with_suffix("").parts
        for name in re.findall(r"^from coop_plan\.runtime\.(\w+)", path.read_text(), re.MULTILINE):
            if top in rank and name in rank:
                assert rank[name] <= rank[top], f"{path} imports {name}"


def test_the_range_is_pyprojects(caplog, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest, beyond) = (".".join(map(str, version)) for version in torch_internals.SUPPORTED)
    assert project["optional-dependencies"]["torch"] == [f"torch>={oldest},<{beyond}"]
    torch_internals.warn_of_version()
    assert caplog.text == ""
    for version in ("2.10.1", "2.16.0a0+git1", "3.0.0"):
        caplog.clear()
        monkeypatch.setattr(torch, "__version__", version)
        torch_internals.warn_of_version()
        assert f"PyTorch {version} was not tested" in caplog.text


# AOTAutograd's cache


def test_aotautograds_entries_can_be_kept_elsewhere():
    compiled, asked, entries = [], [], []

    def find(key, inputs):
        asked.append((key, [isinstance(value, fakes.FakeTensor) for value in inputs]))
        return next(iter(entries), None)

    def save(entry):
        entries.append(pickle.loads(pickle.dumps(entry)))

    def compiler(module, inputs):
        compiled.append(joint_graphs.boxed(lambda args: module(*args)))
        return compiled[-1]

    def backend(gm, inputs):
        assert kept_traces.depends_only_on_key(gm, inputs)
        each = kept_traces.slot_compiler(compiler)
        with kept_traces.keep_traces(kept_traces.TraceStore(find, save)):
            return joint_graphs.aot_autograd(
                fw_compiler=each, bw_compiler=each, inference_compiler=each
            )(gm, inputs)

    cache = torch._functorch._aot_autograd.autograd_cache
    kept = cache.autograd_cache_key, cache.AOTAutogradCache._lookup, cache.AOTAutogradCache.save
    x = torch.ones(3, requires_grad=True)
    with assumed("AOTAutogradCache asks by a key that is equal for equal graphs, and saves once"):
        for _ in range(2):
            torch._dynamo.reset()
            call = torch.compile(lambda x: x.sin().sum(), backend=backend)
            if entries:
                with pytest.raises(AssertionError):  # no code was set
                    call(x)
                forward, backward = kept_traces.slots_of(entries[0])
                forward.run, backward.run = compiled
            call(x).backward()
        (first, fake), (second, _) = asked
        assert first == second
        assert fake == [True]
        assert (len(compiled), len(entries)) == (2, 1)
        assert torch.equal(x.grad, 2 * torch.ones(3).cos())
    after = cache.autograd_cache_key, cache.AOTAutogradCache._lookup, cache.AOTAutogradCache.save
    assert after == kept


def test_a_fake_tensor_can_be_made_over_a_storage():
    with assumed("FakeTensor(mode, meta tensor, device), which shares the storage of the latter"):
        mode = fakes.FakeTensorMode()
        storage = fakes.meta_storage(64)
        with mode:
            whole = torch.empty(8, 2, dtype=torch.complex64)
        one, two = (
            fakes.fake_over(storage, fakes.Layout.of(value), mode)
            for value in (whole[:4].T, whole[2:4].conj())
        )
        assert one.shape == (2, 4)
        assert one.stride() == (1, 2)
        assert one.device == torch.device("cpu")
        assert two.is_conj()
        assert two.storage_offset() == 4
        assert ops.storage_key(one) == ops.storage_key(two)
        with mode:
            assert (one @ two.resolve_conj().new_empty(4, 2)).shape == (2, 2)


# Inductor


def layered(a, b):
    wide = (a * b + 1).to(torch.bfloat16)
    return (wide * b.to(torch.bfloat16) + wide).t().sin(), wide.float().sum(0)


@pytest.mark.skipif(torch_internals.version() < torch_internals.FUSED_SINCE, reason="refused")
def test_inductors_code_is_called_with_a_list_and_has_eagers_layouts_and_roundings():
    a, b = torch.randn(8, 16), torch.randn(16, 8).t()
    graph = inductor.decomposed(layered, fakes_like(a, b))
    with assumed("compile_fx_inner, its layouts of results, and current_callable"):
        kernel = inductor.compile_graphs([(graph, [a, b])])[0]
        given = [a, b]
        made = kernel(given)
        assert given == []
        for ours, eager in zip(made, layered(a, b), strict=True):
            assert torch.equal(ours, eager)
            assert ours.stride() == eager.stride()


def fakes_like(*values):
    with assumed("a fake tensor knows its mode"), fakes.FakeTensorMode() as mode:
        made = [torch.empty_strided(value.shape, value.stride()) for value in values]
        assert all(value.fake_mode is mode for value in made)
    return made


@pytest.fixture
def found(monkeypatch):
    """Whether Inductor found code on disk, by compilation."""
    cache = torch._inductor.codecache.FxGraphCache
    hits, load = [], cache.load_with_key

    def see(*args, **kwargs):
        code, info = load(*args, **kwargs)
        hits.append(code is not None)
        return code, info

    monkeypatch.setattr(cache, "load_with_key", see)
    return hits


def test_inductor_compiles_apart_from_a_trace_and_keeps_its_code(found):
    contexts = []

    def backend(gm, inputs):
        context = torch._guards.TracingContext.get()
        before = context.output_strides, context.fake_mode
        graph = inductor.decomposed(torch.sin, fakes_like(*inputs))
        output = next(iter(reversed(graph.nodes)))
        output.args = ((output.args[0],),)
        with torch._functorch.config.patch(bundled_autograd_cache=True):
            for _ in range(2):
                inductor.compile_graphs([(graph, fakes_like(*inputs))])
        contexts.append(before == (context.output_strides, context.fake_mode))
        return gm

    with assumed("the tracing context, and what Inductor's cache on disk depends on"):
        torch.compile(lambda x: x.cos(), backend=backend)(torch.ones(3, 5))
        assert contexts == [True]
        assert found[-1]
        assert len(found) == 2


def test_inductors_code_on_disk_is_of_the_instruction_set(found, monkeypatch, tmp_path):
    """Code for wider vectors gave wrong numbers and wrote beyond its results."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(7, 33)
    graph = inductor.decomposed(lambda x: (x * x + 1,), fakes_like(x))
    digests = set()
    with assumed("the tag of keys, and the instruction set that Inductor chooses"):
        for capability in ("default", None, "default"):
            if capability is None:
                monkeypatch.delenv("ATEN_CPU_CAPABILITY")
            else:
                monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
            digests.add(inductor.settings_digest())
            (made,) = inductor.compile_graphs([(graph, [x])])[0]([x])
            assert torch.equal(made, x * x + 1)
        assert found == [False, False, True]
        assert len(digests) == 2


@pytest.fixture
def libraries(monkeypatch, tmp_path):
    """Files of kernels that Inductor's compiler makes, in a cache of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    builder = torch._inductor.cpp_builder.CppBuilder
    made, build = [], builder.build

    def see(self):
        build(self)
        if self.get_target_file_path().endswith(".main.so"):
            made.append(self.get_target_file_path())

    monkeypatch.setattr(builder, "build", see)
    return made


def pointwise(count, *, seed=0):
    """Graphs that scale by random numbers, their inputs, and their results."""
    x = torch.randn(4, 16)
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()

    def scaled_by(number):
        return lambda x: ((x * number).sin(),)

    functions = [scaled_by(number) for number in numbers]
    graphs = [(inductor.decomposed(run, fakes_like(x)), [x]) for run in functions]
    return graphs, [run(x)[0] for run in functions]


def results(graphs):
    """The first result of each graph, which is compiled together with the others."""
    kernels = inductor.compile_graphs(graphs)
    return [kernel([*given])[0] for kernel, (_, given) in zip(kernels, graphs, strict=True)]


def test_kernels_of_several_graphs_are_compiled_by_one_call(libraries):
    """Those that were compiled before, in any file, are not compiled again."""
    with assumed("cpp_pybinding, the template of a kernel's module, and how it is loaded"):
        for count, calls in ((3, 1), (2, 1), (5, 2), (4, 2)):
            torch._inductor.codecache.PyCodeCache.cache_clear()
            graphs, expected = pointwise(count)
            torch.testing.assert_close(results(graphs), expected)
            assert len(libraries) == calls


def test_kernels_that_another_thread_compiles_are_complete(libraries):
    x = torch.randn(4, 16)
    with assumed("cpp_pybinding"), inductor_cpp.sources_kept(), ThreadPoolExecutor(1) as pool:
        compiled = torch.compile(lambda x: (x * 0.3).sin(), dynamic=False)
        torch.testing.assert_close(pool.submit(compiled, x).result(), (x * 0.3).sin())


def test_kernels_are_compiled_after_a_failure(libraries):
    graphs, expected = pointwise(2, seed=1)
    with assumed("a wrapper of the same text is one module"):
        with (
            torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
            pytest.raises(Exception, match="compiler"),
        ):
            inductor.compile_graphs(graphs)
        torch.testing.assert_close(results(graphs), expected)


def test_kernels_are_compiled_after_a_compiler_was_killed(libraries, monkeypatch):
    """Half a file may be left."""
    graphs, expected = pointwise(2, seed=2)
    builder = torch._inductor.cpp_builder.CppBuilder
    build = builder.build

    def killed(self):
        build(self)
        if libraries:
            os.truncate(libraries[0], 100)
            raise RuntimeError("killed")

    with assumed("the name of a library is a digest of its source"):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
            patch.setattr(builder, "build", killed)
            inductor.compile_graphs(graphs)
        torch.testing.assert_close(results(graphs), expected)


def test_kernels_whose_library_was_deleted_are_compiled_again(libraries):
    graphs, expected = pointwise(2, seed=3)
    for calls in (1, 2):
        torch._inductor.codecache.PyCodeCache.cache_clear()
        torch.testing.assert_close(results(graphs), expected)
        assert len(libraries) == calls
        Path(libraries[-1]).unlink()


def test_inductors_settings_have_a_digest():
    with assumed("config.get_hash"):
        digest = inductor.settings_digest()
        with torch._inductor.config.patch({"cpp.simdlen": 256}):
            assert inductor.settings_digest() != digest
        assert inductor.settings_digest() == digest


# Dynamo


def compiled_graphs(function, *calls, **options):
    """What `see` of the options returns for each graph that Dynamo hands over."""
    see, found = options.pop("see"), []

    def backend(gm, inputs):
        found.append(see(gm))
        return gm.forward

    compiled = torch.compile(function, backend=backend, **options)
    for call in calls:
        compiled(*call)
    return found


def test_dynamos_settings_can_be_set():
    config = torch._dynamo.config
    with assumed("torch._dynamo.config has optimize_ddp and allow_rnn, since 2.13 of a thread"):
        before = config.optimize_ddp, config.allow_rnn
        restore = dynamo.compile_whole_models()
        assert (config.optimize_ddp, config.allow_rnn) == (False, True)
        with ThreadPoolExecutor(1) as other:
            elsewhere = other.submit(lambda: (config.optimize_ddp, config.allow_rnn)).result()
        restore()
        if dynamo.SETTINGS_OF_THREADS:
            assert (config.optimize_ddp, config.allow_rnn) == elsewhere == before != (False, True)
        else:
            assert (config.optimize_ddp, config.allow_rnn) == elsewhere == (False, True)
    with assumed("torch.compile passes no backend_ctx_ctor on: now nothing need be patched"):

        def backend(gm, inputs):
            return gm.forward

        backend.backend_ctx_ctor = contextlib.nullcontext
        call = torch._TorchCompileWrapper(backend, None, None, None)
        asked = torch._dynamo.eval_frame.get_compiler_fn(call)
        assert not hasattr(asked, "backend_ctx_ctor")


RESET = """
import sys
import torch
from coop_plan.runtime.torch_internals import dynamo

trees = "torch._inductor.cudagraph_trees"
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
torch.cuda.is_available = lambda: True
dynamo.reset_dynamo()
assert trees not in sys.modules
assert torch.cuda.is_available()
assert not torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER
import torch._inductor.cudagraph_trees
reset = []
torch._dynamo.reset = lambda: reset.append(torch.cuda.is_available())
dynamo.reset_dynamo()
assert reset == [True]
"""


def test_a_reset_loads_no_inductor_and_drops_its_graphs_if_it_is_loaded():
    assert Forked(RESET).communicate() == (b"", 0)


def test_the_call_that_compiles_is_found():
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    x = torch.ones(3)
    with assumed("a torch.compile call asks its backend by one _TorchCompileWrapper"):
        first, second = compiled_graphs(broken, (x,), see=lambda _: dynamo.compile_call())
        torch._dynamo.reset()
        other, _ = compiled_graphs(broken, (x,), see=lambda _: dynamo.compile_call())
        assert first is second is not None
        assert other is not first
        assert dynamo.compile_call() is None


def test_calls_of_what_a_backend_compiles_are_watched(monkeypatch):
    met = []

    @contextlib.contextmanager
    def around(call):
        met.append(call)
        yield

    def backend(gm, _):
        return gm.forward

    kept = torch._TorchCompileWrapper.__init__
    registry = torch._dynamo.backends.registry
    monkeypatch.setattr(registry, "_COMPILER_FNS", registry._COMPILER_FNS)
    with assumed("a compile call's attributes get to torch._dynamo.optimize"):
        try:
            dynamo.watch_calls(backend, lambda _: met.append("asked"), around)
            twice = torch.compile(lambda x: x + x, backend=backend)
            torch.compile(lambda x: x, backend="eager")(torch.ones(2))
            for fullgraph in (False, True):
                twice = torch.compile(lambda x: x + x, backend=backend, fullgraph=fullgraph)
                before = dynamo.recorded_nodes()
                twice(torch.ones(2, requires_grad=True))
                assert dynamo.recorded_nodes() > before
        finally:
            torch._TorchCompileWrapper.__init__ = kept
        asked, first, second = [i for i, m in enumerate(met) if m == "asked"], met[2], met[-1]
        assert asked == [0, 1, 3]
        assert first.compiler_fn is second.compiler_fn is backend


def test_threads_that_look_for_the_backend_at_once_find_it():
    """The second registers what the first has registered meanwhile."""
    registry = torch._dynamo.backends.registry
    with assumed("a backend's entry point is loaded, and registered by its name"):
        found = registry.lookup_backend("coop")
        registry.register_backend(compiler_fn=found, name="coop")
        assert registry.lookup_backend("coop") is found
        with pytest.raises(AssertionError, match="duplicate name"):
            registry.register_backend(compiler_fn=lambda: None, name="eager")


def test_a_compiled_call_can_be_put_back():
    module = nn.Linear(2, 2)
    assert dynamo.compiled_call(module) is None
    module.compile(backend="eager")
    assert dynamo.compiled_call(module) is not None
    dynamo.set_compiled_call(module, None)
    assert dynamo.compiled_call(module) is None


def test_gradients_within_dynamos_graph_are_seen():
    found = []

    def backend(gm, _):
        found.append(dynamo_graphs.uses_functorch_grad(gm))
        return gm.forward

    def double(x):
        return (x * x).sum()

    with assumed("torch.func.grad begins with _grad_increment_nesting"):
        torch.compile(torch.func.grad(double), backend=backend)(torch.ones(2))
        torch.compile(double, backend=backend)(torch.ones(2))
    assert found == [True, False]


def test_compilations_are_numbered():
    with assumed("CompileContext numbers a frame's compilations from 0"):
        calls = [(torch.ones(n),) for n in (2, 3)]
        numbers = compiled_graphs(
            torch.sin, *calls, see=lambda _: dynamo.compilation(), dynamic=False
        )
        assert [count for _, count in numbers] == [0, 1]
        assert len({frame for frame, _ in numbers}) == 1
        assert dynamo.compilation() == (None, None)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_recompile_limit_is_the_calls_own(fullgraph):
    """Where PyTorch knows such a limit; else it is the thread's."""
    with (
        assumed("ConvertFrameAssert keeps a `_recompile_limit` for its call"),
        torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=99),
    ):
        raised = compiled_graphs(
            *(torch.sin, *((torch.ones(n),) for n in (2, 3, 4))),
            see=lambda _: dynamo.raise_recompile_limits(dynamo.compilation()[1] + 1),
            dynamic=False,
            fullgraph=fullgraph,
        )
        assert raised == [{"recompile_limit": 2}, {"recompile_limit": 4}, {}]
        own = "recompile_limit" in inspect.signature(dynamo.ConvertFrameAssert).parameters
        assert torch._dynamo.config.recompile_limit == (1 if own else 4)


def test_without_a_limit_of_the_call_the_threads_is_raised(monkeypatch):
    """As in versions of PyTorch whose `torch.compile` takes none."""
    monkeypatch.setattr(dynamo, "_frame_of", lambda _: None)
    with (
        assumed("torch._dynamo.config has two recompile limits"),
        torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2),
    ):
        assert dynamo.raise_recompile_limits(1) == {"recompile_limit": 2}
        raised = dynamo.raise_recompile_limits(2)
        assert raised == {"recompile_limit": 4, "accumulated_recompile_limit": 4}
        config = torch._dynamo.config
        assert (config.recompile_limit, config.accumulated_recompile_limit) == (4, 4)


def test_dynamo_says_what_its_inputs_are():
    layer = nn.Linear(3, 3)

    def facts(gm):
        inputs = gm.graph.find_nodes(op="placeholder")
        return {
            dynamo_graphs.source_name(node): (
                type(dynamo_graphs.example_value(node)).__name__,
                dynamo_graphs.is_boxed_scalar(node),
                dynamo_graphs.is_static_input(node),
            )
            for node in inputs
        }

    def step(x, scale):
        return layer(x) * scale

    x = torch.ones(2, 3)
    calls = [(x, 0.5), (x, 0.25)]
    with assumed("meta, sources and names of the inputs of Dynamo's graphs"):
        *_, found = compiled_graphs(step, *calls, see=facts, dynamic=None)
        assert found["L['x']"] == ("FakeTensor", False, False)
        assert found["L['scale']"][1] is True
        parameters = [given for name, given in found.items() if "parameters" in name]
        assert parameters == [("FakeTensor", False, True)] * 2


def test_dynamo_has_its_inputs_while_it_asks():
    layer = nn.Linear(3, 3)
    given = torch.ones(2, 3, requires_grad=True)
    with assumed("GraphArg.example of Dynamo's inputs"):
        (found,) = compiled_graphs(lambda x: layer(x).relu(), (given,), see=dynamo_graphs.leaves_of)
        assert {id(value) for value in found} == {id(given), *map(id, layer.parameters())}


def test_hooks_see_a_gradient_once_that_was_given_early():
    """Autograd calls them again where a function returns no gradient, in some versions."""

    class Early(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, leaf, early):
            ctx.leaf, ctx.early = leaf, early
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            if ctx.early:
                gradient_of_leaf = torch.ones(2, 2).t()
                autograd.accumulate_gradient(ctx.leaf, gradient_of_leaf, counted_bytes)
                return gradient, None, None
            return gradient, torch.ones(2, 2), None

    seen = []
    leaf = torch.zeros(2, 2, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.stride()) or setattr(p, "grad", None)
    )
    with assumed("the number of a backward, and hooks in an OrderedDict of the leaf"):
        for early in (True, False, True, False):
            Early.apply(torch.ones(2, 2, requires_grad=True), leaf, early).sum().backward()
    assert seen == [(2, 1)] * 4


def test_a_graph_of_ours_passes_for_dynamos():
    layer = nn.Linear(3, 3)

    def copied(gm):
        graph, made = torch.fx.Graph(), {}
        for node in gm.graph.nodes:
            made[node] = dynamo_graphs.copy_dynamo_node(graph, node, made.__getitem__)
        module = dynamo_graphs.dynamo_module(gm, graph)
        return [
            (
                dynamo_graphs.source_name(a),
                dynamo_graphs.source_name(b),
                dynamo_graphs.example_value(b),
            )
            for a, b in zip(gm.graph.nodes, module.graph.nodes, strict=True)
        ], (module.meta, module._param_name_to_source, gm._param_name_to_source)

    with assumed("sources of inputs, meta and _param_name_to_source of a module"):
        ((nodes, (meta, names, same)),) = compiled_graphs(layer, (torch.ones(2, 3),), see=copied)
        assert all(a == b and value is None for a, b, value in nodes)
        assert meta
        assert names == same


def test_code_of_a_graph_is_made_on_demand():
    module = torch.fx.symbolic_trace(nn.Linear(3, 3))
    recompiled = []
    with assumed("_use_lazy_graph_module and _make_graph_module"):
        with joint_graphs.lazy_graph_code():
            lazy = dynamo_graphs.dynamo_module(module, module.graph)
        lazy._real_recompile = lambda: recompiled.append(lazy) or type(lazy)._real_recompile(lazy)
        assert not recompiled
        assert torch.equal(lazy(torch.ones(2, 3)), module(torch.ones(2, 3)))
        assert recompiled == [lazy]


def test_a_graph_break_is_told():
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    with assumed("compile_subgraph_reason of Dynamo's graphs"):
        first, second = compiled_graphs(broken, (torch.ones(3),), see=dynamo_graphs.graph_break)
        file, line, reason = first
        assert (file, line) == (__file__, broken.__code__.co_firstlineno + 2)
        assert "graph_break" in reason
        assert second is None


# AOTAutograd


def test_the_joint_graph_and_its_code():
    inputs, lists = [], []

    def partition(joint, _, *, num_fwd_outputs, **more):
        assert num_fwd_outputs == 1
        assert {"static_lifetime_input_indices"} <= more.keys()
        nodes = joint.graph.find_nodes(op="placeholder")
        inputs.extend((joint_graphs.is_primal(n), joint_graphs.is_tangent(n)) for n in nodes)
        output = next(iter(reversed(joint.graph.nodes)))
        assert len(output.meta["desc"]) == 1 + sum(primal for primal, _ in inputs)
        return torch._functorch.partitioners.default_partition(
            joint, _, num_fwd_outputs=num_fwd_outputs, **more
        )

    def compiler(module, _):
        def run(args):
            given = list(args)
            args.clear()
            lists.append(args)
            return module(*given)

        return joint_graphs.boxed(run)

    with assumed("aot_autograd's partition_fn, names and descriptors, and boxed calls"):
        backend = joint_graphs.aot_autograd(
            fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition
        )
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda x: x.sin(), backend=backend)(x).sum().backward()
        assert inputs == [(True, False), (False, True)]
        assert lists == [[], []]


# Ops and tensors


def test_facts_of_ops():
    aten = torch.ops.aten
    with assumed("schemas of ops"):
        assert isinstance(aten.add.Tensor, ops.OpOverload)
        assert ops.is_mutable(aten.add_.Tensor)
        assert not ops.is_mutable(aten.add.Tensor)
        assert ops.argument_names(aten.add.Tensor) == ["self", "other", "alpha"]
        text = ops.schema_text(aten.mkldnn_rnn_layer.default)
        assert text.startswith("aten::mkldnn_rnn_layer(Tensor input, Tensor weight0")
    with assumed("an op's __call__ calls its C function"):
        call = inspect.getsource(ops.OpOverload.__call__)
        assert call.splitlines()[-1].strip() == "return self._op(*args, **kwargs)"
        assert inspect.isbuiltin(ops.c_function(aten.add.Tensor))
        assert ops.c_function(aten.add.Tensor)(torch.ones(1), other=torch.ones(1)) == 2
        assert ops.c_function(len) is len


def test_running_statistics_are_where_they_were():
    with assumed("results and arguments of functional batch norms"):
        for op in ops.BATCH_NORMS:
            assert ops.argument_names(op)[3:5] == ["running_mean", "running_var"]
        for op in ops.BATCH_NORM_BACKWARDS:
            assert ops.argument_names(op)[3:5] == ["running_mean", "running_var"]
            assert ops.argument_names(op)[7] in ("train", "update")
        x, mean, var = torch.randn(8, 3), torch.zeros(3), torch.ones(3)
        op = torch.ops.aten._native_batch_norm_legit_functional.default
        training, first = ops.BATCH_NORMS[op]
        assert ops.argument_names(op)[training] == "training"
        made = op(x, None, None, mean, var, True, 0.1, 1e-5)
        torch.testing.assert_close(made[first], 0.1 * x.mean(0))


def test_facts_of_tensors():
    with assumed("negative views, zeros without memory, identity of storages"):
        x = torch.ones(3)
        assert ops.negative_view(x).is_neg()
        assert torch.equal(ops.negative_view(x), -x)
        assert ops.has_no_memory(torch._efficientzerotensor(3))
        assert not ops.has_no_memory(x)
        assert ops.storage_key(x) == ops.storage_key(x[1:])
        assert ops.storage_key(x) != ops.storage_key(x.clone())
        found = ops.storage_reference(x[1:])
        assert found().data_ptr() == x.data_ptr()
        y = torch.zeros(3)
        objects = [ops.storage_object(value.untyped_storage()) for value in (x, y)]
        build.arena().exchange_memory(*objects)
        assert (x.sum(), y.sum()) == (0, 3)
        build.arena().exchange_memory(*objects)
        found = ops.storage_reference(y)
        del y
        assert found() is None
        view, storages = x[1:], [x.untyped_storage()]
        assert ops.is_shared(storages, 0)
        del x, view
        assert not ops.is_shared(storages, 0)
        storage = storages[0]
        assert ops.is_shared(storages, 0)
        x = torch.empty(0).set_(storage)
        x.add_(1)
        with torch.inference_mode():
            made = torch.ones(1)
        assert ops.tensor_versions([x, x.clone()]) == [2, 0]
        assert ops.tensor_versions([3, x, None, made]) == [0, 2, 0, 0]


def test_waits_of_the_host_are_told_at_their_line(monkeypatch):
    """The mode is checked on a device, by tests/runtime/test_graph_replay.py."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.warns(UserWarning, match="another") as others, cuda.HostWaits() as waits:
        warnings.warn("another", stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation (Triggered ...)", stacklevel=1)
    assert waits.found is not None and waits.found[0] == __file__
    assert len(others) == 1
    assert modes == ["default", "warn", "default"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_pool_of_a_capture_that_fails_is_released(fails, monkeypatch):
    calls = []
    with assumed("allocations to a pool can be ended"):
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, lambda *given, name=name: calls.append(name))
    graph = Mock()
    graph.capture_end.side_effect = RuntimeError("invalid") if fails else None
    with pytest.raises(RuntimeError, match="invalid") if fails else contextlib.nullcontext():
        cuda.end_capture(graph, 0, (0, 1))
    assert calls == ["_cuda_endAllocateToPool", "_cuda_releasePool"] * fails


def test_the_real_world_is_real():
    def dispatches_in_python():
        return torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher")

    with assumed("fake mode, autocast, dispatch in Python, gradients and generators can be left"):
        before = torch.get_rng_state()
        x = torch.ones(3, 3, requires_grad=True)
        with fakes.FakeTensorMode(), torch.autocast("cpu"), enable_python_dispatcher():
            assert isinstance(torch.ones(2), fakes.FakeTensor)
            assert dispatches_in_python()
            with fakes.real_mode():
                assert not dispatches_in_python()
                made = torch.rand(3, 3) @ x
                assert not isinstance(made, fakes.FakeTensor)
                assert (made.dtype, made.requires_grad) == (torch.float32, False)
            assert isinstance(torch.ones(2), fakes.FakeTensor)
            assert dispatches_in_python()
        assert torch.equal(torch.get_rng_state(), before)


def test_modes_can_be_left():
    seen = []

    class Watch(tracing.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with assumed("_disable_current_modes"), Watch():
        with tracing.without_modes():
            torch.ones(2) + 1
        assert not seen
        torch.ones(2) + 1
        assert seen


def test_below_autograd_nothing_is_recorded():
    x = torch.ones(3, requires_grad=True)
    with assumed("_AutoDispatchBelowAutograd"), tracing.below_autograd_with_grad_mode():
        assert torch.is_grad_enabled()
        assert not x.sin().requires_grad


def test_autograd_keeps_a_gradient_as_it_is():
    """`capture.joint` plans the copy that autograd would make otherwise."""
    produced = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, transposed):
            ctx.transposed = transposed
            return w.sum()

        @staticmethod
        def backward(ctx, _):
            gradient = torch.ones(2, 3).t().contiguous().t() if ctx.transposed else torch.ones(2, 3)
            produced.append(gradient.data_ptr())
            return gradient, None

    with assumed("AccumulateGrad keeps a gradient of the parameter's strides, and copies others"):
        for transposed in (False, True):
            w = torch.ones(2, 3, requires_grad=True)
            Same.apply(w, transposed).backward()
            assert (w.grad.data_ptr() == produced[-1]) is not transposed


# Tracing


def traced_ops(function, x):
    """The ATen ops of the joint graph of `function`."""
    found = []

    def partition(joint, inputs, **more):
        found.extend(str(n.target) for n in joint.graph.nodes if n.op == "call_function")
        raise NotImplementedError

    backend = joint_graphs.aot_autograd(fw_compiler=None, partition_fn=partition)
    torch._dynamo.reset()
    with contextlib.suppress(dynamo.TorchDynamoException):
        torch.compile(function, backend=backend)(x)
    return found


def upsampled(x):
    return nn.functional.interpolate(x, scale_factor=2.0)


def test_a_collective_names_its_group(tmp_path):
    with assumed("functional collectives take a group's name, and a store is behind it"):
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            group = torch.distributed.group.WORLD
            for named in (group, group.group_name):
                assert ranks.group_name(named) == group.group_name
            assert ranks.first_rank(group.group_name) == 0
            ranks.default_store().set("key", "value")
            assert ranks.default_store().get("key") == b"value"
            op = torch.ops._c10d_functional.all_reduce.default
            made = op(torch.ones(3), "sum", group.group_name)
            assert ranks.wait_for_collective(made).tolist() == [1, 1, 1]
            assert ops.argument_names(op)[-1] == "group_name"
        finally:
            torch.distributed.destroy_process_group()


def test_composite_ops_are_traced_as_cpp_on_demand():
    x = torch.ones(1, 1, 4, 4, requires_grad=True)
    op = torch.ops.aten.upsample_nearest2d.vec
    with assumed("PyTorch's Python kernels are in py_kernels, and can be taken out"):
        own = traced_ops(upsampled, x)
        before = dict(op.py_kernels)
        with tracing.python_kernels(dict.fromkeys(tracing.overloads(["lstm"]))):
            assert traced_ops(upsampled, x) == own
        found = tracing.overloads(["upsample_nearest2d", "of no PyTorch"])
        assert op in found
        with tracing.python_kernels(dict.fromkeys(found)):
            assert "aten.upsample_nearest2d.default" in traced_ops(upsampled, x)
        assert "aten.upsample_nearest2d.default" not in own
        assert op.py_kernels == before


def test_a_python_kernel_makes_the_layout_of_a_result():
    op = torch.ops.aten.upsample_bilinear2d_backward.default
    gradient = torch.ones(1, 1, 4, 4, device="meta")
    given = gradient, [4, 4], [1, 1, 2, 2], False

    def layout(*_):
        return torch.empty(5, device="meta")

    with assumed("the dispatcher finds kernels for layouts in py_kernels, and C++ is beside them"):
        with tracing.python_kernels({op: layout}, tracing.META), enable_python_dispatcher():
            assert op(*given).shape == (5,)
            assert tracing.run_meta(op, *given).shape == (1, 1, 2, 2)
        assert op(*given).shape == (1, 1, 2, 2)


def test_the_packets_are_pytorchs():
    with assumed("the ops of composites.PACKETS"):
        missing = [n for n in tracing_rules.PACKETS if not tracing.overloads([n])]
        assert set(missing) <= {"_upsample_lanczos2d_aa"}  # the youngest


def test_a_composite_op_runs_whatever_stands_in_its_place():
    dropout = torch.ops.aten.dropout.default
    with assumed("_op_dk"), tracing.python_kernels({dropout: lambda *_: "ours"}):
        assert torch.equal(tracing.run_composite(dropout, torch.ones(3), 0.5, False), torch.ones(3))


def test_functionalization_can_be_watched():
    seen = []
    x = torch.ones(4, 2, requires_grad=True)

    def step(x):
        return (x * 1).mul_(3)

    with assumed("FunctionalTensorMode.__torch_dispatch__ is asked for every op"):
        with tracing.before_functionalization(lambda op, args: seen.append(str(op))):
            traced_ops(step, x)
        assert "aten.mul_.Tensor" in seen


def test_a_functional_tensor_is_laid_out_anew():
    x = torch.ones(4, 2, requires_grad=True)
    seen = []

    def spread(values, strides):
        seen.append((tuple(values.stride()), tuple(strides)))
        return values.clone()

    def see(op, args):
        if op is torch.ops.aten.sigmoid_.default:
            tracing.restride_functional(args[0], spread)

    def step(x):
        return (x * 1).unsafe_chunk(2, 1)[0].mul_(3).sigmoid_()

    with (
        assumed("a FunctionalTensor has eager's strides, its elem the functional graph's"),
        tracing.before_functionalization(see),
    ):
        assert "aten.clone.default" in traced_ops(step, x)
        assert set(seen) == {((1, 1), (2, 1))}


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_patched_is_put_back(fails):
    tables = {op: op.py_kernels for op in tracing.overloads(tracing_rules.PACKETS)}
    kept = {op: dict(kernels) for op, kernels in tables.items()}
    dispatch = tracing.FunctionalTensorMode.__torch_dispatch__
    with contextlib.suppress(ZeroDivisionError), tracing_rules.as_eager():
        assert tracing.FunctionalTensorMode.__torch_dispatch__ is not dispatch
        assert {op: dict(kernels) for op, kernels in tables.items()} != kept
        if fails:
            raise ZeroDivisionError
    assert {op: dict(kernels) for op, kernels in tables.items()} == kept
    assert tracing.FunctionalTensorMode.__torch_dispatch__ is dispatch


def test_only_one_thread_patches():
    inside, another = [], threading.Event()

    def patch():
        another.set()
        with tracing.before_functionalization(lambda *_: None):
            inside.append("other")

    thread = threading.Thread(target=patch)
    with tracing.python_kernels({}):
        thread.start()
        another.wait()
        thread.join(timeout=0.1)
        inside.append("this")
    thread.join()
    assert inside == ["this", "other"]


# Allocators


def test_the_cpus_tensors_are_served_by_ours():
    size = 4096
    with assumed("SetCPUAllocator, and tensors allocated by `allocate`"):
        memory, run = Memory(), Run(Arena(size, [[(size, 0)]], [False]))
        run.begin(memory, fresh=True)
        run.arena.enter(0)
        made = torch.empty(size, dtype=torch.uint8)
        run.arena.leave()
        assert run.counters().high_water_bytes == size
        assert len(memory.live_offsets) == 1
        del made
        assert memory.live_offsets == []


def words_of_the_table_of(address):
    """The first words of the virtual table of a C++ object, from two before what it points to."""
    table = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0]
    words = ctypes.cast(table - 2 * ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p))
    return [words[i] or 0 for i in range(10)]


def is_simple_data_ptr():
    symbol = "_ZNK3c109Allocator18is_simple_data_ptrERKNS_7DataPtrE"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value


def test_the_cuda_allocator_is_where_it_was():
    if torch.version.cuda is None:
        with pytest.raises(OSError, match="libc10_cuda"):
            cuda.cuda_allocator()
        return
    with assumed("the symbol of the CUDA allocator"):
        address = cuda.cuda_allocator()
        assert address  # it is there without a device, too
    with assumed("the layout of the CUDA allocator"):
        top, kind, *entries = words_of_the_table_of(address)
        assert top == 0
        name = ctypes.string_at(ctypes.cast(kind, ctypes.POINTER(ctypes.c_void_p))[1])
        assert b"CUDACachingAllocator" in name
        # Of c10::Allocator's own entries, the one after `allocate` that is not overridden.
        assert is_simple_data_ptr() in entries[:5]
    assert build.arena().install_cuda(address)


def test_a_trace_with_symbols_says_for_which_sizes_it_holds():
    def inputs(gm):
        return [dynamo_graphs.example_value(node) for node in gm.graph.find_nodes(op="placeholder")]

    def at(size, width=3):
        whole = torch.ones(size, width)
        return [whole if isinstance(given, torch.Tensor) else size for given in examples]

    with assumed("ShapeEnv's guards, ranges and symbols, and Dynamo's stand-ins"):
        (examples,) = compiled_graphs(
            lambda x: x.sum(), (torch.ones(8, 3),), see=inputs, dynamic=True
        )
        symbols = dynamo_graphs.Symbols(examples, at(8))
        (x,) = (given for given in symbols.inputs if isinstance(given, torch.Tensor))
        assert not isinstance(x.shape[0], int)
        assert x.shape[0] % 4 == 0  # a guard
        assert symbols.bind(at(12)) is not None
        assert symbols.bind(at(10)) is None
        assert symbols.bind(at(1)) is None
        assert dynamo_graphs.at_sizes(x.shape[0] * 2, symbols.bind(at(12))) == 24


def test_the_node_of_a_compiled_backward_is_found_and_says_what_is_undefined():
    undefined = []
    layer = nn.Linear(2, 2)
    step = torch.compile(lambda x: (layer(x).sum(), layer(x * 2)), backend="aot_eager")
    with assumed("CompiledFunctionBackward and hooks before it"):
        loss, rest = step(torch.ones(1, 2))
        node = joint_graphs.compiled_node((rest.view(-1), loss))
        node.register_prehook(
            lambda given: undefined.extend(i for i, g in enumerate(given) if g is None)
        )
        loss.backward()
    assert undefined == [1]


# Inductor's partitioner


@pytest.mark.skipif(torch_internals.version() < (2, 13), reason="not supported before")
def test_a_choice_of_saved_nodes_decides_the_partition():
    """Also a second one on the same graph; no cache serves the graph instead."""
    found = []

    class Partitioner(partitioner.CustomPartitionerFn):
        def __call__(self, gm, inputs, **rest):
            def nothing(graph, own):
                assert own()
                return [node for node in graph.nodes if partitioner.is_static_input(node)]

            saved = partitioner.partition(gm, inputs, lambda _, own: own(), **rest)
            made = partitioner.partition(gm, inputs, nothing, **rest)
            found.append((saved, made, rest["num_fwd_outputs"]))
            assert any(value is weight for value in partitioner.traced_tensors(gm.graph))
            donated = partitioner.donated_inputs(saved, 1)
            inputs = {node.name: node for node in saved[1].graph.find_nodes(op="placeholder")}
            first = next(iter(inputs))
            stride = 1, inputs[first].meta["val"].shape[0]
            code = partitioner.lowered(saved[1], 0, donated, [stride])
            assert inputs.keys() <= code.values.keys() | {"tangents_1"}
            assert code.values[first].stride() == stride
            assert "def call(" in code.code
            returned = saved[1].graph.output_node().args[0]
            assert [s is None for s in code.strides] == [value is None for value in returned]
            calls = (n for n in ast.walk(ast.parse(code.code)) if isinstance(n, ast.Call))
            library = [partitioner.library_call(call, code.values) for call in calls]
            targets = [target for target, args, _ in filter(None, library) if len(args) > 1]
            assert any("mm" in str(target) for target in targets)
            return made

        def uuid(self):
            partitioner.refuse_caches()

    weight = torch.randn(8, 8, requires_grad=True)
    for turn in range(2):
        torch._dynamo.reset()
        options = {"custom_partitioner_fn": Partitioner()}
        run = torch.compile(lambda x: (x @ weight).exp().sum(), dynamic=False, options=options)
        run(torch.randn(4, 8)).backward()
        assert len(found) == turn + 1
    own, made, results = found[0]
    assert results == 1
    saved = [len(fw.graph.output_node().args[0]) for fw, _ in (own, made)]
    ops = [
        len(bw.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default))
        for _, bw in (own, made)
    ]
    assert saved[0] >= 2
    assert ops[1] >= ops[0]
    assert any(n.target is torch.ops.aten.mm.default for n in made[1].graph.nodes)


def test_inductors_draws_have_the_known_names():
    for name in partitioner.DRAWS:
        assert hasattr(torch.ops.prims, name.partition(".")[2])


def test_norms_are_added_in_the_order_of_the_groups():
    """By their order the norm of tensors of several dtypes has the bits of PyTorch's."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(0, len(dtypes), (12,), generator=generator).tolist()
        made = [torch.randn(64, generator=generator).to(dtypes[at]) for at in chosen]
        order = ops.norm_order(made)
        assert sorted(order) == [*range(12)]
        norms = torch.stack([torch.linalg.vector_norm(made[at]) for at in order])
        with assumed("clipping groups gradients by `_group_tensors_by_device_and_dtype`"):
            total = torch.nn.utils.get_total_norm(made, foreach=False)
            assert torch.equal(torch.linalg.vector_norm(norms), total)


def test_a_scaler_reads_the_notes_of_a_check():
    """`step` leaves out what was found, `update` lowers the scale, and both forget the notes."""
    for found in (0.0, 1.0):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], 1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        assert optimizers.unscales_as_pytorch(scaler)
        assert optimizers.device_type(scaler) == "cpu"
        scaler.scale(parameter.sum()).backward()
        with assumed("GradScaler keeps its checks in `_per_optimizer_states`"):
            optimizers.note_unscaled(scaler, optimizer, torch.tensor(found))
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert parameter[0].item() == (1.0 if found else -7.0)
        assert scaler.get_scale() == (4.0 if found else 8.0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_fused_optimizers_unscale_by_themselves(kind):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert not optimizers.unscales_itself(kind([parameter], 1.0))
    optimizer = kind([parameter], 1.0, fused=True)
    with assumed("fused optimizers have `_step_supports_amp_scaling`"):
        assert optimizers.unscales_itself(optimizer)
    checks = [vars(optimizer).get(optimizers.CHECKED_ONCE)]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2))
    with assumed("fused SGD checks devices once"):
        checks.append(vars(optimizer).get(optimizers.CHECKED_ONCE))
        assert checks == ([True, False] if kind is torch.optim.SGD else [None, None])
