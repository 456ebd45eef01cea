"""Schema of a cluster file, its validation, and the way back to TOML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from distsim.cluster.graph.link import STORAGE_READ_BYTES_PER_S, STORAGE_WRITE_BYTES_PER_S
from distsim.text.file_tables import (
    Bandwidth,
    Dtype,
    FileTable,
    Flops,
    Fraction,
    Memory,
    Text,
    Time,
    complaints,
    near,
    unit_of,
)
from distsim.text.file_tables import key as _note
from distsim.text.untrusted_input import brief, faulty

# -- The schema of a cluster file, and its check: every fault at once, each with its path in the file.
#
# `distsim topo show CLUSTER --toml` prints a whole cluster in this schema; the comments it prints are the field
# descriptions below.

Ratio = Annotated[float, Field(ge=1)]
Count = Annotated[int, Field(ge=0, le=256, strict=True)]
Positive = Annotated[int, Field(ge=1, le=1024, strict=True)]
# Nodes and what counts them; with _MOST_CABLES a typing mistake ends in a message and not in a full memory.
Nodes = Annotated[int, Field(ge=1, le=32_768, strict=True)]
_MOST_CABLES = 4_000_000
_MOST_WIRES = 20_000
"""Maximum number of links inside one host, where all sockets are connected to each other, and all GPUs of an NVLink
mesh.
"""
_MEASURED = ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "sendrecv")
_CALIBRATED = ("launch_s", "s_per_byte", "more_s_per_byte", "knee_bytes")


class NvlinkSpec(FileTable):
    """NVLink of one GPU."""

    topology: Literal["nvswitch", "mesh"] = _note(
        "nvswitch: all to all at full speed; mesh: a GPU's links shared out to the others", "nvswitch"
    )
    links: Positive = _note("of one GPU")
    bandwidth: Bandwidth = _note("of one link in one direction, as specified")
    efficiency: Fraction = _note("fraction of it that transfers reach", 1.0)
    latency: Time = _note("GPU to GPU, one way")
    sharp: bool = _note("whether the NVSwitch reduces data (NVLink SHARP, NCCL's NVLS)", False)
    domain_nodes: Nodes = _note("nodes that share one NVSwitch plane: 18 in an NVL72 rack", 1)


class GpuSpec(FileTable):
    """One accelerator: dense rates, as its maker specifies them."""

    model: Text = _note("GPU data file: h100, a100, ...")
    compute_capability: Positive = _note("90 for sm_90")
    memory: Memory | None = _note("of one accelerator (default: of its data file)", None)
    memory_bandwidth: Bandwidth | None = _note("of one accelerator (default: of its data file)", None)
    flops: dict[Dtype, Flops] = _note(
        "peak rate by data type, dense; attention follows bf16 (default: of its data file)", {}
    )
    price: Annotated[float, Field(ge=0)] | None = _note("price of one accelerator for an hour, in any currency", None)
    price_basis: Text = _note(
        "source and date, if it is a list price, which a file built on this one does not inherit",
        "",
    )
    power: Annotated[float, Field(ge=0)] | None = _note(
        "watts of one busy accelerator, with its share of the node if you want that counted (default: "
        "its specified limit)",
        None,
    )
    nvlink: NvlinkSpec | None = None


class CpuSpec(FileTable):
    """The host's processors."""

    model: Text
    vendor: Literal["intel", "amd", "arm"] = _note("vendor as NCCL distinguishes processors")
    nccl_class: Literal["", "bdw", "skl", "srp", "erp"] = _note("NCCL's classes of Intel processors", "")
    sockets: Positive = _note("sockets in a node; without accelerators, one rank runs on each")
    cores: Positive = _note("of one socket")
    flops: Flops = _note("of one socket in fp32, as specified")
    flops_efficiency: Fraction = _note("fraction of it that operators reach", 0.5)
    memory_bandwidth: Bandwidth = _note("of one socket, as specified")
    memory_efficiency: Fraction = _note("fraction of it that operators reach", 0.75)
    interconnect: Bandwidth = _note("between two sockets, one direction")
    interconnect_latency: Time = _note("between two sockets", 0.3e-6)
    loopback: Bandwidth = _note("TCP between two ranks of one node", 5e9)
    loopback_latency: Time = _note("TCP between two ranks of one node, one way", 12e-6)
    op_overhead: Time = _note("host time of one eager operator beyond its arithmetic", 5e-6)
    store_latency: Time = _note("TCPStore round trip", 100e-6)


class PcieSpec(FileTable):
    """PCIe: the bus that connects GPUs and NICs."""

    generation: Annotated[int, Field(ge=1, le=7, strict=True)] = _note(
        "PCIe generation, which NCCL's topology search uses"
    )
    bandwidth: Bandwidth = _note("of one slot, one direction, as specified")
    efficiency: Fraction = _note("fraction of it that transfers reach", 1.0)
    latency: Time = _note("of one hop", 0.3e-6)
    switches: Count = _note(
        "PCIe switches in a node, over which GPUs and NICs are spread evenly; 0: they are connected to the sockets", 0
    )
    peer_to_peer: bool = _note("whether GPUs access each other directly", True)
    c2c: Bandwidth | None = _note("NVLink-C2C from a GPU to its socket, instead of PCIe", None)


class NicSpec(FileTable):
    """NICs that carry the ranks' traffic (not storage or management)."""

    model: Text = ""
    net: Literal["ib", "roce", "efa", "slingshot", "tcp", "tcpx", "tcpxo"] = _note("NCCL's network plugin")
    count: Positive = _note("NICs in a node, spread evenly")
    bandwidth: Bandwidth = _note("of one NIC, one direction, as specified")
    efficiency: Fraction = _note("fraction of it that transfers reach", 1.0)
    latency: Time = _note("one way from host to host over one cable; each NIC's link has half of it")
    gpu_direct: bool = _note("whether the NIC reads and writes GPU memory", True)
    collnet: bool = _note("whether the fabric reduces data (InfiniBand SHARP) and NCCL uses it", False)


class NodeSpec(FileTable):
    """One host."""

    gpus: Count = _note("accelerators in a node; 0: one rank per socket")
    gpu: GpuSpec | None = None
    cpu: CpuSpec
    pcie: PcieSpec
    nic: NicSpec | None = None
    storage_write: Bandwidth = _note(
        "bandwidth of one node to the storage of checkpoints; the default is an estimate", STORAGE_WRITE_BYTES_PER_S
    )
    storage_read: Bandwidth = _note(
        "bandwidth of one node from the storage of checkpoints; the default is an estimate", STORAGE_READ_BYTES_PER_S
    )


class _Switched(FileTable):
    switch_latency: Time = _note("latency of every switch, port to port", 0.0)


class StarSpec(_Switched):
    """One non-blocking switch."""

    kind: Literal["star"]


class _Leafy(_Switched):
    nodes_per_leaf: Nodes = _note(
        "hosts under one leaf; with rails, hosts of a unit, which has one leaf for each rail", 16
    )
    spines: Positive = _note("spines (of a pod); each leaf has a cable to each of them", 4)
    oversubscription: Ratio = _note("bandwidth from hosts into a leaf, divided by its bandwidth to the spines", 1.0)
    routing: Literal["ecmp", "adaptive"] = _note(
        "ecmp: a hash picks the spine of a flow; adaptive: a flow is spread over all spines", "ecmp"
    )


class LeafSpineSpec(_Leafy):
    """All NICs of a host are on one leaf switch, and leaves are on spines."""

    kind: Literal["leaf-spine"]


class FatTreeSpec(_Leafy):
    """Three levels: leaves and spines in pods, cores above."""

    kind: Literal["fat-tree"]
    leaves_per_pod: Nodes = _note("leaves under the same spines", 8)
    cores: Positive = _note("core switches; each spine has a cable to each of them", 4)
    core_oversubscription: Ratio = _note(
        "bandwidth from leaves into a spine, divided by its bandwidth to the cores", 1.0
    )


class RailSpec(_Leafy):
    """NIC k of every host of a unit is on the unit's leaf k (one rail)."""

    kind: Literal["rail-optimised"]


class RailOnlySpec(_Switched):
    """NIC k of every host is on switch k, and nothing connects the switches: data for another rail go to a GPU of that
    rail by NVLink first, as NCCL sends them (PXN).
    """

    kind: Literal["rail-only"]


class RingSpec(_Switched):
    """One router for each host, linked to the next in a ring."""

    kind: Literal["ring"]
    bandwidth: Bandwidth | None = _note("of one link, one direction; by default the NICs of a host", None)


class TorusSpec(_Switched):
    """One router for each host, in a grid with wraparound."""

    kind: Literal["torus"]
    dims: Annotated[list[Nodes], Field(min_length=1, max_length=3)] = _note("extent of each dimension")
    bandwidth: Bandwidth | None = _note("of one link, one direction; by default the NICs of a host", None)


class FullMeshSpec(_Switched):
    """One router for each host, linked to every other."""

    kind: Literal["full-mesh"]
    bandwidth: Bandwidth | None = _note(
        "of one link, one direction; by default the NICs of a host over all links", None
    )


class DragonflySpec(_Switched):
    """Groups of switches, all to all inside and between groups."""

    kind: Literal["dragonfly"]
    nodes_per_switch: Nodes = _note("hosts on one switch, with all their NICs", 8)
    switches_per_group: Positive = _note("switches in a group, all linked to each other", 16)
    bandwidth: Bandwidth = _note("between two switches of a group, one direction")
    global_bandwidth: Bandwidth = _note("total bandwidth between two groups, one direction")
    global_links: Positive = _note("links over which that bandwidth is spread", 4)
    routing: Literal["ecmp", "adaptive"] = _note(
        "ecmp: a hash picks the global link of a flow; adaptive: a flow is spread over all", "adaptive"
    )


FabricSpec = Annotated[
    StarSpec
    | LeafSpineSpec
    | FatTreeSpec
    | RailSpec
    | RailOnlySpec
    | TorusSpec
    | RingSpec
    | FullMeshSpec
    | DragonflySpec,
    Field(discriminator="kind"),
]


class NcclSpec(FileTable):
    """NCCL facts that the hardware does not determine."""

    library: Literal["nccl", "rccl"] = _note("rccl on AMD GPUs", "nccl")
    version: Text = _note("NCCL release whose tuning is modelled", "2.27.3")
    plugin: Text = _note("network plugin and its version, such as 'aws-ofi-nccl 1.9.2'", "")
    settings: dict[str, Text] = _note("environment variables that change times, such as FI_CXI_RX_MATCH_MODE", {})


class ConstantSpec(FileTable):
    """A constant of the model of NCCL as it was fitted to measurements of this cluster."""

    value: Annotated[float, Field(gt=0)] = _note("value in the unit of distsim/collectives/fitted/nccl.toml")
    uncertainty: Annotated[float, Field(ge=0)] = _note("standard deviation of its logarithm", 0.0)
    source: Text = _note("data that it was fitted to", "")


class SpreadSpec(FileTable):
    """Spread of measured / simulated time over the logs with which a cluster file was calibrated."""

    low: Annotated[float, Field(gt=0, le=1)] = _note("10th percentile")
    high: Annotated[float, Field(ge=1)] = _note("90th percentile")
    operations: Text = _note(
        "operations in the logs, such as 'all_reduce, alltoall'; others keep the preset's interval; empty: all", ""
    )


class ClusterSpec(FileTable):
    """A whole cluster file."""

    name: Text
    description: Text = ""
    source: Text = ""
    variant: Text = _note("variant of the machine's software", "")
    measured: Text = _note(
        "which times of the model were measured on this machine, and which were taken from others", ""
    )
    nodes: Nodes = _note("hosts", 1)
    unit_nodes: Nodes = _note("hosts for each N of `name:N`: 18 if N counts NVL72 racks", 1)
    node: NodeSpec
    fabric: FabricSpec = Field(default_factory=lambda: StarSpec(kind="star"))
    nccl: NcclSpec = Field(default_factory=NcclSpec)
    calibration: dict[str, float] = _note("measured constants that replace those of the models", {})
    constants: dict[str, ConstantSpec] = _note(
        "constants of the NCCL model that were fitted to this cluster; the others keep their values", {}
    )

    errors: dict[str, SpreadSpec] = _note(
        "error of its times by number of nodes and size, such as '2 nodes, < 64 KiB'", {}
    )

    def misfit(self) -> str | None:
        """Return a description of the first inconsistency between keys that are valid by themselves; None if there is
        none.
        """
        return next((f"{key}: {text}" for key, text in self._misfits()), None)

    def _misfits(self) -> list[tuple[str, str]]:
        node, fabric, result = self.node, self.fabric, []
        nvlink = node.gpu.nvlink if node.gpu else None
        if node.gpus and node.gpu is None:
            result.append(("node.gpu", f"expected a table for gpus = {node.gpus}, got nothing"))
        if self.nodes > 1 and node.nic is None and not (nvlink and nvlink.domain_nodes >= self.nodes):
            result.append(("node.nic", f"expected a table for a cluster of {self.nodes} nodes, got nothing"))
        if nvlink and nvlink.topology == "mesh" and nvlink.domain_nodes > 1:
            result.append(("node.gpu.nvlink.domain_nodes", f"expected 1 with a mesh, got {nvlink.domain_nodes}"))
        result += self._miscalibrated()
        wires = node.cpu.sockets**2 + (node.gpus**2 if nvlink and nvlink.topology == "mesh" else 0)
        if wires > _MOST_WIRES:
            result.append(("node", f"expected at most {_MOST_WIRES:,} wires inside a host, got {wires:,}"))
        parts = self.nodes * (node.gpus + node.cpu.sockets + node.pcie.switches + (node.nic.count if node.nic else 0))
        if parts > _MOST_CABLES:
            result.append(("nodes", f"expected at most {_MOST_CABLES:,} parts in all hosts, got {parts:,}"))
        cables = self._cables()
        if cables > _MOST_CABLES:
            result.append(("fabric", f"expected at most {_MOST_CABLES:,} cables, got {cables:,} ({fabric.kind})"))
        if isinstance(fabric, TorusSpec) and math.prod(fabric.dims) < self.nodes:
            text = f"expected room for {self.nodes} nodes, got {math.prod(fabric.dims)} ({fabric.dims})"
            result.append(("fabric.dims", text))
        return result

    def _miscalibrated(self) -> list[tuple[str, str]]:
        """Check the tables that `distsim calibrate` writes: unknown names have no effect, and an operation needs all
        figures."""
        given, result = self.calibration, []
        wanted = {f"gloo_{op}": [f"gloo_{op}_{figure}" for figure in _CALIBRATED] for op in _MEASURED}
        known = {key for keys in wanted.values() for key in keys}
        for key, value in given.items():
            if key not in known:
                text = f"unknown key (expected gloo_OPERATION_FIGURE, of {', '.join(_CALIBRATED)}){near(key, known)}"
                result.append((f"calibration.{brief(key)}", text))
            elif not 0 <= value < 1e15:
                result.append((f"calibration.{key}", f"expected zero or more, got {value:g}"))
        for keys in wanted.values():
            if lacking := [key for key in keys if key not in given and any(other in given for other in keys)]:
                result.append((f"calibration.{lacking[0]}", "expected a value, got nothing"))
        return result

    def _cables(self) -> int:
        """Estimate how many cables the fabric has, before they are created."""
        match self.fabric:
            case TorusSpec(dims=dims):
                return math.prod(dims) * 2 * len(dims)
            case FullMeshSpec():
                return self.nodes * (self.nodes - 1)
            case DragonflySpec() as dragonfly:
                switches = -(-self.nodes // dragonfly.nodes_per_switch)
                size = min(switches, dragonfly.switches_per_group)
                groups = -(-switches // size)
                return groups * (size * (size - 1) + (groups - 1) * dragonfly.global_links)
            case LeafSpineSpec() | RailSpec() | FatTreeSpec() as tree:
                rails = self.node.nic.count if isinstance(tree, RailSpec) and self.node.nic else 1
                return -(-self.nodes // tree.nodes_per_leaf) * rails * tree.spines * 2
        return 0


def check_spec(data: Mapping[str, Any], where: str) -> ClusterSpec:
    """Validate *data*, the content of a cluster file, or raise one UsageError that lists every fault."""
    try:
        spec = ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise faulty(where, complaints(error, ClusterSpec)) from None
    if (misfit := spec.misfit()) is not None:
        raise faulty(where, [misfit])
    return spec


# -- A checked cluster as TOML again: complete, with the schema's own explanations as comments.

_SCALES = {"GBps": 1e9, "us": 1e-6, "GB": 1e9, "TFLOPS": 1e12}


def to_toml(spec: ClusterSpec) -> str:
    """Return *spec* as TOML that loads as the same cluster."""
    lines = ['# A cluster for distsim (--on FILE). It is enough to give `base = "dgx-h100"` and the keys that differ.']
    _write(spec, "", lines)
    return "\n".join(lines) + "\n"


def _write(table: FileTable, path: str, lines: list[str]) -> None:
    below: list[tuple[str, Any]] = []
    for key, info in type(table).model_fields.items():
        value = getattr(table, key)
        if value is None:
            continue
        if isinstance(value, FileTable):
            below.append((key, value))
        elif isinstance(value, dict):
            below.extend([(key, (value, info))] if value else [])
        else:
            note = f"  # {info.description}" if info.description else ""
            lines.append(f"{key} = {_value(value, info)}{note}")
    for key, value in below:
        inner = f"{path}{key}"
        if isinstance(value, FileTable):
            about = (type(value).__doc__ or "").strip().partition("\n")[0]
            lines.extend(["", f"[{inner}]  # {about}"])
            _write(value, f"{inner}.", lines)
        else:
            entries, info = value
            unit = "TFLOPS" if key == "flops" else ""
            lines.extend(["", f"[{inner}]  # {info.description}"])
            lines.extend(f"{_key(name)} = {_entry(entry, unit)}" for name, entry in entries.items())


def _value(value: Any, info: FieldInfo) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _figure(value, unit_of(info))
    if isinstance(value, list):
        return f"[{', '.join(str(item) for item in value)}]"
    return json.dumps(str(value), ensure_ascii=False)


def _entry(value: Any, unit: str) -> str:
    if isinstance(value, FileTable):
        inside = [f"{key} = {_value(getattr(value, key), info)}" for key, info in type(value).model_fields.items()]
        return f"{{ {', '.join(inside)} }}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _figure(value, unit)


def _figure(value: float, unit: str) -> str:
    if not unit:
        return repr(value)
    return f'"{value / _SCALES[unit]:.12g}{unit}"'


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)
