"""Loads clusters from presets and cluster files."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.fabrics import (
    DragonflyFabric,
    Fabric,
    MeshFabric,
    Ports,
    RailFabric,
    TorusFabric,
    TreeFabric,
)
from distsim.cluster.graph.host_template import HostTemplate, build_host
from distsim.cluster.graph.link import Constant, CpuModel, GpuModel, NcclFacts, NodeModel
from distsim.cluster.graph.mixed_hosts import MixedHosts, slowest
from distsim.cluster.graph.wiring import HostsOnFabric
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, load_toml, read_bytes

if TYPE_CHECKING:
    from distsim.cluster.files.spec import ClusterSpec


def assemble(
    spec: ClusterSpec, host: HostTemplate | None = None, kinds: Sequence[tuple[int, ClusterSpec]] = ()
) -> Cluster:
    """Build the cluster that *spec* describes.

    Args:
        spec: The cluster, with its first kind of node.
        host: The host that replaces that of the spec.
        kinds: Number of nodes and specification of each kind of node, if there are several.
    """
    hosts = _hosts(spec, host, spec)
    wiring: HostsOnFabric | MixedHosts = hosts
    ranks = len(hosts.template.devices)
    node, nodes = _node(spec, ranks), [_node(each, ranks) for _, each in kinds]
    if kinds:
        kind_of = [kind for kind, (count, _) in enumerate(kinds) for _ in range(count)]
        largest = max((each for _, each in kinds), key=lambda each: each.node.nic.count if each.node.nic else 0)
        wiring = MixedHosts([_hosts(each, None, largest) for _, each in kinds], kind_of)
        node, nodes = slowest(nodes), [nodes[kind] for kind in kind_of]
    nccl = _nccl(spec, node)
    if kinds:
        nccl = replace(nccl, compute_capability=min(one.gpu.compute_capability for one in nodes if one.gpu))
    return Cluster(
        spec.name,
        spec.nodes,
        wiring,
        _cpu(spec, ranks),
        node,
        nccl,
        nodes=nodes,
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
        spec=None if host or kinds else spec,
    )


def _hosts(spec: ClusterSpec, host: HostTemplate | None, largest: ClusterSpec) -> HostsOnFabric:
    """Return the hosts of *spec* on a fabric with as many ports as *largest* needs."""
    nic, nvlink = spec.node.nic, spec.node.gpu.nvlink if spec.node.gpu else None
    return HostsOnFabric(
        (host or build_host(spec.node)).staged(spec.node),
        spec.nodes,
        _fabric(largest),
        nic_bytes_per_s=nic.bandwidth * nic.efficiency if nic else 0.0,
        nic_latency_s=nic.latency if nic else 0.0,
        domain=nvlink.domain_nodes if nvlink else 1,
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
        case "leaf-spine" | "rail-optimised" | "fat-tree":
            return TreeFabric(
                ports,
                nodes_per_leaf=fabric.nodes_per_leaf,
                rails=nic.count if fabric.kind == "rail-optimised" else 1,
                leaves_per_pod=getattr(fabric, "leaves_per_pod", None),
                spines=fabric.spines,
                cores=getattr(fabric, "cores", 0),
                oversubscription=fabric.oversubscription,
                core_oversubscription=getattr(fabric, "core_oversubscription", 1.0),
                adaptive=fabric.routing == "adaptive",
                switch_latency_s=latency,
            )
        case "rail-only":
            return RailFabric(ports, latency)
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
            price=gpu.price,
            price_basis=gpu.price_basis,
            power_w=gpu.power,
        ),
        ranks_per_node=ranks,
        nvlink=nvlink.topology if nvlink else "none",
        nvlinks_per_gpu=nvlink.links if nvlink else 0,
        nvlink_bytes_per_s=rate,
        nvlink_spec_bytes_per_s=raw,
        nvlink_pair_bytes_per_s=rate / max(1, node.gpus - 1) if mesh else rate,
        nvlink_latency_s=nvlink.latency if nvlink else 0.0,
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


LARGEST_FILE = 64 << 20
MAX_NODES = 32_768
"""Maximum number of nodes; a larger number is taken for a typing error."""

LONGEST_NAME = 4096
_SUFFIXES = (".toml", ".xml", ".json", ".yml", ".yaml")


@functools.cache
def _presets() -> tuple[str, ...]:
    folder = resources.files("distsim.cluster") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def preset_names() -> list[str]:
    """Return the names of the built-in clusters, in alphabetical order."""
    return list(_presets())


def preset_text(name: str) -> str:
    """Return the TOML text of a preset."""
    return (resources.files("distsim.cluster") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def preset_variants(name: str) -> dict[str, str]:
    """Return the software variants of a preset with their descriptions, the default variant first."""
    data = _preset_data(name)
    known = {each: str(table.get("description", "")) for each, table in data.get("variants", {}).items()}
    usual = [each for each in known if each == data.get("variant")]
    return {each: known[each] for each in [*usual, *(each for each in known if each not in usual)]}


def load_cluster(name: str) -> Cluster:
    """Load a cluster by preset name or from a file.

    Args:
        name: `preset[:variant][:nodes]`, such as `dgx-h100:4`, or the path of a cluster TOML, an NCCL topology XML, a
            networkx node-link JSON or an ASTRA-sim network YAML. `file:nodes` sets the number of nodes of a TOML or XML
            file.

    Returns:
        The cluster as a graph of links.

    Raises:
        UsageError: There is no such preset or file, or the file has mistakes.
    """
    stem, variant, nodes = _split(name)
    path = Path(stem)
    file_like = path.suffix.lower() in _SUFFIXES or "/" in stem or _exists(path)
    if path.suffix == ".py":
        script = brief(str(path), 300)
        raise UsageError(
            f"expected a cluster (a preset or a .toml file), got the Python script {script}; the script comes last: "
            f"distsim run [--on CLUSTER] {script}"
        )
    if file_like and stem not in preset_names():
        return _load_file(path, variant, nodes)
    if stem not in preset_names():
        raise UsageError(_unknown(stem))
    return from_data(_preset_data(stem), nodes, stem, variant=variant)


_OF_THE_MODEL = ("memory", "memory_bandwidth", "flops")


def kind_of(cluster: str) -> str:
    """Return the kind of machine of a cluster: its name without the number of nodes."""
    kind, colon, nodes = cluster.rpartition(":")
    return kind if colon and nodes.isdigit() else cluster


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge *over* into *base*, table by table.

    A table of another `kind` replaces the one in *base*. A GPU of another `model` does not inherit the figures of the
    one in *base*: those of its data file apply.
    """
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            same = value.get("kind", below.get("kind")) == below.get("kind")
            if key == "gpu" and value.get("model", below.get("model")) != below.get("model"):
                below = {name: one for name, one in below.items() if name not in _OF_THE_MODEL}
            result[key] = merged(below, value) if same else value
        else:
            result[key] = value
    return result


def read_text(path: Path) -> str:
    """Return the text of a file that the user named, or raise UsageError."""
    try:
        text = read_bytes(path, LARGEST_FILE).decode("utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"no such file: {brief(str(path), 300)} (expected a cluster file, or a preset: {_list()})"
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory: expected a cluster file") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x} at {error.start}"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {brief(str(path), 300)}: {error.strerror or error}") from None
    if not text.strip():
        raise UsageError(f"{path} is empty: expected a cluster file (distsim topo show dgx-h100 --toml prints one)")
    return text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _split(name: str) -> tuple[str, str | None, int | None]:
    """Split *name* into preset or file, variant, and number of nodes.

    A part after a colon that is not a number names a variant.
    """
    if not name.strip():
        raise UsageError(f"expected a cluster: a preset ({_list()}) or a TOML file, got an empty name")
    if len(name) > LONGEST_NAME or "\0" in name:
        raise UsageError(f"expected a cluster: a preset ({_list()}) or a file, got {brief(name)}")
    if _exists(Path(name)) or ":" not in name:
        return name, None, None
    stem, _, last = name.rpartition(":")
    if not stem:
        raise UsageError(f"expected a cluster before ':{brief(last)}': a preset ({_list()}) or a TOML file, got none")
    try:
        nodes: int | None = int(last)
    except ValueError:
        return stem, last, None
    if nodes is not None and not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"{brief(name)}: expected 1 to {MAX_NODES} nodes, got {brief(nodes)}")
    if ":" in stem and not _exists(Path(stem)):
        stem, _, last = stem.rpartition(":")
        return stem, last, nodes
    return stem, None, nodes


def _load_file(path: Path, variant: str | None, nodes: int | None) -> Cluster:
    text = read_text(path)
    if variant is not None and path.suffix.lower() != ".toml":
        raise UsageError(_no_variant(str(path), variant, {}))
    match path.suffix.lower():
        case ".toml":
            return from_data(_parse_toml(text, path), nodes, str(path), variant=variant)
        case ".xml":
            from distsim.cluster.files.nccl_xml import from_nccl_xml

            host, data = from_nccl_xml(text, str(path))
            return from_data(data, nodes, str(path), host)
        case ".json" | ".yml" | ".yaml" if nodes is not None:
            raise UsageError(f"{path} says itself how many nodes there are: leave out ':{nodes}'")
        case ".json":
            from distsim.cluster.files.graph_files import from_node_link

            return from_node_link(text, str(path), _usual)
        case ".yml" | ".yaml":
            from distsim.cluster.files.graph_files import from_astra

            return from_astra(text, str(path), _usual)
        case other:
            raise UsageError(f"{path}: expected a file ending in {', '.join(_SUFFIXES)}, got {other!r}")


def _usual() -> Cluster:
    from distsim.cluster.graph.wiring import USUAL

    return load_cluster(USUAL)


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return load_toml(text)
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def from_data(
    data: Mapping[str, Any],
    nodes: int | None,
    where: str,
    host: HostTemplate | None = None,
    variant: str | None = None,
) -> Cluster:
    """Build the cluster that the tables *data* describe; *where* names their file in complaints."""
    from distsim.cluster.files.spec import check_spec

    data = dict(data)
    own_fabric = data.get("fabric", {})
    if "base" in data:
        base = _base(data.pop("base"), where)
        if isinstance(data.get("node"), list):
            data["node"] = [_on_base(table, base.get("node", {}), where) for table in data["node"]]
        data = merged(base, data)
    data = _of_variant(data, variant, where)
    where = f"preset {where}" if where in preset_names() else where
    if nodes is not None and isinstance(data.get("node"), list):
        raise UsageError(f"{where} says itself how many nodes there are of each kind: leave out ':{nodes}'")
    if nodes is not None:
        unit = data.get("unit_nodes", 1)
        data["nodes"] = nodes * (unit if isinstance(unit, int) and 1 <= unit <= MAX_NODES else 1)
    tables = data.get("node")
    if isinstance(tables, list):
        from distsim.cluster.files.node_kinds import node_kinds

        kinds = node_kinds(data, tables, where)
        cluster = assemble(kinds[0][1], None, kinds if len(kinds) > 1 else ())
        cluster.warnings = _without_effect(kinds[0][1], own_fabric, where)
        return cluster
    spec = check_spec(data, where)
    cluster = assemble(spec, host)
    cluster.warnings = _without_effect(spec, own_fabric, where)
    return cluster


def _on_base(table: Any, node: Mapping[str, Any], where: str) -> Any:
    """Return a table of `[[node]]` merged into the *node* of the file's base, or of the preset that it names itself."""
    if not isinstance(table, Mapping):
        return table
    own = dict(table)
    if "base" in own:
        node = _base(own.pop("base"), where).get("node", {})
    return merged(node, own)


def _without_effect(spec: ClusterSpec, own_fabric: Mapping[str, Any], where: str) -> list[str]:
    """Return a warning for an oversubscription that affects no transfer, because all hosts are under one leaf."""
    leaf = getattr(spec.fabric, "nodes_per_leaf", None)
    if (
        leaf is None
        or spec.nodes > leaf
        or "nodes_per_leaf" in own_fabric
        or own_fabric.get("oversubscription", 1) == 1
    ):
        return []
    hosts = "the only host is" if spec.nodes == 1 else f"all {spec.nodes} hosts are"
    return [
        f"{where}: fabric.oversubscription {own_fabric['oversubscription']:g} has no effect: {hosts} under one leaf "
        f"(nodes_per_leaf is {leaf} where the file does not say it); write nodes_per_leaf = N beside it"
    ]


@functools.cache
def _preset_data(name: str) -> dict[str, Any]:
    """Return a preset's content merged into that of its base preset. It is cached, so callers must not change it."""
    data = tomllib.loads(preset_text(name))
    if "base" not in data:
        return data
    below = _base(data.pop("base"), f"preset {name}")
    for key in ("measured", "errors"):  # what was measured on another machine is borrowed here: the preset says it
        below.pop(key, None)
    return merged(below, data)


def _base(given: Any, where: str) -> dict[str, Any]:
    """Return the content of the preset (and variant) that a file names as its base."""
    stem, _, variant = given.partition(":") if isinstance(given, str) else (str(given), "", "")
    if stem not in preset_names():
        raise UsageError(f"{where}: base: {_unknown(stem)}")
    return _without_list_price(_of_variant(_preset_data(stem), variant or None, f"{where}: base {stem}"))


def _without_list_price(data: dict[str, Any]) -> dict[str, Any]:
    """Return *data* without a list price: it is that of one offer, and not of a machine that is built like it."""
    gpu = data.get("node", {}).get("gpu", {})
    if not gpu.get("price_basis"):
        return data
    gpu = {key: value for key, value in gpu.items() if key not in ("price", "price_basis")}
    return data | {"node": data["node"] | {"gpu": gpu}}


def _of_variant(data: Mapping[str, Any], variant: str | None, where: str) -> dict[str, Any]:
    """Merge a variant into *data*; if *variant* is None, the default one, which the key `variant` names."""
    data = dict(data)
    variants = data.pop("variants", {})
    if not isinstance(variants, Mapping) or not all(isinstance(one, Mapping) for one in variants.values()):
        raise UsageError(f"{where}: variants: expected a table of tables, got {brief(variants)}")
    chosen = data.get("variant", "") if variant is None else variant
    if variant is None and (not variants or not isinstance(chosen, str)):
        return data
    if chosen not in variants:
        raise UsageError(_no_variant(where, chosen, variants))
    if variant is not None and isinstance(data.get("name"), str):
        data["name"] = f"{data['name']}:{variant}"
    over = {**variants[chosen], "variant": chosen}
    descriptions = [one for one in (data.get("description"), over.get("description")) if isinstance(one, str)]
    return merged(data, {**over, **({"description": "; ".join(descriptions)} if descriptions else {})})


def _no_variant(where: str, variant: str, variants: Mapping[str, Any]) -> str:
    if not variants:
        return (
            f"{brief(where)}:{brief(variant)}: expected a number of nodes after ':', got {brief(variant)!r} "
            f"(as in {brief(where)}:2)"
        )
    return (
        f"{brief(where)}: expected a variant of its software ({', '.join(variants)}) or a number of nodes after ':', "
        f"got {brief(variant)!r}"
    )


def _list() -> str:
    return ", ".join(preset_names())


def _unknown(stem: str) -> str:
    wanted = stem.lower()[:80]
    near = (
        [name for name in preset_names() if name == f"dgx-{wanted}"]  # h100 for a GPU: NVIDIA's own machine
        or difflib.get_close_matches(wanted, preset_names(), 1)
        or [name for name in preset_names() if name.startswith(wanted) or wanted in name.split("-")]
    )
    hint = f"; did you mean '{near[0]}'?" if near else ":"
    return f"unknown cluster '{brief(stem)}'{hint} expected a preset ({_list()}) or a TOML file"
