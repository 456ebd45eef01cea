"""Routes of many pairs at once: what `HostsOnFabric.route` says of each, put together by whole columns.

Hosts are alike, so the wires inside one come from tables by local device and NIC, moved to the host's block of links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distsim.cluster.graph.tree_fabric import Fabric, TreeFabric

if TYPE_CHECKING:
    from distsim.cluster.graph.host_template import HostTemplate

__all__ = ["Places", "Rows", "Wires", "mixed", "one_by_one", "padded", "routes"]

Places = NDArray[np.int64]
"""Positions of devices, or numbers of NICs."""
Rows = NDArray[np.int64]
"""A row for each pair: its links in order, and -1 in places between that a shorter way does not need."""


def padded(paths: Sequence[Sequence[int]]) -> Rows:
    """*paths* as rows."""
    width = max(map(len, paths), default=0)
    return np.array([[*path, *[-1] * (width - len(path))] for path in paths], dtype=np.int64).reshape(len(paths), width)


def one_by_one(
    route: Callable[[int, int, int, int | None, int | None], tuple[int, ...]],
    src: Places,
    dst: Places,
    key: int,
    rails: Places,
    enters: Places,
) -> Rows:
    """The rows by *route*, which knows the way of one pair."""
    asked = zip(src.tolist(), dst.tolist(), rails.tolist(), enters.tolist(), strict=True)
    return padded(
        [route(a, b, key, None if rail < 0 else rail, None if enter < 0 else enter) for a, b, rail, enter in asked]
    )


def mixed(*values: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """`tree_fabric.mix` of each row."""
    state = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
    for value in values:
        plain = np.uint64(value & 0xFFFFFFFFFFFFFFFF) if isinstance(value, int) else value.astype(np.uint64)
        with np.errstate(over="ignore"):
            state = (state ^ plain) * np.uint64(0xBF58476D1CE4E5B9)
            state = state ^ (state >> np.uint64(27))
            state = state * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


class Wires:
    """The paths inside a host as tables: [device, device or NIC, step], -1 past a path's end."""

    def __init__(self, template: HostTemplate) -> None:
        self.between, self.apart = _table(template.between_devices)
        self.out, self.no_way_out = _table(template.to_nic)
        self.back, self.no_way_back = _table(template.from_nic)
        self.own = padded(template.own_nics)
        """NICs of each device."""
        self.num_own = np.array([len(nics) for nics in template.own_nics], dtype=np.int64)


def _table(paths: list[list[tuple[int, ...] | None]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The table, and where there is no path."""
    rows, columns = len(paths), len(paths[0]) if paths else 0
    flat = padded([path or () for row in paths for path in row])
    return flat.reshape(rows, columns, flat.shape[1]), np.array([[path is None for path in row] for row in paths])


def routes(
    wires: Wires,
    fabric: Fabric,
    src: Places,
    dst: Places,
    key: int,
    rails: Places,
    enters: Places,
    *,
    block: int,
    nic_base: int,
    cable_base: int,
) -> Rows | None:
    """Rows from devices *src* to devices *dst* (positions) through NICs and fabric, out by NIC *rails* and in by NIC
    *enters* (-1: by one of their own); None where a pair has no way, which is the caller's to tell."""
    per_host, num_nics = wires.out.shape[:2]
    (host, i), (other, j) = np.divmod(src, per_host), np.divmod(dst, per_host)
    flow = mixed(src, dst, key)
    ends: list[NDArray[np.int64]] = []
    for device, forced in ((i, rails), (j, enters)):
        own = wires.num_own[device]
        if ((forced < 0) & (own == 0)).any() or (forced >= num_nics).any():
            return None
        turn = (flow % np.maximum(own, 1).astype(np.uint64)).astype(np.int64)
        ends.append(np.where(forced < 0, wires.own[device, turn], forced) if wires.own.shape[1] else forced)
    leave, enter = ends
    if wires.no_way_out[i, leave].any() or wires.no_way_back[enter, j].any():
        return None
    first, last = host * block, other * block
    cables = _cables(fabric, fabric.attach(host, leave), fabric.attach(other, enter), flow >> np.uint64(16))
    return np.hstack(
        [
            _moved(wires.out[i, leave], first),
            (first + nic_base + 2 * leave)[:, None],
            np.where(cables < 0, -1, cables + cable_base),
            (last + nic_base + 2 * enter + 1)[:, None],
            _moved(wires.back[enter, j], last),
        ]
    )


def _cables(fabric: Fabric, src: Any, dst: Any, key: NDArray[np.uint64]) -> Rows:
    if isinstance(fabric, TreeFabric):
        return fabric.paths(src, dst, key)
    return padded([fabric.path(*asked) for asked in zip(src.tolist(), dst.tolist(), key.tolist(), strict=True)])


def _moved(local: Rows, base: NDArray[np.int64]) -> Rows:
    return np.where(local < 0, -1, local + base[:, None])
