"""Many equal hosts on a fabric: the wiring of every cluster that a file describes.

Everything has a computed place: host h's links are a block of the same size, a fabric's cables follow, so a
route is put together from the host's own paths and the fabric's, in a few microseconds, on any number of
hosts.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distsim.cluster.graph.host_template import HostTemplate
from distsim.cluster.graph.link import Links, Vertex
from distsim.cluster.graph.many_routes import Places, Rows, Wires, one_by_one, routes
from distsim.cluster.graph.tree_fabric import Fabric, mix
from distsim.errors import UsageError

__all__ = ["HostsOnFabric"]


class HostsOnFabric:
    """*num_hosts* of *template*, their NICs on *fabric*, their NVLink ports on one NVSwitch per *domain*
    hosts.
    """

    def __init__(
        self,
        template: HostTemplate,
        num_hosts: int,
        fabric: Fabric | None,
        *,
        nic_bytes_per_s: float = 0.0,
        nic_latency_s: float = 0.0,
        domain: int = 1,
    ) -> None:
        self.template, self.num_hosts, self.fabric, self.domain = template, num_hosts, fabric, domain
        self.nic_bytes_per_s = nic_bytes_per_s
        self.per_host = len(template.devices)
        self._nic_latency_s = nic_latency_s / 2
        num_wires = len(template.wires)
        self._port_base = num_wires
        self._nic_base = num_wires + (2 * self.per_host if template.port else 0)
        self._block = self._nic_base + (2 * len(template.nics) if fabric else 0)
        self._cable_base = self._block * num_hosts

    @cached_property
    def devices(self) -> list[str]:
        """In rank order."""
        return [f"n{host}/{device}" for host in range(self.num_hosts) for device in self.template.devices]

    @cached_property
    def vertices(self) -> list[Vertex]:
        """Hosts first, then what they share."""
        template = self.template
        found = [
            Vertex(f"n{host}/{part.name}", part.kind, host, part.local)
            for host in range(self.num_hosts)
            for part in template.parts
        ]
        if template.port is not None:
            domains = -(-self.num_hosts // self.domain)
            found.extend(Vertex(f"nvswitch{i}", "nvswitch", None, i) for i in range(domains))
        if self.fabric is not None:
            found.extend(Vertex(name, kind, None, i) for i, (name, kind) in enumerate(self.fabric.switches))
        return found

    @cached_property
    def links(self) -> Links:
        """A block for each host (its wires, its ports, its NICs' both directions), then the fabric's cables."""
        template, fabric = self.template, self.fabric
        block = [(wire.bandwidth_bytes_per_s, wire.latency_s, wire.kind) for wire in template.wires]
        if template.port is not None:
            block += [(*template.port, "nvlink")] * (2 * self.per_host)
        cables: NDArray[np.float64] = np.zeros(0)
        hop_s = 0.0
        if fabric is not None:
            cables, hop_s = fabric.cables.bandwidth_bytes_per_s, fabric.switch_latency_s
            out = (self.nic_bytes_per_s, self._nic_latency_s, "nic")
            block += [out, (self.nic_bytes_per_s, self._nic_latency_s + hop_s, "nic")] * len(template.nics)
        kinds = [*dict.fromkeys(kind for _, _, kind in block), "fabric"]
        codes = np.array([kinds.index(kind) for _, _, kind in block], dtype=np.uint8)
        figures = np.array([figures[:2] for figures in block], dtype=np.float64).reshape(len(block), 2).T
        return Links(
            np.concatenate([np.tile(figures[0], self.num_hosts), cables]),
            np.concatenate([np.tile(figures[1], self.num_hosts), np.full(len(cables), hop_s)]),
            np.concatenate([np.tile(codes, self.num_hosts), np.full(len(cables), len(kinds) - 1, dtype=np.uint8)]),
            kinds,
            self._ends,
        )

    def _ends(self, index: int) -> tuple[str, str]:
        """The names that link *index* leads from and to."""
        template, fabric = self.template, self.fabric
        host, place = divmod(index, self._block)
        if host >= self.num_hosts:
            assert fabric is not None
            cable = index - self._cable_base
            return fabric.switches[fabric.cables.src[cable]][0], fabric.switches[fabric.cables.dst[cable]][0]
        if place < self._port_base:
            wire = template.wires[place]
            return f"n{host}/{wire.src}", f"n{host}/{wire.dst}"
        if place < self._nic_base:
            port, down = divmod(place - self._port_base, 2)
            own, switch = f"n{host}/{template.devices[port]}", f"nvswitch{host // self.domain}"
        else:
            assert fabric is not None
            nic, down = divmod(place - self._nic_base, 2)
            own, switch = f"n{host}/{template.nics[nic]}", fabric.switches[fabric.attach(host, nic)][0]
        return (switch, own) if down else (own, switch)

    @cached_property
    def _own_nics(self) -> list[tuple[int, ...]]:
        return self.template.own_nics

    def route(self, src: int, dst: int, flow_key: int, rail: int | None, enter: int | None = None) -> tuple[int, ...]:
        """Inside the host, through a shared NVSwitch, or over NICs and fabric: out by NIC *rail*, in by NIC *enter*."""
        host, i = divmod(src, self.per_host)
        other, j = divmod(dst, self.per_host)
        base, other_base = host * self._block, other * self._block
        template = self.template
        if template.port is not None and host // self.domain == other // self.domain:
            if src == dst:
                return ()
            return base + self._port_base + 2 * i, other_base + self._port_base + 2 * j + 1
        if host == other:
            inside = template.between_devices[i][j]
            if inside is None:
                raise UsageError(f"nothing connects {self.devices[src]} and {self.devices[dst]}")
            return tuple([base + index for index in inside])
        if self.fabric is None or not template.nics:
            raise UsageError(f"nothing connects {self.devices[src]} and {self.devices[dst]}: the nodes have no NIC")
        flow = mix(src, dst, flow_key)
        k, m = self._nic(i, flow, rail), self._nic(j, flow, rail if enter is None else enter)
        out, back = template.to_nic[i][k], template.from_nic[m][j]
        if out is None or back is None:
            raise UsageError(f"nothing connects {self.devices[src]} to NIC {k} of its node")
        fabric = self.fabric
        cables = fabric.path(fabric.attach(host, k), fabric.attach(other, m), flow >> 16)
        return (
            *[base + index for index in out],
            base + self._nic_base + 2 * k,
            *[self._cable_base + index for index in cables],
            other_base + self._nic_base + 2 * m + 1,
            *[other_base + index for index in back],
        )

    def routes(self, src: Places, dst: Places, flow_key: int, rails: Places, enters: Places | None = None) -> Rows:
        """`route` of many, a row each, -1 where a row has no more links; *rails* are -1 where none is forced,
        *enters* are the same where a way comes in by another NIC than it goes out by."""
        enters = rails if enters is None else enters
        wires, template = self._wires, self.template
        host, other = src // self.per_host, dst // self.per_host
        i, j = src - host * self.per_host, dst - other * self.per_host
        close = host == other
        inside = np.where(wires.between[i, j] < 0, -1, wires.between[i, j] + (host * self._block)[:, None])
        lost = close & wires.apart[i, j]
        if template.port is not None:
            close, lost = host // self.domain == other // self.domain, np.zeros(len(src), dtype=bool)
            up = host * self._block + self._port_base + 2 * i
            down = other * self._block + self._port_base + 2 * j + 1
            inside = np.where((src == dst)[:, None], -1, np.stack([up, down], axis=1))
        away = ~close
        outside = None
        if away.any() and self.fabric is not None and template.nics:
            outside = routes(
                wires,
                self.fabric,
                src[away],
                dst[away],
                flow_key,
                rails[away],
                enters[away],
                block=self._block,
                nic_base=self._nic_base,
                cable_base=self._cable_base,
            )
        if lost.any() or (away.any() and outside is None):  # one of them has no way: say which
            return one_by_one(self.route, src, dst, flow_key, rails, enters)
        if outside is None:
            return inside
        rows = np.full((len(src), max(inside.shape[1], outside.shape[1])), -1, dtype=np.int64)
        rows[close, : inside.shape[1]] = inside[close]
        rows[away, : outside.shape[1]] = outside
        return rows

    @cached_property
    def _wires(self) -> Wires:
        return Wires(self.template)

    def _nic(self, device: int, flow: int, rail: int | None) -> int:
        if rail is not None:
            if not 0 <= rail < len(self.template.nics):
                raise UsageError(f"expected a rail from 0 to {len(self.template.nics) - 1}, got {rail}")
            return rail
        own = self._own_nics[device]
        if not own:
            raise UsageError(f"nothing connects {self.template.devices[device]} to a NIC of its node")
        return own[flow % len(own)]

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """See `bisection`."""
        from distsim.cluster.graph.bisection import bisect_hosts

        return bisect_hosts(self)
