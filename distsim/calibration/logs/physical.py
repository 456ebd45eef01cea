"""What a constant of the model of NCCL is, in words, and how far a fit may take it."""

from __future__ import annotations

from distsim.calibration.constants import Constants
from distsim.cluster import Cluster

__all__ = ["bounds", "meaning", "value_of"]

_FAR = 8.0
"""A time is at most so many times the preset's, or that part of it."""
_LEAST_US = 0.05
_PROTOCOLS = ("LL128", "LL", "Simple")
_INSIDE = ("ampere", "hopper", "blackwell", "pcie")
_WORDS = {
    "launch.shared_process_per_gpu": "starting a call on each GPU of a process, us",
    "launch.fill": "filling the pipeline, of a chunk's time",
    "p2p.base": "grouped sends and receives, us",
    "p2p.per_peer": "the same for each peer inside a node, us",
    "p2p.net_channel_GBps": "one channel of a send between nodes, GB/s",
    "p2p.shared_process_per_gpu": "the same from a process of several GPUs, us",
    "p2p.fill": "filling their pipeline, of a chunk's time",
    "efa.hop": "a hop between nodes, of what EFA's plugin tells of its latency",
    "efa-sendrecv.hop": "a hop between nodes, of what EFA's plugin tells of its latency",
}
_KEYS = {
    "hop": "a hop {where}, us",
    "tree": "a tree's hop between nodes, in hops of LL",
    "ring": "a ring's hop between nodes, in hops of LL",
    "ring_more": "what a ring's hop between nodes takes beyond one in LL, us",
    "tree_more": "what a tree's hop between nodes takes beyond one in LL, us",
    "message": "each further message of a ring's step, us over the NICs",
    "message_pair": "the same where there are two nodes, times",
    "growth": "how much longer a hop gets up to 64 KiB",
    "remote": "each further message of an all-to-all, us",
    "efficiency": "what the links {where} give, of the preset's",
    "remote_tiny": "the same for very short ones, times",
    "rendezvous": "a message too long to be sent unasked, us more",
    "loss": "what of it is lost as nodes double",
    "ring_loss": "what of it a ring loses as nodes double",
    "tree_share": "what a tree gets of it",
    "p2p_efficiency": "what sends and receives get of the links",
    "channel": "one channel, GB/s",
    "rate": "the most a GPU sends by its NIC, GB/s",
    "root": "what a PCIe slot gives from one device to another across the root ports",
    "local": "memory traffic beside what moves, of its time",
    "nvls": "what NVLink SHARP gives, of the links",
    "nvls_base": "starting NVLink SHARP, us",
    "nvls_tree_hop": "a hop of NVLink SHARP's tree between nodes, in hops of a tree",
    "nvls_tree_fill": "filling its pipeline, of its chunks' time",
    "process_intel": "starting a call, us",
    "process_amd": "starting a call, us",
    "process_arm": "starting a call, us",
}
_SHARES = ("efficiency", "p2p_efficiency", "nvls", "tree_share")


def meaning(name: str) -> str:
    """What the constant *name* stands for, with its unit; the name alone says little."""
    if name in _WORDS:
        return _WORDS[name]
    table, _, key = name.rpartition(".")
    proto = next((proto for proto in _PROTOCOLS if key.endswith(f"_{proto}")), "")
    what = key.removesuffix(f"_{proto}") if proto else key
    inside = table in _INSIDE
    usual = "starting, us" if table == "launch" else what
    if what == "tree" and (inside or table == "launch"):
        return f"what a tree gets of a ring's rate, {proto}"
    if table == "launch" and key in _PROTOCOLS:
        return f"starting in {key}, us"
    if what == "channel" and proto and not inside:
        return f"what a node stores of a tree for its NIC, one channel, GB/s, {proto}"
    if what == "p2p":
        usual = "what sends and receives get of the links" if inside else "a message's hop, of a tree's in LL"
    told = _KEYS.get(what, usual).format(where="inside a node" if inside else "between nodes")
    return f"{told}, {proto}" if proto else told


def value_of(constants: Constants, name: str) -> float:
    """The constant `table.key`, its table's own or the borrowed one."""
    table, _, key = name.rpartition(".")
    return constants.get(table, key)


def bounds(name: str, start: Constants, cluster: Cluster) -> tuple[float, float]:
    """The least and the most that a constant can be: links give no more than specified, and nothing takes no time."""
    value = value_of(start, name)
    table, _, key = name.rpartition(".")
    node = cluster.node
    low, high = value / _FAR, value * _FAR
    if key.startswith("efficiency") or key in _SHARES or (key == "p2p" and table in _INSIDE):
        if table in _INSIDE:
            given = node.nvlink_bytes_per_s / node.nvlink_spec_bytes_per_s if node.nvlink_spec_bytes_per_s else 1.0
        else:
            given = node.nic_bytes_per_s / node.nic_spec_bytes_per_s if node.nic_spec_bytes_per_s else 1.0
        return low, max(value, 1.0 / given)
    if name == "pcie.root":
        return low, 1.0
    if key.startswith(("hop", "base", "per_peer", "process", "shared_process", "nvls")):
        low = max(low, _LEAST_US)
    return min(low, value), high
