"""The mutations of `tests/mutations.py` can be made, and the tests that must see them are there."""

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, sources


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_up_to_date(mutation: Mutation):
    texts = [path.read_text() for path in sources(ROOT / mutation.where)]
    assert sum(text.count(mutation.old) for text in texts) == 1
    for test in mutation.tests:
        path, _, name = test.partition("::")
        module = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
        assert not name or name.partition("[")[0] in functions
