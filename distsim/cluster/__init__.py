"""Clusters: hardware as a graph of links, from presets and files.

Examples::

    cluster = load_cluster("dgx-h100:4")
    [cluster.links[i].name for i in cluster.route("n0/gpu0", "n3/gpu5")]
"""

from __future__ import annotations

from distsim.cluster.files.load import load_cluster, preset_names, preset_variants
from distsim.cluster.graph.cluster import Cluster, Reroute
from distsim.cluster.graph.link import Constant, CpuModel, GpuModel, Link, NcclFacts, NodeModel, Slot, Vertex

__all__ = [
    "Cluster",
    "Constant",
    "CpuModel",
    "GpuModel",
    "Link",
    "NcclFacts",
    "NodeModel",
    "Reroute",
    "Slot",
    "Vertex",
    "load_cluster",
    "preset_names",
    "preset_variants",
]
