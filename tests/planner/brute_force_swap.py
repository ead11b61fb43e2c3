"""The shortest makespan over recomputation and transfers, by exhaustive search on tiny graphs.

Label setting over event sequences: what may come next is a run, a free, a copy that begins, or a
wait. A state says what is readable, in flight and on the host; its labels are the times of compute,
of both engines and of what is in flight, and only those that are nowhere later than another are
kept. Memory is logical, and ops first run in program order. SsaForm of what is overwritten in the
arena are tensors (`planner.core.ssa`), each with one buffer at a time. Homes are on the host from
the begin on (`planner.homes.lower`), and their last versions at the end.
"""

import heapq
from itertools import chain, combinations
from typing import NamedTuple

from coop_plan.planner import Problem
from coop_plan.planner.core.ssa import SsaForm
from coop_plan.planner.homes.lower import lowered
from coop_plan.planner.homes.updates import host_updates


class TooManyStatesError(Exception):
    """The search was given up."""


class State(NamedTuple):
    """First runs done; tensors readable, being copied away and back (in order), on the host."""

    done: int
    live: frozenset[int]
    away: tuple[int, ...]
    back: tuple[int, ...]
    host: frozenset[int]


def shortest(
    problem: Problem, arena_bytes: int, *, most: int = 60_000, variants: bool = False
) -> float | None:
    """
    Least makespan in µs of any schedule whose live bytes stay within the arena, None if none does.

    With `variants` each run has any of its op's, else the default one.
    Host copies take rounded bytes from the begin of the copy until they are not needed any more.

    Raises:
        TooManyStatesError: more than `most` labels.
    """
    return _Search(SsaForm.of(problem), arena_bytes, variants).run(most)


def shortest_with_homes(problem: Problem, budget: int, *, most: int = 20_000) -> float | None:
    """As `shortest`, within a budget (bytes), of all choices of homes and of updates on the host.

    The host computes the updates in the order in which their gradients arrive.
    """
    movable = [problem.graph.tensors[t].id for t in problem.home_candidates]
    costs = []
    for updates in _subsets(host_updates(problem)):
        used = {t for update in updates for t in update.residents}
        for others in _subsets([t for t in movable if t not in used]):
            form = lowered(problem, {*used, *others}, updates).form
            arena = budget - form.problem.fixed_bytes
            if arena >= 0:
                costs.append(_Search(form, arena, False).run(most))
    return min((cost for cost in costs if cost is not None), default=None)


def _subsets(items):
    return chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))


class _Search:
    def __init__(self, versions, arena_bytes, variants):
        self.problem = problem = versions.problem
        self.copies = frozenset(problem.homes.copies)
        self.returned = {t for t, _ in problem.homes.returned}
        self.host_us = dict(problem.homes.host_us)
        self.graph = problem.graph
        self.ends = [{read for _, read in pairs} for pairs in versions.overwrites]
        step, limit = problem.alignment, problem.host_budget
        self.capacity = -(-arena_bytes // step) * step
        self.host_capacity = float("inf") if limit is None else -(-limit // step) * step
        self.n = problem.op_count - len(problem.homes.returned)
        self.variants = [[] for _ in range(problem.op_count)]
        for variant in problem.variants if variants else problem.variants[: self.n]:
            self.variants[variant.op].append(variant)
        device = self.graph.device
        self.out = [self.copy_us(device, size, device.d2h_bytes_per_s) for size in problem.bytes]
        self.back = [self.copy_us(device, size, device.h2d_bytes_per_s) for size in problem.bytes]
        self.kept = {
            t for t in range(problem.tensor_count) if problem.is_output[t] and self.in_arena(t)
        }

    @staticmethod
    def copy_us(device, size, speed):
        return device.copy_latency_us + size / speed * 1e6 if speed else float("inf")

    def in_arena(self, t):
        return not (self.problem.resident[t] or self.problem.outside[t])

    def size(self, tensors):
        return sum(self.problem.size[t] for t in tensors)

    def run(self, most):
        none = frozenset()
        start = State(len(self.copies), none, (), (), self.copies)
        times = (0.0, 0.0, 0.0, 0.0, 0.0)
        labels, heap, number = {start: [times]}, [(0.0, 0, start, times)], 0
        while heap:
            now, _, state, times = heapq.heappop(heap)
            if times not in labels[state]:
                continue
            ended = state.done == self.n and not state.away + state.back
            if ended and self.kept <= state.live and self.returned <= state.host:
                return now
            for following, then in self.moves(state, times):
                known = labels.setdefault(following, [])
                if any(all(a <= b for a, b in zip(old, then, strict=True)) for old in known):
                    continue
                known[:] = [
                    old for old in known if not all(b <= a for a, b in zip(old, then, strict=True))
                ]
                known.append(then)
                number += 1
                if number > most:
                    raise TooManyStatesError
                heapq.heappush(heap, (max(then[0], then[3]), number, following, then))
        return None

    def moves(self, state, times):
        """States that may follow, with times: compute, engines, host, launches, what is in flight.

        Where the device is the host's processor, costs of runs contain their launch.
        """
        done, live, away, back, host = state
        now, out_free, back_free, computed, launched, *ends = times
        device = self.graph.device
        blocks = device.kind == "cpu"
        sent = 0.0 if blocks else launched + device.copy_launch_us
        told = now + device.copy_launch_us if blocks else now  # compute after the launch of a copy
        out_ends, back_ends = ends[: len(away)], ends[len(away) :]

        def label(clock, following, out_at, back_at, out, coming, us=0.0, launched=launched):
            host_at = max(clock, launched, computed, out[-1]) + us if us else computed
            times = [max(clock, t) for t in (clock, out_at, back_at, host_at, *out, *coming)]
            return following, (*times[:4], launched, *times[4:])

        for t in live - set(away):
            yield label(
                now, state._replace(live=live - {t}), out_free, back_free, out_ends, back_ends
            )
        room = self.capacity - self.size(live) - self.size(back)
        host_room = self.host_capacity - self.size(host) - self.size(away)
        for t in live - set(away) - host:
            if self.problem.size[t] and self.problem.size[t] <= host_room:
                end = max(told, sent, out_free) + self.out[t]
                following = state._replace(away=(*away, t))
                us, out, after, begun = self.host_us.get(t, 0.0), [*out_ends, end], told, sent
                if us:  # the launch of the update
                    after += blocks * device.copy_launch_us
                    begun += (not blocks) * device.copy_launch_us
                yield label(after, following, end, back_free, out, back_ends, us, begun)
        for t in host - live - set(back):
            if self.problem.size[t] <= room:
                end = max(told, sent, back_free) + self.back[t]
                following = state._replace(back=(*back, t))
                coming = [*back_ends, end]
                yield label(told, following, out_free, end, out_ends, coming, 0.0, sent)
        if self.problem.host_budget is not None:
            for t in host - set(back):
                following = state._replace(host=host - {t})
                yield label(now, following, out_free, back_free, out_ends, back_ends)
        if away:  # in the order of the engine, as later ones end later
            following = state._replace(away=away[1:], host=host | {away[0]})
            clock = max(now, out_ends[0])
            yield label(clock, following, out_free, back_free, out_ends[1:], back_ends)
        if back:
            following = state._replace(back=back[1:], live=live | {back[0]})
            clock = max(now, back_ends[0])
            yield label(clock, following, out_free, back_free, out_ends, back_ends[1:])
        for o in range(len(self.copies), min(done + 1, self.n)):
            if o < done and not self.graph.ops[o].recomputable:
                continue
            for variant in self.variants[o]:
                if o < done > self.problem.rerun_limit_of(variant):
                    continue  # an input outside the arena has been overwritten
                for after in self.runs(o, variant, done, state):
                    following = state._replace(done=max(done, o + 1), live=after)
                    begun = launched + device.launch_us * (variant.cost_us > 0 and not blocks)
                    waits = max(now, begun) if variant.cost_us else now
                    free = out_free, back_free, out_ends, back_ends
                    yield label(waits + variant.cost_us, following, *free, 0.0, begun)

    def runs(self, o, variant, done, state):
        """What is readable after a run of op o, one set per choice of what shares an address."""
        problem = self.problem
        if any(self.in_arena(t) and t not in state.live for t in variant.inputs):
            return
        if any(not self.in_arena(t) and problem.producer[t] >= done for t in variant.inputs):
            return
        made = {t for t in variant.outputs if self.in_arena(t) or o < done}
        if made & set(state.back) or self.ends[o] & set(state.away):
            return  # fetched in vain, or overwritten while it is copied
        need = self.size(state.live) + self.size(state.back)
        need += problem.rounded(variant.workspace_bytes) + self.size(made)
        pairs = [(a, b) for a, b in variant.inplace if a in made and b not in state.away]
        for count in range(len(pairs) + 1):
            for chosen in combinations(pairs, count):
                if len({a for a, _ in chosen}) < count or len({b for _, b in chosen}) < count:
                    continue
                taken = {b for _, b in chosen}
                if any(problem.bytes[t] and t not in taken for t in self.ends[o]):
                    continue  # the next version lies where it lay
                if need - self.size(a for a, _ in chosen) <= self.capacity:
                    after = state.live - taken - self.ends[o]
                    yield after | {t for t in made if self.in_arena(t)}
