"""
In-place pairs: which outputs of a run take over the address of which inputs. There is one choice.

A run's allowed pairs form a bipartite graph of outputs and inputs. Larger outputs are matched
first, moving earlier ones to other inputs where they can: outputs that can be matched at once form
a transversal matroid (Edmonds and Fulkerson, 1965), so that greedy saves the most bytes.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Flags, Ints
from coop_plan.planner.core.jit import linked, njit


@linked
def choose_pairs(a: Arrays, variant: int, allowed: Flags) -> Flags:
    """
    Flags per row entry of the variant's `shares`: the pairs to use, of those that are `allowed` now.

    Each output and each input is in one of them at most.
    """
    low, high = a.shares_ptr[variant], a.shares_ptr[variant + 1]
    count = high - low
    chosen = np.zeros(count, dtype=np.uint8)
    seen = np.full(count, -1, dtype=np.int64)  # by pair: the output that a path has led here for
    before = np.empty(count, dtype=np.int64)  # on the path: the pair whose input is asked for
    queue = np.empty(count, dtype=np.int64)
    for first in range(count):
        out = a.shares_out[low + first]
        if first > 0 and a.shares_out[low + first - 1] == out:
            continue
        head = tail = 0
        for k in range(first, count):  # the pairs of one output are neighbours
            if a.shares_out[low + k] != out:
                break
            if allowed[k]:
                seen[k], before[k], queue[tail] = first, -1, k
                tail += 1
        while head < tail:
            k = queue[head]
            head += 1
            user = -1
            for j in range(count):
                if chosen[j] == 1 and a.shares_in[low + j] == a.shares_in[low + k]:
                    user = j
            if user < 0:
                while k >= 0:  # every output on the path moves to the input asked for
                    for j in range(count):
                        if a.shares_out[low + j] == a.shares_out[low + k]:
                            chosen[j] = 0
                    chosen[k] = 1
                    k = before[k]
                break
            for j in range(count):
                other = a.shares_out[low + j] == a.shares_out[low + user]
                if other and allowed[j] and seen[j] != first:
                    seen[j], before[j], queue[tail] = first, k, j
                    tail += 1
    return chosen


@njit
def working_sets(a: Arrays) -> Ints:
    """
    Per variant the arena bytes that it needs at least, rounded sizes: in its first run, and run again.

    Inputs, outputs and workspace, those that can share one address counted once. Shape (2, variants).
    """
    count = a.cost.size
    need = np.zeros((2, count), dtype=np.int64)
    for variant in range(count):
        for again in range(2):
            total = a.workspace[variant]
            for k in range(a.reads_ptr[variant], a.reads_ptr[variant + 1]):
                total += a.size[a.reads[k]]
            for k in range(a.makes_ptr[variant], a.makes_ptr[variant + 1]):
                if again == 1 or a.outside[a.makes[k]] == 0:
                    total += a.size[a.makes[k]]
            low, high = a.shares_ptr[variant], a.shares_ptr[variant + 1]
            if high > low:
                allowed = np.ones(high - low, dtype=np.uint8)
                for k in range(low, high):
                    if again == 0 and a.outside[a.shares_out[k]] == 1:
                        allowed[k - low] = 0
                chosen = choose_pairs(a, variant, allowed)
                for k in range(low, high):
                    if chosen[k - low] == 1:
                        total -= a.size[a.shares_out[k]]
            need[again, variant] = total
    return need
