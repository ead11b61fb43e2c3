"""The editor of graphs loses no field of a tensor or an op."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coop_plan.schemas import Graph, InvalidInputError, Op
from coop_plan.schemas.graph_editor import GraphEditor, renumbered
from tests.strategies import graphs

GRAPHS = graphs(mutates=True, inplace=True, variants=True, rng=True)


@settings(max_examples=100)
@given(GRAPHS, st.text(max_size=8))
def test_an_edit_that_changes_nothing_returns_an_equal_graph(graph, source):
    ops = [op.model_copy(update={"source": source}) for op in graph.ops]
    graph = graph.model_copy(update={"ops": ops})
    assert GraphEditor(graph).graph() == graph
    same = {t.id: t.id for t in graph.tensors}
    assert [renumbered(op, same) for op in graph.ops] == graph.ops


@settings(max_examples=50)
@given(GRAPHS, GRAPHS)
def test_merged_graphs_are_the_graphs_with_other_ids(first, second):
    editor = GraphEditor(Graph(schema_=first.schema_, tensors=[], ops=[]))
    merged = []
    for graph in (first, second):
        ids = editor.add_tensors(graph.tensors)
        for op in graph.ops:
            editor.add_op(op, ids)
        merged.append(ids)
    made = editor.graph()
    assert [op.id for op in made.ops] == list(range(len(first.ops) + len(second.ops)))
    tensors, ops = iter(made.tensors), iter(made.ops)
    for graph, ids in zip((first, second), merged, strict=True):
        back = {new: old for old, new in ids.items()}
        for tensor in graph.tensors:
            assert next(tensors).model_copy(update={"id": tensor.id}) == tensor
        for op in graph.ops:
            assert renumbered(next(ops), back).model_copy(update={"id": op.id}) == op


def test_tensors_are_added_changed_and_checked():
    op = Op(id=7, name="aten.relu", inputs=[0], outputs=[1], cost_us=1, inplace=[[1, 0]])
    graph = Graph(schema_="coop-plan/graph/1", tensors=[], ops=[])
    editor = GraphEditor(graph)
    other, made = (editor.add_tensor(name, 4, "buffer") for name in ("other", "made"))
    editor.change_tensor(made, kind="activation", bytes=8)
    editor.add_op(op, {0: other, 1: made})
    found = editor.graph()
    assert [tensor.name for tensor in found.tensors] == ["other", "made"]
    assert found.tensors[1].bytes == 8
    (only,) = found.ops
    assert (only.id, only.inputs, only.inplace) == (0, [other], [[made, other]])
    editor.add_op(op, {0: made + 1, 1: made})
    with pytest.raises(InvalidInputError, match="unknown tensor"):
        editor.graph()


def test_an_op_is_inserted_before_the_op_at_its_position():
    graph = Graph(schema_="coop-plan/graph/1", tensors=[], ops=[])
    editor = GraphEditor(graph)
    for name, at in (("a", None), ("c", None), ("b", 1)):
        editor.add_op(Op(id=9, name=name, inputs=[], outputs=[], cost_us=0.0), at=at)
    assert [(op.id, op.name) for op in editor.graph().ops] == [(0, "a"), (1, "b"), (2, "c")]
