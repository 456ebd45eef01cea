"""What a cluster is made of: vertices, links, slots, and the facts that the models of time read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Constant", "CpuModel", "GpuModel", "Link", "Links", "NcclFacts", "NodeModel", "Slot", "Vertex"]

# -- What a cluster's graph is made of: vertices, directed links, and the slots that take ranks.


@dataclass(frozen=True, slots=True)
class Vertex:
    """A piece of hardware. *kind* is one of gpu, cpu, nvswitch, pcie, nic, leaf, spine, switch.

    *host* is None for what several hosts share (switches, an NVLink domain of a rack); *local* is the index
    among the vertices of that kind on the host, or in the fabric.
    """

    name: str
    kind: str
    host: int | None
    local: int


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link. *bandwidth_bytes_per_s* is what transfers can have of it (the specified rate times the
    efficiency that the cluster file states); *index* is its position in `Cluster.links`.

    *kind* is one of nvlink, c2c, pcie, socket, nic, fabric, loopback.
    """

    index: int
    src: str
    dst: str
    bandwidth_bytes_per_s: float
    latency_s: float
    kind: str

    @property
    def name(self) -> str:
        """`src->dst`, as reports print it."""
        return f"{self.src}->{self.dst}"


class Links(Sequence[Link]):
    """Every link of a cluster by index: arrays of what each has, from which its `Link` is made when it is asked for.

    *codes* are positions in *kinds*; *ends* gives the names that link i leads from and to.
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
        """The same links."""
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
        """Which links are of one of *kinds*."""
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
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        rate, latency = float(self.bandwidth_bytes_per_s[place]), float(self.latency_s[place])
        return Link(place, *self._ends(place), rate, latency, self._kinds[self._codes[place]])

    def __iter__(self) -> Iterator[Link]:
        every = zip(self.bandwidth_bytes_per_s.tolist(), self.latency_s.tolist(), self._codes.tolist(), strict=True)
        for id_, (rate, latency, code) in enumerate(every):
            yield Link(id_, *self._ends(id_), rate, latency, self._kinds[code])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Link.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a rank: a device on a host."""

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
        "NCCL_NVLS_ENABLE",
        "NCCL_PROTO",
        "FI_CXI_RX_MATCH_MODE",
        "FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD",
    }
)
"""Of `nccl.settings`, and of what NCCL reads of its environment: the others change no simulated time."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of the model of NCCL that was fitted to one cluster."""

    value: float
    uncertainty: float = 0.0
    """Standard deviation of its logarithm."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class CpuModel:
    """The host processor as one rank sees it: *flops_per_s* and *memory_bytes_per_s* are that rank's share
    when *ranks_per_node* ranks divide the node evenly.
    """

    model: str
    vendor: str
    """intel, amd or arm, as NCCL tells them apart."""
    num_sockets: int
    cores_per_socket: int
    ranks_per_node: int
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    op_overhead_s: float
    """What an operator costs the host beyond its arithmetic: Python, dispatch, autograd."""
    store_latency_s: float
    """A TCPStore round trip."""
    loopback_bytes_per_s: float
    """TCP between two ranks of one host."""

    def share(self, ranks_per_node: int) -> CpuModel:
        """The same node divided among *ranks_per_node* ranks."""
        factor = self.ranks_per_node / ranks_per_node
        return replace(
            self,
            ranks_per_node=ranks_per_node,
            flops_per_s=self.flops_per_s * factor,
            memory_bytes_per_s=self.memory_bytes_per_s * factor,
            memory_bytes=int(self.memory_bytes * factor),
        )


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One accelerator, as its maker specifies it (dense rates, no sparsity)."""

    model: str
    compute_capability: int
    """80 for Ampere A100, 90 for Hopper, 100 for Blackwell."""
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """By data type: fp64, fp32, tf32, fp16, bf16, fp8, fp4."""
    price: float | None = None
    """Of its hour; None: the cluster file does not say it."""
    power_w: float | None = None
    """At work; None: the cluster file does not say it."""


STORAGE_WRITE_BYTES_PER_S = 4e9
STORAGE_READ_BYTES_PER_S = 8e9
"""Of one node to the file system of checkpoints, where a cluster file does not say it: what NVIDIA's DGX SuperPOD
reference architecture with H100 (RA-11333, guidelines for storage performance, "better") asks of one. Recalled, not
looked up, and borrowed by every preset."""


@dataclass(frozen=True, slots=True)
class NodeModel:
    """One host, as the models of collectives need it. Bandwidths are per direction, and effective unless
    named spec.
    """

    num_gpus: int
    gpu_model: str
    """h100, a100, ...; empty on a node without accelerators."""
    gpu: GpuModel | None
    ranks_per_node: int
    """Devices that take a rank: accelerators, or sockets on a node without."""
    nvlink: str
    """nvswitch, mesh (direct links between each pair), or none."""
    nvlinks_per_gpu: int
    nvlink_bytes_per_s: float
    """All NVLinks of one GPU together."""
    nvlink_spec_bytes_per_s: float
    nvlink_pair_bytes_per_s: float
    """Between two GPUs: all of it through an NVSwitch, the pair's own links in a mesh."""
    nvlink_latency_s: float
    num_nvswitches: int
    nvls: bool
    """The NVSwitch reduces in the switch (NVLink SHARP)."""
    nvlink_domain_nodes: int
    """Hosts that share one NVLink domain: 1, or 18 in an NVL72 rack."""
    pcie_generation: int
    pcie_bytes_per_s: float
    """One x16 slot, as measured; NCCL's own search uses its table by generation."""
    pcie_peer_to_peer: bool
    """False where transfers between GPUs go through host memory."""
    num_nics: int
    nic_bytes_per_s: float
    """One NIC."""
    nic_spec_bytes_per_s: float
    nic_latency_s: float
    """Host to host over one cable, one way."""
    gpu_direct_rdma: bool
    nics_beyond_root: bool = False
    """A GPU reaches its NIC through the processor's root ports only: no PCIe switch has both, and no C2C."""
    storage_write_bytes_per_s: float = STORAGE_WRITE_BYTES_PER_S
    storage_read_bytes_per_s: float = STORAGE_READ_BYTES_PER_S
    """All ranks of the node together, to where checkpoints lie."""


@dataclass(frozen=True, slots=True)
class NcclFacts:
    """Facts of a machine that NCCL's tuning reads."""

    version: str
    compute_capability: int
    """0 without accelerators."""
    cpu_vendor: str
    cpu_class: str
    """NCCL's own classes of Intel processors (bdw, skl, srp, erp); empty for others."""
    net: str
    """ib, roce, efa, slingshot, tcp, tcpx, tcpxo; none on a single node."""
    num_nics: int
    nic_bytes_per_s: float
    nic_latency_s: float
    collnet: bool
    """The fabric reduces in its switches (InfiniBand SHARP) and NCCL is set up to use it."""
    library: str = "nccl"
    """nccl, or rccl."""
    plugin: str = ""
    """Of the network, with its version: aws-ofi-nccl 1.9.2; empty where it is not known or NCCL's own."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment that changes times: FI_CXI_RX_MATCH_MODE and its like."""

    def named(self, variant: str) -> bool:
        """Whether more than the library's release is named, so that times are those of one setup among several."""
        return bool(self.plugin or self.settings or variant)

    @property
    def software(self) -> str:
        """The library, its version, plugin and settings in one line: what an answer assumed."""
        settings = [
            f"{name}={value}" + ("" if self._has_effect(name) else " (no effect on simulated times)")
            for name, value in self.settings.items()
        ]
        return ", ".join(filter(None, [f"{self.library.upper()} {self.version}", self.plugin, *settings]))

    def _has_effect(self, setting: str) -> bool:
        """NCCL_IB_DISABLE is why a cluster file has sockets for its network: there it is in every time."""
        return setting in SETTINGS_WITH_EFFECT or (setting == "NCCL_IB_DISABLE" and self.net == "tcp")
