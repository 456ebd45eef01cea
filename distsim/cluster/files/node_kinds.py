"""Reads `[[node]]`, the kinds of node of a cluster file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distsim.cluster.files.spec import ClusterSpec, check_spec
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

MAX_NODES = 32_768
_EQUAL = ("gpus", "cpu.sockets", "gpu.nvlink.topology", "gpu.nvlink.domain_nodes", "nic.net", "nic.gpu_direct")
"""Keys of a node that all kinds of a cluster have in common."""


def node_kinds(data: Mapping[str, Any], tables: Sequence[Any], where: str) -> list[tuple[int, ClusterSpec]]:
    """Return the number of nodes and the specification of each kind of node.

    Args:
        data: Content of a cluster file.
        tables: Its `[[node]]` tables, each complete but for `count` (default 1).
        where: Name of the file in complaints.

    Raises:
        UsageError: A table has a fault, or the kinds cannot be in one cluster.
    """
    if not tables or not all(isinstance(table, Mapping) for table in tables):
        raise UsageError(f"{where}: node: expected tables [[node]], got {brief(list(tables))}")
    counts = [table.get("count", 1) for table in tables]
    for i, count in enumerate(counts):
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_NODES:
            raise UsageError(f"{where}: node[{i}].count: expected 1 to {MAX_NODES} nodes, got {brief(count)}")
    total = sum(counts)
    if data.get("nodes", 1) not in (1, total):
        got = brief(data["nodes"])
        raise UsageError(f"{where}: nodes: expected {total}, the sum of all node.count, or nothing, got {got}")
    specs: list[ClusterSpec] = []
    for i, table in enumerate(tables):
        own = {key: value for key, value in table.items() if key != "count"}
        specs.append(check_spec({**data, "nodes": total, "node": own}, f"{where}: node[{i}]"))
        for key in _EQUAL:
            first, this = _at(specs[0].node, key), _at(specs[i].node, key)
            if first != this:
                raise UsageError(f"{where}: node[{i}].{key}: expected {first} as in node[0], got {this}")
    lone = "a fabric of kind 'rail-only'" if specs[0].fabric.kind == "rail-only" else ""
    if (_at(specs[0].node, "gpu.nvlink.domain_nodes") or 1) > 1:
        lone = "an NVLink domain of several nodes"
    if lone and len(specs) > 1:
        raise UsageError(f"{where}: node: expected one kind of node with {lone}, got {len(specs)}")
    return list(zip(counts, specs, strict=True))


def _at(node: Any, key: str) -> Any:
    """Return the value at the path *key*; None if a part of it is missing."""
    for name in key.split("."):
        node = getattr(node, name, None)
    return node
