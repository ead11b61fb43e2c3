"""Iterations that fail: all is as before or as after, or told and refused from then on."""

import concurrent.futures.thread
import copy
import queue
import re
import sys
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import coop_plan
from coop_plan.runtime import PartlyUpdatedError
from tests.runtime.iterating import OPTIMIZERS, eager, equal, listed, preferring_host, state_of
from tests.runtime.test_homes import by_parameter

WIDTH, ROWS, WORDS = 24, 16, 10
STANDARD = {module.__file__ for module in (threading, queue, concurrent.futures.thread)}


class Tasks(nn.Module):
    """A trunk, and a head for each task, which other micro-batches do not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.ModuleList(nn.Embedding(WORDS, WIDTH) for _ in range(2))
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in range(2))

    def loss(self, batch):
        task, words, following = batch
        x = self.trunk(self.words[task](words)).tanh()
        return nn.functional.cross_entropy(self.heads[task](x), following)


def batches_of(step, tasks, bad=None):
    """One micro-batch a task; in micro-batch `bad` a word is none of the vocabulary."""
    draw = torch.Generator().manual_seed(step)
    found = []
    for at, task in enumerate(tasks):
        words, following = torch.randint(0, WORDS, (2, ROWS), generator=draw)
        words[3] += WORDS * (at == bad)
        found.append((task, words, following))
    return found


class Trained:
    """A model of tasks and its optimizers, by iterations; `loop` trains the same in eager."""

    def __init__(self, optimizer, tasks, clip_norm, budget, **options):
        torch._dynamo.reset()
        self.tasks, self.clip_norm = tasks, clip_norm
        self.model, self.optimizer = Trained.made(optimizer)
        self.other, self.others = Trained.made(optimizer)
        self.iteration = coop_plan.train_iteration(
            self.model.loss,
            self.optimizer,
            budget,
            clip_norm=clip_norm,
            method="coop-offline",
            **options,
        )
        self.schedulers, self.other_schedulers = (
            [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in listed(of)]
            for of in (self.optimizer, self.others)
        )

    @staticmethod
    def made(optimizer):
        model = Tasks()
        return model, OPTIMIZERS[optimizer](model.parameters())

    def run(self, step, bad=None):
        self.iteration(*batches_of(step, self.tasks, bad))

    def loop(self, step):
        eager(self.other.loss, self.others, batches_of(step, self.tasks), self.clip_norm)

    def compare(self, *steps):
        for step in steps:
            self.run(step)
            self.loop(step)
            for one in (*self.schedulers, *self.other_schedulers):
                one.step()
            assert equal(self.state(), self.state_of_loop())

    def state(self):
        return [v.detach().clone() for v in state_of(self.model, self.optimizer)]

    def state_of_loop(self):
        return state_of(self.other, self.others)

    def by_parameter(self):
        return by_parameter(self.model, self.optimizer)

    def saved(self):
        optimizers = [one.state_dict() for one in listed(self.optimizer)]
        return copy.deepcopy((self.model.state_dict(), optimizers))

    def load(self, saved):
        self.model.load_state_dict(saved[0])
        for one, state in zip(listed(self.optimizer), copy.deepcopy(saved[1]), strict=True):
            one.load_state_dict(state)

    def named(self, text):
        """Positions in the model of the parameters that a text of an error names."""
        found = set()
        order = {parameter: at for at, parameter in enumerate(self.model.parameters())}
        for number, kind, group, places in re.findall(
            r"optimizer (\d+) \((\w+)\), group (\d+): ([\d, -]+)", text
        ):
            one = listed(self.optimizer)[int(number)]
            assert type(one).__name__ == kind
            for span in places.rstrip(", ").split(", "):
                first, last = int(span.split("-")[0]), int(span.split("-")[-1])
                named = one.param_groups[int(group)]["params"][first : last + 1]
                found |= {order[parameter] for parameter in named}
        return found


@st.composite
def kinds(draw):
    tasks = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
    return {
        "optimizer": draw(st.sampled_from(["momentum", "adamw", "muon-adamw"])),
        "tasks": tuple(tasks),
        "clip_norm": draw(st.sampled_from([None, 1.0])),
        "budget": draw(st.sampled_from(["60%", "min"])),
        "link": draw(st.sampled_from(["0", "2GB/s"])),
    }


CASE = {"optimizer": "adamw", "tasks": (0, 1), "clip_norm": None, "budget": "60%"}


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(of=kinds(), data=st.data())
@example(CASE | {"link": "0"}, 1)
@example(CASE | {"link": "2GB/s", "budget": "min"}, 1)
def test_a_forward_that_fails_leaves_all_as_before(of, data):
    """That of any micro-batch, also where those before it trained parameters of their own."""
    bad = data if isinstance(data, int) else data.draw(st.integers(0, len(of["tasks"]) - 1))
    ours = Trained(**of)
    ours.compare(0, 1)
    before = ours.state()
    with pytest.raises(IndexError):
        ours.run(2, bad)
    assert equal(ours.state(), before)
    ours.compare(2, 3)


class Failure(Exception):
    pass


def failing(at):
    """A profiler that fails before call number `at`, but for those in locks and threads.

    There, an exception before the call that releases a lock would leave it locked for ever.
    """
    left = at

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_call") and frame.f_code.co_filename not in STANDARD:
            left -= 1
            if left == -1:
                raise Failure

    profile.seen = lambda: at - left
    return profile


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(of=kinds(), on_host=st.booleans(), permille=st.integers(0, 999))
@example(CASE | {"link": "0"}, False, 700)
@example(CASE | {"link": "2GB/s", "budget": "min"}, False, 600)
@example(CASE | {"link": "2GB/s", "budget": "min"}, True, 800)
def test_an_exception_at_any_call_is_of_before_or_of_after_or_refused(of, on_host, permille):
    """As one that another thread sends, or that an op, a copy or an update raises."""
    with pytest.MonkeyPatch.context() as patch:
        if on_host:
            preferring_host(patch)
        ours = Trained(**of)
        ours.compare(0)
    counting = failing(-1)
    sys.setprofile(counting)
    ours.run(1)
    sys.setprofile(None)
    ours.loop(1)
    before, saved = ours.by_parameter(), ours.saved()
    ours.loop(2)
    after, told = by_parameter(ours.other, ours.others), None
    try:
        sys.setprofile(failing(permille * counting.seen() // 1000))
        ours.run(2)
    except PartlyUpdatedError as error:
        told = str(error)
    except Failure:
        pass
    finally:
        sys.setprofile(None)
    found = ours.by_parameter()
    if told is None:
        if not all(map(equal, found, after)):
            assert all(map(equal, found, before))
            ours.run(2)
    else:
        updated, amid = (ours.named(part) for part in told.split("amid their update"))
        assert updated | amid
        for at, is_now in enumerate(found):
            assert at in amid or equal(is_now, (after if at in updated else before)[at])
        for _ in range(2):
            with pytest.raises(PartlyUpdatedError, match="parameters were updated"):
                ours.run(2)
        assert all(map(equal, ours.by_parameter(), found))
        ours.load(saved)
        ours.run(2)
    ours.compare(3, 4)


@pytest.mark.parametrize("link", ["0", "2GB/s"])
def test_a_thread_with_the_lock_finds_the_state_of_before_or_of_after(link):
    """As one that saves a checkpoint while another trains."""
    ours = Trained("adamw", (0, 1), None, "min", link=link)
    ours.compare(0)
    states, found, ended = [ours.state()], [], threading.Event()
    for step in range(1, 9):
        ours.loop(step)
        states.append([value.detach().clone() for value in ours.state_of_loop()])

    def save():
        while not ended.is_set():
            with ours.iteration.lock:
                found.append(ours.state())

    thread = threading.Thread(target=save)
    thread.start()
    try:
        for step in range(1, 9):
            ours.run(step)
            time.sleep(0.001)
    finally:
        ended.set()
        thread.join()
    assert all(any(equal(one, state) for state in states) for one in found)
    assert len(found) > 1
