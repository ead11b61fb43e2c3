"""Single ops, between two layers, give eager's numbers at the smallest budget.

Many of them are traced by PyTorch as something else than eager runs, or are described wrongly.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coop_plan import runtime
from coop_plan.runtime.capture import profiler


class Between(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.op = op

    def forward(self, x):
        return self.last(self.op(torch.tanh(self.first(x)))).square().mean()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


@torch.library.custom_op("coop_plan_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)


def image(x):
    return x.view(1, 4, 16, 16)


def rows(x):
    """Back to what the last layer takes."""
    return x.flatten()[: 64 * 16].reshape(64, 16)


def slice_written(x):
    y = x.clone()
    y[:, :4] = 0.5
    return y.mul_(2)


def scattered_mask(x):
    mask = torch.arange(64 * 16).view(64, 16) < 40
    return x.masked_scatter(mask, x.flatten()[:40] * 3)


def transposed_softplus(x):
    """The gradient has other strides than FakeTensorMode says: a view of it fails when run."""
    return F.softplus(x.view(4, 16, 16).transpose(1, 2)).reshape(64, 16)


def norm_of_transposed(x):
    return F.layer_norm(x.view(4, 16, 16).transpose(1, 2), (16,)).transpose(1, 2).reshape(64, 16)


def parts_changed_twice(x):
    """The parts have gaps between their rows, their columns and every two elements."""
    strided = x.view(8, 8, 16).transpose(0, 1)
    parts = [
        part.mul_(2).sigmoid_()
        for values, dim in ((strided, 0), (strided, 1), (strided, 2), (x.view(8, 8, 8, 2), 3))
        for part in (values * 1).unsafe_chunk(2, dim)
    ]
    return torch.cat([part.flatten() for part in parts]).view(-1, 16)


OPS = {
    "dropout whose scale eager rounds twice": lambda x: F.dropout(x, 0.15),
    "dropout of half precision": lambda x: F.dropout(x.bfloat16(), 0.1).float(),
    "feature dropout": lambda x: F.dropout1d(x, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "random numbers of an op": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "attention": lambda x: rows(
        F.scaled_dot_product_attention(
            *x.view(1, 2, 4, 8, 16).expand(3, -1, -1, -1, -1), is_causal=True
        )
    ),
    "attention with dropout": lambda x: rows(
        F.scaled_dot_product_attention(*[x.view(2, 4, 8, 16)] * 3, dropout_p=0.1)
    ),
    "bilinear": lambda x: rows(F.interpolate(image(x), scale_factor=2, mode="bilinear")),
    "bicubic": lambda x: rows(F.interpolate(image(x), scale_factor=1.5, mode="bicubic")),
    "nearest": lambda x: rows(F.interpolate(image(x), size=17)),
    "grid sample": lambda x: rows(
        F.grid_sample(image(x), x[:, :8].reshape(1, 16, 16, 2), align_corners=False)
    ),
    "margins": lambda x: x * F.multilabel_margin_loss(x, torch.zeros(64, 16, dtype=torch.long)),
    "softplus of a transposed": transposed_softplus,
    "norm of a transposed": norm_of_transposed,
    "masked scatter": scattered_mask,
    "masked fill": lambda x: x.masked_fill(x > 0, 0),
    "write to a slice": slice_written,
    "write to parts": parts_changed_twice,
    "index put": lambda x: x.clone().index_put_((torch.arange(3),), torch.ones(3, 16)),
    "rows by a mask": lambda x: x.clone().index_put_((torch.arange(64) < 3,), torch.ones(3, 16)),
    "repeated rows": lambda x: x.repeat_interleave(torch.arange(64) % 3, 0, output_size=63)[:9] + 1,
    "means of segments": lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([4, 60])),
    "conjugate": lambda x: (torch.complex(x, x).mT.conj() @ torch.complex(x, x)).abs()[:1] + x,
    "Fourier": lambda x: torch.fft.rfft(x).abs().repeat(1, 2)[:, :16],
    "inverse": lambda x: x @ torch.linalg.inv(x.T @ x + torch.eye(16)),
    "Cholesky": lambda x: x @ torch.linalg.cholesky(x.T @ x + torch.eye(16)),
    "equations": lambda x: torch.linalg.solve(x.T @ x + torch.eye(16), x.T).T,
    "constant": lambda x: x * torch.tensor([2.0] * 16),
    "empty": lambda x: torch.cat([x, x[:0]]) + torch.zeros(0, 16).sum(),
    "autograd function": lambda x: Double.apply(x),
    "custom op": lambda x: twice(x),
    "transform": lambda x: torch.vmap(lambda row: row.sin() * row.sum())(x),
    "batch of one row": lambda x: torch.stack([row * 2 for row in x.unbind(0)]),
}


def results(model, step, x):
    torch.manual_seed(1)
    for _ in range(2):
        model.zero_grad()
        loss = step(x)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]


def compiled(model):
    return torch.compile(
        model, backend="coop", options={"budget": "min"}, fullgraph=True, dynamic=False
    )


@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # Dynamo's
def test_ops_equal_eager(name):
    eager = Between(OPS[name])
    planned = copy.deepcopy(eager)
    x = torch.randn(64, 16)
    expected = results(eager, eager, x)
    assert all(map(torch.equal, results(planned, compiled(planned), x), expected))
    (report,) = runtime.reports()
    assert report.outside_bytes == 0
    assert report.measured_arena_bytes == report.planned_arena_bytes


@pytest.mark.parametrize(
    ("kind", "both_ways"), [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, True), (nn.RNN, False)]
)
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_recurrent_layers_equal_eager(kind, both_ways):
    """AOTAutograd leaves out the dropout between the layers, and fails on oneDNN's LSTM."""
    # 21 is no multiple of what fits into a register: rows end in elements computed one by one.
    eager = kind(16, 21, 2, batch_first=True, dropout=0.2, bidirectional=both_ways)
    planned = copy.deepcopy(eager)
    x = torch.randn(8, 3, 16)  # needs no gradient

    def step_of(model):
        return lambda x: model(x)[0].square().mean()

    expected = results(eager, step_of(eager), x)
    assert all(map(torch.equal, results(planned, compiled(step_of(planned)), x), expected))


def test_the_trace_is_eagers_only_while_the_backend_compiles():
    kernels = (
        dict(torch.ops.aten.lstm.input.py_kernels),
        dict(torch.ops.aten.dropout.default.py_kernels),
    )
    model = Between(lambda x: F.dropout(x, 0.1))
    compiled(model)(torch.randn(64, 16)).backward()
    assert kernels == (
        torch.ops.aten.lstm.input.py_kernels,
        torch.ops.aten.dropout.default.py_kernels,
    )


REFUSED = {
    "a shape out of data": (
        lambda x: x[x.detach() > 0].sum() * x,
        r"test_ops.py:\d+: aten.index.Tensor makes a shape out of data.*torch.where",
    ),
    "a number out of data": (
        lambda x: x * x.detach().sum().long().item(),
        r"test_ops.py:\d+: aten.\S+ makes a number out of data",
    ),
    "a branch": (
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        "cannot be planned",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused(name):
    op, message = REFUSED[name]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        compiled(Between(op))(torch.randn(64, 16))


def test_a_matrix_without_a_factorization_is_eagers_error():
    """Although nothing of the step reads what is checked."""
    model = Between(lambda x: torch.linalg.cholesky(x.T @ x - 99 * torch.eye(16)).sum() * 0 + x)
    x = torch.randn(64, 16)
    for step in (model, compiled(model)):
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            step(x)


def test_a_sparse_gradient_is_refused():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="with sparse=False"):
        compiled(nn.Embedding(8, 4, sparse=True))(torch.arange(3))


@pytest.mark.parametrize(
    "shapes", [((24, 16), (3, 16, 8)), ((3, 8, 16), (16, 24)), ((8, 24), (24, 16))]
)
def test_groups_of_a_grouped_product_are_timed_with_rows_in_them(shapes):
    """Group ends of zero are valid, but leave an expert's product without work."""
    matrices = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    ends = torch.empty(3, dtype=torch.int32)
    product = torch.ops.aten._grouped_mm.default
    for given, named in (([*matrices, ends], {}), (matrices, {"offs": ends})):
        made, named = profiler.synthetic_arguments(product, given, named)
        assert (named or {"offs": made[-1]})["offs"].tolist() == [8, 16, 24]
        assert all(map(torch.count_nonzero, product(*made, **named)))
