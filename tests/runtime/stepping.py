"""Training steps for tests that compare what two ways to run them return."""

import torch


def stepped(model, step, x):
    """The losses of two steps, and the gradients and buffers behind each."""
    seen = []
    for _ in range(2):
        model.zero_grad()
        loss = step(x)
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        seen += [b.clone() for b in model.buffers()]
    return seen


def eager_and_compiled(model, x, options):
    """The same of a model as it is and compiled, from one state of the generator."""
    torch._dynamo.reset()
    seen = []
    for step in (model, torch.compile(model, backend="coop", options=options)):
        torch.manual_seed(1)
        seen.append(stepped(model, step, x))
    return seen
