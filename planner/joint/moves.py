"""
The moves of the joint walk: events are put in, moved, or taken out where it helps.

A read may be served by what is kept, by a recompute, or by a fetch. Where a change needs more
memory than there is, something that is only kept there is served otherwise; events that serve
nothing are collected.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.sequence import (
    ALIVE,
    AT_LEAVE,
    AT_OFFLOAD,
    AWAY,
    FETCH,
    FIRST,
    INSERTED,
    LEAVE,
    LENGTH,
    NEEDED,
    OFFLOAD,
    SEEN,
    TRIAL,
    WANTED,
    JointState,
)


@inlined
def begin_trial(j: JointState) -> None:
    """The trial is the sequence at hand."""
    for e in range(j.counts[LENGTH]):
        j.trial[e] = j.sequence[e]
        j.trial_begins[e] = j.begins[e]
    j.trial_begins[j.counts[LENGTH]] = j.begins[j.counts[LENGTH]]
    j.counts[TRIAL] = j.counts[LENGTH]


@inner
def put_in(j: JointState, code: int, at: int) -> bool:
    """Put an event into the trial before event `at`; false where there is no room."""
    size = j.counts[TRIAL]
    if size >= j.trial.size:
        return False
    for e in range(size, at, -1):
        j.trial[e] = j.trial[e - 1]
    j.trial[at] = code
    j.counts[TRIAL] = size + 1
    return True


@inner
def move_to(j: JointState, event: int, to: int) -> None:
    """Move an event of the trial to before what is event `to` now."""
    code = j.trial[event]
    if to > event:
        for e in range(event, to - 1):
            j.trial[e] = j.trial[e + 1]
        j.trial[to - 1] = code
    else:
        for e in range(event, to, -1):
            j.trial[e] = j.trial[e - 1]
        j.trial[to] = code


@inner
def reads(a: Arrays, code: int, t: int) -> bool:
    """Whether an event is a run that reads a tensor."""
    if code >= a.ops:
        return False
    found = False
    for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
        found = found or a.reads[k] == t
    return found


@inlined
def look_back(a: Arrays, j: JointState, code: int) -> None:
    """What is needed before an event, from what is needed after it."""
    if code < a.ops:
        for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
            if a.evictable[a.makes[k]] == 1:
                j.tensor[ALIVE, a.makes[k]] = 0
        for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
            j.tensor[ALIVE, a.reads[k]] = 1
    elif (code - a.ops) % 3 == FETCH:
        j.tensor[ALIVE, (code - a.ops) // 3] = 0
    elif (code - a.ops) % 3 == OFFLOAD:
        j.tensor[ALIVE, (code - a.ops) // 3] = 1


@inlined
def restore(a: Arrays, j: JointState, code: int) -> None:
    """What `look_back` changed is as it was again."""
    if code < a.ops:
        for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
            j.tensor[ALIVE, a.makes[k]] = j.tensor[NEEDED, a.makes[k]]
        for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
            j.tensor[ALIVE, a.reads[k]] = j.tensor[NEEDED, a.reads[k]]
    else:
        t = (code - a.ops) // 3
        j.tensor[ALIVE, t] = j.tensor[NEEDED, t]


@inner
def change(a: Arrays, j: JointState) -> bool:
    """A trial that differs from the sequence; false where the one drawn is none."""
    numbers = j.numbers
    size = j.counts[LENGTH]
    kind = np.random.random()
    begin = np.random.randint(size)
    begin_trial(j)
    if kind < numbers.recompute_chance:
        return _recompute_for(a, j, begin)
    kind -= numbers.recompute_chance
    if kind < numbers.fetch_chance:
        return _fetch_for(a, j, begin)
    kind -= numbers.fetch_chance
    if kind < numbers.retime_chance:
        return retime(a, j)
    kind -= numbers.retime_chance
    for _ in range(numbers.tries):
        if j.is_first[begin] == 0:
            break
        begin = np.random.randint(size)
    if j.is_first[begin] == 1:
        return False
    if kind < numbers.convert_chance:
        return _convert(a, j, begin)
    if kind - numbers.convert_chance < numbers.move_chance:
        return _move(a, j, begin)
    return _take_out(a, j, begin)


@inner
def _convert(a: Arrays, j: JointState, event: int) -> bool:
    """What is computed again is fetched instead, or the other way round."""
    code, size = j.sequence[event], j.counts[LENGTH]
    if code < a.ops:
        count = a.makes_ptr[code + 1] - a.makes_ptr[code]
        t = a.makes[a.makes_ptr[code] + np.random.randint(count)] if count > 0 else -1
    elif (code - a.ops) % 3 == FETCH:
        t = (code - a.ops) // 3
    else:
        return False
    if t < 0 or j.movable[t] == 0:
        return False
    read = event + 1
    while read < size and not reads(a, j.sequence[read], t):
        read += 1
    if read == size:
        return False
    _drop(j, event)
    if code < a.ops:
        return fetch(a, j, t, read - 1, -1, -1)
    maker = a.producer[t]
    if j.again[maker] == 0 or a.evictable[t] == 0:
        return False
    return recompute(a, j, maker, read - 1)


@inner
def _drop(j: JointState, event: int) -> None:
    """Take an event out of the trial."""
    for e in range(event, j.counts[TRIAL] - 1):
        j.trial[e] = j.trial[e + 1]
        j.trial_begins[e] = j.trial_begins[e + 1]
    j.counts[TRIAL] -= 1
    j.trial_begins[j.counts[TRIAL]] = j.trial_begins[j.counts[TRIAL] + 1]


@inner
def _move(a: Arrays, j: JointState, begin: int) -> bool:
    """Move a block of events that are no first runs."""
    size = j.counts[LENGTH]
    more = j.numbers.moved_block if np.random.random() < j.numbers.moved_block_chance else 0.0
    end = begin + 1
    while np.random.random() < more and end < size and j.is_first[end] == 0:
        end += 1
    distance = int(j.numbers.furthest ** np.random.random())
    to = begin + (distance if np.random.random() < 0.5 else -distance)
    if to < 0 or to > size - (end - begin):
        return False
    for e in range(begin, end):
        code = j.sequence[e]
        if code < a.ops:
            first = j.op[FIRST, code]
            if j.again[code] == 0 or first - (end - begin if first > begin else 0) >= to:
                return False
    filled = 0
    rest = 0
    for e in range(size + 1):
        if begin <= e < end:
            continue
        if rest == to:
            for moved in range(begin, end):
                j.trial[filled] = j.sequence[moved]
                filled += 1
        if e < size:
            j.trial[filled] = j.sequence[e]
            filled += 1
            rest += 1
    return True


@inner
def _take_out(a: Arrays, j: JointState, begin: int) -> bool:
    """Take out a block of recomputes and fetches; of a tensor's copy to the host all that is."""
    size = j.counts[LENGTH]
    end = begin + 1
    while np.random.random() < j.numbers.removed_block and end < size and j.is_first[end] == 0:
        end += 1
    filled = 0
    for e in range(size):
        code = j.sequence[e]
        gone = begin <= e < end
        if not gone and code >= a.ops:
            first = j.sequence[begin]
            gone = (
                first >= a.ops
                and (first - a.ops) % 3 != FETCH
                and (first - a.ops) // 3 == (code - a.ops) // 3
            )
        elif gone and code >= a.ops and (code - a.ops) % 3 != FETCH:
            gone = code == j.sequence[begin]
        if not gone:
            j.trial[filled] = code
            filled += 1
    j.counts[TRIAL] = filled
    return bool(filled < size)


@inner
def _recompute_for(a: Arrays, j: JointState, event: int) -> bool:
    """Something that an event reads is computed again for it."""
    op = j.sequence[event]
    if op >= a.ops:
        return False
    count = a.reads_ptr[op + 1] - a.reads_ptr[op]
    if count == 0:
        return False
    maker = a.producer[a.reads[a.reads_ptr[op] + np.random.randint(count)]]
    at = event
    if np.random.random() < j.numbers.early_chance:
        at -= int(j.numbers.earliest ** np.random.random())
    if maker < 0 or j.again[maker] == 0 or at < 0 or at <= j.op[FIRST, maker]:
        return False
    return recompute(a, j, maker, at)


@inner
def _fetch_for(a: Arrays, j: JointState, event: int) -> bool:
    """Something that an event reads is fetched for it."""
    op = j.sequence[event]
    if op >= a.ops:
        return False
    count = a.reads_ptr[op + 1] - a.reads_ptr[op]
    if count == 0:
        return False
    t = a.reads[a.reads_ptr[op] + np.random.randint(count)]
    if j.movable[t] == 0:
        return False
    return fetch(a, j, t, event, -1, -1)


@inner
def recompute(a: Arrays, j: JointState, op: int, at: int) -> bool:
    """
    Put `op` into the trial before event `at`; false where there is no room for more events.

    What it reads and is not kept there is mostly computed again or fetched with it.
    """
    size = j.counts[TRIAL]
    for e in range(size - 1, at - 1, -1):
        look_back(a, j, j.trial[e])
    numbers = j.numbers
    rarely = np.random.random() >= numbers.usually
    kept = numbers.kept_rarely if rarely else 0.0
    gone = numbers.gone_rarely if rarely else numbers.gone_usually
    j.inserted[0] = op
    count = 1
    i = 0
    while i < count:
        o = j.inserted[i]
        i += 1
        if o >= a.ops:
            continue
        for k in range(a.reads_ptr[o], a.reads_ptr[o + 1]):
            t = a.reads[k]
            maker = a.producer[t]
            if count == j.inserted.size or maker < 0:
                continue
            chance = kept if j.tensor[ALIVE, t] == 1 else gone
            if np.random.random() >= chance:
                continue
            again = j.again[maker] == 1
            code = maker
            if 0 <= j.tensor[AT_LEAVE, t] < at and (
                not again or np.random.random() < numbers.fetched_chance
            ):
                code = a.ops + 3 * t + FETCH
            elif not again:
                continue
            known = False
            for other in range(count):
                known = known or j.inserted[other] == code
            if not known:
                j.inserted[count] = code
                count += 1
    for e in range(at, size):
        restore(a, j, j.trial[e])
    j.counts[INSERTED] = count
    if size + count > j.trial.size:
        return False
    for i in range(1, count):  # fetches, then in program order
        o = j.inserted[i]
        k = i
        while k > 0 and (j.inserted[k - 1] < a.ops and (o >= a.ops or j.inserted[k - 1] > o)):
            j.inserted[k] = j.inserted[k - 1]
            k -= 1
        j.inserted[k] = o
    for e in range(size - 1, at - 1, -1):
        j.trial[e + count] = j.trial[e]
    for i in range(count):
        j.trial[at + i] = j.inserted[i]
    j.counts[TRIAL] = size + count
    return True


@inner
def fetch(a: Arrays, j: JointState, t: int, event: int, after: int, before: int) -> bool:
    """
    Fetch `t` for the trial's event `event`, and copy it to the host first where it is not.

    It is fetched after event `after` and has left the device before event `before`, if they are
    not -1, and else in time for no one to wait.
    """
    begins, size = j.trial_begins, j.counts[TRIAL]
    factor = 1.0 if np.random.random() < j.numbers.punctual_chance else 2.0 * np.random.random()
    latest = begins[event] - factor * j.in_us[t]
    at = event
    while at > after + 1 and at > 0 and begins[at] > latest:
        at -= 1
    offload = leave = made = -1
    for e in range(size):
        code = j.trial[e]
        if code == a.ops + 3 * t + OFFLOAD:
            offload = e
        elif code == a.ops + 3 * t + LEAVE:
            leave = e
        elif made < 0 and code == a.producer[t]:
            made = e
    if offload >= 0 and leave >= 0:
        most = at if before < 0 else min(at, before)
        if leave >= most:
            if most <= offload:
                return False
            move_to(j, leave, most)
            at += leave >= at
        return put_in(j, a.ops + 3 * t + FETCH, at)
    if made < 0 or at <= made:
        return False
    last = made  # the last read before it is fetched
    for e in range(made, at):
        if reads(a, j.trial[e], t):
            last = e
    factor = 1.0 if np.random.random() < j.numbers.punctual_chance else 2.0 * np.random.random()
    earliest = begins[made] + a.cost[a.producer[t]] + factor * j.out_us[t]
    leave = last + 1
    most = at if before < 0 else min(at, before)
    if leave > most:
        return False
    while leave < most and begins[leave] < earliest:
        leave += 1
    return (
        put_in(j, a.ops + 3 * t + FETCH, at)
        and put_in(j, a.ops + 3 * t + LEAVE, leave)
        and put_in(j, a.ops + 3 * t + OFFLOAD, made + 1)
    )


@inner
def collect(a: Arrays, j: JointState) -> None:
    """Take events out of the trial that serve nothing."""
    size = j.counts[TRIAL]
    for e in range(size):
        code = j.trial[e]
        j.stay[e] = 0
        if code < a.ops:
            j.stay[e] = 1 - j.op[SEEN, code]
            j.op[SEEN, code] = 1
        else:
            j.tensor[WANTED, (code - a.ops) // 3] = 0
    for e in range(size - 1, -1, -1):
        code = j.trial[e]
        if code < a.ops:
            for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
                t = a.makes[k]
                if a.evictable[t] == 1 and j.tensor[ALIVE, t] == 1:
                    j.stay[e] = 1
        else:
            t = (code - a.ops) // 3
            if (code - a.ops) % 3 == FETCH:
                j.stay[e] = j.tensor[ALIVE, t]
                if j.stay[e] == 1:
                    j.tensor[WANTED, t] = 1
            else:
                j.stay[e] = j.tensor[WANTED, t]
        if j.stay[e] == 1:
            look_back(a, j, code)
    for e in range(size):
        restore(a, j, j.trial[e])
        if j.trial[e] < a.ops:
            j.op[SEEN, j.trial[e]] = 0
    filled = 0
    for e in range(size):
        if j.stay[e] == 1:
            j.trial[filled] = j.trial[e]
            filled += 1
    j.counts[TRIAL] = filled


@inner
def retime(a: Arrays, j: JointState) -> bool:
    """Tensors leave as early, and are fetched as late, as nobody waits; false with no copies."""
    n, size = a.ops, j.counts[TRIAL]
    begins = j.begins
    for e in range(size + 1):
        j.heads[e] = -1
    for e in range(size):
        if j.trial[e] >= n:
            j.tensor[AT_OFFLOAD, (j.trial[e] - n) // 3] = -1
    free = np.inf  # from when on the engine is taken, going back
    moved = 0
    for e in range(size - 1, -1, -1):
        code = j.trial[e]
        if code < n or (code - n) % 3 != FETCH:
            continue
        t = (code - n) // 3
        need = e + 1
        while need < size and not reads(a, j.trial[need], t):
            need += 1
        free = min(free, begins[need]) - j.in_us[t]
        at = need
        while at > 0 and begins[at] > free:
            at -= 1
        j.nexts[e] = j.heads[at]
        j.heads[at] = e
        moved += 1
    if moved == 0:
        return False
    now = 0.0
    for e in range(size):
        code = j.trial[e]
        if code < n:
            continue
        t, kind = (code - n) // 3, (code - n) % 3
        if kind == OFFLOAD:
            now = max(now, begins[e]) + j.out_us[t]
            j.when[AWAY, t] = now
            j.tensor[AT_OFFLOAD, t] = e
        elif kind == LEAVE:
            at = j.tensor[AT_OFFLOAD, t] + 1
            for other in range(at, e):
                if reads(a, j.trial[other], t):
                    at = other + 1
            while at < e and begins[at] < j.when[AWAY, t]:
                at += 1
            j.nexts[e] = j.heads[at]
            j.heads[at] = e
    filled = 0
    for e in range(size + 1):
        put = j.heads[e]
        while put >= 0:
            j.live[filled] = j.trial[put]  # scratch: a trial of the same length
            filled += 1
            put = j.nexts[put]
        if e < size:
            code = j.trial[e]
            if code < n or (code - n) % 3 == OFFLOAD:
                j.live[filled] = code
                filled += 1
    for e in range(size):
        j.trial[e] = j.live[e]
    return True
