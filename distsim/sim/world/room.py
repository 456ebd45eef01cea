"""What makes a run's room smaller than its cluster."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.cluster import Cluster, Slot

__all__ = ["limited_by"]


def limited_by(cluster: Cluster, slots: Sequence[Slot]) -> str:
    """The flags that leave *slots* alone of all that *cluster* has, as the end of a sentence about too little room."""
    whole = len(cluster.place())
    if len(slots) >= whole:
        return ": take a larger one"
    nodes, places = len({slot.host for slot in slots}), max(slot.local_rank for slot in slots) + 1
    said = [f"--nnodes {nodes} (nnodes)"] if nodes < cluster.num_nodes else []
    if places < whole // cluster.num_nodes:
        said.append(f"--nproc-per-node {places} (nproc_per_node)")
    return f" of its {whole}, because of {' and '.join(said)}: lift that, take a larger one"
