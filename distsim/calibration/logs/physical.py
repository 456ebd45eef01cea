"""What a constant of the model of NCCL is, in words, and how far a fit may take it."""

from __future__ import annotations

from distsim.calibration.constants import Constants
from distsim.cluster import Cluster

__all__ = ["bounds", "meaning"]

_FAR = 8.0
"""A time is at most so many times the preset's, or that part of it."""
_LEAST_US = 0.05
_PROTOCOLS = ("LL128", "LL", "Simple")
_WORDS = {
    "launch.process_intel": "starting a call from its own process on Intel, us",
    "launch.process_amd": "starting a call from its own process on AMD, us",
    "launch.process_arm": "starting a call from its own process on Grace, us",
    "launch.shared_process_per_gpu": "starting a call on each GPU of a process, us",
    "launch.fill": "filling the pipeline, of a chunk's time",
    "p2p.base": "grouped sends and receives, us",
    "p2p.per_peer": "the same for each peer inside a node, us",
    "p2p.net_channel_GBps": "one channel of a send between nodes, GB/s",
    "p2p.fill": "a chunk's second copy on its way to the NIC, of its time",
    "p2p.shared_process_per_gpu": "the same from a process of several GPUs, us",
}
_FABRICS = ("net", "ib", "roce", "slingshot", "efa", "tcp", "tcpx", "tcpxo")


def meaning(name: str) -> str:
    """What the constant *name* stands for, with its unit; the name alone says little."""
    if name in _WORDS:
        return _WORDS[name]
    table, _, key = name.partition(".")
    proto = next((proto for proto in _PROTOCOLS if key.endswith(f"_{proto}")), "")
    what = key.removesuffix(f"_{proto}") if proto else key
    where = "between nodes" if table.split("-")[0] in _FABRICS else "inside a node"
    told = {
        "hop": f"a hop {where}, us",
        "tree": "a tree's hop between nodes, in hops of LL",
        "ring": "a ring's hop between nodes, in hops of LL",
        "message": "each further message of a ring's step, us",
        "remote": "a message to another node among many, us",
        "remote_tiny": "the same for very short ones, times",
        "rendezvous": "a message too long to be sent unasked, us more",
        "loss": "what bytes take longer for each doubling of nodes",
        "tree_share": "what a tree gives of the links between nodes",
        "p2p_efficiency": f"what the links {where} give to sends and receives",
        "efficiency": f"what the links {where} give, of the preset's figure",
        "p2p": f"the same {where} for sends and receives",
        "channel": "one channel, GB/s",
        "rate": f"the most {where}, GB/s",
        "local": "memory traffic beside what moves, of its time",
        "nvls": "what NVLink SHARP gives, of the links' figure",
        "nvls_base": "starting NVLink SHARP, us",
        "nvls_tree_base": "starting it between nodes, us",
    }.get(what, "starting, us" if table == "launch" else what)
    return f"{told}, {proto}" if proto else told


def bounds(name: str, start: Constants, cluster: Cluster) -> tuple[float, float]:
    """The least and the most that a constant can be: links give no more than specified, and nothing takes no time."""
    value = start.values[name]
    table, _, key = name.partition(".")
    node = cluster.node
    low, high = value / _FAR, value * _FAR
    spec = cluster.spec
    if key.startswith("efficiency") or key in ("p2p", "nvls"):
        between = table.split("-")[0] in _FABRICS
        if between:
            given = spec.node.nic.efficiency if spec is not None and spec.node.nic is not None else 1.0
        else:
            given = node.nvlink_bytes_per_s / node.nvlink_spec_bytes_per_s if node.nvlink_spec_bytes_per_s else 1.0
        return low, max(value, 1.0 / given)
    if key.startswith(("hop", "base", "per_peer", "process", "shared_process")):
        low = max(low, _LEAST_US)
    return min(low, value), high
