"""From a checked cluster file to a Cluster: host, fabric, and the facts the other models read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.facts import Constant, CpuModel, GpuModel, NcclFacts, NodeModel
from distsim.cluster.graph.grid_fabric import DragonflyFabric, MeshFabric, TorusFabric
from distsim.cluster.graph.host_template import HostTemplate, build_host
from distsim.cluster.graph.tree_fabric import Fabric, Ports, TreeFabric
from distsim.cluster.graph.wiring import HostsOnFabric

if TYPE_CHECKING:
    from distsim.cluster.files.spec import ClusterSpec

__all__ = ["assemble"]


def assemble(spec: ClusterSpec, host: HostTemplate | None = None) -> Cluster:
    """The cluster that *spec* describes; *host* replaces the host that it would build (for imported ones)."""
    nic, nvlink = spec.node.nic, spec.node.gpu.nvlink if spec.node.gpu else None
    template = (host or build_host(spec.node)).staged(spec.node)
    wiring = HostsOnFabric(
        template,
        spec.nodes,
        _fabric(spec),
        nic_bytes_per_s=nic.bandwidth * nic.efficiency if nic else 0.0,
        nic_latency_s=nic.latency if nic else 0.0,
        domain=nvlink.domain_nodes if nvlink else 1,
    )
    node = _node(spec, len(template.devices))
    return Cluster(
        spec.name,
        spec.nodes,
        wiring,
        _cpu(spec, len(template.devices)),
        node,
        _nccl(spec, node),
        calibration=spec.calibration,
        constants={name: Constant(one.value, one.uncertainty, one.source) for name, one in spec.constants.items()},
        errors={
            name: (one.low, one.high, tuple(one.operations.replace(",", " ").split()))
            for name, one in spec.errors.items()
        },
        measured=spec.measured,
        variant=spec.variant,
        description=spec.description,
        source=spec.source,
        spec=None if host else spec,
    )


def _fabric(spec: ClusterSpec) -> Fabric | None:
    fabric, nic = spec.fabric, spec.node.nic
    if nic is None:
        return None
    ports = Ports(spec.nodes, nic.count, nic.bandwidth * nic.efficiency)
    latency = fabric.switch_latency
    match fabric.kind:
        case "star":
            return TreeFabric(ports, nodes_per_leaf=spec.nodes, spines=0, switch_latency_s=latency)
        case "leaf-spine":
            return TreeFabric(
                ports,
                nodes_per_leaf=fabric.nodes_per_leaf,
                spines=fabric.spines,
                oversubscription=fabric.oversubscription,
                adaptive=fabric.routing == "adaptive",
                switch_latency_s=latency,
            )
        case "rail-optimised":
            return TreeFabric(
                ports,
                nodes_per_leaf=fabric.nodes_per_leaf,
                rails=nic.count,
                spines=fabric.spines,
                oversubscription=fabric.oversubscription,
                adaptive=fabric.routing == "adaptive",
                switch_latency_s=latency,
            )
        case "fat-tree":
            return TreeFabric(
                ports,
                nodes_per_leaf=fabric.nodes_per_leaf,
                leaves_per_pod=fabric.leaves_per_pod,
                spines=fabric.spines,
                cores=fabric.cores,
                oversubscription=fabric.oversubscription,
                core_oversubscription=fabric.core_oversubscription,
                adaptive=fabric.routing == "adaptive",
                switch_latency_s=latency,
            )
        case "torus":
            return TorusFabric(ports, fabric.dims, fabric.bandwidth, latency)
        case "ring":
            return TorusFabric(ports, (spec.nodes,), fabric.bandwidth, latency)
        case "full-mesh":
            return MeshFabric(ports, fabric.bandwidth, latency)
        case "dragonfly":
            return DragonflyFabric(
                ports,
                nodes_per_switch=fabric.nodes_per_switch,
                switches_per_group=fabric.switches_per_group,
                bandwidth_bytes_per_s=fabric.bandwidth,
                global_bytes_per_s=fabric.global_bandwidth,
                global_links=fabric.global_links,
                adaptive=fabric.routing == "adaptive",
                switch_latency_s=latency,
            )


def _cpu(spec: ClusterSpec, ranks: int) -> CpuModel:
    cpu = spec.node.cpu
    return CpuModel(
        model=cpu.model,
        vendor=cpu.vendor,
        num_sockets=cpu.sockets,
        cores_per_socket=cpu.cores,
        ranks_per_node=ranks,
        flops_per_s=cpu.flops * cpu.flops_efficiency * cpu.sockets / ranks,
        memory_bytes_per_s=cpu.memory_bandwidth * cpu.memory_efficiency * cpu.sockets / ranks,
        memory_bytes=cpu.memory // ranks,
        op_overhead_s=cpu.op_overhead,
        store_latency_s=cpu.store_latency,
        loopback_bytes_per_s=cpu.loopback,
    )


def _node(spec: ClusterSpec, ranks: int) -> NodeModel:
    node, gpu, nic = spec.node, spec.node.gpu, spec.node.nic
    nvlink = gpu.nvlink if gpu else None
    raw = nvlink.links * nvlink.bandwidth if nvlink else 0.0
    rate = raw * nvlink.efficiency if nvlink else 0.0
    mesh = nvlink is not None and nvlink.topology == "mesh"
    return NodeModel(
        num_gpus=node.gpus,
        gpu_model=gpu.model if gpu else "",
        gpu=None
        if gpu is None
        else GpuModel(
            model=gpu.model,
            compute_capability=gpu.compute_capability,
            memory_bytes=gpu.memory,
            memory_bytes_per_s=gpu.memory_bandwidth,
            flops_per_s={str(dtype): rate for dtype, rate in gpu.flops.items()},
        ),
        ranks_per_node=ranks,
        nvlink=nvlink.topology if nvlink else "none",
        nvlinks_per_gpu=nvlink.links if nvlink else 0,
        nvlink_bytes_per_s=rate,
        nvlink_spec_bytes_per_s=raw,
        nvlink_pair_bytes_per_s=rate / max(1, node.gpus - 1) if mesh else rate,
        nvlink_latency_s=nvlink.latency if nvlink else 0.0,
        num_nvswitches=nvlink.switches if nvlink and not mesh else 0,
        nvls=bool(nvlink and nvlink.sharp),
        nvlink_domain_nodes=nvlink.domain_nodes if nvlink else 1,
        pcie_generation=node.pcie.generation,
        pcie_bytes_per_s=node.pcie.bandwidth * node.pcie.efficiency,
        pcie_peer_to_peer=node.pcie.peer_to_peer,
        num_nics=nic.count if nic else 0,
        nic_bytes_per_s=nic.bandwidth * nic.efficiency if nic else 0.0,
        nic_spec_bytes_per_s=nic.bandwidth if nic else 0.0,
        nic_latency_s=nic.latency if nic else 0.0,
        gpu_direct_rdma=bool(nic and nic.gpu_direct and gpu),
        nics_beyond_root=bool(gpu) and not node.pcie.switches and node.pcie.c2c is None,
        storage_write_bytes_per_s=node.storage_write,
        storage_read_bytes_per_s=node.storage_read,
    )


def _nccl(spec: ClusterSpec, node: NodeModel) -> NcclFacts:
    cpu, nic = spec.node.cpu, spec.node.nic
    return NcclFacts(
        version=spec.nccl.version,
        compute_capability=node.gpu.compute_capability if node.gpu else 0,
        cpu_vendor=cpu.vendor,
        cpu_class=cpu.nccl_class,
        net=nic.net if nic else "none",
        num_nics=node.num_nics,
        nic_bytes_per_s=node.nic_bytes_per_s,
        nic_latency_s=node.nic_latency_s,
        collnet=bool(nic and nic.collnet),
        library=spec.nccl.library,
        plugin=spec.nccl.plugin,
        settings=spec.nccl.settings,
    )
