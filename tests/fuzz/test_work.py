"""Small files that ask for much work are read by an algorithm that is linear in them, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.fuzz.attempt import bounded_memory, tried
from tests.fuzz.commands import COMMANDS
from tests.fuzz.readers import READERS
from tests.realexec.test_flight_recorder import dump, entry


def _one_number() -> dict[str, bytes]:
    calls = [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 1} for _ in range(40_000)]
    return {"dump_0.json": json.dumps(dump(calls, "[0, 1]")).encode()}


def _wide_group() -> dict[str, bytes]:
    return {"dump_0.json": json.dumps(dump([entry(1), entry(2, state="scheduled")], str(list(range(40_000))))).encode()}


def _sockets() -> dict[str, bytes]:
    return {"made.xml": b'<system version="1">' + b'<cpu host_hash="0x1" arch="x86_64"/>' * 20_000 + b"</system>"}


def _graph(hosts: int, edges: list[tuple[int, int]]) -> dict[str, bytes]:
    nodes = [{"id": str(host), "kind": "cpu", "host": host} for host in range(hosts)]
    ends = [{"source": str(a), "target": str(b), "bandwidth": "1GBps"} for a, b in edges]
    return {"made.json": json.dumps({"directed": False, "nodes": nodes, "edges": ends}).encode()}


def _full_mesh() -> dict[str, bytes]:
    text = "topology: [ FullyConnected ]\nnpus_count: [ 60000 ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n"
    return {"made.yml": text.encode()}


@pytest.mark.parametrize(
    ("reader", "files"),
    [
        ("Flight Recorder JSON", _one_number),
        ("Flight Recorder JSON", _wide_group),
        ("NCCL XML", _sockets),
        ("distsim bench --on made.json", lambda: _graph(20_000, [(a, a + 1) for a in range(19_999)])),
        ("node-link JSON", lambda: _graph(400, [(a, b) for b in range(400) for a in range(b)])),
        ("ASTRA YAML", _full_mesh),
    ],
    ids=["one number", "wide group", "sockets", "line of hosts", "full mesh", "full mesh of NPUs"],
)
def test_a_small_file_takes_no_minutes(reader: str, files: Callable[[], dict[str, bytes]]) -> None:
    """Within the CPU time and memory that a reader may take of any file; each took more than that."""
    (tested,) = [one for one in (*READERS, *COMMANDS) if one.name == reader]
    with bounded_memory():
        broken = tried(tested, files(), reader)
    assert broken is None, broken.trace or str(broken)
