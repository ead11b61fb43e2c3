"""Matching of outputs to inputs whose address they take over in place, saving the most bytes.

A run's allowed pairs form a bipartite graph of outputs and inputs. Outputs are matched greedily,
the largest first, along augmenting paths. The sets of outputs that can be matched together form a
transversal matroid (Edmonds and Fulkerson, 1965), so greedy is optimal.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Flags, IntTable
from coop_plan.planner.core.jit import linked, njit


@linked
def choose_pairs(a: Arrays, variant: int, allowed: Flags) -> Flags:
    """Flags per entry of the variant's row of `shares`: the pairs to use, a subset of `allowed`.

    Each output and each input is in one of them at most.
    """
    low, high = a.shares_ptr[variant], a.shares_ptr[variant + 1]
    count = high - low
    chosen = np.zeros(count, dtype=np.uint8)
    # Breadth-first search for an augmenting path, pair by pair.
    seen = np.full(count, -1, dtype=np.int64)  # per pair: the last output whose search reached it
    before = np.empty(count, dtype=np.int64)  # per pair: the one before it on the path
    queue = np.empty(count, dtype=np.int64)
    for first in range(count):
        out = a.shares_out[low + first]
        if first > 0 and a.shares_out[low + first - 1] == out:
            continue
        head = tail = 0
        for k in range(first, count):  # the pairs of one output are adjacent
            if a.shares_out[low + k] != out:
                break
            if allowed[k]:
                seen[k], before[k], queue[tail] = first, -1, k
                tail += 1
        while head < tail:
            k = queue[head]
            head += 1
            user = -1  # the chosen pair that uses this input
            for j in range(count):
                if chosen[j] == 1 and a.shares_in[low + j] == a.shares_in[low + k]:
                    user = j
            if user < 0:
                while k >= 0:  # a free input: switch every output on the path
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
def working_set_bytes(a: Arrays) -> IntTable:
    """Working set of each variant in its first run and in a rerun, bytes rounded up: (2, variants).

    Inputs, outputs and workspace; a pair that can share one address counts once. A rerun writes
    outputs to the arena that the first run writes outside.
    """
    count = a.cost.size
    result = np.zeros((2, count), dtype=np.int64)
    for variant in range(count):
        for rerun in range(2):
            total = a.workspace[variant]
            for k in range(a.reads_ptr[variant], a.reads_ptr[variant + 1]):
                total += a.size[a.reads[k]]
            for k in range(a.makes_ptr[variant], a.makes_ptr[variant + 1]):
                if rerun == 1 or a.outside[a.makes[k]] == 0:
                    total += a.size[a.makes[k]]
            low, high = a.shares_ptr[variant], a.shares_ptr[variant + 1]
            if high > low:
                allowed = np.ones(high - low, dtype=np.uint8)
                for k in range(low, high):
                    if rerun == 0 and a.outside[a.shares_out[k]] == 1:
                        allowed[k - low] = 0
                chosen = choose_pairs(a, variant, allowed)
                for k in range(low, high):
                    if chosen[k - low] == 1:
                        total -= a.size[a.shares_out[k]]
            result[rerun, variant] = total
    return result
