"""Training steps, and halves of them, for tests that compare what two ways to run them return."""

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


def halve(p):
    """A hook behind a gradient's accumulation."""
    p.grad.mul_(0.5)


def hooked(way, weight):
    """Give a weight the hook of that name, if it is one."""
    if way == "hook":
        weight.register_hook(lambda g: g * 3)
    if way == "after":
        weight.register_post_accumulate_grad_hook(halve)


def backward_that_does_more_than_add(way, loss, weights, another):
    """
    A backward of one loss, and perhaps of `another()`; the gradients that it returned beside.

    Each `way` does something with gradients that are there but add what comes in the end.
    """
    found = torch.autograd.grad(loss, weights, retain_graph=True) if way == "grad" else ()
    if way == "inputs":
        loss.backward(inputs=weights[:2])
    elif way == "create_graph":
        loss.backward(create_graph=True)
    elif way == "outside":
        (loss + weights[0].square().sum()).backward()
    elif way == "retain":
        loss.backward(retain_graph=True)
        loss.backward()
    elif way == "twice":
        (loss + another()).backward()
    else:
        loss.backward()
    return found
