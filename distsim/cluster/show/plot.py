"""A cluster as a picture, in layers: accelerators, PCIe, NICs, leaves, spines. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path

from distsim.cluster.graph.cluster import Cluster
from distsim.errors import UsageError

__all__ = ["plot"]

_LAYERS = {
    "nvswitch": -1.0,
    "gpu": 0.0,
    "pcie": 1.0,
    "cpu": 1.7,
    "nic": 2.6,
    "host": 2.6,
    "leaf": 4.0,
    "spine": 5.2,
}
_COLOURS = {
    "gpu": "#76b900",
    "cpu": "#4477aa",
    "nvswitch": "#228833",
    "pcie": "#999999",
    "nic": "#aa3377",
    "host": "#66ccee",
    "leaf": "#ee6677",
    "spine": "#ccbb44",
    "switch": "#ee8866",
}
_MAX_WHOLE_HOSTS = 8
_MAX_POINTS = 5000


def plot(cluster: Cluster, path: Path) -> None:
    """Draw *cluster* into *path* (the ending chooses the format); beyond 8 nodes a node is one point."""
    try:
        from matplotlib.collections import LineCollection
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'torch-distsim[plot]'") from None
    fold = cluster.num_nodes > _MAX_WHOLE_HOSTS
    names: dict[str, str] = {}
    placed: dict[str, None] = {}
    layers: dict[str, list[str]] = {}
    for vertex in cluster.vertices:
        name = f"n{vertex.host}" if fold and vertex.host is not None else vertex.name
        if name not in placed:
            placed[name] = None
            layers.setdefault("host" if name != vertex.name else vertex.kind, []).append(name)
        names[vertex.name] = name
    if sum(len(layer) for layer in layers.values()) > _MAX_POINTS:
        raise UsageError(f"--plot draws up to {_MAX_POINTS} points; show fewer nodes, as in {cluster.name}:64")
    places = _places(layers)
    pairs = {(names[link.src], names[link.dst]): link.bandwidth_bytes_per_s for link in cluster.links}
    lines = {tuple(sorted(pair)): rate for pair, rate in pairs.items() if pair[0] != pair[1]}
    fastest = max(lines.values(), default=1.0)
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.add_subplot()
    segments = [[places[a], places[b]] for a, b in lines]
    widths = [0.3 + 2.2 * (rate / fastest) ** 0.5 for rate in lines.values()]
    axes.add_collection(LineCollection(segments, linewidths=widths, colors="#bbbbbb", zorder=1))
    for kind, layer in layers.items():
        xs, ys = zip(*(places[name] for name in layer), strict=True)
        axes.scatter(
            xs,
            ys,
            s=60 if len(layer) < 100 else 12,
            c=_COLOURS[kind],
            label=f"{kind} ({len(layer)})",
            zorder=2,
        )
    axes.set_axis_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(layers), frameon=False)
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    axes.set_title(f"{cluster.name}: {nodes}, {len(cluster.devices)} ranks")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UsageError(f"cannot draw {path}: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _places(layers: dict[str, list[str]]) -> dict[str, tuple[float, float]]:
    """Each layer spread evenly over the width. Routers (no leaves below) stand on an arch, so that the links
    between them do not hide each other.
    """
    places: dict[str, tuple[float, float]] = {}
    for kind, layer in layers.items():
        for position, name in enumerate(layer):
            x = (position + 0.5) / len(layer)
            if kind == "switch":
                y = 6.4 if "leaf" in layers else 4.0 + 2.0 * math.sin(math.pi * x)
            else:
                y = _LAYERS[kind]
            places[name] = x, y
    return places
