"""Elements of a cluster: vertices, links, slots, and the properties that the timing models read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, overload

import numpy as np
from annotated_types import Ge, Gt, Lt, MaxLen
from numpy.typing import NDArray

# -- What a cluster's graph is made of: vertices, directed links, and the slots that take ranks.


@dataclass(frozen=True, slots=True)
class Vertex:
    """A piece of hardware. *kind* is one of gpu, cpu, nvswitch, pcie, nic, leaf, spine, switch.

    *host* is None for parts that several hosts share (switches, the NVLink domain of a rack); *local* is the index
    among the vertices of the same kind on the host, or in the fabric.
    """

    name: str
    kind: str
    host: int | None
    local: int


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link of kind nvlink, c2c, pcie, socket, nic, fabric or loopback.

    *bandwidth_bytes_per_s* is the bandwidth that transfers can use (the specified rate times the efficiency in the
    cluster file); *index* is the link's position in `Cluster.links`.
    """

    index: int
    src: str
    dst: str
    bandwidth_bytes_per_s: float
    latency_s: float
    kind: str

    @property
    def name(self) -> str:
        """Return the name of the link in reports: `src->dst`."""
        return f"{self.src}->{self.dst}"


class Links(Sequence[Link]):
    """Every link of a cluster as arrays, from which a `Link` is created on access.

    *codes* are positions in *kinds*; *ends* returns the names of the two ends of link i.
    """

    def __init__(
        self,
        bandwidth_bytes_per_s: NDArray[np.float64],
        latency_s: NDArray[np.float64],
        codes: NDArray[np.integer[Any]],
        kinds: Sequence[str],
        ends: Callable[[int], tuple[str, str]],
    ) -> None:
        self.bandwidth_bytes_per_s, self.latency_s = bandwidth_bytes_per_s, latency_s
        self._codes, self._kinds, self._ends = codes, kinds, ends

    @classmethod
    def of(cls, links: Sequence[Link]) -> Links:
        """Return *links* as arrays."""
        kinds = list(dict.fromkeys(link.kind for link in links))
        ends = [(link.src, link.dst) for link in links]
        return cls(
            np.array([link.bandwidth_bytes_per_s for link in links], dtype=np.float64),
            np.array([link.latency_s for link in links], dtype=np.float64),
            np.array([kinds.index(link.kind) for link in links], dtype=np.uint16),
            kinds,
            ends.__getitem__,
        )

    def are(self, kinds: Collection[str]) -> NDArray[np.bool_]:
        """Return a mask of the links whose kind is one of *kinds*."""
        result: NDArray[np.bool_] = np.array([kind in kinds for kind in self._kinds], dtype=bool)[self._codes]
        return result

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Link: ...
    @overload
    def __getitem__(self, index: slice) -> list[Link]: ...
    def __getitem__(self, index: int | slice) -> Link | list[Link]:
        if isinstance(index, slice):
            return [self[id_] for id_ in range(len(self))[index]]
        id_ = range(len(self))[index]
        rate, latency = float(self.bandwidth_bytes_per_s[id_]), float(self.latency_s[id_])
        return Link(id_, *self._ends(id_), rate, latency, self._kinds[self._codes[id_]])

    def __iter__(self) -> Iterator[Link]:
        every = zip(self.bandwidth_bytes_per_s.tolist(), self.latency_s.tolist(), self._codes.tolist(), strict=True)
        for id_, (rate, latency, code) in enumerate(every):
            yield Link(id_, *self._ends(id_), rate, latency, self._kinds[code])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Link.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Slot:
    """Location of a rank: a device on a host."""

    rank: int
    host: int
    local_rank: int
    device: str


# -- What the models of computation and of collectives read of a cluster: plain facts.

SETTINGS_WITH_EFFECT = frozenset(
    {
        "NCCL_ALGO",
        "NCCL_BUFFSIZE",
        "NCCL_COLLNET_ENABLE",
        "NCCL_CROSS_NIC",
        "NCCL_MAX_CTAS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_NVLS_ENABLE",
        "NCCL_PROTO",
        "FI_CXI_RX_MATCH_MODE",
        "FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD",
    }
)
"""Settings in `nccl.settings` and NCCL's environment that change simulated times; all others have no effect."""
_TIMED_SETTINGS = (
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COLLNET", "NCCL_CROSS_NIC", "NCCL_CTA_POLICY", "NCCL_IB_QPS",
    "NCCL_IB_SPLIT_DATA", "NCCL_MAX_", "NCCL_MIN_", "NCCL_NCHANNELS", "NCCL_NET_GDR", "NCCL_NTHREADS", "NCCL_NVLS",
    "NCCL_P2P_", "NCCL_PROTO", "NCCL_PXN", "NCCL_SHM", "NCCL_LL_", "NCCL_LL128", "FI_CXI_",
)  # fmt: skip
"""Beginnings of the names with which NCCL and Slingshot's provider are set to other times."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of the model of NCCL that was fitted to one cluster."""

    value: float
    uncertainty: float = 0.0
    """Standard deviation of the constant's logarithm."""
    source: str = ""


Number = Annotated[int, Ge(0), Lt(10**30)]
PositiveNumber = Annotated[int, Gt(0), Lt(10**30)]
Figure = Annotated[float, Ge(0), Lt(1e30)]
PositiveFigure = Annotated[float, Gt(0), Lt(1e30)]
"""A figure that others are divided by; the bounds hold for facts that are read from a file of a graph."""
Name = Annotated[str, MaxLen(200)]
Net = Literal["none", "ib", "roce", "efa", "slingshot", "tcp", "tcpx", "tcpxo"]


@dataclass(frozen=True, slots=True)
class CpuModel:
    """The host processor as one rank sees it.

    *flops_per_s* and *memory_bytes_per_s* are one rank's share when *ranks_per_node* ranks divide the node evenly.
    """

    model: Name
    vendor: Name
    """intel, amd or arm; NCCL's tuning depends on it."""
    num_sockets: PositiveNumber
    cores_per_socket: PositiveNumber
    ranks_per_node: PositiveNumber
    flops_per_s: PositiveFigure
    memory_bytes_per_s: PositiveFigure
    op_overhead_s: Figure
    """Seconds of host time per operator beyond its arithmetic: Python, dispatch, autograd."""
    store_latency_s: Figure
    """Seconds of a round trip to the TCPStore."""
    loopback_bytes_per_s: PositiveFigure
    """Bytes/s of TCP between two ranks of one host."""

    def share(self, ranks_per_node: int) -> CpuModel:
        """Return the model for *ranks_per_node* ranks that share the node."""
        factor = self.ranks_per_node / ranks_per_node
        return replace(
            self,
            ranks_per_node=ranks_per_node,
            flops_per_s=self.flops_per_s * factor,
            memory_bytes_per_s=self.memory_bytes_per_s * factor,
        )


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What a cluster file says of one accelerator; the rest is in the data file of *model*."""

    model: Name
    compute_capability: Number
    """CUDA compute capability times ten: 80 for A100, 90 for Hopper, 100 for Blackwell."""
    memory_bytes: Figure | None
    memory_bytes_per_s: Figure | None
    flops_per_s: Mapping[str, PositiveFigure] = field(default_factory=dict)
    """Peak flop/s by data type (fp64, fp32, tf32, fp16, bf16, fp8, fp4), dense, without sparsity."""
    price: Figure | None = None
    """Price of one GPU hour; None if the cluster file does not give it."""
    price_basis: str = ""
    """Source and date of the price if it is a public list price; empty for a price that the user gave."""
    power_w: Figure | None = None
    """Watts under load; None if the cluster file does not give them."""


STORAGE_WRITE_BYTES_PER_S = 4e9
STORAGE_READ_BYTES_PER_S = 8e9
"""Default bytes/s of one node from the file system of checkpoints, if a cluster file does not give it.

Source: NVIDIA's DGX SuperPOD reference architecture with H100 (RA-11333, guidelines for storage performance,
"better"). Recalled, not looked up, and used for every preset.
"""


@dataclass(frozen=True, slots=True)
class NodeModel:
    """Properties of one host that the models of collectives need.

    Bandwidths are per direction. They are what transfers reach, unless their name says spec.
    """

    num_gpus: Number
    gpu_model: Name
    """Name of the GPU data file, such as h100 or a100; empty on a node without accelerators."""
    gpu: GpuModel | None
    ranks_per_node: PositiveNumber
    """Number of devices that take a rank: accelerators, or CPU sockets on a node without any."""
    nvlink: Literal["nvswitch", "mesh", "none"]
    """nvswitch, mesh (direct links between each pair of GPUs), or none."""
    nvlinks_per_gpu: Number
    nvlink_bytes_per_s: Figure
    """Bytes/s of all NVLinks of one GPU."""
    nvlink_spec_bytes_per_s: Figure
    nvlink_pair_bytes_per_s: Figure
    """Bytes/s between two GPUs: the whole bandwidth through an NVSwitch, the pair's own links in a mesh."""
    nvlink_latency_s: Figure
    nvls: bool
    """Whether the NVSwitch can reduce data (NVLink SHARP)."""
    nvlink_domain_nodes: PositiveNumber
    """Number of hosts in one NVLink domain: 1, or 18 in an NVL72 rack."""
    pcie_generation: PositiveNumber
    pcie_bytes_per_s: PositiveFigure
    """Measured bytes/s of one x16 slot; NCCL's own search uses its table of generations instead."""
    pcie_peer_to_peer: bool
    """Whether GPUs transfer directly over PCIe; otherwise they go through host memory."""
    num_nics: Number
    nic_bytes_per_s: Figure
    """Bytes/s of one NIC."""
    nic_spec_bytes_per_s: Figure
    nic_latency_s: Figure
    """One-way latency of a cable from host to host, in seconds."""
    gpu_direct_rdma: bool
    nics_beyond_root: bool = False
    """Whether a GPU reaches its NIC only through the processor's root ports, without a common PCIe switch and without
    C2C.
    """
    storage_write_bytes_per_s: PositiveFigure = STORAGE_WRITE_BYTES_PER_S
    storage_read_bytes_per_s: PositiveFigure = STORAGE_READ_BYTES_PER_S
    """Bytes/s at which all ranks of the node together read checkpoints."""


@dataclass(frozen=True, slots=True)
class NcclFacts:
    """Properties of a machine that NCCL's tuning depends on."""

    version: Name
    compute_capability: Number
    """Compute capability of the GPUs times ten; 0 without accelerators."""
    cpu_vendor: Name
    cpu_class: Name
    """NCCL's class of an Intel processor (bdw, skl, srp, erp); empty for other vendors."""
    net: Net
    """Kind of network: ib, roce, efa, slingshot, tcp, tcpx, tcpxo; none for a single node."""
    num_nics: Number
    nic_bytes_per_s: Figure
    nic_latency_s: Figure
    collnet: bool
    """Whether NCCL uses reductions in the switches of the fabric (InfiniBand SHARP)."""
    library: Name = "nccl"
    """nccl or rccl."""
    plugin: Name = ""
    """Network plugin with its version, such as aws-ofi-nccl 1.9.2; empty for NCCL's own transport, or if unknown."""
    settings: Mapping[str, Name] = field(default_factory=dict)
    """Environment variables that change times, such as FI_CXI_RX_MATCH_MODE."""

    def named(self, variant: str) -> bool:
        """Return whether the software is known beyond the library's release, so that times are those of one particular
        setup.
        """
        return bool(self.plugin or self.settings or variant)

    @property
    def software(self) -> str:
        """Return the library, its version, plugin and settings as one line, for a report's assumptions."""
        settings = [
            f"{name}={value}" + ("" if self._has_effect(name) else " (no effect on simulated times)")
            for name, value in self.settings.items()
        ]
        return ", ".join(filter(None, [f"{self.library.upper()} {self.version}", self.plugin, *settings]))

    def ignored(self, environ: Mapping[str, str]) -> list[str]:
        """Return a sentence about each variable of NCCL in *environ* that no simulated time follows."""
        notes = []
        for name, value in sorted(environ.items()):
            if name.startswith(_TIMED_SETTINGS) and self.settings.get(name) != value:
                hint = ": write it under [nccl.settings] of the cluster file" * (name in SETTINGS_WITH_EFFECT)
                notes.append(f"{name}={value} in the environment has no effect on simulated times{hint}")
        return notes

    def _has_effect(self, setting: str) -> bool:
        """Return whether *setting* changes simulated times.

        NCCL_IB_DISABLE does not by itself: a cluster file that uses it has sockets as its network, which all times
        include.
        """
        return setting in SETTINGS_WITH_EFFECT or (setting == "NCCL_IB_DISABLE" and self.net == "tcp")
