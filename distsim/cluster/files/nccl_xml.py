"""Reads NCCL's topology dumps (`NCCL_TOPO_DUMP_FILE`), which describe one host.

The dump has PCIe speeds, NVLink counts and NIC speeds but no NVLink bandwidth: that, and the conversion of PCIe
speeds, come from NCCL itself (v2.30.7, src/graph/topo.h and topo.cc). Everything else (memory, clock rates, latencies)
comes from the preset with the same generation of GPU. The hosts, as many as the user asks for, are connected by one
switch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

from distsim.cluster.graph.host_template import HostTemplate, TemplatePart, Wire
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, faulty

_MAX_CHARACTERS = 16 << 20
# NCCL v2.30.7 src/graph/topo.h: NCCL_TOPO_MAX_NODES, of one kind in a host.
_MAX_PARTS = 576

# NCCL v2.30.7 src/graph/topo.h: GB/s of one NVLink, one direction, by compute capability.
_NVLINK_GBPS = {
    60: 18.0,
    70: 20.0,
    72: 20.0,
    80: 20.0,
    86: 12.0,
    87: 12.0,
    90: 20.6,
    100: 40.1,
    103: 40.1,
    120: 40.1,
}
# What PCIe calls GT/s, as NCCL counts it: lanes times this over 80 is GB/s.
_PCIE_UNITS = {"2.5": 15, "5": 30, "8": 60, "16": 120, "32": 240, "64": 480}
_PCIE_GENERATION = {15: 1, 30: 2, 60: 3, 120: 4, 240: 5, 480: 6}
_PCIE_DEFAULT_GBPS = 12.0
# GB/s between sockets, by vendor: NCCL's, from topo.h (SRP for Intel).
_SOCKET_GBPS = {"intel": 22.0, "amd": 16.0, "arm": 6.0}
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}
# The preset whose memory, rates and latencies stand for a compute capability.
_LIKE = {100: "dgx-b200", 103: "dgx-b200", 90: "dgx-h100", 80: "dgx-a100"}
_MODELS = {
    60: "p100",
    70: "v100",
    80: "a100",
    86: "a40",
    89: "rtx4090",
    90: "h100",
    100: "b200",
    103: "b300",
    120: "rtx5090",
}
_NETS = (
    ("mlx", "ib"),
    ("ib", "ib"),
    ("rdmap", "efa"),
    ("efa", "efa"),
    ("cxi", "slingshot"),
    ("bnxt", "roce"),
)

_NVSWITCH_CLASS, _GPU_CLASS, _CPU_CLASS = "0x068000", "0x0302", "0x068001"


@dataclass
class _Element:
    tag: str
    attributes: dict[str, str]
    line: int
    children: list[_Element] = field(default_factory=list)


def from_nccl_xml(text: str, where: str) -> tuple[HostTemplate, dict[str, Any]]:
    """Return the host of a dump and the content of a cluster file for the rest, or raise one UsageError with every
    fault.
    """
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"{where}: expected at most {_MAX_CHARACTERS >> 20} MiB of XML, got {len(text) >> 20} MiB")
    root = _parse(text, where)
    if root.tag != "system":
        raise UsageError(f"{where}: expected NCCL's <system>, got <{brief(root.tag)}>")
    reader = _Reader()
    for cpu in root.children:
        if cpu.tag == "cpu":
            reader.read_cpu(cpu)
    reader.join()
    if not reader.gpus:
        reader.faults.append("expected at least one <gpu> inside a <cpu>, got none")
    if len(reader.hosts) > 1:
        reader.faults.append(
            f"expected one host, got {len(reader.hosts)} (host_hash {brief(', '.join(sorted(reader.hosts)))})"
        )
    if reader.faults:
        raise faulty(where, reader.faults)
    return reader.template(), reader.data(Path(where).stem)


def _parse(text: str, where: str) -> _Element:
    """Return the XML tree. A document with a DTD is refused, so that no entity is expanded."""
    parser = expat.ParserCreate()
    stack: list[_Element] = []
    roots: list[_Element] = []
    counts: Counter[str] = Counter()

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = _Element(tag, attributes, parser.CurrentLineNumber)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)
        counts[tag] += 1
        if tag != "nvlink" and counts[tag] > _MAX_PARTS:
            raise UsageError(f"{where}: line {element.line}: expected at most {_MAX_PARTS} <{brief(tag)}>, got more")
        if len(stack) > 64:
            raise UsageError(f"{where}: line {element.line}: nested more than 64 deep: not a topology of NCCL's")

    def refuse(*_: object) -> None:
        raise UsageError(f"{where}: line {parser.CurrentLineNumber}: a DTD is not allowed in a topology file")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: stack.pop()
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        raise UsageError(f"{where}: not well-formed XML (cut off?): {error}") from None
    return roots[0]


class _Reader:
    """Reads the dump in one pass and collects the parts of the host."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.hosts: dict[str, None] = {}
        self.parts: list[TemplatePart] = []
        self.wires: list[Wire] = []
        self.cpus: list[str] = []
        self.gpus: list[tuple[int, str, _Element, str]] = []
        self.nets: list[tuple[str, float, str, bool, float]] = []
        self.gpu_direct = True
        """False if a NIC of the fastest kind has gdr="0" (no GPUDirect RDMA)."""
        self.switches = 0
        self.nvlink_gbps = 0.0
        self.nvlinks: dict[str, int] = {}
        self._joined: set[frozenset[str]] = set()
        self.meshed = False
        self.vendor, self.pcie_units = "intel", 60

    def read_cpu(self, cpu: _Element) -> None:
        name = f"cpu{len(self.cpus)}"
        self.cpus.append(name)
        self.parts.append(TemplatePart(name, "cpu", len(self.cpus) - 1))
        self.hosts[cpu.attributes.get("host_hash", "")] = None
        arch = cpu.attributes.get("arch", "")
        self.vendor = "arm" if "arm" in arch else _VENDORS.get(cpu.attributes.get("vendor", ""), "intel")
        for child in cpu.children:
            self._read_below(child, name, "", 5000.0)

    def _read_below(self, element: _Element, above: str, busid: str, gbps: float) -> None:
        """Read *element*, which is connected to *above* by a slot of *gbps* (LOC_BW if there is no slot, as directly
        under a socket).
        """
        if element.tag == "pci":
            speed = self._slot_gbps(element)
            busid = element.attributes.get("busid", "").lower()
            devices = [child for child in element.children if child.tag in ("gpu", "nic")]
            if devices:
                for child in devices:
                    self._read_below(child, above, busid, speed)
            elif element.children:
                name = f"pcie{self.switches}"
                self.parts.append(TemplatePart(name, "pcie", self.switches))
                self.switches += 1
                self._wire(above, name, speed, "pcie")
                for child in element.children:
                    self._read_below(child, name, busid, speed)
        elif element.tag == "gpu":
            dev = self._number(element, "dev")
            sm = self._number(element, "sm")
            name = f"gpu{dev}"
            if any(name == other for _, other, _, _ in self.gpus):
                self.faults.append(f"line {element.line}: <gpu dev>: {dev} is already taken")
            self.gpus.append((dev, name, element, busid))
            self.nvlink_gbps = _NVLINK_GBPS.get(sm, 20.0)
            c2c = next((child for child in element.children if child.tag == "c2c"), None)
            if c2c is not None:  # NCCL: bw in MB/s of one of count links
                self._wire(above, name, self._number(c2c, "bw") * self._number(c2c, "count") / 1000, "c2c")
            else:
                self._wire(above, name, gbps, "pcie")
        elif element.tag in ("nic", "net"):
            for net in element.children if element.tag == "nic" else [element]:
                if net.tag == "net":
                    name = net.attributes.get("name", "")
                    speed = self._number(net, "speed", 10_000) or 10_000
                    self.nets.append((name, speed / 8000, above, net.attributes.get("gdr", "1") != "0", gbps))

    def _slot_gbps(self, element: _Element) -> float:
        words = element.attributes.get("link_speed", "").split()
        units = _PCIE_UNITS.get(words[0].removesuffix(".0")) if words else None
        lanes = self._number(element, "link_width", 0)
        if units is None or lanes <= 0:
            return _PCIE_DEFAULT_GBPS
        self.pcie_units = max(self.pcie_units, units)
        return lanes * units / 80

    def join(self) -> None:
        """Connect NVLinks and sockets when all parts are known, and keep only the fastest kind of NIC."""
        self.gpus.sort(key=lambda gpu: gpu[0])
        self.parts.extend(TemplatePart(name, "gpu", index) for index, (_, name, _, _) in enumerate(self.gpus))
        by_bus = {busid: name for _, name, _, busid in self.gpus if busid}
        switched: dict[str, int] = {}
        for _, name, element, _ in self.gpus:
            for link in element.children:
                if link.tag != "nvlink":
                    continue
                count = self._number(link, "count", 1)
                target, kind = link.attributes.get("target", "").lower(), link.attributes.get("tclass", "")
                self.nvlinks[name] = self.nvlinks.get(name, 0) + count
                if target in by_bus:
                    self.meshed = True
                    self._wire_once(name, by_bus[target], count * self.nvlink_gbps)
                elif kind.startswith(_NVSWITCH_CLASS):
                    switched[name] = switched.get(name, 0) + count
                elif not kind.startswith(_CPU_CLASS):
                    self.faults.append(
                        f"line {link.line}: <nvlink target>: expected a GPU or NVSwitch, got {brief(target)!r}"
                    )
        if switched:
            self.parts.append(TemplatePart("nvswitch0", "nvswitch", 0))
            for name, count in switched.items():
                self._wire(name, "nvswitch0", count * self.nvlink_gbps, "nvlink")
        fastest = max((net[1] for net in self.nets), default=0.0)
        self.nets = [net for net in self.nets if net[1] == fastest]
        self.gpu_direct = all(direct for _, _, _, direct, _ in self.nets)
        for index, (_, _, above, _, gbps) in enumerate(self.nets):
            self.parts.append(TemplatePart(f"nic{index}", "nic", index))
            self._wire(above, f"nic{index}", gbps, "pcie")
        for i, one in enumerate(self.cpus):
            for other in self.cpus[i + 1 :]:
                self._wire(one, other, _SOCKET_GBPS[self.vendor], "socket")

    def _wire(self, a: str, b: str, gbps: float, kind: str) -> None:
        latency = {"nvlink": 0.47e-6, "c2c": 0.3e-6}.get(kind, 0.3e-6)
        self.wires.append(Wire(a, b, gbps * 1e9, latency, kind))
        self.wires.append(Wire(b, a, gbps * 1e9, latency, kind))

    def _wire_once(self, a: str, b: str, gbps: float) -> None:
        """Connect two GPUs by NVLink once, although the dump lists the link at both ends."""
        if (pair := frozenset((a, b))) not in self._joined:
            self._joined.add(pair)
            self._wire(a, b, gbps, "nvlink")

    def _number(self, element: _Element, key: str, default: int | None = None) -> int:
        text = element.attributes.get(key)
        if text is None and default is not None:
            return default
        try:
            number = int(text or "", 0)
        except ValueError:
            number = -1
        if not 0 <= number < 1 << 31:
            self.faults.append(
                f"line {element.line}: <{element.tag} {key}>: expected a whole number, got {brief(text)!r}"
            )
            return default or 0
        return number

    def template(self) -> HostTemplate:
        """Return the host as a template."""
        return HostTemplate(
            tuple(self.parts),
            tuple(self.wires),
            tuple(name for _, name, _, _ in self.gpus),
            tuple(f"nic{index}" for index in range(len(self.nets))),
        )

    def data(self, name: str) -> dict[str, Any]:
        """Return the content of a cluster file with the same properties."""
        sm = self._number(self.gpus[0][2], "sm")
        links = max(self.nvlinks.values(), default=0)
        gpu: dict[str, Any] = {"model": _MODELS.get(sm, f"sm{sm}"), "compute_capability": sm}
        if links:
            gpu["nvlink"] = {
                "links": links,
                "bandwidth": self.nvlink_gbps * 1e9,
                "efficiency": 1.0,
                "topology": "mesh" if self.meshed else "nvswitch",
                "latency": 0.94e-6,
                "sharp": sm >= 90 and not self.meshed,
            }
        pcie = self.pcie_units * 16 / 80 * 1e9
        data: dict[str, Any] = {
            "base": _LIKE.get(sm, "pcie-4090"),
            "name": name,
            "description": "imported from a topology dump of NCCL",
            "source": "NCCL_TOPO_DUMP_FILE",
            "node": {
                "gpus": len(self.gpus),
                "gpu": gpu,
                "cpu": {
                    "vendor": self.vendor,
                    "sockets": len(self.cpus),
                    "nccl_class": "srp" if self.vendor == "intel" else "",
                },
                "pcie": {
                    "generation": _PCIE_GENERATION[self.pcie_units],
                    "bandwidth": pcie,
                    "efficiency": 1.0,
                    "switches": self.switches,
                    "peer_to_peer": sm != 89,  # no dump says it: of GeForce's driver of that generation it is known
                },
            },
            "fabric": {"kind": "star"},
        }
        if self.nets:
            label, gbps = self.nets[0][0].lower(), self.nets[0][1]
            net = next((net for prefix, net in _NETS if label.startswith(prefix)), "tcp")
            data["node"]["nic"] = {"net": net, "count": len(self.nets), "bandwidth": gbps * 1e9}
            data["node"]["nic"]["gpu_direct"] = self.gpu_direct
            data["node"]["nic"]["efficiency"] = 0.97 if net != "tcp" else 0.94
        else:
            data["node"]["nic"] = None
        return data
