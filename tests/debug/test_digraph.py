"""The wait-for graph's own graph, against networkx."""

from __future__ import annotations

import random

import networkx

from distsim.debug.diagnosis.waits.wait_graph import Digraph


def test_terminal_components_are_those_of_networkx() -> None:
    """Of 500 random graphs the components without a way out, and all neighbours, are networkx's."""
    for seed in range(500):
        draw = random.Random(seed)
        size = draw.randint(1, 9)
        ours: Digraph[int] = Digraph()
        theirs: networkx.DiGraph[int] = networkx.DiGraph()
        for node in range(size):
            ours.add(node)
            theirs.add_node(node)
        for _ in range(draw.randint(0, 14)):
            tail, head = draw.randrange(size), draw.randrange(size)
            ours.add(tail, [head])
            theirs.add_edge(tail, head)
        condensed = networkx.condensation(theirs)
        wanted = [sorted(condensed.nodes[c]["members"]) for c in condensed if not condensed.out_degree(c)]
        assert sorted(map(sorted, ours.terminal_components())) == sorted(wanted), seed
        for node in theirs:
            assert list(ours.successors(node)) == list(theirs.successors(node))
            assert list(ours.predecessors(node)) == list(theirs.predecessors(node))
