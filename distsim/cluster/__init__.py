"""Clusters: hardware as a graph of links, from presets and files.

Examples::

    cluster = load_cluster("dgx-h100:4")
    [cluster.links[i].name for i in cluster.route("n0/gpu0", "n3/gpu5")]
"""

from __future__ import annotations

from distsim.cluster.around import Around
from distsim.cluster.cluster import Cluster
from distsim.cluster.facts import CpuModel, GpuModel, NcclFacts, NodeModel
from distsim.cluster.link import Link, Slot, Vertex
from distsim.cluster.load import load_cluster, preset_names

__all__ = [
    "Around",
    "Cluster",
    "CpuModel",
    "GpuModel",
    "Link",
    "NcclFacts",
    "NodeModel",
    "Slot",
    "Vertex",
    "load_cluster",
    "preset_names",
]
