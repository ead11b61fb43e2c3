"""Python code that runs amid an iteration: all parameters are those of before or of after it."""

import asyncio
import copy
import ctypes
import faulthandler
import gc
import itertools
import os
import signal
import sys
import threading
from contextlib import ExitStack, nullcontext, suppress

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import coop_plan
from coop_plan import runtime
from coop_plan.runtime.whole_iteration.all_or_none import AllOrNone
from coop_plan.runtime.whole_iteration.updates import ParameterUpdate
from tests.runtime.iterating import OPTIMIZERS, WIDTH, equal, listed, preferring_host, state_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
OPTIONS = ({}, {"link": "8GB/s", "method": "coop-offline"})


class Preempted(Exception):
    pass


class Trained:
    """A model, its optimizers, and averages of its parameters that a hook after a step makes."""

    def __init__(self, optimizer, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.averages = [p.detach().clone() for p in self.model.parameters()]
        listed(self.optimizer)[-1].register_step_post_hook(self.average)
        self.iteration = coop_plan.train_iteration(
            lambda x: self.model(x).square().mean(), self.optimizer, "min", **options
        )

    def average(self, *_):
        for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.5)

    def run(self, step):
        self.iteration(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)))

    def saved(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, saved):
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def state(self):
        found = [*state_of(self.model, self.optimizer), *self.averages]
        return [value.detach().clone() for value in found]


def calling(at, then):
    """A profiler that calls a function before the call number `at` of any function."""
    left = at

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_call"):
            left -= 1
            if left == -1:
                then()

    profile.seen = lambda: at - left  # calls until now
    return profile


def calls_of(run, *args):
    """Number of the calls of functions that a function makes."""
    counting = calling(-1, None)
    sys.setprofile(counting)
    run(*args)
    sys.setprofile(None)
    return counting.seen()


def send_at_once(numbers):
    """Send signals to this thread, of which each is there before a handler runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.pthread_kill(threading.get_ident(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def settled(run, levels=8):
    """Run a function; handlers that raise after one another, on its way out, end with it."""
    with suppress(Preempted):
        settled(run, levels - 1) if levels else run()
    with suppress(Preempted):
        signal.pthread_sigmask(signal.SIG_BLOCK, ())  # runs handlers that an error left for later


def handlers_raised(error):
    """Errors of handlers, the first one first, as they propagated."""
    while isinstance(error, Preempted):
        yield error.args
        error = error.__context__


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(["momentum", "adamw", "muon-adamw"]),
    options=st.sampled_from(OPTIONS),
    numbers=st.sets(st.sampled_from(SIGNALS), min_size=1),
    raises=st.booleans(),
    percent=st.integers(0, 100),
    on_host=st.booleans(),
)
@example("adamw", OPTIONS[0], {*SIGNALS}, True, 70, False)
@example("adamw", OPTIONS[0], {signal.SIGINT, signal.SIGTERM}, True, 90, False)
@example("adamw", OPTIONS[1], {*SIGNALS}, True, 70, False)
@example("adamw", OPTIONS[1], {*SIGNALS}, True, 70, True)
@example("adamw", OPTIONS[1], {*SIGNALS}, True, 95, True)
def test_a_signal_at_any_call_finds_the_state_of_before_or_of_after(
    optimizer, options, numbers, raises, percent, on_host
):
    """As a handler that saves a checkpoint, or raises, before the job is preempted."""
    torch._dynamo.reset()
    ours, theirs = Trained(optimizer, **options), Trained(optimizer, **options)
    with pytest.MonkeyPatch.context() as patch:
        for trained in (ours, theirs):
            if on_host:
                preferring_host(patch)
            trained.run(0)
            calls = calls_of(trained.run, 1)
    before = ours.state()
    theirs.run(2)
    after, sent, found = theirs.state(), [], []

    def send():
        for number in numbers:
            sent.append(number)
            os.kill(os.getpid(), number)  # at which a handler raises, if at once

    def handler(number, frame):
        found.append((number, ours.state()))
        if raises:
            raise Preempted

    kept = {number: signal.signal(number, handler) for number in SIGNALS}
    profile = calling(percent * calls // 100, send)
    try:
        with suppress(Preempted):
            sys.setprofile(profile)
            ours.run(2)
    finally:
        sys.setprofile(None)
        assert all(signal.getsignal(number) is handler for number in SIGNALS)
        for number, one in kept.items():
            signal.signal(number, one)
    assert sorted(number for number, _ in found) == sorted(sent)
    assert all(equal(state, before) or equal(state, after) for _, state in found)
    assert equal(ours.state(), before) or equal(ours.state(), after)


@pytest.mark.parametrize("optimizer", ["adamw", "muon-adamw"])
def test_a_hook_that_fails_finds_the_state_of_after(optimizer):
    ours, theirs = Trained(optimizer), Trained(optimizer)
    stepped = []
    for one in listed(ours.optimizer):
        one.register_step_post_hook(lambda one, *_: stepped.append(one))

    def fail(*_):
        raise Preempted

    handle = listed(ours.optimizer)[0].register_step_post_hook(fail)
    with pytest.raises(Preempted):
        ours.run(0)
    theirs.run(0)
    assert stepped == listed(ours.optimizer)
    assert equal(ours.state(), theirs.state())
    handle.remove()
    ours.run(1)
    theirs.run(1)
    assert equal(ours.state(), theirs.state())


@torch.library.custom_op("coop_tests::fails_backward", mutates_args=())
def fails_backward(x: torch.Tensor, fails: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("coop_tests::failing", mutates_args=())
def failing(gradient: torch.Tensor, fails: torch.Tensor) -> torch.Tensor:
    if fails:
        raise Preempted
    return gradient.clone()


@fails_backward.register_fake
@failing.register_fake
def _(x, fails):
    return torch.empty_like(x)


fails_backward.register_autograd(
    lambda ctx, gradient: (failing(gradient, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_op_that_fails_among_the_updates_is_told(at, options):
    """An op of the user's, whose backward comes after those of the layers from `at` on."""
    ours = Trained("momentum")
    parameters = [*ours.model.parameters()]

    def loss(batch):
        x, fails = batch
        for i, layer in enumerate(ours.model):
            x = layer(fails_backward(x, fails) if i == at else x)
        return (fails_backward(x, fails) if at == 3 else x).square().mean()

    iteration = coop_plan.train_iteration(loss, ours.optimizer, "min", **options)
    for fails in (False, True, False):
        before = [p.detach().clone() for p in parameters]
        saved = ours.saved()
        if not fails:
            iteration((torch.ones(8, WIDTH), torch.tensor(fails)))
            assert not any(map(torch.equal, before, parameters))
            continue
        with pytest.raises((Preempted, runtime.PartlyUpdatedError)) as found:
            iteration((torch.ones(8, WIDTH), torch.tensor(fails)))
        updated = sum(not torch.equal(*pair) for pair in zip(before, parameters, strict=True))
        most = 2 * (3 - at)  # updates on the host that have not begun are left out
        assert updated <= most if "link" in options else updated == most
        if updated:
            assert found.match(f"after {updated} of 6 parameters were updated.*Preempted: load")
        assert found.type is (runtime.PartlyUpdatedError if updated else Preempted)
        ours.load(saved)


def actions():
    """Of each signal: the process's action, as C has it, and Python's handler."""
    found = []
    for number in SIGNALS:
        action = ctypes.create_string_buffer(256)
        ctypes.CDLL(None).sigaction(number, None, action)
        handler_and_flags = action.raw[:8] + action.raw[136:140]
        found.append((handler_and_flags, signal.getsignal(number)))
    return found


PARAMETER = nn.Parameter(torch.zeros(1))
OPTIMIZER = torch.optim.SGD([PARAMETER])
UPDATE = ParameterUpdate(OPTIMIZER, 0, PARAMETER, nullcontext(), None), torch.zeros(1)


def all_or_none(finish=lambda: None):
    return AllOrNone(finish, [OPTIMIZER])


def restart_calls(number):
    signal.siginterrupt(number, False)


def dump_traces_first(number):
    faulthandler.register(number, sys.__stderr__, chain=True)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    installed=st.lists(
        st.sampled_from([None, restart_calls, dump_traces_first]),
        min_size=len(SIGNALS),
        max_size=len(SIGNALS),
    ),
    sent=st.sets(st.sampled_from(SIGNALS)),
    at=st.integers(0, 3),
    fails=st.booleans(),
)
@example([dump_traces_first] * 4, {*SIGNALS}, 1, False)
@example([restart_calls] * 4, {*SIGNALS}, 1, True)
def test_handlers_are_those_of_before_and_run_once(installed, sent, at, fails):
    """Those of C too, and the options of the system's call."""
    called = []
    kept = {
        number: signal.signal(number, lambda number, _: called.append(number)) for number in SIGNALS
    }
    with ExitStack() as after:
        for number, handler in kept.items():
            after.callback(signal.signal, number, handler)
        for number, install in zip(SIGNALS, installed, strict=True):
            if install is not None:
                install(number)
            if install is dump_traces_first:
                after.callback(faulthandler.unregister, number)
        before = actions()
        with suppress(Preempted, runtime.PartlyUpdatedError), all_or_none() as updates:
            for i in range(3):
                if i == at:
                    for number in sent:
                        os.kill(os.getpid(), number)
                if fails and i == 2:
                    raise Preempted
                updates.begin(3)
                updates.run(*UPDATE)
            assert set(called) == (sent if at == 0 else set())
        assert actions() == before
        assert sorted(called) == sorted(sent if at < 3 else ())


def test_a_handler_of_an_event_loop_runs_once():
    """The loop reads signals from a file, to which each arrival writes."""
    called = []

    async def preempted():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, called.append, 1)
        with all_or_none() as updates:
            updates.begin(1)
            os.kill(os.getpid(), signal.SIGTERM)
            updates.run(*UPDATE)
        await asyncio.sleep(0.05)

    asyncio.run(preempted())
    assert called == [1]


def test_a_handler_that_a_hook_installs_stays():
    def handler(*_):
        pass

    kept = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with all_or_none(lambda: signal.signal(signal.SIGTERM, handler)) as updates:
            updates.begin(1)
            updates.run(*UPDATE)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, kept)


@pytest.mark.parametrize("sent", [*itertools.combinations(SIGNALS, 1), SIGNALS[:2], SIGNALS])
@pytest.mark.parametrize("amid", ["updates", "end"])
def test_signals_at_any_call_leave_all_handlers_and_run_each_once(sent, amid):
    """Whatever the handlers raise: the first error propagates, with the others as its context."""
    called = []

    def handler(number, _):
        called.append(number)
        raise Preempted(number)

    def run():
        with all_or_none() as updates:
            updates.begin(1)
            if amid == "updates":
                send_at_once(sent)
            updates.run(*UPDATE)

    def run_to(at):
        sys.setprofile(calling(at, lambda: send_at_once(sent)))
        run()

    kept = {number: signal.signal(number, handler) for number in SIGNALS}
    gc.disable()  # in its callbacks, errors are ignored
    try:
        if amid == "updates":
            with pytest.raises(Preempted) as found:
                run()
            assert [(number,) for number in called] == [*handlers_raised(found.value)]
            assert sorted(called) == sorted(sent)
            assert all(signal.getsignal(number) is handler for number in SIGNALS)
            return
        for at in range(calls_of(run) - 1):  # the last ends the profile
            settled(lambda at=at: run_to(at))
            sys.setprofile(None)
            assert sorted(called) == sorted(sent)
            called.clear()
            assert all(signal.getsignal(number) is handler for number in SIGNALS)
    finally:
        sys.setprofile(None)
        gc.enable()
        for number, one in kept.items():
            signal.signal(number, one)


@pytest.mark.parametrize("percent", [2, 10, 30, 50, 70, 90, 98])
def test_a_handler_that_trains_runs_after_the_iteration_or_is_refused(percent):
    """The iteration that it interrupts before the first update has the parameters in its ops."""
    torch._dynamo.reset()
    ours, theirs = Trained("adamw"), Trained("adamw")
    for trained in (ours, theirs):
        trained.run(0)
        calls = calls_of(trained.run, 1)
    kept = signal.signal(signal.SIGUSR1, lambda *_: ours.run(3))
    refused = None
    try:
        sys.setprofile(
            calling(percent * calls // 100, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        )
        ours.run(2)
    except runtime.RuntimeRefusalError as error:
        refused = error
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, kept)
    if refused is None:
        theirs.run(2)
        theirs.run(3)
    else:
        assert "called within itself" in str(refused)
    assert equal(ours.state(), theirs.state())
    ours.run(4)
    theirs.run(4)
    assert equal(ours.state(), theirs.state())
