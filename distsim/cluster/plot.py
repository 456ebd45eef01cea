"""Draws a cluster as a plotly figure, in layers: accelerators, PCIe, NICs, leaves, spines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import Any

from distsim.cluster.graph.cluster import Cluster
from distsim.errors import UsageError
from distsim.text.units import format_bandwidth, plural

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
_LINK_COLOURS = {
    "nvlink": "#228833",
    "c2c": "#117733",
    "pcie": "#777777",
    "socket": "#4477aa",
    "nic": "#aa3377",
    "fabric": "#cc6677",
}
_MAX_WHOLE_HOSTS = 2
_MAX_POINTS = 5000
_MAX_ALIKE = 32
"""Maximum number of switches of a layer that are drawn separately; more become one point."""
_MAX_NAMES = 90
_Places = dict[str, tuple[float, float]]


def plot(cluster: Cluster) -> dict[str, Any]:
    """Draw *cluster*: node 0 completely, and the other nodes as one point if there are more than two.

    The legend gives the kind and speed of each link. On a grid, each node is a point.

    Returns:
        A plotly figure, as plain data.

    Raises:
        UsageError: The figure would have too many points.
    """
    names = _names(cluster)
    layers: dict[str, list[str]] = {}
    for vertex in cluster.vertices:
        name = names[vertex.name]
        layer = layers.setdefault("host" if vertex.host is not None and "/" not in name else vertex.kind, [])
        if not layer or layer[-1] != name:
            layer.append(name)
    layers = {kind: list(dict.fromkeys(layer)) for kind, layer in layers.items()}
    if sum(len(layer) for layer in layers.values()) > _MAX_POINTS:
        raise UsageError(f"--plot draws up to {_MAX_POINTS} points; show fewer nodes, as in {cluster.name}:64")
    title = f"{cluster.name}: {plural(cluster.num_nodes, 'node')}, {plural(len(cluster.devices), 'rank')}"
    places = _places(layers)
    axis = {"visible": False}
    return {
        "data": [*_link_traces(cluster, names, places), *_point_traces(cluster, names, layers, places)],
        "layout": {
            "title": {"text": escape(title, quote=False), "x": 0.5},
            "width": 1200,
            "height": 750,
            "plot_bgcolor": "white",
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "x": 0.5, "xanchor": "center", "y": 0.0, "yanchor": "top"},
        },
    }


def _link_traces(cluster: Cluster, names: dict[str, str], places: _Places) -> Iterator[dict[str, Any]]:
    """Yield the lines of each kind and speed; None separates two lines."""
    fastest = max((link.bandwidth_bytes_per_s for link in cluster.links if link.kind != "loopback"), default=1.0)
    for (kind, rate), (pairs, number) in _lines(cluster, names).items():
        ends = [point for a, b in pairs for point in (places[a], places[b], (None, None))]
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": [x for x, _ in ends],
            "y": [y for _, y in ends],
            "line": {"width": 0.5 + 2.5 * (rate / fastest) ** 0.5, "color": _LINK_COLOURS.get(kind, "#bbbbbb")},
            "name": f"{kind}: {format_bandwidth(rate)} each way ({number:,} links)",
            "hoverinfo": "skip",
        }


def _point_traces(
    cluster: Cluster, names: dict[str, str], layers: dict[str, list[str]], places: _Places
) -> Iterator[dict[str, Any]]:
    counts = Counter(names.values())
    for kind, layer in layers.items():
        label = f"{kind} ({sum(counts[name] for name in layer)})"
        if kind == "host":
            whole = "gpu" in layers or "cpu" in layers
            label = f"other nodes ({cluster.num_nodes - 1})" if whole else f"nodes ({len(layer)})"
        texts = [escape(name, quote=False) for name in layer]
        yield {
            "type": "scatter",
            "mode": "markers+text" if len(places) <= _MAX_NAMES else "markers",
            "x": [places[name][0] for name in layer],
            "y": [places[name][1] for name in layer],
            "text": texts,
            "textposition": "top center",
            "textfont": {"size": 9},
            "hovertext": texts,
            "hoverinfo": "text",
            "marker": {"size": 12 if len(layer) < 100 else 5, "color": _COLOURS[kind]},
            "name": label,
        }


def _names(cluster: Cluster) -> dict[str, str]:
    """Map each vertex to the point that represents it in the drawing."""
    kinds = Counter(vertex.kind for vertex in cluster.vertices if vertex.host is None)
    grid = "switch" in kinds
    names: dict[str, str] = {}
    for vertex in cluster.vertices:
        name = vertex.name
        if vertex.host is not None and grid and cluster.num_nodes > _MAX_WHOLE_HOSTS:
            name = f"n{vertex.host}"
        elif vertex.host is not None and cluster.num_nodes > _MAX_WHOLE_HOSTS and vertex.host > 0:
            name = f"n1-n{cluster.num_nodes - 1}, like n0"
        elif vertex.host is None and not grid and kinds[vertex.kind] > _MAX_ALIKE:
            name = f"{kinds[vertex.kind]} {vertex.kind}s"
        names[vertex.name] = name
    return names


Lines = dict[tuple[str, float], tuple[list[tuple[str, str]], int]]


def _lines(cluster: Cluster, names: dict[str, str]) -> Lines:
    """Return the lines to draw by kind and speed: pairs of points, with the number of links between them."""
    pairs_of: dict[tuple[str, float], tuple[dict[tuple[str, str], None], int]] = {}
    for link in cluster.links:
        if link.kind == "loopback":
            continue
        one, other = sorted((names[link.src], names[link.dst]))
        pairs, number = pairs_of.get((link.kind, link.bandwidth_bytes_per_s), ({}, 0))
        if one != other:
            pairs[one, other] = None
        pairs_of[link.kind, link.bandwidth_bytes_per_s] = pairs, number + (link.src < link.dst)
    return {key: (list(pairs), number) for key, (pairs, number) in pairs_of.items() if pairs}


def _places(layers: dict[str, list[str]]) -> _Places:
    """Return the coordinates of each layer, spread evenly over the width. Routers without leaves form an arch, so that
    links between them stay visible.
    """
    places: _Places = {}
    for kind, layer in layers.items():
        for position, name in enumerate(layer):
            x = (position + 0.5) / len(layer)
            if kind == "switch":
                y = 6.4 if "leaf" in layers else 4.0 + 2.0 * math.sin(math.pi * x)
            else:
                y = _LAYERS[kind]
            places[name] = x, y
    return places
