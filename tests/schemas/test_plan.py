"""The plan document: what it must look like, before anyone asks whether it is valid."""

import json
from pathlib import Path

import jsonschema
import pytest

from coop_plan.schemas import InvalidInputError, TensorRead, load_plan, parse_plan

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "schemas/plan.schema.json").read_text(encoding="utf-8")
)


def sample():
    """A plan with every kind of step, decoded."""
    return {
        "schema": "coop-plan/plan/1",
        "graph": "sha256:" + "0" * 64,
        "method": "coop",
        "status": "feasible",
        "budget_bytes": 8192,
        "resident_bytes": 0,
        "arena_bytes": 4096,
        "peak_bytes": 4096,
        "base_cost_us": 1.0,
        "cost_us": 1.5,
        "overhead": 0.5,
        "lower_bound_us": None,
        "fragmentation": 0.0,
        "recomputed_ops": 0,
        "swapped_bytes": 0,
        "solve_seconds": 0.0,
        "versions": {"python": "3.11"},
        "steps": [
            {"do": "compute", "op": 0, "variant": None, "reads": [4, {"tensor": 3}]}
            | {"writes": [{"buffer": 17, "tensor": 9, "offset": None, "bytes": 8192}]}
            | {"workspace": {"offset": 0, "bytes": 0}},
            {"do": "free", "buffers": [4]},
            {"do": "offload", "buffer": 17},
            {"do": "prefetch", "buffer": 31, "tensor": 9, "offset": 512, "bytes": 8, "from": 17},
            {"do": "wait", "buffer": 31},
        ],
    }


def changed(*path_and_value):
    *path, last, value = path_and_value
    document = sample()
    node = document
    for part in path:
        node = node[part]
    node[last] = value
    return document


def test_the_sample_is_a_plan_and_round_trips():
    """The document of the contract, with its defaults; `from` and `schema` keep their names."""
    plan = parse_plan(sample())
    assert plan == parse_plan(json.dumps(sample()))
    assert (plan.alignment, plan.outputs) == (512, "outside")
    assert plan.steps[0].reads == [4, TensorRead(tensor=3)]
    assert plan.steps[3].from_ == 17
    assert parse_plan(plan.to_json()) == plan
    written = json.loads(plan.to_json())
    assert sample().items() <= written.items()


BAD = [
    (("schema", "coop-plan/plan/2"), "/schema"),
    (("graph", "md5:0"), "/graph"),
    (("graph", "sha256:" + "G" * 64), "/graph"),
    (("status", "perfect"), "/status"),
    (("budget_bytes", -1), "/budget_bytes"),
    (("budget_bytes", 2**63), "/budget_bytes"),
    (("cost_us", "1.5"), "/cost_us"),
    (("overhead", float("nan")), "/overhead"),
    (("overhead", "0.5"), "/overhead"),
    (("recomputed_ops", True), "/recomputed_ops"),
    (("alignment", 0), "/alignment"),
    (("outputs", "both"), "/outputs"),
    (("versions", {"python": 3}), "/versions"),
    (("color", 1), "/color"),
    (("steps", 0, "color", 1), "/steps/0/color"),
    (("steps", 0, "do", "dance"), "/steps/0/do"),
    (("steps", 0, "reads", 0, -1), "/steps/0/reads/0"),
    (("steps", 0, "reads", 1, {"tensor": -3}), "/steps/0/reads/1/tensor"),
    (("steps", 0, "reads", 1, {"tensor": 3, "color": 1}), "/steps/0/reads/1/color"),
    (("steps", 0, "writes", 0, "offset", -512), "/steps/0/writes/0/offset"),
    (("steps", 0, "writes", 0, {}), "/steps/0/writes/0/buffer"),
    (("steps", 0, "workspace", None), "/steps/0/workspace"),
    (("steps", 1, "buffers", [4, "5"]), "/steps/1/buffers/1"),
    (("steps", 3, "offset", None), "/steps/3/offset"),
    (("steps", 4, {"buffer": 31}), "/steps/4/do"),
]


@pytest.mark.parametrize(("change", "pointer"), BAD)
def test_bad_field(change, pointer):
    """The pointer can be followed in the document: no names of union branches in it."""
    with pytest.raises(InvalidInputError) as caught:
        parse_plan(changed(*change))
    assert caught.value.pointer == pointer
    if "NaN" not in json.dumps(changed(*change)):
        with pytest.raises(InvalidInputError) as caught:
            parse_plan(json.dumps(changed(*change)))
        assert caught.value.pointer == pointer
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(changed(*change))


def test_schema_field_is_required():
    """A document that does not say what it is, is refused."""
    document = sample()
    del document["schema"]
    with pytest.raises(InvalidInputError, match=r"^/schema: required field is missing$"):
        parse_plan(document)


def test_json_schema_accepts_the_sample():
    """The committed JSON Schema is one, and describes what we write."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(sample())
    validator.validate(json.loads(parse_plan(sample()).to_json()))


def test_files(tmp_path):
    """The file's name is part of the message."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(changed("status", "?")), encoding="utf-8")
    with pytest.raises(InvalidInputError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}#/status: ")
