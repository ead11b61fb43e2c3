"""DTR's e*: the cost of recomputing a tensor together with its evicted neighbours.

Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021, section 4.1 and appendix C.2. Evicted
tensors that depend on each other form components, kept approximately in a union-find. Component
costs are merged on eviction and reduced, without splitting, on recomputation.
"""

from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.online.columns import NODE, NODES, OWN_COST, PARENT, ROOT_SEEN, STAMP
from coop_plan.planner.online.state import ArenaState


@inner
def mark_evicted(s: ArenaState, tensor: int) -> None:
    """Add an evicted tensor: a new component, merged with those of its evicted neighbours."""
    node = s.counts[NODES]  # a new node: an earlier one may still be in a component
    s.counts[NODES] += 1
    s.tensor[NODE, tensor] = node
    s.part[PARENT, node] = node
    s.component[node] = s.times[OWN_COST, tensor]
    for k in range(s.near_ptr[tensor], s.near_ptr[tensor + 1]):
        other = s.tensor[NODE, s.near[k]]
        if other >= 0:
            root, joined = _root(s, node), _root(s, other)
            if root != joined:
                s.part[PARENT, joined] = root
                s.component[root] += s.component[joined]


@inner
def mark_resident(s: ArenaState, tensor: int) -> None:
    """Remove a tensor that is resident again: subtract its cost from its component."""
    if s.tensor[NODE, tensor] >= 0:
        root = _root(s, s.tensor[NODE, tensor])
        s.component[root] = max(0.0, s.component[root] - s.times[OWN_COST, tensor])
        s.tensor[NODE, tensor] = -1


@inlined
def neighbour_cost(s: ArenaState, tensor: int) -> float:
    """Cost of the tensor plus that of each adjacent evicted component, µs."""
    total = float(s.times[OWN_COST, tensor])
    s.counts[STAMP] += 1
    stamp = s.counts[STAMP]
    for k in range(s.near_ptr[tensor], s.near_ptr[tensor + 1]):
        other = s.tensor[NODE, s.near[k]]
        if other >= 0:
            root = _root(s, other)
            if s.part[ROOT_SEEN, root] != stamp:
                s.part[ROOT_SEEN, root] = stamp
                total += s.component[root]
    return total


@inlined
def _root(s: ArenaState, node: int) -> int:
    while s.part[PARENT, node] != node:
        s.part[PARENT, node] = s.part[PARENT, s.part[PARENT, node]]
        node = s.part[PARENT, node]
    return node
