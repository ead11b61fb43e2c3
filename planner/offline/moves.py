"""
The moves of the Metropolis walk: recomputes are taken out, moved, or put in where they help.

Where a move needs more memory than there is, something else that is only kept there is computed
again for its next read instead; recomputes of which nothing is read are collected.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.offline.sequence import (
    ALIVE,
    BEGIN,
    COPIES,
    END,
    FIRST,
    NEEDED,
    OVER,
    RAN,
    ROOM,
    SEEN,
    TENSOR,
    TRIAL,
    WINDOW,
    WORST,
    MetropolisState,
)


@inlined
def look_back(a: Arrays, m: MetropolisState, op: int) -> None:
    """What is needed before a run of `op`, from what is needed after it."""
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        if a.evictable[a.makes[k]] == 1:
            m.tensor[ALIVE, a.makes[k]] = 0
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        m.tensor[ALIVE, a.reads[k]] = 1


@inlined
def _restore(a: Arrays, m: MetropolisState, op: int) -> None:
    """What `look_back` changed is as it was again."""
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        m.tensor[ALIVE, a.makes[k]] = m.tensor[NEEDED, a.makes[k]]
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        m.tensor[ALIVE, a.reads[k]] = m.tensor[NEEDED, a.reads[k]]


@inner
def change(a: Arrays, m: MetropolisState) -> bool:
    """A trial that differs from the window; false where the one drawn is none."""
    size = m.counts[WINDOW]
    if size == 0:
        return False
    kind = np.random.random()
    begin = np.random.randint(size)
    if kind < m.numbers.recompute_chance:
        return _change_read(a, m, begin)
    for _ in range(m.numbers.tries):
        if m.is_first[begin] == 0:
            break
        begin = np.random.randint(size)
    if m.is_first[begin] == 1:
        return False
    moves = kind < m.numbers.recompute_chance + m.numbers.move_chance
    more = m.numbers.removed_block
    if moves:
        more = m.numbers.moved_block if np.random.random() < m.numbers.moved_block_chance else 0.0
    end = begin + 1
    while np.random.random() < more and end < size and m.is_first[end] == 0:
        end += 1
    to = size
    if moves:
        distance = int(m.numbers.furthest ** np.random.random())
        to = begin + (distance if np.random.random() < m.numbers.later_chance else -distance)
        if to < 0 or to > size - (end - begin):
            return False
        for e in range(begin, end):
            first = m.op[FIRST, m.window[e]]
            if m.again[m.window[e]] == 0 or first - (end - begin if first > begin else 0) >= to:
                return False
    filled = 0
    rest = 0
    for e in range(size + 1):
        if begin <= e < end:
            continue
        if moves and rest == to:
            for moved in range(begin, end):
                m.trial[filled] = m.window[moved]
                filled += 1
        if e < size:
            m.trial[filled] = m.window[e]
            filled += 1
            rest += 1
    m.counts[TRIAL] = filled
    return True


@inner
def _change_read(a: Arrays, m: MetropolisState, event: int) -> bool:
    """Something that an event reads is computed again for it."""
    op = m.window[event]
    reads = a.reads_ptr[op + 1] - a.reads_ptr[op]
    if reads == 0:
        return False
    maker = a.producer[a.reads[a.reads_ptr[op] + np.random.randint(reads)]]
    at = event
    if np.random.random() < m.numbers.early_chance:
        at -= int(m.numbers.earliest ** np.random.random())
    if m.again[maker] == 0 or at < 0 or at <= m.op[FIRST, maker]:
        return False
    for e in range(m.counts[WINDOW]):
        m.trial[e] = m.window[e]
    m.counts[TRIAL] = m.counts[WINDOW]
    return _insert(a, m, maker, at)


@inner
def _insert(a: Arrays, m: MetropolisState, op: int, at: int) -> bool:
    """
    Put `op` into the trial before event `at`; false where there is no room for more events.

    What it reads is mostly computed again with it unless it is kept there anyway.
    """
    size = m.counts[TRIAL]
    for e in range(size - 1, at - 1, -1):
        look_back(a, m, m.trial[e])
    n = m.numbers
    kept = n.kept_usually if np.random.random() < n.usually else n.kept_rarely
    gone = n.gone_usually if np.random.random() < n.usually else n.gone_rarely
    m.inserted[0] = op
    count = 1
    i = 0
    while i < count:
        o = m.inserted[i]
        i += 1
        for k in range(a.reads_ptr[o], a.reads_ptr[o + 1]):
            t = a.reads[k]
            maker = a.producer[t]
            chance = kept if m.tensor[ALIVE, t] == 1 else gone
            if m.again[maker] == 0 or count == m.inserted.size or np.random.random() >= chance:
                continue
            known = False
            for j in range(count):
                known = known or m.inserted[j] == maker
            if not known:
                m.inserted[count] = maker
                count += 1
    for e in range(at, size):
        _restore(a, m, m.trial[e])
    if size + count > m.counts[ROOM]:
        return False
    for i in range(1, count):  # in program order
        o = m.inserted[i]
        j = i
        while j > 0 and m.inserted[j - 1] > o:
            m.inserted[j] = m.inserted[j - 1]
            j -= 1
        m.inserted[j] = o
    for e in range(size - 1, at - 1, -1):
        m.trial[e + count] = m.trial[e]
    for i in range(count):
        m.trial[at + i] = m.inserted[i]
    m.counts[TRIAL] = size + count
    return True


@inner
def repair(a: Arrays, m: MetropolisState) -> bool:
    """At the fullest event, something only kept there is computed again for its next read."""
    worst = m.counts[WORST]
    over = m.counts[OVER]
    now = m.trial[worst]
    best, best_score = -1, np.inf
    for c in range(m.counts[COPIES]):
        t = m.copy[TENSOR, c]
        if not m.copy[BEGIN, c] < worst < m.copy[END, c] or a.size[t] == 0:
            continue
        if m.again[a.producer[t]] == 0 or a.evictable[t] == 0:
            continue
        read = False
        for k in range(a.reads_ptr[now], a.reads_ptr[now + 1]):
            read = read or a.reads[k] == t
        for k in range(a.pairs_ptr[now], a.pairs_ptr[now + 1]):
            read = read and a.pairs_in[k] != t  # then the op overwrites it
        score = a.cost[a.producer[t]] / min(a.size[t], over) * np.random.exponential()
        if score < best_score and not read:
            best, best_score = t, score
    if best < 0:
        return False
    for e in range(worst + 1, m.counts[TRIAL]):
        op = m.trial[e]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            if a.reads[k] == best:
                return _insert(a, m, a.producer[best], e)
    return _insert(a, m, a.producer[best], m.counts[TRIAL])


@inner
def collect(a: Arrays, m: MetropolisState) -> None:
    """Take recomputes out of the trial of which nothing is read."""
    size = m.counts[TRIAL]
    for e in range(size):
        op = m.trial[e]
        m.stay[e] = 1 - m.op[SEEN, op]
        m.op[SEEN, op] = 1
    for e in range(size - 1, -1, -1):
        op = m.trial[e]
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            t = a.makes[k]
            if a.evictable[t] == 1 and m.tensor[ALIVE, t] == 1:
                m.stay[e] = 1
        if m.stay[e] == 1:
            look_back(a, m, op)
    for e in range(size):
        _restore(a, m, m.trial[e])
        m.op[SEEN, m.trial[e]] = m.op[RAN, m.trial[e]]
    filled = 0
    for e in range(size):
        if m.stay[e] == 1:
            m.trial[filled] = m.trial[e]
            filled += 1
    m.counts[TRIAL] = filled
