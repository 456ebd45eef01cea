"""The schema of a cluster file, and its check: every fault at once, each with its path in the file.

`distsim topo show CLUSTER --toml` prints a whole cluster in this schema, with each key explained.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from distsim.errors import UsageError
from distsim.units import parse_bandwidth, parse_flops, parse_memory, parse_time

__all__ = ["ClusterSpec", "FabricSpec", "check_spec"]


def _quantity(parse: Callable[[Any], float]) -> BeforeValidator:
    def check(value: Any) -> float:
        try:
            return parse(value)
        except UsageError as error:
            raise PydanticCustomError("quantity", "{text}", {"text": str(error)}) from None

    return BeforeValidator(check)


Bandwidth = Annotated[float, _quantity(parse_bandwidth)]
Time = Annotated[float, _quantity(parse_time)]
Memory = Annotated[int, _quantity(parse_memory)]
Flops = Annotated[float, _quantity(parse_flops)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=0, le=1_000_000, strict=True)]
Positive = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NvlinkSpec(_Table):
    """NVLink of one GPU: *links* of *bandwidth* each (one direction, as specified) times *efficiency*."""

    topology: Literal["nvswitch", "mesh"] = "nvswitch"
    links: Positive
    bandwidth: Bandwidth
    efficiency: Fraction = 1.0
    latency: Time
    switches: Count = 1
    sharp: bool = False
    domain_nodes: Positive = 1

    @model_validator(mode="after")
    def _domain_needs_switches(self) -> NvlinkSpec:
        if self.topology == "mesh" and self.domain_nodes > 1:
            text = f"expected 1 with topology = 'mesh', got {self.domain_nodes}"
            raise PydanticCustomError("domain", "{text}", {"text": text, "key": "domain_nodes"})
        return self


class GpuSpec(_Table):
    """One accelerator: dense rates, as its maker specifies them."""

    model: str
    compute_capability: Positive
    memory: Memory
    memory_bandwidth: Bandwidth
    flops: dict[Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"], Flops] = {}
    nvlink: NvlinkSpec | None = None


class CpuSpec(_Table):
    """The host: *cores*, *flops* and *memory_bandwidth* are of one socket, *memory* is of the node."""

    model: str
    vendor: Literal["intel", "amd", "arm"]
    nccl_class: Literal["", "bdw", "skl", "srp", "erp"] = ""
    sockets: Positive
    cores: Positive
    flops: Flops
    flops_efficiency: Fraction = 0.5
    memory: Memory
    memory_bandwidth: Bandwidth
    memory_efficiency: Fraction = 0.75
    interconnect: Bandwidth
    interconnect_latency: Time = 0.3e-6
    loopback: Bandwidth = 5e9
    loopback_latency: Time = 12e-6
    op_overhead: Time = 5e-6
    store_latency: Time = 100e-6


class PcieSpec(_Table):
    """PCIe: one slot's *bandwidth* (one direction) times *efficiency*; *switches* in a node, 0 for straight to a socket."""

    generation: Annotated[int, Field(ge=1, le=7, strict=True)]
    bandwidth: Bandwidth
    efficiency: Fraction = 1.0
    latency: Time = 0.3e-6
    switches: Count = 0
    peer_to_peer: bool = True
    c2c: Bandwidth | None = None


class NicSpec(_Table):
    """*count* NICs of *bandwidth* each (one direction) times *efficiency*; *latency* is host to host on one cable."""

    model: str = ""
    net: Literal["ib", "roce", "efa", "slingshot", "tcp", "tcpx", "tcpxo"]
    count: Positive
    bandwidth: Bandwidth
    efficiency: Fraction = 1.0
    latency: Time
    gpu_direct: bool = True
    collnet: bool = False


class NodeSpec(_Table):
    """One host."""

    gpus: Count
    gpu: GpuSpec | None = None
    cpu: CpuSpec
    pcie: PcieSpec
    nic: NicSpec | None = None

    @model_validator(mode="after")
    def _gpu_table(self) -> NodeSpec:
        if self.gpus and self.gpu is None:
            text = f"expected a table [node.gpu] for gpus = {self.gpus}, got none"
            raise PydanticCustomError("gpu_table", "{text}", {"text": text, "key": "gpu"})
        return self


class _Switched(_Table):
    switch_latency: Time = 0.0


class StarSpec(_Switched):
    """One switch that blocks nothing."""

    kind: Literal["star"]


class LeafSpineSpec(_Switched):
    """Hosts on leaves (all NICs of a host on one), leaves on *spines*; *routing* adaptive spreads a flow over them all."""

    kind: Literal["leaf-spine"]
    nodes_per_leaf: Positive = 16
    spines: Positive = 4
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    routing: Literal["ecmp", "adaptive"] = "ecmp"


class FatTreeSpec(_Switched):
    """Three levels: leaves in pods of *leaves_per_pod*, *spines* a pod, *cores* above; each level may oversubscribe."""

    kind: Literal["fat-tree"]
    nodes_per_leaf: Positive = 16
    leaves_per_pod: Positive = 8
    spines: Positive = 4
    cores: Positive = 4
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    core_oversubscription: Annotated[float, Field(ge=1)] = 1.0
    routing: Literal["ecmp", "adaptive"] = "ecmp"


class RailSpec(_Switched):
    """NIC k of every host of a unit of *nodes_per_leaf* on leaf k of that unit; leaves on *spines*."""

    kind: Literal["rail-optimised"]
    nodes_per_leaf: Positive = 32
    spines: Positive = 4
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    routing: Literal["ecmp", "adaptive"] = "adaptive"


class TorusSpec(_Switched):
    """A router a host, in a grid of *dims* (2 or 3) with wraparound; links of *bandwidth*, by default the host's NICs."""

    kind: Literal["torus"]
    dims: Annotated[list[Positive], Field(min_length=1, max_length=3)]
    bandwidth: Bandwidth | None = None


class RingSpec(_Switched):
    """A router a host, each linked to the next."""

    kind: Literal["ring"]
    bandwidth: Bandwidth | None = None


class FullMeshSpec(_Switched):
    """A router a host, each linked to every other by *bandwidth* (by default the host's NICs shared among all)."""

    kind: Literal["full-mesh"]
    bandwidth: Bandwidth | None = None


class DragonflySpec(_Switched):
    """Groups of switches, all to all inside a group and between groups; minimal routes.

    *bandwidth* is one link inside a group, *global_bandwidth* everything between two groups, spread over
    *global_links* of them.
    """

    kind: Literal["dragonfly"]
    nodes_per_switch: Positive = 8
    switches_per_group: Positive = 16
    bandwidth: Bandwidth
    global_bandwidth: Bandwidth
    global_links: Positive = 4
    routing: Literal["ecmp", "adaptive"] = "adaptive"


FabricSpec = (
    StarSpec | LeafSpineSpec | FatTreeSpec | RailSpec | TorusSpec | RingSpec | FullMeshSpec | DragonflySpec
)


class NcclSpec(_Table):
    """What cannot be read off the hardware."""

    version: str = "2.27.3"


class ClusterSpec(_Table):
    """A whole cluster file."""

    name: str
    description: str = ""
    source: str = ""
    nodes: Positive = 1
    unit_nodes: Positive = 1
    node: NodeSpec
    fabric: Annotated[FabricSpec, Field(discriminator="kind")] = StarSpec(kind="star")
    nccl: NcclSpec = NcclSpec()
    calibration: dict[str, float] = {}

    @model_validator(mode="after")
    def _fits(self) -> ClusterSpec:
        if self.nodes > 1 and self.node.nic is None and not self._one_domain():
            text = f"expected a table [node.nic] for a cluster of {self.nodes} nodes, got none"
            raise PydanticCustomError("nic_table", "{text}", {"text": text, "key": "node.nic"})
        if isinstance(self.fabric, TorusSpec):
            size = 1
            for extent in self.fabric.dims:
                size *= extent
            if size < self.nodes:
                text = f"expected room for {self.nodes} nodes, got {self.fabric.dims} ({size} nodes)"
                raise PydanticCustomError("dims", "{text}", {"text": text, "key": "fabric.dims"})
        return self

    def _one_domain(self) -> bool:
        nvlink = self.node.gpu.nvlink if self.node.gpu else None
        return nvlink is not None and nvlink.domain_nodes >= self.nodes


def check_spec(data: Mapping[str, Any], where: str) -> ClusterSpec:
    """*data* (a cluster file's content) as a spec, or one UsageError that lists every fault."""
    try:
        return ClusterSpec.model_validate(dict(data))
    except ValidationError as error:
        faults = [_fault(detail) for detail in error.errors(include_url=False)]
    if len(faults) == 1:
        raise UsageError(f"{where}: {faults[0]}")
    raise UsageError("\n".join([f"{where}: {len(faults)} faults", *(f"  {fault}" for fault in faults)]))


_KINDS = ("star", "leaf-spine", "fat-tree", "rail-optimised", "torus", "ring", "full-mesh", "dragonfly")


def _fault(detail: Mapping[str, Any]) -> str:
    location = [str(part) for part in detail["loc"] if str(part) not in _KINDS and part != "[key]"]
    context = detail.get("ctx", {})
    if "key" in context:
        location.append(context["key"])
    path, given = ".".join(location), detail["input"]
    match detail["type"]:
        case "missing":
            return f"{path}: expected a value, got nothing"
        case "extra_forbidden":
            return f"{path}: unknown key{_known(location)}"
        case "union_tag_invalid" | "union_tag_not_found":
            kind = given.get("kind") if isinstance(given, Mapping) else given
            near = difflib.get_close_matches(str(kind), _KINDS, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            return f"{path}.kind: expected one of {', '.join(_KINDS)}, got {kind!r}{hint}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{path}: expected a table, got {given!r}"
    if "text" in context:
        return f"{path}: {context['text']}"
    expected = str(detail["msg"]).replace("Input should be a valid", "a valid").replace("Input should be", "")
    return f"{path}: expected {expected.strip()}, got {given!r} ({type(given).__name__})"


def _known(location: list[str]) -> str:
    table: Any = ClusterSpec
    for key in location[:-1]:
        annotation = table.model_fields[key].annotation if key in table.model_fields else None
        options = [a for a in getattr(annotation, "__args__", (annotation,)) if isinstance(a, type)]
        tables = [a for a in options if issubclass(a, _Table)]
        if len(tables) != 1:
            return ""
        table = tables[0]
    near = difflib.get_close_matches(location[-1], table.model_fields, 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f" (expected one of {', '.join(table.model_fields)}){hint}"
