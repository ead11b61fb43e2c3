import json

import pytest

from coop_plan.api.cli.main import main
from tests.support import make_graph


@pytest.fixture
def chain():
    """Four layers and their gradients: keep-all needs 5 of the 100-byte activations at once."""
    tensors = {0: ("input", 10), 9: ("output", 8)}
    tensors |= dict.fromkeys(range(1, 9), ("activation", 100))
    ops = [
        {"name": "f1", "inputs": [0], "outputs": [1]},
        {"name": "f2", "inputs": [1], "outputs": [2]},
        {"name": "f3", "inputs": [2], "outputs": [3]},
        {"name": "f4", "inputs": [3], "outputs": [4]},
        {"name": "b4", "inputs": [4, 3], "outputs": [5]},
        {"name": "b3", "inputs": [5, 2], "outputs": [6]},
        {"name": "b2", "inputs": [6, 1], "outputs": [7]},
        {"name": "b1", "inputs": [7, 0], "outputs": [8]},
        {"name": "loss", "inputs": [8], "outputs": [9]},
    ]
    return make_graph(tensors, ops)


@pytest.fixture
def document(chain):
    """The chain as a JSON document."""
    return json.loads(chain.to_json())


@pytest.fixture
def folder(tmp_path, monkeypatch, document):
    """The working folder, with the chain in graph.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.json").write_text(json.dumps(document))
    return tmp_path


@pytest.fixture
def run(folder, capsys):
    """Run the command in the folder: (exit code, stdout, stderr)."""

    def call(*arguments):
        code = 0
        try:
            main([str(a) for a in arguments])
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
