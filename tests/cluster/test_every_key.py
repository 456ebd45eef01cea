"""Every key of a cluster file changes some result: a route, a time, or the report; and every fact has a reader."""

from __future__ import annotations

import ast
import copy
import io
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import torch.distributed as dist

from distsim.cluster.files.load import assemble, from_data, merged, preset_text
from distsim.cluster.files.spec import ClusterSpec, FabricSpec, check_spec
from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.link import CpuModel, GpuModel, NcclFacts, NodeModel
from distsim.cluster.show import render_cluster, to_json
from distsim.collectives import Compiler, Transfer
from distsim.collectives.uncertainty import SIZES
from distsim.debug.report.console import Console
from distsim.errors import UsageError
from distsim.report import print_summary, report_document
from distsim.sim import simulate
from distsim.text.file_tables import FileTable, tables_in
from tests.house.tree import ROOT, modules

NOTES = {"name", "description", "source", "measured", "node.nic.model"}
"""Texts for the reader of the file and of `topo show`."""
REPORTED = {
    *(f"node.cpu.{key}" for key in ("flops", "flops_efficiency", "memory_bandwidth", "memory_efficiency")),
    *(f"node.cpu.{key}" for key in ("model", "cores", "op_overhead", "store_latency")),
    *(f"node.gpu.{key}" for key in ("model", "memory", "memory_bandwidth", "flops", "price", "price_basis", "power")),
    *("node.storage_write", "node.storage_read", "nccl.plugin", "nccl.settings", "variant", "errors"),
}
"""Keys that change what a run reports, and neither a route nor the time of a collective."""
MEANT: dict[str, Any] = {
    "node.gpu.compute_capability": 80,
    "node.gpu.nvlink.topology": "mesh",
    "node.gpu.nvlink.domain_nodes": 2,
    "node.gpu.model": "a100",
    "node.gpu.memory": "40GB",
    "node.gpu.flops": {"bf16": "148TFLOPS"},
    "node.gpu.price": 3.0,
    "node.gpu.power": 350.0,
    "node.cpu.model": "2x AMD EPYC 7742",
    "node.cpu.vendor": "amd",
    "node.cpu.nccl_class": "bdw",
    "node.nic.net": "tcp",
    "nccl.version": "2.16.0",
    "unit_nodes": 2,
    "node.pcie.generation": 1,
    "calibration": dict.fromkeys(
        [f"gloo_all_reduce_{figure}" for figure in ("launch_s", "s_per_byte", "more_s_per_byte", "knee_bytes")], 1e-6
    ),
    "node.cpu.cores": 1,
    "fabric.oversubscription": 3.0,
    "fabric.core_oversubscription": 3.0,
    "fabric.dims": [4, 1],
    "fabric.kind": "star",
    "fabric.routing": None,
    "constants": {"ib.ring_more": {"value": 100.0}},
    "errors": {f"1 node, {size}": {"low": 0.5, "high": 1.9} for size in SIZES},
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
    del data["node"]["gpu"]["price"], data["node"]["gpu"]["price_basis"]
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


BASES = [_base(), _plain(), _of_sockets(), merged(_base(), {"node": {"gpu": {"price": 2.0}}})]


def _keys(table: type[FileTable], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below *table* with its type."""
    for name, field in table.model_fields.items():
        annotation = field.annotation
        inner = [
            one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, FileTable)
        ]
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
    """Routes with what they are made of, and times of every backend; never the facts themselves."""
    try:
        cluster = assemble(check_spec(copy.deepcopy(data), "made"))
    except UsageError as error:
        return f"refused: {error}"
    return f"{_times(cluster)}\n{_routes(cluster)}"


def _shown(data: dict[str, Any]) -> str:
    """What `topo show` prints, and what it writes."""
    cluster, out = assemble(check_spec(copy.deepcopy(data), "made")), io.StringIO()
    Console(file=out, width=200).print(render_cluster(cluster))
    return f"{out.getvalue()}{to_json(cluster)}"


def _train(folder: str) -> str:
    """Three steps, a checkpoint written and read on GPUs, and a word to a store; what torch says of the memory."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, device, width = dist.get_rank(), "cpu", 256
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        device, width = "cuda", 4096
    model = torch.nn.Sequential(torch.nn.Embedding(8, width), torch.nn.Linear(width, width, bias=False)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.zeros(1, width, dtype=torch.int64, device=device)
    for _ in range(3):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            model(words).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.TCPStore(os.environ["MASTER_ADDR"], 29_999, is_master=rank == 0).add("ranks", 1)
    if device == "cpu":
        return ""
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    torch.load(f"{folder}/{rank}.pt")
    return str(torch.cuda.mem_get_info())


def _report(data: dict[str, Any]) -> str:
    """What the report of a run says of times, memory, cost and software: of as many ranks as there are cores."""
    try:
        cluster = assemble(check_spec(copy.deepcopy(data), "made"))
        with tempfile.TemporaryDirectory() as folder:
            outcome = simulate(_train, cluster, [folder], nnodes=1, nproc_per_node=2 if cluster.node.num_gpus else 4)
    except UsageError as error:
        return f"refused: {error}"
    out = io.StringIO()
    print_summary(outcome, out)
    document = {key: value for key, value in report_document(outcome).items() if "wall" not in key and key != "cluster"}
    return f"{outcome.results} {document} {re.sub('[^(]*wall time', '', out.getvalue())}"


@cache
def _before(results: Callable[[dict[str, Any]], str], number: int) -> str:
    """*results* of one of `BASES` as it is."""
    return results(BASES[number])


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


def _differs(number: int, key: str) -> bool:
    data = BASES[number]
    annotation = dict(_keys(ClusterSpec))[key]
    changed = _with(data, key, _other(key, _value(data, key), annotation))
    if changed == data:
        return False
    if key == "unit_nodes":
        return from_data(data, 2, "made").num_nodes != from_data(changed, 2, "made").num_nodes
    results = _shown if key in NOTES else _report if key in REPORTED else _results
    return results(changed) != _before(results, number)


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key not in ("node", "fabric", "nccl", "node.cpu", "node.pcie", "node.gpu")]
)
def test_every_key_changes_a_result(key: str) -> None:
    """On one of four clusters: with NVLink, without, without accelerators, with a price; a note is shown."""
    assert any(_differs(number, key) for number in range(len(BASES))), f"{key} changes nothing"


@pytest.mark.parametrize(("key", "value"), [("value", 99.0), ("uncertainty", 0.5), ("source", "a folder")])
def test_every_key_of_a_fitted_constant_changes_a_result(key: str, value: Any) -> None:
    """The value times; whence it is and how sure is shown."""
    entry = {"value": 50.0, "uncertainty": 0.1, "source": "logs"}
    data = _base() | {"constants": {"ib.ring_more": entry}}
    changed = _base() | {"constants": {"ib.ring_more": entry | {key: value}}}
    results = _results if key == "value" else _shown
    assert results(data) != results(changed)


def _fabric_keys() -> list[tuple[str, str, Any]]:
    found = []
    for table in tables_in(FabricSpec):
        (kind,) = get_args(table.model_fields["kind"].annotation)
        found += [(kind, name, field.annotation) for name, field in table.model_fields.items() if name != "kind"]
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
