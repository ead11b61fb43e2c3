"""Every bad graph is refused with the place of its fault; good ones load and round-trip."""

import gzip
import json
import math
import re
import tracemalloc
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cache_hits import chain
from coop_plan.schemas import Graph, InvalidInputError, _parse, load_graph, parse_graph
from coop_plan.schemas.generate import DOCUMENTS, main, render
from tests.strategies import graphs

REPOSITORY = Path(__file__).parents[2]
REAL = sorted((REPOSITORY.parent / "shared/data/graphs").glob("*.json"))
SCHEMA = json.loads((REPOSITORY / "schemas/graph.schema.json").read_text(encoding="utf-8"))


def sample():
    """A graph with every field, decoded."""
    return {
        "schema": "coop-plan/graph/1",
        "name": "sample",
        "device": {"kind": "cuda", "name": "", "memory_bytes": 1, "h2d_bytes_per_s": 1.0}
        | {"d2h_bytes_per_s": 2.5},
        "tensors": [
            {"id": 3, "name": "w", "bytes": 4096, "kind": "parameter"},
            {"id": 7, "name": "x", "bytes": 64, "kind": "input"},
            {"id": 9, "name": "y", "bytes": 64, "kind": "activation"},
            {"id": 1, "name": "loss", "bytes": 4, "kind": "output"},
            {"id": 4, "name": "mask", "bytes": 8, "kind": "activation"},
        ],
        "ops": [
            {"id": 0, "name": "aten.mm", "phase": "forward", "inputs": [3, 7], "outputs": [9]}
            | {"cost_us": 12.5, "workspace_bytes": 0, "recomputable": True, "rng": False}
            | {"mutates": [], "inplace": [], "variants": []},
            {"id": 5, "name": "aten.sum", "phase": "backward", "inputs": [9, 3], "outputs": [1]}
            | {"cost_us": 1, "mutates": [3], "inplace": [[1, 9]]},
        ],
    }


def variant(name="lean", inputs=(3, 7), outputs=(9,), **fields):
    body = {"name": name, "cost_us": 1.0, "inputs": list(inputs), "outputs": list(outputs)}
    return body | fields


def changed(*path_and_value):
    *path, last, value = path_and_value
    document = sample()
    node = document
    for part in path:
        node = node[part]
    node[last] = value
    return document


def refused(document, source=""):
    """The error, the same from JSON text and from the decoded object."""
    with pytest.raises(InvalidInputError) as from_text:
        parse_graph(json.dumps(document), source)
    with pytest.raises(InvalidInputError) as from_object:
        parse_graph(document, source)
    assert from_text.value.pointer == from_object.value.pointer
    assert "\n" not in str(from_text.value)
    return from_text.value


def test_the_sample_is_a_graph_and_round_trips():
    """Text and object give one graph; what is written reads back equal."""
    graph = parse_graph(sample())
    assert graph == parse_graph(json.dumps(sample())) == parse_graph(json.dumps(sample()).encode())
    assert parse_graph(graph.to_json()) == graph
    assert graph.tensors[0].resident
    assert not graph.tensors[3].resident


BAD_FIELDS = [
    (("schema", "coop-plan/graph/2"), "/schema"),
    (("schema", None), "/schema"),
    (("color", "red"), "/color"),
    (("a/b~c", 1), "/a~1b~0c"),
    (("ops", {}), "/ops"),
    (("name", 5), "/name"),
    (("device", "h2d_bytes_per_s", -1.0), "/device/h2d_bytes_per_s"),
    (("device", "memory_bytes", 0.5), "/device/memory_bytes"),
    (("tensors", 1, "bytes", -1), "/tensors/1/bytes"),
    (("tensors", 1, "bytes", 2**63), "/tensors/1/bytes"),
    (("tensors", 1, "bytes", 10**30), "/tensors/1/bytes"),
    (("tensors", 1, "bytes", 1.5), "/tensors/1/bytes"),
    (("tensors", 1, "bytes", "64"), "/tensors/1/bytes"),
    (("tensors", 1, "bytes", True), "/tensors/1/bytes"),
    (("tensors", 1, "kind", "view"), "/tensors/1/kind"),
    (("tensors", 1, "id", -7), "/tensors/1/id"),
    (("tensors", 1, "color", 1), "/tensors/1/color"),
    (("tensors", 0, 5), "/tensors/0"),
    (("ops", 0, "cost_us", -0.1), "/ops/0/cost_us"),
    (("ops", 0, "cost_us", math.nan), "/ops/0/cost_us"),
    (("ops", 0, "cost_us", math.inf), "/ops/0/cost_us"),
    (("ops", 0, "cost_us", "12.5"), "/ops/0/cost_us"),
    (("ops", 0, "recomputable", "yes"), "/ops/0/recomputable"),
    (("ops", 0, "rng", 1), "/ops/0/rng"),
    (("ops", 0, "workspace_bytes", -1), "/ops/0/workspace_bytes"),
    (("ops", 0, "phase", "sideways"), "/ops/0/phase"),
    (("ops", 0, "inputs", 1, None), "/ops/0/inputs/1"),
    (("ops", 1, "inplace", [[1]]), "/ops/1/inplace/0"),
    (("ops", 1, "inplace", [[1, 9, 9]]), "/ops/1/inplace/0"),
    (("ops", 0, "variants", [{}]), "/ops/0/variants/0/name"),
    (("ops", 0, "variants", [variant(cost_us=-1.0)]), "/ops/0/variants/0/cost_us"),
]


@pytest.mark.parametrize(("change", "pointer"), BAD_FIELDS)
def test_bad_field(change, pointer):
    """Wrong types, unknown names, numbers out of range: the pointer names the field."""
    assert refused(changed(*change)).pointer == pointer


BAD_STRUCTURE = [
    (("tensors", 2, "id", 7), "/tensors/2/id", "duplicate tensor id 7"),
    (("ops", 1, "id", 0), "/ops/1/id", "duplicate op id 0"),
    (("ops", 0, "inputs", [3, 8]), "/ops/0/inputs/1", "unknown tensor 8"),
    (("ops", 0, "outputs", [9, 8]), "/ops/0/outputs/1", "unknown tensor 8"),
    (("ops", 0, "mutates", [8]), "/ops/0/mutates/0", "unknown tensor 8"),
    (("ops", 1, "inplace", [[1, 9], [8, 9]]), "/ops/1/inplace/1/0", "unknown tensor 8"),
    (("ops", 1, "outputs", [1, 9]), "/ops/1/outputs/1", "produced twice"),
    (("ops", 0, "outputs", [9, 9]), "/ops/0/outputs/1", "produced twice"),
    (("ops", 0, "outputs", [9, 3]), "/ops/0/outputs/1", "a parameter"),
    (("ops", 0, "outputs", [9, 7]), "/ops/0/outputs/1", "an input"),
    (("ops", 0, "mutates", [9]), "/ops/0/mutates/0", "not among its inputs"),
    (("ops", 1, "inplace", [[9, 1]]), "/ops/1/inplace/0", "in-place pair"),
    (("ops", 0, "inputs", [3, 4]), "/ops/0/inputs/1", "which no op produces"),
    (("tensors", 4, "kind", "output"), "/tensors/4", "produced by no op"),
    (("ops", 0, "inputs", [9]), "/ops/0/inputs/0", "cycle"),
    (("ops", 0, "inputs", [3, 1]), "/ops/0/inputs/1", "cycle"),
    (("tensors", 0, "bytes", 2**63 - 1), "/tensors", "add up"),
    (("tensors", 0, "bytes", 2**60), "/tensors", "add up"),
    (("ops", 0, "variants", [variant(inputs=[8])]), "/ops/0/variants/0/inputs/0", "unknown"),
    (("ops", 0, "variants", [variant(), variant()]), "/ops/0/variants/1/name", "two variants"),
    (("ops", 0, "variants", [variant(inputs=[1])]), "/ops/0/variants/0/inputs/0", "no earlier op"),
    (("ops", 0, "variants", [variant(inputs=[4])]), "/ops/0/variants/0/inputs/0", "no earlier op"),
    (("ops", 0, "variants", [variant(outputs=[3])]), "/ops/0/variants/0/outputs/0", "resident"),
    (("ops", 0, "variants", [variant(outputs=[9, 1])]), "/ops/0/variants/0/outputs/1", "another"),
    (("ops", 0, "variants", [variant(outputs=[9, 9])]), "/ops/0/variants/0/outputs/1", "twice"),
    (("ops", 1, "variants", [variant(inputs=[4])]), "/ops/1/variants/0/inputs/0", "no earlier op"),
    (("ops", 0, "variants", [variant(workspace_bytes=2**60)]), "/tensors", "1 EiB"),
]


@pytest.mark.parametrize(("change", "pointer", "message"), BAD_STRUCTURE)
def test_bad_structure(change, pointer, message):
    """Ids, edges and order that do not fit together."""
    error = refused(changed(*change))
    assert error.pointer == pointer
    assert message in error.message


def test_read_before_production():
    """Program order is not topological, but no cycle either: the message tells them apart."""
    document = sample()
    document["ops"].reverse()
    error = refused(document)
    assert error.pointer == "/ops/0/inputs/0"
    assert "before op 0 produces it" in error.message


def test_tensors_of_a_variants_own():
    """A variant may make a tensor that only a later op's variant reads."""
    document = changed("ops", 0, "variants", [variant(outputs=[9, 4], inplace=[[4, 7]])])
    document["ops"][1]["variants"] = [variant(inputs=[4, 3], outputs=[1])]
    assert parse_graph(document).ops[1].variants[0].inputs == [4, 3]


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({}, None, ""),
        ({"outputs": [4]}, "/outputs", "no outputs"),
        ({"workspace_bytes": 1}, "/workspace_bytes", "no workspace_bytes"),
        ({"inputs": [3, 9, 7]}, "/inputs/2", "no movable resident"),
    ],
)
def test_a_variant_on_the_host_uses_no_memory_of_the_device(fields, place, message):
    """It has no outputs and no workspace, and reads copies and movable residents alone."""
    document = changed("tensors", 0, "movable", True)
    body = variant("host", inputs=[3, 9], outputs=[], engine="host") | fields
    update = {"id": 6, "name": "update", "phase": "optimizer", "inputs": [3, 9]}
    update |= {"outputs": body["outputs"], "cost_us": 1, "mutates": [3], "variants": [body]}
    document["ops"].append(update)
    if place is None:
        assert parse_graph(document).ops[2].variants[0].engine == "host"
    else:
        error = refused(document)
        assert error.pointer == f"/ops/2/variants/0{place}"
        assert message in error.message


@pytest.mark.parametrize("field", ["schema", "tensors", "ops"])
def test_missing_field(field):
    """A required field that is missing is named where it should be."""
    document = sample()
    del document[field]
    error = refused(document)
    assert error.pointer == f"/{field}"
    assert error.message == "required field is missing"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        b"",
        "{",
        "[]",
        "null",
        '"graph"',
        json.dumps(sample())[:-5],
        json.dumps(sample()) + "x",
        b'{"schema": "\xff\xfe"}',
        '{"schema": "\ud800"}',
        json.dumps(sample()).encode("utf-16"),
        gzip.compress(json.dumps(sample()).encode()),
        "[" * 500 + "]" * 500,
        "[" * 100_000,
        bytes(range(256)),
    ],
    ids=range(16),
)
def test_broken_text(text):
    """Whatever the bytes, the answer is one line about the whole document."""
    with pytest.raises(InvalidInputError) as caught:
        parse_graph(text, "model.json")
    assert caught.value.pointer == ""
    assert str(caught.value).startswith("model.json: ")
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_fault():
    """Editors of Windows write one."""
    assert parse_graph(b"\xef\xbb\xbf" + json.dumps(sample()).encode()) == parse_graph(sample())


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "/x"),
        ('{"name": ' + "[" * 100_000 + "]" * 100_000 + "}", "/name"),
        (json.dumps(sample()).replace("4096", "9" * 5000), "/tensors/0/bytes"),
        (json.dumps(sample()).replace("12.5", "1e999"), "/ops/0/cost_us"),
        (json.dumps(sample()).replace("12.5", "-Infinity"), "/ops/0/cost_us"),
        (json.dumps(sample()).replace("12.5", "1e308"), "/ops/0/cost_us"),
    ],
)
def test_what_is_beyond_reading_has_its_place(text, pointer):
    """Depth and digits without end are faults of one field, told in one short line."""
    with pytest.raises(InvalidInputError) as caught:
        parse_graph(text)
    assert caught.value.pointer == pointer
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "again",
    ['"name": "other", ', '"na\\u006de": "other", ', '"name": "o\\u003a", ', '"ops": [], '],
)
def test_a_field_named_twice_is_refused(again):
    """Which one was meant? Colons in texts, and escaped ones, are none between name and value."""
    text = json.dumps(sample() | {"name": "aten::mm \\ : \u00e9"})
    assert parse_graph(text) == parse_graph(text.replace("aten:", "aten\\u003a"))
    with pytest.raises(InvalidInputError, match="twice"):
        parse_graph("{" + again + text[1:])


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_a_field_named_twice_is_found_wherever_it_is(graph, data):
    """Also in documents that are searched in parts."""
    text = graph.to_json()
    again = data.draw(st.sampled_from([found.end() for found in re.finditer("{", text)]))
    name = re.match('("[^"]*":)', text[again:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_parse, "PART_BYTES", data.draw(st.integers(1, 200)))
        patch.setattr(_parse, "PART_ITEMS", data.draw(st.integers(1, 3)))
        assert parse_graph(text) == graph
        with pytest.raises(InvalidInputError, match="twice"):
            twice = f"{text[:again]}{name[1]}0,{text[again:]}"
            _parse._check_duplicates(twice.encode(), "")


def test_reading_takes_less_memory_than_three_documents_besides_the_graph():
    document = json.dumps(chain(10_000)).encode()
    tracemalloc.start()
    try:
        graph = parse_graph(document)
        kept, peak = tracemalloc.get_traced_memory()
        assert len(graph.ops) == 20_000
        assert peak - kept < 3 * len(document)
    finally:
        tracemalloc.stop()


def test_reading_stops_at_the_first_of_many_faults():
    """A million wrong tensors cost what one does; the message does not repeat them."""
    tensors = '{"id": 1, "bytes": -1, "kind": 7, "color": 1}'
    document = json.dumps(sample()).replace('"tensors": [', f'"tensors": [{tensors * 1}, ')
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError):
            parse_graph(document.replace(tensors, ", ".join([tensors] * 20_000)))
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


def places(value, path=()):
    """Paths of all values of a document."""
    yield path
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from places(inner, (*path, key))


@pytest.mark.parametrize("constant", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", [*places(sample())][1:])
def test_a_constant_in_place_of_any_value_is_refused_there(path, constant):
    """In place of a text it ended in a traceback."""
    error = refused(changed(*path, constant))
    assert error.pointer == "".join(f"/{part}" for part in path)


def test_nan_in_text_is_named():
    """`json.dumps` writes NaN where JSON has none."""
    error = refused(changed("ops", 0, "cost_us", math.nan), "model.json")
    assert str(error).startswith("model.json#/ops/0/cost_us: ")


def test_files(tmp_path):
    """A missing file, a folder and a good file."""
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_graph(tmp_path / "none.json")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_graph(tmp_path)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(sample()), encoding="utf-8")
    assert load_graph(path) == load_graph(str(path)) == parse_graph(sample())


@pytest.mark.skipif(not REAL, reason="the real graphs are not there")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_graphs_load(path):
    """Captured and traced graphs are valid, and valid to the JSON Schema."""
    assert len(load_graph(path).ops) > 10
    validator(SCHEMA).validate(json.loads(path.read_text(encoding="utf-8")))


def validator(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_json_schema_accepts_and_refuses():
    """Other languages get the types, ranges and names; edges and order only we check."""
    check = validator(SCHEMA)
    check.validate(sample())
    for change, pointer in BAD_FIELDS:
        document = changed(*change)
        if "NaN" not in json.dumps(document) and "Infinity" not in json.dumps(document):
            assert not check.is_valid(document), pointer


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_random_graphs_round_trip(graph):
    """Written and read back, a graph is the same; and valid to the JSON Schema."""
    assert parse_graph(graph.to_json()) == graph
    assert isinstance(graph, Graph)
    validator(SCHEMA).validate(json.loads(graph.to_json()))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_committed_json_schemas_are_current(name):
    """`python -m coop_plan.schemas.generate` was run after the last change of a model."""
    text = (REPOSITORY / "schemas" / name).read_text(encoding="utf-8")
    assert text == render(name)
    assert json.loads(text)["$id"].startswith("urn:coop-plan:")


def test_generate_writes_and_checks(tmp_path, capsys):
    """`--check` says which file differs in one line, and changes nothing."""
    arguments = ["--folder", str(tmp_path)]
    assert main([*arguments, "--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "plan.schema.json").write_text("{}", encoding="utf-8")
    assert main([*arguments, "--check"]) == 1
    assert capsys.readouterr() == (
        "",
        "out of date: plan.schema.json; run python -m coop_plan.schemas.generate\n",
    )
