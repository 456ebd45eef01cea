"""A directed graph, and its terminal components: what is waited for and waits for nothing beyond itself.

Ours, for networkx takes a fifth of a second to import, and every run looks for hangs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Digraph"]

N = TypeVar("N", bound=Hashable)


class Digraph(Generic[N]):
    """Nodes in the order they came; an edge is there once."""

    def __init__(self) -> None:
        self._after: dict[N, dict[N, None]] = {}
        self._before: dict[N, dict[N, None]] = {}

    @property
    def num_edges(self) -> int:
        return sum(map(len, self._after.values()))

    def __contains__(self, node: N) -> bool:
        return node in self._after

    def add(self, node: N, after: Iterable[N] = ()) -> None:
        """*node*, and edges from it to each of *after*."""
        mine = self._after.setdefault(node, {})
        for other in after:
            mine[other] = None
            self._after.setdefault(other, {})
            self._before.setdefault(other, {})[node] = None

    def successors(self, node: N) -> Iterable[N]:
        return self._after[node]

    def predecessors(self, node: N) -> Iterable[N]:
        return self._before.get(node, ())

    def terminal_components(self) -> list[list[N]]:
        """Strongly connected components that no edge leaves (Tarjan, "Depth-first search and linear graph
        algorithms", 1972; without recursion)."""
        number: dict[N, int] = {}
        lowest: dict[N, int] = {}
        open_nodes: dict[N, None] = {}
        """Seen, and in no component yet."""
        component: dict[N, int] = {}
        found: list[list[N]] = []
        for root in self._after:
            if root in number:
                continue
            path: list[tuple[N, Iterator[N]]] = []
            number[root] = lowest[root] = len(number)
            open_nodes[root] = None
            path.append((root, iter(self._after[root])))
            while path:
                node, rest = path[-1]
                for other in rest:
                    if other not in number:
                        number[other] = lowest[other] = len(number)
                        open_nodes[other] = None
                        path.append((other, iter(self._after[other])))
                        break
                    if other in open_nodes:
                        lowest[node] = min(lowest[node], number[other])
                else:
                    path.pop()
                    if path:
                        above = path[-1][0]
                        lowest[above] = min(lowest[above], lowest[node])
                    if lowest[node] == number[node]:
                        members: list[N] = []
                        while not members or members[-1] != node:
                            members.append(open_nodes.popitem()[0])
                        component.update(dict.fromkeys(members, len(found)))
                        found.append(members)
        return [
            members
            for place, members in enumerate(found)
            if all(component[other] == place for node in members for other in self._after[node])
        ]
