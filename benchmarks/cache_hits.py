"""CPU time of a kept plan, with its request read, held against the store and verified.

`python -m benchmarks.cache_hits ../shared/data/graphs`
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from coop_plan.api.answers import Answers, Limits
from coop_plan.api.graphs import SqliteGraphs
from coop_plan.planner.cache.store import SqliteStore


def chain(layers: int) -> dict[str, Any]:
    """A chain of layers and their gradients."""
    kinds = ["input", *["activation"] * (2 * layers)]
    tensors = [{"id": t, "bytes": 1 << 20, "kind": kind} for t, kind in enumerate(kinds)]
    ops = [
        {"id": i, "name": "f", "inputs": [i], "outputs": [i + 1], "cost_us": 10.5 + i % 7}
        for i in range(layers)
    ]
    for i in range(layers, 2 * layers):
        saved = 2 * layers - i
        ops.append(
            {"id": i, "name": "b", "inputs": [i, saved], "outputs": [i + 1], "cost_us": 20.5}
        )
    return {"schema": "coop-plan/graph/1", "tensors": tensors, "ops": ops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    graphs = {
        name: json.loads((parser.parse_args().folder / f"{name}.json").read_text())
        for name in ("unet", "densenet121")
    }
    graphs["chain of 10 000"] = chain(5_000)
    gc.disable()  # as in the service's workers
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans"
        answers = Answers(SqliteStore(path), Limits(), SqliteGraphs(path))
        for name, graph in graphs.items():
            answers.solve(_body(graph), "", False, lambda *_: None)
            for op in graph["ops"]:
                op["cost_us"] *= 1.01
            body = _body(graph)
            spent = []
            for _ in range(9):
                started = time.process_time()
                reply, _ = answers.ask(body, "", b"")
                spent.append(time.process_time() - started)
                assert reply.found
            middle = sorted(spent)[len(spent) // 2]
            print(f"{name:16} {len(body) / 1e6:5.2f} MB  {middle * 1e3:6.1f} ms of CPU a hit")


def _body(graph: dict[str, Any]) -> bytes:
    return json.dumps({"graph": graph, "budget": "60%"}).encode()


if __name__ == "__main__":
    main()
