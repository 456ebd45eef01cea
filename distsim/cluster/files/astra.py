"""ASTRA-sim's analytical network files: a few dimensions, each a ring, a full mesh or a switch.

topology: [ Ring, Switch ] npus_count: [ 4, 8 ] bandwidth: [ 50.0, 25.0 ]   # GB/s latency: [ 500.0, 500.0 ]
# ns

That is all of YAML such files use, so no YAML library is needed to read them. Bandwidth is per link and in
units of 1e9 bytes (releases of ASTRA-sim before the change to SI units reckoned 2^30). NPUs that differ in
the first dimension only are one host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from distsim.cluster.graph.any_graph import graph_cluster
from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.link import Link, Vertex
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, folded

__all__ = ["from_astra"]

_KEYS = ("topology", "npus_count", "bandwidth", "latency")
_TOPOLOGIES = ("Ring", "FullyConnected", "Switch")
_MAX_NPUS = 65_536
_LINE_RE = re.compile(r"([A-Za-z_][\w-]*)\s*:\s*(.*)")


def from_astra(text: str, where: str, usual: Callable[[], Cluster]) -> Cluster:
    """A cluster from an ASTRA-sim network file; every fault at once. See `graph_cluster` for *usual*."""
    table = _read(text, where)
    faults = [f"{key}: expected a list, got nothing" for key in _KEYS if key not in table]
    sizes = {key: len(table[key]) for key in _KEYS if key in table}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} {size}" for key, size in sizes.items())
        faults.append(f"expected as many values in each list as there are dimensions, got {listed}")
    for position, name in enumerate(table.get("topology", [])):
        if name not in _TOPOLOGIES:
            faults.append(f"topology[{position}]: expected one of {', '.join(_TOPOLOGIES)}, got {brief(name)!r}")
    counts = _numbers(table.get("npus_count", []), "npus_count", 1, faults)
    bandwidths = _numbers(table.get("bandwidth", []), "bandwidth", 1e-9, faults)
    latencies = _numbers(table.get("latency", []), "latency", 0, faults)
    if any(count != int(count) for count in counts):
        faults.append(f"npus_count: expected whole numbers, got {counts}")
    if math.prod(counts) > _MAX_NPUS:
        faults.append(f"npus_count: expected at most {_MAX_NPUS} NPUs in all, got {math.prod(counts):.0f}")
    if faults:
        raise UsageError("\n".join([f"{where}: not an ASTRA-sim network file", *(f"  {f}" for f in folded(faults))]))
    return _build(
        table["topology"],
        [int(count) for count in counts],
        [value * 1e9 for value in bandwidths],
        [value * 1e-9 for value in latencies],
        where,
        usual,
    )


def _build(
    topologies: list[str],
    counts: list[int],
    bandwidths: list[float],
    latencies: list[float],
    where: str,
    usual: Callable[[], Cluster],
) -> Cluster:
    total, per_host = math.prod(counts), counts[0]
    names = [f"n{i // per_host}/gpu{i % per_host}" for i in range(total)]
    vertices = [Vertex(name, "gpu", i // per_host, i % per_host) for i, name in enumerate(names)]
    links: list[Link] = []
    stride = 1
    for axis, (topology, count) in enumerate(zip(topologies, counts, strict=True)):
        kind = "nvlink" if axis == 0 else "fabric"
        for first in _first_of_groups(total, stride, count):
            group = [names[first + k * stride] for k in range(count)]
            if topology == "Switch":
                hub = f"n{first // per_host}/nvswitch0" if axis == 0 else f"dim{axis}/switch{first}"
                host = first // per_host if axis == 0 else None
                vertices.append(Vertex(hub, "nvswitch" if axis == 0 else "switch", host, 0))
                pairs = [(member, hub) for member in group]
            elif topology == "Ring":
                pairs = [(group[k], group[(k + 1) % count]) for k in range(count if count > 2 else count - 1)]
            else:
                pairs = [(a, b) for k, a in enumerate(group) for b in group[k + 1 :]]
            for a, b in pairs:
                for src, dst in ((a, b), (b, a)):
                    links.append(Link(len(links), src, dst, bandwidths[axis], latencies[axis], kind))
        stride *= count
    return graph_cluster(Path(where).stem, vertices, links, where, usual)


def _first_of_groups(total: int, stride: int, count: int) -> Iterator[int]:
    return (i for i in range(total) if i // stride % count == 0)


def _numbers(values: list[str], key: str, least: float, faults: list[str]) -> list[float]:
    numbers: list[float] = []
    for position, value in enumerate(values):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (least <= number < math.inf):
            faults.append(f"{key}[{position}]: expected a number of at least {least:g}, got {brief(value)!r}")
            number = 1.0
        numbers.append(number)
    return numbers


def _read(text: str, where: str) -> dict[str, list[str]]:
    """Keys with flow lists (`[a, b]`), block lists (`- a`) or single values."""
    table: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line or line in ("---", "..."):
            continue
        if line.startswith("- ") and current is not None:
            current.append(_unquoted(line[2:]))
            continue
        match = _LINE_RE.fullmatch(line)
        if match is None:
            raise UsageError(f"{where}: line {number}: expected 'key: [value, ...]', got {brief(line[:60])!r}")
        key, value = match.groups()
        if value.startswith("[") and not value.endswith("]"):
            raise UsageError(f"{where}: line {number}: a list without its closing ']' (cut off?)")
        items = value.removeprefix("[").removesuffix("]").split(",") if value else []
        current = table[key] = [_unquoted(item) for item in items if item.strip()]
    return table


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")
