"""The passes that find fused regions: convex, in program order, with the results of the graph."""

import copy
import random

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from coop_plan.runtime.capture.graph_builder import GETITEM, is_view
from coop_plan.runtime.fused import regions
from coop_plan.runtime.fused.clusters import TIMES_LARGEST, clusters_of, parts_of
from coop_plan.runtime.fused.in_kernel import MOST_READ, recompute_in_kernels
from coop_plan.runtime.fused.ops import bytes_of, producer_of, storage_of
from coop_plan.runtime.fused.regions import REGION, fuse_regions, region
from coop_plan.runtime.torch_internals import inductor
from coop_plan.runtime.torch_internals.inductor_scheduler import scheduled

aten = torch.ops.aten


def uncompiled(regions):
    """No op for any region; their graphs are run."""


def drawn(seed, size=40):
    """A random graph of pointwise ops and products; the values are 4 x 4."""
    draw, mode = random.Random(seed), FakeTensorMode()
    graph = fx.Graph()
    nodes = [graph.placeholder(f"primals_{i}") for i in range(1, 4)]
    for _ in range(size):
        one, two = draw.choices(nodes[-8:], k=2)
        target = draw.choice([aten.add.Tensor, aten.mul.Tensor, aten.mm.default, aten.t.default])
        args = (one,) if target is aten.t.default else (one, two)
        nodes.append(graph.call_function(target, args))
    graph.output((nodes[-2], nodes[-1]))
    with mode:
        for node in nodes:
            node.meta["val"] = torch.empty(4, 4)
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("seed", range(30))
def test_clusters_have_no_cycle(seed):
    """One op for each cluster leaves a graph without cycles, and each has two ops or more."""
    graph = drawn(seed, 80).graph
    ops = [node for node in graph.nodes if node.op == "call_function"]
    before = {op: {a for a in op.all_input_nodes if a.op == "call_function"} for op in ops}
    half = {op: i < 40 for i, op in enumerate(ops) if op.target is not aten.mm.default}
    clusters = clusters_of(ops, before, half)
    assert clusters
    number = {op: -i for i, op in enumerate(ops)}
    for i, members in enumerate(clusters, start=1):
        assert len(members) > 1
        assert len({half[op] for op in members}) == 1
        number |= dict.fromkeys(members, i)
    waits = {}
    for op in ops:
        others = {number[other] for other in before[op]} - {number[op]}
        waits.setdefault(number[op], set()).update(others)
    while ready := {unit for unit, others in waits.items() if not others}:
        waits = {u: others - ready for u, others in waits.items() if u not in ready}
    assert waits == {}


def run(module, inputs):
    """Results of a graph whose regions are run op by op."""
    values = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[len(values)]
        elif node.op == "output":
            return [values[value] for value in node.args[0]]
        else:
            args = fx.node.map_arg(node.args, values.__getitem__)
            if node.target is region:
                inner = node.meta["coop_op_maker"].args[0]
                values[node] = fx.GraphModule({}, inner)(*args[0])
            else:
                values[node] = node.target(*args)
    return None


@pytest.mark.parametrize("seed", range(30))
def test_a_graph_with_regions_returns_the_same(seed):
    """Also if it computes some of them twice."""
    module = repeated(drawn(seed), seed)
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    expected = module(*inputs)
    ops = sum(node.op == "call_function" for node in module.graph.nodes)
    fuse_regions(module, 1, uncompiled)
    assert module.graph.find_nodes(op="call_function", target=region)
    assert sum(node.op == "call_function" for node in module.graph.nodes) < ops
    assert all(map(torch.equal, run(module, inputs), expected))


def repeated(module, seed):
    """The graph with second copies of some ops, which some of their readers read."""
    draw, graph = random.Random(seed), module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and draw.random() < 0.5:
            with graph.inserting_after(node):
                copy = graph.node_copy(node)
            for user in [user for user in node.users if draw.random() < 0.5]:
                user.replace_input_with(node, copy)
    return module


@pytest.mark.parametrize("depth", [2, 5])
def test_layers_share_what_the_backward_is_given_of_each(depth):
    """A mask of positions; other results, products and results of the step stay apart."""
    module, last = layered(["product"] * depth)
    graph = module.graph
    (*_, output) = graph.nodes
    with graph.inserting_before(last):
        mask = next(node for node in graph.nodes if node.target is aten.maximum.default)
        results = [graph.node_copy(mask) for _ in range(depth)]
    output.args = ((last, *results, *output.args[0][1:]),)
    module.recompile()
    inputs = [torch.rand(64, 64) for _ in range(3)]
    expected = module(*inputs)
    seen = []
    fuse_regions(module, 1 + depth, seen.extend)
    made = run(module, inputs)
    assert all(map(torch.equal, made, expected))
    assert len({value.data_ptr() for value in made}) == len(made)
    nodes = [node for found, _ in seen for node in found.nodes] + list(module.graph.nodes)
    assert sum(node.target is aten.maximum.default for node in nodes) == 1 + depth
    assert sum(node.target is aten.mm.default for node in nodes) == 4 * depth


@pytest.mark.parametrize("seed", range(30))
def test_what_layers_share_needs_no_memory(seed, monkeypatch):
    """Bytes of keep-everything are at most those of layers that share nothing."""
    draw = random.Random(seed)
    use = draw.choice(["product", "sum"])
    uses = [use, *draw.choices([use, None], k=3), use]
    peaks = []
    for merge in (regions._merge_equal, lambda *_: None):
        monkeypatch.setattr(regions, "_merge_equal", merge)
        module, _ = layered(uses)
        fuse_regions(module, 1, uncompiled)
        peaks.append(live_peak(module.graph))
    assert peaks[0] <= peaks[1]


def layered(uses):
    """Layers that may make a mask of positions, and their backward; the first result's node, too.

    The backward of a product with the mask reads it, that of a sum does not.
    """
    graph = fx.Graph()
    positions, x, gradient = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1"))

    def op(target, *args):
        return graph.call_function(target, args)

    backward = []
    for use in uses:
        below = x
        x = op(aten.mm.default, x, x)
        if use:
            mask = op(aten.maximum.default, positions, op(aten.t.default, positions))
            x = op(aten.mm.default if use == "product" else aten.add.Tensor, x, mask)
        backward.append((below, mask if use == "product" else None))
    total = op(aten.sum.default, x)
    for below, mask in reversed(backward):
        if mask is not None:
            gradient = op(aten.mm.default, gradient, mask)
        gradient = op(aten.mm.default, gradient, below)
    graph.output((total, gradient))
    with FakeTensorMode():
        for node in graph.nodes:
            node.meta["val"] = torch.empty(() if node is total else (64, 64))
    return fx.GraphModule({}, graph), total


def live_peak(graph):
    """Most bytes of results that are live at once in program order, inputs not counted."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    spans = {}
    for node in graph.nodes:
        for read in map(storage_of, () if node.target is GETITEM else node.all_input_nodes):
            if producer_of(read).op == "call_function":
                begin, _ = spans.get(read, (position[producer_of(read)], 0))
                spans[read] = begin, position[node]
    return max(
        sum(bytes_of(value) for value, (begin, end) in spans.items() if begin <= i <= end)
        for i in range(len(position))
    )


def largest_working_set(graph):
    """Most bytes of results that an op reads and makes."""
    ops = [n for n in graph.nodes if n.op == "call_function" and n.target is not GETITEM]

    def values_of(op):
        yield from [user for user in op.users if user.target is GETITEM] or [op]
        yield from (v for v in map(storage_of, op.all_input_nodes) if v.op == "call_function")

    return max(sum(map(bytes_of, set(values_of(op)))) for op in ops if not is_view(op))


@pytest.mark.parametrize("seed", range(30))
def test_a_region_has_at_most_twice_the_working_set_of_an_op(seed):
    module = drawn(seed, 120)
    ops = len(module.graph.nodes)
    most = TIMES_LARGEST * largest_working_set(module.graph)
    fuse_regions(module, 1, uncompiled)
    assert len(module.graph.nodes) < ops
    assert largest_working_set(module.graph) <= most


def bodies(graph):
    """The graphs of the regions as text, by number, in program order."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=region):
        inner = node.meta["coop_op_maker"].args[0]
        found.setdefault(node.meta[REGION], []).append(str(inner))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_split_regions_return_the_same_in_parts_of_fewer_bytes(seed):
    """Others stay whole; no part has more bytes than the region."""
    draw = random.Random(seed)
    module = drawn(seed)
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    expected = module(*inputs)
    whole, split = copy.deepcopy(module), copy.deepcopy(module)
    fuse_regions(whole, 1, uncompiled)
    before = bodies(whole.graph)
    size = 4 * 4 * 4
    limit = draw.choice([0, 3 * size, 4 * size])
    limits = dict.fromkeys(draw.sample(sorted(before), max(1, len(before) // 2)), limit)
    fuse_regions(split, 1, uncompiled, limits)
    assert all(map(torch.equal, run(split, inputs), expected))
    after = bodies(split.graph)
    assert all(after[number] == before[number] for number in before.keys() - limits.keys())
    assert after.keys() <= before.keys()
    assert largest_working_set(split.graph) <= largest_working_set(whole.graph)


@pytest.mark.parametrize("terms", [3, 4, 7])
@pytest.mark.parametrize("most", [3, 4])
def test_parts_of_a_sum_of_products_have_at_most_the_limit(terms, most):
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    products = [graph.call_function(aten.mm.default, (x, x)) for _ in range(terms)]
    total = products[0]
    for other in products[1:]:
        total = graph.call_function(aten.add.Tensor, (total, other))
    graph.output((graph.call_function(aten.mm.default, (total, x)),))
    with FakeTensorMode():
        for node in graph.nodes:
            node.meta["val"] = torch.empty(64, 64)
    ops = [node for node in graph.nodes if node.op == "call_function"]
    sums = [op for op in ops if op.target is aten.add.Tensor]
    parts = parts_of(sums, ops, most * bytes_of(total))
    assert [op for part in parts for op in part] == sums
    assert max(map(len, parts)) <= most - 2
    assert len(parts) < terms or most == 3


@pytest.mark.parametrize("seed", range(12))
def test_the_terms_of_a_sum_do_not_wait_for_its_last_one(seed):
    """As the gradient of a weight that each step of a recurrent network reads."""
    draw, mode = random.Random(seed), FakeTensorMode()
    graph = fx.Graph()
    state, weight = map(graph.placeholder, ("primals_1", "primals_2"))
    total, terms = None, draw.randint(8, 24)
    for _ in range(terms):
        state = graph.call_function(aten.mm.default, (state, weight))
        state = graph.call_function(draw.choice([aten.tanh.default, aten.neg.default]), (state,))
        term = graph.call_function(aten.mm.default, (weight, state))
        if draw.random() < 0.5:
            term = graph.call_function(aten.sin.default, (term,))
        pair = (total, term) if draw.random() < 0.5 else (term, total)
        total = graph.call_function(aten.add.Tensor, pair) if total else term
    graph.output((total,))
    with mode:
        for node in graph.nodes:
            node.meta["val"] = torch.empty(64, 64)
    module = fx.GraphModule({}, graph)
    before = live_peak(module.graph)
    fuse_regions(module, 1, uncompiled)
    assert module.graph.find_nodes(op="call_function", target=region)
    assert live_peak(module.graph) <= before + bytes_of(total)


@pytest.mark.parametrize("seed", range(12))
def test_readers_of_one_tensor_are_no_region_larger_than_any_op(seed):
    """As both factors' gradients of a product, each of which reads the product's gradient."""
    draw, mode = random.Random(seed), FakeTensorMode()
    graph = fx.Graph()
    weight, large = map(graph.placeholder, ("primals_1", "primals_2"))
    shared = graph.call_function(aten.mm.default, (weight, weight))
    total = None
    for _ in range(draw.randint(4, 12)):
        other = graph.call_function(aten.mm.default, (weight, weight))
        made = graph.call_function(aten.mul.Tensor, (shared, other))
        total = graph.call_function(aten.mm.default, (made, total or weight))
    tall = graph.call_function(aten.mm.default, (large, total))
    graph.output((graph.call_function(aten.mm.default, (tall, weight)),))
    rows = draw.choice([64, 128, 512])
    with mode:
        for node in graph.nodes:
            node.meta["val"] = torch.empty(64, 64)
        for node in (large, tall):
            node.meta["val"] = torch.empty(rows, 64)
    module = fx.GraphModule({}, graph)

    most = largest_working_set(module.graph)
    fuse_regions(module, 1, uncompiled)
    assert largest_working_set(module.graph) <= most
    merged = bool(module.graph.find_nodes(op="call_function", target=region))
    assert merged == (rows == 512)


def test_random_ops_keep_their_order():
    """A region of the first op and the last would need the second draw before the first."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("primals_1")
    early = graph.call_function(aten.sin.default, (x,))
    product = graph.call_function(aten.mm.default, (early, x))
    first = graph.call_function(aten.bernoulli.p, (product, 0.5))
    second = graph.call_function(aten.bernoulli.p, (x, 0.5))
    late = graph.call_function(aten.add.Tensor, (early, second))
    graph.output((first, graph.call_function(aten.cos.default, (late,))))
    with mode:
        for node in graph.nodes:
            node.meta["val"] = torch.empty(64, 64)
    module = fx.GraphModule({}, graph)
    fuse_regions(module, 2)
    one, two = (node for node in module.graph.nodes if node.target is aten.bernoulli.p)
    assert one.args[0].target is aten.mm.default
    assert two.args[0].op == "placeholder"
    assert module.graph.find_nodes(op="call_function", target=region)


def joint(*, product):
    """The joint graph of y = silu(x w): its gradient reads x w, and perhaps y."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x, w, tangent = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1"))
    made = graph.call_function(aten.mm.default, (x, w))
    y = graph.call_function(aten.silu.default, (made,))
    last = graph.call_function(aten.mm.default, (y, w))
    kept = graph.call_function(aten.mul.Tensor, (tangent, y))
    kept = graph.call_function(aten.mul.Tensor, (kept, made))
    other = graph.call_function(aten.mm.default, (y if product else tangent, kept))
    graph.output((last, other))
    with mode:
        for node in graph.nodes:
            node.meta["val"] = torch.empty(64, 64)
    return graph, {x, w, made, y, last}, made, y


@pytest.mark.parametrize("product", [False, True])
def test_the_backward_is_not_given_what_it_makes_in_its_kernels(product):
    """A product reads its argument from memory; a pointwise op makes it again."""
    graph, forward, made, y = joint(product=product)
    recompute_in_kernels(graph, forward, set())
    graph.lint()
    backward = set(graph.nodes) - forward
    assert any(user in backward for user in made.users)
    assert any(user in backward for user in y.users) == product


@pytest.mark.parametrize("depth", [4, 8, 16, 32])
def test_the_backward_of_a_layer_does_not_begin_with_all_layers(depth):
    """Of y = x + tanh(x w) + tanh(y w) + ..., each sum could be made of the one before it."""
    graph, mode = fx.Graph(), FakeTensorMode()
    state, weight, gradient = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1"))
    products = []
    for _ in range(depth):
        inner = graph.call_function(aten.sin.default, (state,))
        made = graph.call_function(aten.mm.default, (inner, weight))
        last = graph.call_function(aten.tanh.default, (made,))
        state = graph.call_function(aten.add.Tensor, (state, last))
        products.append((state, made))
    results = [state]
    for state, made in reversed(products):
        for read in (state, made):
            gradient = graph.call_function(aten.mul.Tensor, (gradient, read))
        gradient = graph.call_function(aten.mm.default, (gradient, weight))
    graph.output((*results, gradient))
    with mode:
        for node in graph.nodes:
            node.meta["val"] = torch.empty(64, 64)
    module = fx.GraphModule({}, graph)
    fuse_regions(module, 1, uncompiled)
    for node in module.graph.find_nodes(op="call_function", target=region):
        assert len(node.all_input_nodes) <= 2 + MOST_READ


@pytest.mark.parametrize("seed", range(12))
def test_the_gradient_of_a_likelihood_is_eagers_and_has_no_scratch(seed):
    """Weights, ignored targets, reductions and shapes are drawn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, classes = draw.randint(1, 40), draw.randint(1, 40)
    flat = draw.random() < 0.25
    reduction = draw.randrange(3)
    scores = torch.randn(classes) if flat else torch.randn(rows, classes)
    target = torch.randint(0, classes, () if flat else (rows,))
    gradient = torch.randn(rows) if reduction == 0 and not flat else torch.randn(())
    weight = torch.rand(classes) if draw.random() < 0.5 else None
    total = torch.rand(()) + 1
    ignored = draw.choice([-100, int(target.flatten()[0])])
    given = [gradient, scores, target, *([] if weight is None else [weight]), total]

    def run(gradient, scores, target, *rest):
        weight = rest[0] if len(rest) > 1 else None
        last = reduction, ignored, rest[-1]
        return (aten.nll_loss_backward.default(gradient, scores, target, weight, *last),)

    mode = FakeTensorMode()
    graph = inductor.decomposed(run, [mode.from_tensor(value) for value in given])
    (made,) = inductor.compile_graphs([(graph, given)])[0]([*given])
    assert torch.equal(made, run(*given)[0])
    assert scheduled(graph, given).scratch_bytes == 0
