"""Kernels name the fields of their arrays, and read and write them as Python does."""

import ast
from pathlib import Path
from typing import NamedTuple

import numba
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coop_plan.planner
from coop_plan.planner.core.jit import njit
from coop_plan.planner.core.kernel_types import type_of
from coop_plan.planner.core.records import Int32, Record, Table, record, table


class Link(Record):
    cost: float
    bytes: int
    next: Int32
    is_seen: bool


class Total(Record):
    cost: float
    links: int


class State(NamedTuple):
    link: Table[Link]
    total: Total


@njit
def follow(s: State, first: int) -> int:
    """Sum the chain of links from `first` on and mark them; returns the last."""
    last = first
    while first >= 0 and not s.link[first].is_seen:
        link, last = s.link[first], first
        link.is_seen = True
        s.total.cost += link.cost
        s.total.links += 1
        link.bytes -= link.next
        first = link.next
    return last


LINKS = st.lists(
    st.tuples(st.floats(0, 9), st.integers(-(1 << 62), 1 << 62), st.integers(-1, 9), st.booleans()),
    min_size=10,
    max_size=10,
)


@given(LINKS, st.integers(0, 9))
def test_a_kernel_reads_and_writes_the_fields_that_python_does(links, first):
    compiled, interpreted = (State(table(Link, 10), record(Total)) for _ in range(2))
    compiled.link[:] = interpreted.link[:] = links
    found = follow(compiled, first)
    assert found == getattr(follow, "py_func", follow)(interpreted, first)
    assert compiled.link[:].tolist() == interpreted.link[:].tolist()
    assert compiled.total.item() == interpreted.total.item()
    assert numba.typeof(compiled) == type_of(State)


def test_a_field_takes_the_bytes_of_its_type():
    assert {name: kind.itemsize for name, (kind, _) in Link.dtype.fields.items()} == {
        "cost": 8,
        "bytes": 8,
        "next": 4,
        "is_seen": 1,
    }


@pytest.mark.parametrize("name", ["copy", "size", "item"])
def test_a_field_that_numpys_records_would_hide_is_refused(name):
    with pytest.raises(TypeError, match=rf"Hidden\.{name} is a method of NumPy's records"):
        type("Hidden", (Record,), {"__annotations__": {name: int}})


def named_columns(source):
    """Lines of a module that index an array by a constant's name, as in `access[x, END]`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            names = {getattr(part, "attr", getattr(part, "id", "")) for part in parts}
            if any(name.isupper() and len(name) > 1 for name in names):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_kernel_indexes_an_array_by_the_name_of_a_column():
    assert list(named_columns("a.access[x, c.END] + a.rows[LIVE, t] + a.access[x].end + b[x, 0]"))
    found = {
        path.name: list(named_columns(path.read_text()))
        for path in Path(coop_plan.planner.__file__).parent.rglob("*.py")
    }
    assert not {name: lines for name, lines in found.items() if lines}


def test_no_field_is_declared_that_no_module_names():
    folder = Path(coop_plan.planner.__file__).parent
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    declared, named = {}, set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and "Record" in map(ast.unparse, node.bases):
            fields = {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
            declared |= dict.fromkeys(fields - {"dtype"}, node.name)
        elif isinstance(node, ast.Attribute):
            named.add(node.attr)
    assert declared
    assert set(declared) <= named
