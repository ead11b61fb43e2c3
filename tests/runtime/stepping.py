"""Training steps for tests that compare what two ways to run them return."""

import torch


def stepped(model, step, x, count=2):
    """The losses of some steps, and the gradients and buffers behind each."""
    seen = []
    for _ in range(count):
        model.zero_grad()
        loss = step(x)
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        seen += [b.clone() for b in model.buffers()]
    return seen


def compiled_and_eager(model, step, x, options, seed=1):
    """The same of a step as it is and compiled, from one state of the generator."""
    torch._dynamo.reset()
    seen = []
    for run in (step, torch.compile(step, backend="coop", options=options)):
        torch.manual_seed(seed)
        seen.append(stepped(model, run, x))
    return seen
