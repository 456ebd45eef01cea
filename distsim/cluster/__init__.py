"""Clusters: hardware as a graph of links, from presets and files.

Examples::

    cluster = load_cluster("dgx-h100:4")
    [cluster.links[i].name for i in cluster.route("n0/gpu0", "n3/gpu5")]
"""

from __future__ import annotations

from distsim.cluster.files.load import load_cluster, preset_names, preset_variants
from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.facts import Constant, CpuModel, GpuModel, NcclFacts, NodeModel
from distsim.cluster.graph.link import Link, Slot, Vertex
from distsim.cluster.graph.reroute import Reroute

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
