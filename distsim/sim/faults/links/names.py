"""The links that a rule names: by pattern, or by the part that they belong to."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from distsim.cluster import Cluster
from distsim.errors import UsageError

__all__ = ["CUTS", "links_of", "links_of_part"]

CUTS = ("link_cut", "nic_down", "switch_down")
"""What may cut hosts off: these rules can be carried out on a real network, too."""


def links_of(cluster: Cluster, patterns: Sequence[str]) -> list[int]:
    """Indices of the links whose names (`src->dst`) the shell patterns name; each must name one."""
    found: dict[int, None] = {}
    for pattern in patterns:
        hits = [link.index for link in cluster.links if fnmatch.fnmatchcase(link.name, pattern)]
        if not hits:
            raise UsageError(
                f"no link {pattern!r} in {cluster.name}; {_close(pattern, [n.name for n in cluster.links])}"
            )
        found.update(dict.fromkeys(hits))
    return list(found)


def links_of_part(cluster: Cluster, part: str, kind: str, kinds: Sequence[str]) -> list[int]:
    """Indices of all links from and to the vertex *part*, which must be of one of *kinds*, together a *kind*."""
    vertex = next((v for v in cluster.vertices if v.name == part), None)
    if vertex is None or vertex.kind not in kinds:
        names = [v.name for v in cluster.vertices if v.kind in kinds]
        raise UsageError(f"no {kind} {part!r} in {cluster.name}; {_close(part, names)}")
    return [link.index for link in cluster.links if part in (link.src, link.dst)]


def _close(name: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known[:3])
    return f"there is {', '.join(near)}, ... (distsim topo show has all)" if near else "there is none"
