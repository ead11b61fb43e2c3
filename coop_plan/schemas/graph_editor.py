"""Editor of graphs: changes tensors and ops, and returns a validated graph."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coop_plan.schemas.graph import Graph, Op, Tensor


class GraphEditor:
    """Editable copy of a graph; `graph()` returns an equal graph if nothing changed.

    Ops are numbered by position once one was added. Edits are validated in `graph()` alone. Another
    graph is merged with `add_tensors`, then `add_op` with the ids that it returned.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._tensors = {tensor.id: tensor for tensor in graph.tensors}
        self._ops = list(graph.ops)
        self._added = False

    def add_tensors(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Add copies of tensors under new ids; returns {old id: new id}."""
        ids: dict[int, int] = {}
        for new, tensor in enumerate(tensors, start=max(self._tensors, default=-1) + 1):
            ids[tensor.id] = new
            self._tensors[new] = tensor.model_copy(update={"id": new})
        return ids

    def add_tensor(self, name: str, size: int, kind: Any) -> int:
        """Add a tensor of `size` bytes; returns its id."""
        (made,) = self.add_tensors([Tensor(id=0, name=name, bytes=size, kind=kind)]).values()
        return made

    def change_tensor(self, tensor_id: int, **changes: Any) -> None:
        """Set fields of a tensor."""
        self._tensors[tensor_id] = self._tensors[tensor_id].model_copy(update=changes)

    def add_op(self, op: Op, ids: Mapping[int, int] | None = None, at: int | None = None) -> None:
        """Insert an op at position `at`, or last, with its tensors renumbered by `ids`."""
        added = op if ids is None else renumbered(op, ids)
        self._ops.insert(len(self._ops) if at is None else at, added)
        self._added = True

    def add_inputs(self, position: int, tensors: Sequence[int]) -> None:
        """Let the op at a position, and its variants, also read these tensors."""
        op = self._ops[position]
        variants = [
            variant.model_copy(update={"inputs": [*variant.inputs, *tensors]})
            for variant in op.variants
        ]
        changes = {"inputs": [*op.inputs, *tensors], "variants": variants}
        self._ops[position] = op.model_copy(update=changes)

    def graph(self) -> Graph:
        """The edited graph.

        Raises:
            InvalidInputError: ids, edges and order do not fit together.
        """
        ops = self._ops
        if self._added:
            ops = [op.model_copy(update={"id": i}) for i, op in enumerate(ops)]
        return self._graph.model_copy(update={"tensors": [*self._tensors.values()], "ops": ops})


def renumbered(op: Op, ids: Mapping[int, int]) -> Op:
    """An op, its in-place pairs and its variants with other tensor ids; unlisted ids stay."""

    def listed(tensors: Iterable[int]) -> list[int]:
        return [ids.get(t, t) for t in tensors]

    forms: list[Any] = [op, *op.variants]
    first, *variants = (
        form.model_copy(
            update={
                "inputs": listed(form.inputs),
                "outputs": listed(form.outputs),
                "inplace": [listed(pair) for pair in form.inplace],
            }
        )
        for form in forms
    )
    changed: Op = first.model_copy(update={"mutates": listed(op.mutates), "variants": variants})
    return changed
