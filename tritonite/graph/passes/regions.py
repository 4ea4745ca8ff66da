"""Regions of a graph that become one node: convex sets of nodes, found so that the graph stays free of cycles."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterator, Sequence

from torch import fx

from tritonite.graph.effects import draws, writes


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Regions:
    """The nodes of a graph in disjoint regions, each of one node at first.

    Sets of nodes are bit masks. A node depends on its inputs, on the last node before it that writes memory, and on the
    last one that draws random numbers, or the like (`effects.draws`), if it does so itself. A node that writes depends
    on all nodes before it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.members = [1 << i for i in range(len(self.nodes))]
        self._needs = self._dependencies()
        self._before = [0] * len(self.nodes)
        self._after = [0] * len(self.nodes)
        for i, needed in enumerate(self._needs):
            for j in _bits(needed):
                self._before[i] |= self._before[j] | 1 << j
        users = [0] * len(self.nodes)
        for i, needed in enumerate(self._needs):
            for j in _bits(needed):
                users[j] |= 1 << i
        for i in reversed(range(len(self.nodes))):
            for j in _bits(users[i]):
                self._after[i] |= self._after[j] | 1 << j

    def copy(self) -> Regions:
        """Return the same regions, which may be merged further by themselves."""
        other = copy.copy(self)
        other.members, other._before, other._after = [*self.members], [*self._before], [*self._after]
        return other

    def _dependencies(self) -> list[int]:
        found, barrier, since, drawn = [], 0, 0, 0
        for i, node in enumerate(self.nodes):
            needed = barrier
            for each in node.all_input_nodes:
                needed |= 1 << self.index[each]
            if draws(node):
                needed, drawn = needed | drawn, 1 << i
            if writes(node):
                needed, barrier, since = needed | since, 1 << i, 0
            since |= 1 << i
            found.append(needed)
        return found

    def region(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of a node's region, in the graph's order."""
        return [self.nodes[i] for i in _bits(self.members[self.index[node]])]

    def merge(self, a: fx.Node, b: fx.Node) -> bool:
        """Merge the regions of two nodes, unless a path from one to the other leads through a third region."""
        i, j = self.index[a], self.index[b]
        both = self.members[i] | self.members[j]
        before, after = self._before[i] | self._before[j], self._after[i] | self._after[j]
        if before & after & ~both:
            return False
        # What was before both of them knows all that is after.
        for k in _bits((self._before[i] ^ self._before[j]) & ~both):
            self._after[k] |= after | both
        for k in _bits((self._after[i] ^ self._after[j]) & ~both):
            self._before[k] |= before | both
        for k in _bits(both):
            self.members[k], self._before[k], self._after[k] = both, before & ~both, after & ~both
        return True

    def order(self) -> list[list[fx.Node]]:
        """Return the regions in an order in which each comes after what it depends on, else in the graph's order."""
        firsts = {mask: (mask & -mask).bit_length() - 1 for mask in self.members}
        needs = {mask: 0 for mask in firsts}
        for i, mask in enumerate(self.members):
            needs[mask] |= self._needs[i] & ~mask
        waiting = {mask: {self.members[k] for k in _bits(needed)} for mask, needed in needs.items()}
        users: dict[int, list[int]] = {}
        for mask, needed in waiting.items():
            for each in needed:
                users.setdefault(each, []).append(mask)
        remaining = {mask: len(needed) for mask, needed in waiting.items()}
        ready = [(mask.bit_length(), mask) for mask, count in remaining.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            _, mask = heapq.heappop(ready)
            found.append([self.nodes[i] for i in _bits(mask)])
            for each in users.get(mask, ()):
                remaining[each] -= 1
                if not remaining[each]:
                    heapq.heappush(ready, (each.bit_length(), each))
        assert len(found) == len(firsts), "regions depend on each other"
        return found


def replace(graph: fx.Graph, regions: Regions, make: Callable[[Sequence[fx.Node]], dict[fx.Node, fx.Node]]) -> None:
    """Replace each region of several nodes by nodes that `make` inserts, and move nodes after what they depend on.

    `make` is called with a region's nodes, where its inputs exist. It returns the new node for each node of the region
    that has users outside.
    """
    output = next(iter(reversed(graph.nodes)))
    for region in regions.order():
        if len(region) == 1:
            if region[0] is not output:
                output.prepend(region[0])
            continue
        with graph.inserting_before(output):
            made = make(region)
        for old, new in made.items():
            old.replace_all_uses_with(new)
    for region in reversed([own for own in regions.order() if len(own) > 1]):
        for node in reversed(region):
            graph.erase_node(node)
