"""Every key of a cluster file changes some result: a route, a time, or the report; and every fact has a reader."""

from __future__ import annotations

import ast
import copy
import io
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from distsim.cluster.files.load import _from_data, assemble, merged, preset_text
from distsim.cluster.files.spec import ClusterSpec, FabricSpec, Table, check_spec
from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.link import CpuModel, GpuModel, NcclFacts, NodeModel
from distsim.cluster.show import render_cluster
from distsim.collectives import Compiler, Transfer
from distsim.debug.report.console import Console
from distsim.errors import UsageError
from tests.house.tree import ROOT, modules

COMPUTE = {
    *(f"node.cpu.{key}" for key in ("flops", "flops_efficiency", "memory_bandwidth", "memory_efficiency")),
    *(f"node.cpu.{key}" for key in ("op_overhead", "store_latency", "memory")),
    *(f"node.gpu.{key}" for key in ("memory", "memory_bandwidth", "flops")),
}
"""Keys of computing, not of traffic: they become facts that the simulator reads (the test of facts' readers)."""
MEANT: dict[str, Any] = {
    "node.gpu.compute_capability": 80,
    "node.gpu.nvlink.topology": "mesh",
    "node.gpu.nvlink.domain_nodes": 2,
    "node.gpu.flops": {"bf16": 1e12},
    "node.cpu.vendor": "amd",
    "node.cpu.nccl_class": "bdw",
    "node.nic.net": "tcp",
    "nccl.version": "2.16.0",
    "unit_nodes": 2,
    "node.pcie.generation": 1,
    "calibration": dict.fromkeys(
        [f"gloo_all_reduce_{figure}" for figure in ("launch_s", "s_per_byte", "more_s_per_byte", "knee_bytes")], 1e-6
    ),
    "node.cpu.memory": 10**12,
    "node.cpu.cores": 3,
    "fabric.oversubscription": 3.0,
    "fabric.core_oversubscription": 3.0,
    "fabric.dims": [4, 1],
    "fabric.kind": "star",
    "fabric.routing": None,
    "constants": {"ib.ring_more": {"value": 100.0}},
    "errors": {"1 node, < 64 KiB": {"low": 0.9, "high": 1.2}},
    "node.gpu": None,
    "node.gpu.nvlink": None,
    "node.nic": None,
    "node.pcie.c2c": "300GBps",
    "node.gpus": 2,
    "nodes": 6,
}
"""Another value where the next number would not do."""
FABRICS: dict[str, dict[str, Any]] = {
    "star": {},
    "leaf-spine": {"nodes_per_leaf": 2, "spines": 2},
    "rail-optimised": {"nodes_per_leaf": 2, "spines": 2, "routing": "ecmp"},
    "rail-only": {},
    "fat-tree": {"nodes_per_leaf": 1, "leaves_per_pod": 2, "spines": 2, "cores": 2},
    "torus": {"dims": [2, 2], "bandwidth": "20GBps"},
    "ring": {"bandwidth": "20GBps"},
    "full-mesh": {"bandwidth": "20GBps"},
    "dragonfly": {
        "nodes_per_switch": 1,
        "switches_per_group": 2,
        "bandwidth": "20GBps",
        "global_bandwidth": "20GBps",
        "global_links": 2,
        "routing": "ecmp",
    },
}


def _base(kind: str = "leaf-spine", **over: Any) -> dict[str, Any]:
    """Four nodes with everything that a key could be of; *over* is laid on the node."""
    data = tomllib.loads(preset_text("dgx-h100"))
    fabric = {"kind": kind, "switch_latency": "1us", **FABRICS[kind]}
    return merged(
        data, {"name": "made", "nodes": 4, "fabric": fabric, "node": {"gpus": 4, "nic": {"count": 2}, **over}}
    )


def _plain(kind: str = "leaf-spine") -> dict[str, Any]:
    """The same without NVLink: what PCIe is like shows."""
    data = _base(kind)
    data["node"]["gpu"].pop("nvlink")
    return data


def _of_sockets() -> dict[str, Any]:
    return merged(tomllib.loads(preset_text("ethernet-cpu")), {"nodes": 2})


BASES = [_base(), _plain(), _of_sockets()]


def _keys(table: type[Table], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below *table* with its type."""
    for name, field in table.keys().items():
        annotation = field.annotation
        inner = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, Table)]
        yield f"{path}{name}", annotation
        if name in ("fabric", "constants", "errors"):
            continue
        for one in inner:
            yield from _keys(one, f"{path}{name}.")


def _other(key: str, value: Any, annotation: Any) -> Any:
    if key in MEANT:
        return MEANT[key]
    if get_origin(annotation) is Literal:
        return next(one for one in get_args(annotation) if one != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.7 if value else 1e-5
    return f"{value}x"


def _results(data: dict[str, Any]) -> str:
    """Routes with what they are made of, times of every backend, and what is printed; never the facts themselves."""
    try:
        cluster = assemble(check_spec(copy.deepcopy(data), "made"))
    except UsageError as error:
        return f"refused: {error}"
    said = [_times(cluster), _routes(cluster)]
    out = io.StringIO()
    Console(file=out, width=200).print(render_cluster(cluster))
    return "\n".join([*said, out.getvalue(), cluster.source])


def _times(cluster: Cluster) -> str:
    compiler = Compiler(cluster)
    devices = tuple(cluster.devices)
    told = []
    for op, flavour, size, members in (
        ("all_gather", "nccl", 1 << 16, devices[: cluster.node.ranks_per_node]),
        ("all_reduce", "nccl", 1 << 20, devices[: cluster.node.ranks_per_node]),
        ("all_reduce", "nccl", 1 << 24, devices),
        ("all_reduce", "nccl", 1 << 12, devices),
        ("all_gather", "nccl", 1 << 24, devices[: cluster.node.ranks_per_node]),
        ("all_reduce", "nccl", 1 << 28, devices[: cluster.node.ranks_per_node]),
        ("sendrecv", "nccl", 1 << 24, devices),
        ("all_reduce", "gloo", 1 << 20, devices),
    ):
        if flavour == "nccl" and not cluster.node.num_gpus:
            continue
        transfer = Transfer(op, flavour, members, size)
        plan = compiler.compile(transfer)
        told.append(f"{op} {plan.algo} {plan.proto} {plan.alone_s(compiler.links.capacity)!r}")
        told.append(str(compiler.explain(transfer)))
    return "\n".join(told)


def _routes(cluster: Cluster) -> str:
    told = []
    for dst in cluster.devices[1:]:
        for flow in range(3):
            route = [cluster.links[index] for index in cluster.route(cluster.devices[0], dst, flow)]
            told.append(str([(link.src, link.dst, link.bandwidth_bytes_per_s, link.latency_s) for link in route]))
    return "\n".join(told)


def _value(data: dict[str, Any], key: str) -> Any:
    """What stands there once the file is checked, defaults included; None where the table is not there."""
    found: Any = check_spec(copy.deepcopy(data), "made")
    for part in key.split("."):
        found = getattr(found, part, None)
    return found


def _with(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    table = changed
    *above, last = key.split(".")
    for part in above:
        if part != "nccl" and table.get(part) is None:
            return data
        table = table.setdefault(part, {})
    if key == "node.gpu.nvlink.topology":
        changed["node"]["gpu"]["nvlink"].update(domain_nodes=1)
    table[last] = value
    return changed


KEYS = sorted(key for key, _ in _keys(ClusterSpec))


def _differs(data: dict[str, Any], key: str) -> bool:
    annotation = dict(_keys(ClusterSpec))[key]
    changed = _with(data, key, _other(key, _value(data, key), annotation))
    if changed == data:
        return False
    if key == "unit_nodes":
        return _from_data(data, 2, "made").num_nodes != _from_data(changed, 2, "made").num_nodes
    if key in COMPUTE:
        one, other = (assemble(check_spec(copy.deepcopy(each), "made")) for each in (data, changed))
        return (one.cpu, one.node.gpu, one.nccl) != (other.cpu, other.node.gpu, other.nccl)
    return _results(data) != _results(changed)


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key not in ("node", "fabric", "nccl", "node.cpu", "node.pcie", "node.gpu")]
)
def test_every_key_changes_a_result(key: str) -> None:
    """On one of three clusters: with NVLink, without, without accelerators."""
    assert any(_differs(data, key) for data in BASES), f"{key} changes nothing"


@pytest.mark.parametrize(("key", "value"), [("value", 99.0), ("uncertainty", 0.5), ("source", "a folder")])
def test_every_key_of_a_fitted_constant_changes_a_result(key: str, value: Any) -> None:
    """The value times, the others what `topo show` prints."""
    entry = {"value": 50.0, "uncertainty": 0.1, "source": "logs"}
    data = _base() | {"constants": {"ib.ring_more": entry}}
    changed = _base() | {"constants": {"ib.ring_more": entry | {key: value}}}
    assert _results(data) != _results(changed)


def _fabric_keys() -> list[tuple[str, str, Any]]:
    found = []
    for table in FabricSpec.__args__:
        (kind,) = get_args(table.keys()["kind"].annotation)
        found += [(kind, name, field.annotation) for name, field in table.keys().items() if name != "kind"]
    return found


@pytest.mark.parametrize(
    ("kind", "name", "annotation"), _fabric_keys(), ids=lambda one: one if isinstance(one, str) else ""
)
def test_every_key_of_every_fabric_changes_a_result(kind: str, name: str, annotation: Any) -> None:
    """Each kind of fabric on four nodes."""
    data = _base(kind)
    value = _value(data, f"fabric.{name}")
    other = [1, 4] if name == "dims" else _other(name, value, annotation)
    changed = _with(data, f"fabric.{name}", other)
    assert _results(data) != _results(changed), f"fabric.{name} of {kind} changes nothing"


UNREAD: dict[type[Any], set[str]] = {
    CpuModel: set(),
    GpuModel: set(),
    NodeModel: set(),
    NcclFacts: set(),
}


def test_every_fact_has_a_reader() -> None:
    """A fact that nobody reads is a key that changes nothing (house fault no. 4)."""
    made_in = {ROOT / "distsim" / "cluster" / f"{name}.py" for name in ("assemble", "facts", "graphs", "node_link")}
    read: set[str] = set()
    for path in {Path(path).resolve() for path in modules().values()} - {path.resolve() for path in made_in}:
        read |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    for facts, unread in UNREAD.items():
        assert {field.name for field in fields(facts)} - read == unread, facts


def test_without_peer_to_peer_traffic_goes_through_host_memory() -> None:
    """Into the memory of the receiver's socket and out of it, which costs time; NVLink needs none of that."""
    direct, staged = _plain(), _with(_plain(), "node.pcie.peer_to_peer", False)
    one, other = assemble(check_spec(direct, "made")), assemble(check_spec(staged, "made"))
    kinds = [[c.links[i].kind for i in c.route(c.devices[0], c.devices[1])] for c in (one, other)]
    assert "memory" not in kinds[0]
    assert kinds[1].count("memory") == 1
    names = [
        link.src
        for link in (other.links[i] for i in other.route(other.devices[0], other.devices[3]))
        if link.kind == "memory"
    ]
    assert names == ["n0/cpu1"]
    linked = assemble(check_spec(_with(_base(), "node.pcie.peer_to_peer", False), "made"))
    assert {linked.links[i].kind for i in linked.route(linked.devices[0], linked.devices[1])} == {"nvlink"}


def test_without_gpu_direct_a_nic_is_fed_from_host_memory() -> None:
    """On both hosts, at the GPU's own socket."""
    cluster = assemble(check_spec(_with(_base(), "node.nic.gpu_direct", False), "made"))
    route = [cluster.links[index] for index in cluster.route(cluster.devices[0], cluster.devices[4])]
    assert [link.src for link in route if link.kind == "memory"] == ["n0/cpu0", "n1/cpu0"]
    assert all(one.dst == other.src for one, other in pairwise(route))
