"""Hypothesis strategies: small random graphs, training-like and arbitrary."""

from hypothesis import strategies as st

from coop_plan.schemas import Device, Graph, Op, Tensor, Variant

SIZES = st.sampled_from([0, 1, 2, 3, 4, 4, 4, 8, 8, 12, 16])
COSTS = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 3.25, 10.0])
RESIDENT_KINDS = st.sampled_from(["parameter", "parameter", "buffer", "input", "constant"])


class _Draft:
    """A graph under construction; tensors and ops are numbered by position until `finish`."""

    def __init__(self, draw, mutates, inplace, variants, rng):
        self.draw = draw
        self.flags = {"mutates": mutates, "inplace": inplace, "variants": variants, "rng": rng}
        self.tensors = []
        self.ops = []

    def chance(self, percent):
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def tensor(self, kind, size=None):
        self.tensors.append((kind, self.draw(SIZES) if size is None else size))
        return len(self.tensors) - 1

    def made(self, size=None):
        return self.tensor("output" if self.chance(12) else "activation", size)

    def op(self, inputs, outputs, phase, mutates=(), workspace=None):
        pairs = []
        if self.flags["inplace"] and self.chance(35):
            every = [(out, t) for out in outputs for t in inputs if t not in mutates]
            if every:
                some = st.lists(st.sampled_from(every), min_size=1, max_size=4, unique=True)
                pairs = self.draw(some)
        self.ops.append(
            {
                "name": self.draw(st.sampled_from(["aten.mm", "aten.relu", "aten.add"])),
                "phase": phase,
                "inputs": inputs,
                "outputs": outputs,
                "cost_us": self.draw(COSTS),
                "workspace_bytes": self.draw(SIZES) if self.chance(30) else 0,
                "recomputable": not self.chance(10),
                "rng": self.flags["rng"] and self.chance(12),
                "mutates": list(mutates),
                "inplace": pairs,
                "variants": self.draw(st.integers(1, 2))
                if self.flags["variants"] and self.chance(15)
                else 0,
            }
        )

    def launches(self):
        times = st.sampled_from([0.0, 0.0, 0.25, 0.5, 3.0])
        kind = self.draw(st.sampled_from(["cpu", "cuda"]))
        return {"kind": kind, "launch_us": self.draw(times), "copy_launch_us": self.draw(times)}

    def finish(self, bandwidth, launches=False):
        # Ids are neither dense nor in order: nothing may take them for positions.
        step = self.draw(st.sampled_from([1, 3]))
        count = len(self.tensors)
        ids = [(count - t) * step + 5 for t in range(count)]
        ops = []
        for position, raw in enumerate(self.ops):
            fields = dict(raw)
            for key in ("inputs", "outputs", "mutates"):
                fields[key] = [ids[t] for t in fields[key]]
            fields["inplace"] = [[ids[a], ids[b]] for a, b in fields["inplace"]]
            fields["variants"] = [
                Variant(
                    name=f"v{number}",
                    cost_us=self.draw(COSTS),
                    workspace_bytes=self.draw(SIZES),
                    inputs=fields["inputs"][::-1] if number else fields["inputs"],
                    outputs=fields["outputs"][::-1] if number else fields["outputs"],
                    inplace=[] if number else fields["inplace"],
                )
                for number in range(fields["variants"])
            ]
            ops.append(Op(id=(len(self.ops) - position) * 2, **fields))
        return Graph(
            schema_="coop-plan/graph/1",
            device=Device(
                h2d_bytes_per_s=self.draw(st.sampled_from([4e6, 1e6, 1e7 / 3])),
                d2h_bytes_per_s=self.draw(st.sampled_from([2e6, 4e6, 1e7 / 3])),
                copy_latency_us=self.draw(st.sampled_from([0.0, 0.0, 0.75])),
                **(self.launches() if launches else {}),
            )
            if bandwidth
            else Device(),
            tensors=[
                Tensor(id=ids[t], name=f"t{t}", bytes=size, kind=kind)
                for t, (kind, size) in enumerate(self.tensors)
            ],
            ops=ops,
        )


def _arbitrary(draft, max_ops):
    """Any DAG: dead outputs, ops without inputs or outputs, overwritten tensors anywhere."""
    draw = draft.draw
    there = [draft.tensor(draw(RESIDENT_KINDS)) for _ in range(draw(st.integers(0, 3)))]
    for _ in range(draw(st.integers(0, max_ops))):
        inputs = draw(st.lists(st.sampled_from(there), max_size=3)) if there else []
        outputs = [draft.made() for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2])))]
        mutates = []
        if draft.flags["mutates"] and inputs and draft.chance(12):
            mutates = [draw(st.sampled_from(inputs))]
        phase = draw(st.sampled_from(["forward", "backward"]))
        draft.op(inputs, outputs, phase, mutates)
        there += outputs


def _training(draft, max_ops):
    """Layers forward, then backward over their activations, then updates of the parameters."""
    draw = draft.draw
    layers = draw(st.integers(1, max(1, max_ops // 3)))
    size = draw(SIZES)
    weights = [draft.tensor("parameter") for _ in range(layers)]
    activations = [draft.tensor("input", size)]
    for weight in weights:
        outputs = [draft.tensor("activation", size)]
        if draft.chance(25):
            outputs.append(draft.made())
        inputs = [activations[-1], weight]
        if len(activations) > 2 and draft.chance(25):
            inputs.append(draw(st.sampled_from(activations[1:-1])))
        draft.op(inputs, outputs, "forward")
        activations.append(outputs[0])
    gradient = draft.tensor("output", draw(SIZES))
    draft.op([activations[-1]], [gradient], "forward")
    updates = []
    for layer in reversed(range(layers)):
        inputs = [gradient, activations[layer], weights[layer]]
        gradient = draft.made(size)
        outputs = [gradient]
        if draft.chance(70):
            updates.append((layer, draft.made(draft.tensors[weights[layer]][1])))
            outputs.append(updates[-1][1])
        draft.op(inputs, outputs, "backward")
    for layer, weight_gradient in updates if draft.flags["mutates"] else ():
        weight = weights[layer]
        draft.op([weight, weight_gradient], [], "optimizer", [weight])


def _overwriting(draft, max_ops):
    """Buffers that ops make and others overwrite, readers of any version, some of them late."""
    draw = draft.draw
    there = [draft.tensor("parameter")]
    made = []
    for _ in range(draw(st.integers(3, max(3, max_ops)))):
        recent = st.sampled_from(there[-3:])
        inputs = draw(st.lists(recent, min_size=1, max_size=2))
        mutates = [t for t in inputs if t in made and draft.chance(45)][:1]
        outputs = [] if mutates and draft.chance(75) else [draft.made()]
        if not mutates and draft.chance(15):
            outputs.append(draft.made())
        if made and draft.chance(40):
            late = draw(st.sampled_from(made))
            inputs += [] if late in mutates else [late]
        draft.op(inputs, outputs, draw(st.sampled_from(["forward", "backward"])), mutates)
        there += outputs
        made += outputs


@st.composite
def overwriting_graphs(draw, max_ops=8, *, bandwidth=False):
    """Valid graphs in which most ops make, overwrite or read what is overwritten in the arena."""
    draft = _Draft(draw, mutates=True, inplace=True, variants=False, rng=False)
    _overwriting(draft, max_ops)
    return draft.finish(bandwidth)


@st.composite
def graphs(
    draw,
    max_ops=8,
    *,
    mutates=True,
    inplace=True,
    variants=True,
    rng=True,
    bandwidth=True,
    launches=False,
):
    """Valid graphs of about `max_ops` ops and tensors of 0 to 16 bytes.

    The flags switch features off: tensors overwritten in place, in-place pairs, operator variants,
    random ops, bandwidths (without which a plan must not swap). `launches` adds those of the host.
    Always possible are several or no outputs per op, dead outputs, no bytes, no cost, workspace,
    ops that cannot be recomputed.
    """
    draft = _Draft(draw, mutates, inplace, variants, rng)
    build = draw(st.sampled_from([_arbitrary, _training]))
    build(draft, max_ops)
    return draft.finish(bandwidth, launches)


@st.composite
def variant_graphs(draw, max_ops=5, *, mutates=False, bandwidth=True):
    """Valid graphs whose variants omit inputs, or make a tensor that variants of readers read."""
    graph = draw(
        overwriting_graphs(max_ops=max_ops, bandwidth=bandwidth)
        if mutates
        else graphs(max_ops, mutates=False, variants=False, rng=False, bandwidth=bandwidth)
    )
    tensors, ops = list(graph.tensors), []
    masks = {}
    for op in graph.ops:
        variants = []
        fields = {"workspace_bytes": draw(SIZES), "inplace": op.inplace}
        spare = sorted(set(op.inputs) - set(op.mutates))
        if spare and draw(st.booleans()):
            left = draw(st.sampled_from(spare))
            read = [t for t in op.inputs if t != left]
            read += [masks[left]] if left in masks else []
            pairs = [pair for pair in op.inplace if pair[1] != left]
            lean = {"inputs": read, "outputs": op.outputs, "inplace": pairs}
            variants.append(Variant(name="lean", cost_us=draw(COSTS), **(fields | lean)))
        if op.outputs and draw(st.booleans()):
            new = max(t.id for t in tensors) + 1
            tensors.append(Tensor(id=new, name="mask", bytes=draw(SIZES), kind="activation"))
            masks[op.outputs[0]] = new
            more = {"inputs": op.inputs, "outputs": [*op.outputs, new]}
            variants.append(Variant(name="mask", cost_us=draw(COSTS), **(fields | more)))
        ops.append(op.model_copy(update={"variants": variants}))
    return graph.model_copy(update={"tensors": tensors, "ops": ops})
