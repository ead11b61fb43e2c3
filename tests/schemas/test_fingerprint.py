"""What the fingerprint ignores, and what it must not ignore."""

import json
import math
import re
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cache_hits import chain
from coop_plan.schemas import cost_signature, fingerprint, parse_graph
from coop_plan.schemas.fingerprint import tensor_order
from tests.schemas.test_graph import changed, sample, variant
from tests.strategies import graphs

MODULE = sys.modules["coop_plan.schemas.fingerprint"]  # the function hides it


def renumbered(document, tensor_id, op_id):
    """The same graph under other ids."""
    document = json.loads(json.dumps(document))
    for tensor in document["tensors"]:
        tensor["id"] = tensor_id(tensor["id"])
    for op in document["ops"]:
        op["id"] = op_id(op["id"])
        for form in (op, *op.get("variants", ())):
            form["inputs"] = [tensor_id(t) for t in form["inputs"]]
            form["outputs"] = [tensor_id(t) for t in form["outputs"]]
            form["inplace"] = [[tensor_id(a), tensor_id(b)] for a, b in form.get("inplace", ())]
        op["mutates"] = [tensor_id(t) for t in op.get("mutates", ())]
    return document


@settings(max_examples=60, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_names_ids_costs_and_device_do_not_enter(graph, random):
    """Two ranks of one job, with ids and measurements of their own, get one fingerprint."""
    document = json.loads(graph.to_json())
    other = renumbered(document, lambda t: 10_000 - 3 * t, lambda o: 7 * o + 2)
    other["name"] = "another rank"
    other["device"] = {"kind": "cuda", "memory_bytes": 1}
    random.shuffle(other["tensors"])
    for tensor in other["tensors"]:
        tensor["name"] = f"n{random.random()}"
    for op in other["ops"]:
        op["cost_us"] = random.random()
        random.shuffle(op["inplace"])
        for form in op["variants"]:
            form["cost_us"] = random.random()
    assert fingerprint(parse_graph(other)) == fingerprint(graph)


STRUCTURE = [
    ("tensors", 0, "bytes", 4097),
    ("tensors", 0, "kind", "buffer"),
    ("tensors", 4, "bytes", 9),
    ("tensors", 4, "kind", "input"),
    ("ops", 0, "name", "aten.bmm"),
    ("ops", 0, "phase", "backward"),
    ("ops", 0, "inputs", [7, 3]),
    ("ops", 0, "inputs", [3]),
    ("ops", 0, "inputs", [3, 7, 7]),
    ("ops", 0, "outputs", [9, 4]),
    ("ops", 0, "workspace_bytes", 1),
    ("ops", 0, "recomputable", False),
    ("ops", 0, "rng", True),
    ("ops", 0, "mutates", [7]),
    ("ops", 0, "inplace", [[9, 7]]),
    ("ops", 0, "variants", [variant()]),
    ("ops", 0, "variants", [variant("other")]),
    ("ops", 0, "variants", [variant(inputs=[7, 3])]),
    ("ops", 0, "variants", [variant(workspace_bytes=1)]),
    ("ops", 0, "variants", [variant(approximate=True)]),
    ("ops", 0, "variants", [variant(inplace=[[9, 7]])]),
    ("tensors", 0, "movable", True),
]


def test_structure_enters():
    """Sizes, kinds, edges, flags, targets: each change is another graph."""
    seen = {fingerprint(parse_graph(changed(*change))) for change in STRUCTURE}
    assert len(seen | {fingerprint(parse_graph(sample()))}) == len(STRUCTURE) + 1


def test_order_of_ops_enters():
    """Program order is part of the structure."""
    document = changed("ops", 1, "inputs", [3])
    document["ops"][1]["inplace"] = []
    document["ops"][1]["mutates"] = []
    before = fingerprint(parse_graph(document))
    document["ops"].reverse()
    assert fingerprint(parse_graph(document)) != before


def test_the_value_is_pinned():
    """Caches outlive versions: a change of this value invalidates every stored plan."""
    assert fingerprint(parse_graph(sample())) == PINNED


PINNED = "sha256:0aa95d1c45c328d6f462198c382e44dd519e055e866882cf5627c27e2e12ea33"


@pytest.mark.parametrize(
    ("cost", "same"), [(13.0, True), (10.0, False), (100.0, False), (0, False)]
)
def test_cost_signature(cost, same):
    """Nearby measurements agree; others, and free ops, do not."""
    signature = cost_signature(parse_graph(sample()))
    assert math.log2(12.5) > 3.5
    assert (cost_signature(parse_graph(changed("ops", 0, "cost_us", cost))) == signature) is same


def test_cost_signature_ignores_structure():
    """It is the other half of a cache key."""
    other = parse_graph(changed("tensors", 0, "bytes", 1))
    assert cost_signature(other) == cost_signature(parse_graph(sample()))


@pytest.mark.parametrize("name", ["", "a b~", 'a"b', "a\\b", "ä", "\x7f", "\n\x01", "😀"])
def test_names_of_any_characters_are_digested_as_ascii_json(name):
    """However the library at hand would escape them."""
    graph = parse_graph(changed("ops", 0, "name", name))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for literal in (MODULE._LITERAL, re.compile(b"(?!)")):
            patch.setattr(MODULE, "_LITERAL", literal)
            for part in (1, 2, 256):
                patch.setattr(MODULE, "PART", part)
                found.append(fingerprint(graph))
    assert len(set(found)) == 1


def test_a_digest_takes_less_memory_than_the_document():
    """Besides the numbers of its tensors; the graph as lists took seven times as much."""
    document = json.dumps(chain(10_000)).encode()
    graph = parse_graph(document)
    tracemalloc.start()
    try:
        numbers = {t: place for place, t in enumerate(tensor_order(graph))}
        _, least = tracemalloc.get_traced_memory()
        del numbers
        tracemalloc.reset_peak()
        fingerprint(graph)
        cost_signature(graph)
        assert tracemalloc.get_traced_memory()[1] < 2 * least + len(document)
    finally:
        tracemalloc.stop()
