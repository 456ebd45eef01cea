"""Clusters made for tests."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from typing import Any

from distsim.cluster import Cluster
from distsim.cluster.files.load import assemble, merged, preset_text
from distsim.cluster.files.spec import check_spec

__all__ = ["hop_names", "made"]


def made(base: str = "dgx-h100", nodes: int = 1, **over: Any) -> Cluster:
    """The preset *base* with other tables laid on it."""
    data = merged(tomllib.loads(preset_text(base)), {"nodes": nodes, **over})
    return assemble(check_spec(data, "test"))


def hop_names(cluster: Cluster, src: str, dst: str, key: int = 0, rail: int | None = None) -> list[str]:
    """The vertices that a route passes, after checking that its links follow each other."""
    links = [cluster.links[index] for index in cluster.route(src, dst, key, rail)]
    if not links:
        return [src]
    assert links[0].src == src
    assert links[-1].dst == dst
    assert all(a.dst == b.src for a, b in pairwise(links))
    return [links[0].src, *(link.dst for link in links)]
