"""The stacks of all ranks as one prefix tree, outermost frames first: for each frame a row
`[function, place, parent row or null, ranks, number of ranks, all of them are accused]`."""

from __future__ import annotations

from typing import Any

from distsim.debug.report.render import stack_of
from distsim.debug.report.stack_tree import StackNode, merge_stacks
from distsim.debug.words.phrases import place
from distsim.report.html.collect.material import Material
from distsim.text.ranks import format_ranks

__all__ = ["stacks"]

MOST_FRAMES = 600


def stacks(material: Material) -> list[list[Any]]:
    """Empty where nobody is stuck."""
    evidence = material.evidence
    if evidence is None or not (material.diagnoses or material.snapshot):
        return []
    found = {rank: stack for rank in evidence.ranks if (stack := stack_of(rank, evidence))}
    accused = {rank for d in material.diagnoses if d.exit_code for rank in d.culprits}
    rows: list[list[Any]] = []
    todo: list[tuple[StackNode, int | None]] = [(node, None) for node in merge_stacks(found).ordered()]
    while todo and len(rows) < MOST_FRAMES:  # breadth first: what is cut off lies innermost
        node, parent = todo.pop(0)
        assert node.site is not None
        rows.append(
            [
                node.site.function,
                place(node.site, through=False),
                parent,
                format_ranks(node.ranks),
                len(node.ranks),
                accused.issuperset(node.ranks),
            ]
        )
        todo += [(child, len(rows) - 1) for child in node.ordered()]
    return rows
