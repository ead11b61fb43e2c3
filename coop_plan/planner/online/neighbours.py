"""DTR's e*: the cost of recomputing a tensor together with its evicted neighbours.

Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021, section 4.1 and appendix C.2. Evicted
tensors that depend on each other form components, kept approximately in a union-find. Component
costs are merged on eviction and reduced, without splitting, on recomputation.
"""

from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.online.state import ArenaState


@inner
def mark_evicted(s: ArenaState, tensor: int) -> None:
    """Add an evicted tensor: a new component, merged with those of its evicted neighbours."""
    node = s.now.nodes  # a new node: an earlier one may still be in a component
    s.now.nodes += 1
    s.tensor[tensor].node = node
    s.part[node].parent, s.part[node].cost_us = node, s.tensor[tensor].cost_us
    for k in range(s.near_ptr[tensor], s.near_ptr[tensor + 1]):
        other = s.tensor[s.near[k]].node
        if other >= 0:
            root, joined = _root(s, node), _root(s, other)
            if root != joined:
                s.part[joined].parent = root
                s.part[root].cost_us += s.part[joined].cost_us


@inner
def mark_resident(s: ArenaState, tensor: int) -> None:
    """Remove a tensor that is resident again: subtract its cost from its component."""
    if s.tensor[tensor].node >= 0:
        root = _root(s, s.tensor[tensor].node)
        s.part[root].cost_us = max(0.0, s.part[root].cost_us - s.tensor[tensor].cost_us)
        s.tensor[tensor].node = -1


@inlined
def neighbour_cost(s: ArenaState, tensor: int) -> float:
    """Cost of the tensor plus that of each adjacent evicted component, µs."""
    total = s.tensor[tensor].cost_us
    s.now.stamp += 1
    stamp = s.now.stamp
    for k in range(s.near_ptr[tensor], s.near_ptr[tensor + 1]):
        other = s.tensor[s.near[k]].node
        if other >= 0:
            root = _root(s, other)
            if s.part[root].seen != stamp:
                s.part[root].seen = stamp
                total += s.part[root].cost_us
    return total


@inlined
def _root(s: ArenaState, node: int) -> int:
    while s.part[node].parent != node:
        s.part[node].parent = s.part[s.part[node].parent].parent
        node = s.part[node].parent
    return node
