"""Every reader of distsim's with files it is glad of: what a user would do with such a file, in this process.

Each is right to answer, or to raise a UsageError; anything else is a break.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distsim.errors import UsageError

__all__ = ["READERS", "Reader", "fuzzed_names"]


@dataclass(frozen=True)
class Reader:
    """*act* is given a folder with the files of *seeds*, of which those in *fuzzed* are changed."""

    name: str
    seeds: Callable[[], dict[str, bytes]]
    act: Callable[[Path], None]
    fuzzed: str = "*"
    weight: int = 10
    """How many inputs, against the others."""
    cpu_s: float = 0.0
    """CPU time of one input; 0: as all readers."""
    spoils: bool = False
    """Whether there may be a folder, a pipe, a device or nothing in the place of a file."""


def fuzzed_names(reader: Reader) -> list[str]:
    """The files of *reader* that are changed."""
    return sorted(fnmatch.filter(reader.seeds(), reader.fuzzed))


def _printed(act: Callable[[], Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        act()


# Clusters ------------------------------------------------------------------------------------------------


def _use_cluster(path: Path) -> None:
    from distsim.cluster import load_cluster
    from distsim.cluster.files.graph_files import to_node_link
    from distsim.cluster.show import render_cluster, to_json
    from distsim.collectives import Compiler, Transfer
    from distsim.debug.report.console import Console

    cluster = load_cluster(str(path))
    devices = tuple(cluster.devices[:4])
    cluster.route(devices[0], devices[-1])
    backend = "nccl" if cluster.node.num_gpus else "gloo"
    for op in ("all_reduce", "sendrecv"):
        members = devices[:2] if op == "sendrecv" else devices
        if len(members) > 1:
            compiler = Compiler(cluster)
            compiler.compile(Transfer(op, backend, members, 1 << 20)).alone_s(compiler.links.capacity)
    if len(cluster.links) < 3000:
        Console(file=io.StringIO(), width=100).print(render_cluster(cluster))
        json.dumps(to_json(cluster))
        json.dumps(to_node_link(cluster))
    if cluster.spec is not None:
        cluster.to_toml()


def _cluster(name: str, seeds: Callable[[], dict[str, bytes]], weight: int = 10) -> Reader:
    return Reader(name, seeds, lambda folder: _use_cluster(next(iter(folder.iterdir()))), weight=weight)


@cache
def toml() -> dict[str, bytes]:
    from distsim.cluster import load_cluster

    text = load_cluster("pcie-4090").to_toml().replace("nodes = 1", "nodes = 2")
    return {"made.toml": text.encode()}


def based_toml() -> dict[str, bytes]:
    text = """base = "snellius-h100"
name = "mine"
nodes = 3
[node]
gpus = 2
[node.gpu.nvlink]
links = 4
bandwidth = "25GBps"
[node.nic]
count = 2
bandwidth = "200Gbps"
gpu_direct = false
[fabric]
kind = "leaf-spine"
nodes_per_leaf = 2
spines = 2
oversubscription = 1.5
[calibration]
gloo_all_reduce_launch_s = 1e-4
gloo_all_reduce_s_per_byte = 1e-9
gloo_all_reduce_more_s_per_byte = 2e-9
gloo_all_reduce_knee_bytes = 100000
"""
    return {"based.toml": text.encode()}


@cache
def node_link() -> dict[str, bytes]:
    from distsim.cluster import load_cluster
    from distsim.cluster.files.graph_files import to_node_link

    return {"made.json": json.dumps(to_node_link(load_cluster("pcie-4090:1"))).encode()}


def xml() -> dict[str, bytes]:
    from tests.cluster.test_import import HOPPER

    return {"made.xml": HOPPER.encode()}


def other_xml() -> dict[str, bytes]:
    from tests.cluster.test_import import AMPERE

    return {"made.xml": AMPERE.encode()}


def astra() -> dict[str, bytes]:
    from tests.cluster.test_import import ASTRA

    return {"made.yml": ASTRA.encode()}


# Scenarios -----------------------------------------------------------------------------------------------

SCENARIO = b"""schema = "distsim.scenario/1"
teaches = "A rank that is late."
program = "prog.py:step"
args = ["8", "x"]
on = "dgx-a100:2"
nproc_per_node = 2
backend = "sim"
seed = 3
explore = "60s"
guards = ["nan", "buffers"]
[env]
A = "b"
[limits]
virtual_time_s = "10s"
wall_time_s = 60.0
events = 1000
[[faults]]
what = "delay"
ranks = [1]
call = "all_reduce #3 on dp"
delay_s = "5ms"
[[faults]]
what = "link_slow"
link = "n0/gpu0->*"
factor = 0.5
for_s = 1.5
[[faults]]
what = "jitter"
period_s = 1e-3
pause_s = "10us"
[expect]
kind = "straggler"
culprits = [1]
line = "# <- culprit"
call = { op = "all_reduce", seq = 3 }
memory_below = "512MiB"
busbw_above = { all_reduce = "1GB/s" }
utilisation_below = { "n*" = 0.9 }
[expect.prints]
all = ["x"]
0 = ["y"]
[expect.step_time]
band = 0.1
"""
PROGRAM = b"def step(*args):\n    return 1  # <- culprit\n"


def scenario() -> dict[str, bytes]:
    return {"one.toml": SCENARIO, "prog.py": PROGRAM, "one.baseline.json": b'{"virtual_time_s": 1.5, "compute_s": 2}'}


def _use_scenario(folder: Path) -> None:
    from distsim.scenario.expect.expect import baseline_path, read_baseline
    from distsim.scenario.file.load import is_scenario, load_scenarios

    is_scenario(folder / "one.toml")
    (scenario,) = load_scenarios([folder / "one.toml"])
    assert scenario.world_size >= 1
    str([scenario.teaches, scenario.name, scenario.rules, scenario.cluster])
    read_baseline(baseline_path(scenario))


def _use_baseline(folder: Path) -> None:
    from distsim.scenario.expect.expect import read_baseline

    read_baseline(folder / "one.baseline.json")


def _vary() -> dict[str, bytes]:
    return {
        **scenario(),
        "words": b"cluster.nodes=1,2,4\nfaults[0].delay_s=1ms,2ms\nargs[1]=a,b\non=dgx-h100:1,dgx-a100:1\n",
    }


def _use_vary(folder: Path) -> None:
    from distsim.planning.variations import checked, parse_variation, point_of
    from distsim.scenario.file.load import load_scenario

    scenario = load_scenario(folder / "one.toml")
    for line in (folder / "words").read_text("utf-8", "surrogateescape").splitlines():
        variation = checked(parse_variation(line), scenario)
        for value in variation.values[:2]:
            point_of(scenario, {variation.path: value})


def _words() -> dict[str, bytes]:
    return {
        "words": b"rank2@5+0.1s,buffered,any=7\nall_reduce #3 on dp\n400Gbps\n5us\n80GiB\n989TFLOPS\n64M\n1e3Kibps\n"
        b"hang and not (slow or big)\ndgx-h100:2\n8,1K,64M\n"
    }


def _use_words(folder: Path) -> None:
    """What a user types: every word into every parser of words."""
    from distsim.cluster import load_cluster
    from distsim.scenario.explore.budget import Budget
    from distsim.scenario.suite import matching
    from distsim.sim.faults.fault import CallPoint
    from distsim.sim.kernel.chooser import ReplayString
    from distsim.text import units

    class Named:
        name = "hangs/missing"

    parsers: list[Callable[[str], Any]] = [
        units.parse_bandwidth, units.parse_time, units.parse_memory, units.parse_flops, units.parse_size,
        ReplayString.parse, Budget.read, CallPoint.parse, lambda text: matching(text)(Named()),  # type: ignore[arg-type]
        lambda text: load_cluster(text) if len(text) < 12 or not text.startswith(("dgx", "gb")) else None,
    ]  # fmt: skip
    for line in (folder / "words").read_text("utf-8", "surrogateescape").splitlines():
        for parse in parsers:
            with contextlib.suppress(UsageError):
                parse(line)


# Measurements --------------------------------------------------------------------------------------------

INDEX = b"""file,op,on,nnodes,nproc_per_node,launcher,algo,nccl,use
one.csv,all_reduce,dgx-a100,1,4,process,,2.20,fit
"""
ROWS = b"# source: a friend\nsize_bytes,time_us,ip_time_us\n1024,20.5,21\n65536,40,41\n33554432,300,310\n"


def logs() -> dict[str, bytes]:
    from tests.calibration.logs import log

    times = [(8 << (3 * power), 20.0 + 2.0**power) for power in range(8)]
    said = ("NCCL version 2.21.5+cuda12.4", "n:1:2 [0] NCCL INFO Using network IB", "+ export FI_CXI_X=1")
    return {
        "all_reduce.log": log("all_reduce", times, nodes=2, gpus=2, heard=said).encode(),
        "both.log": (
            log("alltoall", times, gpus=4, heard=said) + log("all_gather", times, gpus=4, heard=said)
        ).encode(),
    }


def _use_logs(folder: Path) -> None:
    from distsim.calibration.logs.fit import benches_of
    from distsim.calibration.logs.folder import agreed, fits, read_logs

    logs = agreed(read_logs(folder))
    fits(logs, "dgx-h100")
    for bench in benches_of(logs.runs, "dgx-h100", logs.version):
        bench.times_us([0])


def tables() -> dict[str, bytes]:
    return {"_index.csv": INDEX, "one.csv": ROWS}


def _command(*words: str) -> None:
    from distsim.cli.dispatch import _dispatch

    _printed(lambda: _dispatch(list(words), own_process=False))


# Records -------------------------------------------------------------------------------------------------


@cache
def rings() -> dict[str, bytes]:
    from distsim.debug.records import MainPosition, Site
    from distsim.debug.records.signature import Signature
    from distsim.debug.rings import layout as rings
    from distsim.debug.rings.files import ring_path
    from distsim.debug.rings.writer import RingWriter

    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for rank in range(2):
            ring = RingWriter(
                ring_path(folder, rank, 0, "job"), rank=rank, world_size=2, local_rank=rank, job="job", attempt=0
            )
            group = ring.group("0", "default_pg", [0, 1])
            site = ring.entry(rings.TABLE_SITE, "s", [["train.py", 7, "step"], ["train.py", 20, "main"]])
            thread = ring.entry(rings.TABLE_THREAD, "t", [1, "MainThread"])
            content = Signature("all_reduce", ((4, 4),), (), ("float32",), "SUM", nbytes=64)
            where, print_ = ring.signature("k", lambda _key, content=content: (content, False))
            ring.header(rings.W_JOINED, 1)
            for seq in range(1, 5 - rank):
                state = rings.ISSUED if seq == 4 else rings.COMPLETED
                ring.issue(
                    state | (rings.WAITING if seq == 4 else 0), group, thread, seq, where, site, print_, 5, -1, 0
                )
            ring.position(MainPosition(Site("/usr/lib/x.py", 3, "wait"), (Site("train.py", 7, "step"),), ("key",)))
            if rank == 1:
                said = {"error": "ValueError: bad", "traceback": "Traceback ...", "frames": [["train.py", 9, "f"]]}
                ring.header(rings.W_EXCEPTION, ring.entry(rings.TABLE_TEXT, "e", said))
                ring.header(rings.W_FINDING, ring.entry(rings.TABLE_TEXT, "f", {"kind": "ddp", "text": "p unused"}))
                ring.header(rings.W_LIFE, rings.LIFE_RAISED)
                ring.header(rings.W_EXIT_CODE, 1001)
            ring.close()
        for path in folder.iterdir():
            files[path.name] = path.read_bytes()
    return files


@cache
def beside() -> dict[str, bytes]:
    diagnosis = {
        "kind": "missing_rank", "culprits": [1], "victims": [0],
        "sites": {"0": {"file": "a.py", "line": 3, "function": "f"}},
        "group": {"name": "0", "description": "dp", "ranks": [0, 1]}, "call": {"op": "all_reduce", "seq": 4},
        "stuck": {"0": {"op": "all_reduce", "group_ranks": [0, 1], "seq": 4, "file": "a.py", "line": 3}}, "cycle": None,
        "pair": [0, 1], "detected_after_s": 1.5, "explanation": "Rank 1 never called it.", "suggestion": "Look.",
    }  # fmt: skip
    verdict = {"schema": "distsim.report/1", "diagnoses": [diagnosis], "exit_code": 3, "world_size": 2, "job": "job"}
    return {
        "verdict.job.json": json.dumps(verdict).encode(),
        "exit.00001.a0.json": b'{"rank": 1, "attempt": 0, "code": -6}',
        "rank00001.job.stacks": b"Fatal Python error: Aborted\n\nCurrent thread 0x00000001 (most recent call first):\n"
        b'  File "/x/train.py", line 7 in step\n',
        "launcher.json": b'{"pid": 1, "start": 5, "host": "x"}',
    }


def _use_records(folder: Path) -> None:
    from distsim.cli import diagnose, watch
    from distsim.debug.monitor.loop import Monitor
    from distsim.debug.settings import Settings

    here = os.getcwd()
    try:
        os.chdir(folder)
        args = argparse.Namespace(directory=folder, report=str(folder / "report.json"), sources=None, html=None)
        _printed(lambda: diagnose.run(args))
        if next(folder.glob("*.ring"), None) is None:
            return
        _printed(lambda: watch.run(argparse.Namespace(directory=folder, interval=0.1, job="", html=None, metrics=None)))
    finally:
        os.chdir(here)
    monitor = Monitor(folder, Settings(), None)
    monitor.host.find()
    monitor.host.read()
    monitor.host.comparer.check()
    monitor.look()


def _with_rings(more: Callable[[], dict[str, bytes]]) -> Callable[[], dict[str, bytes]]:
    return lambda: {**rings(), **more()}


@cache
def _dumps() -> dict[str, Any]:
    from tests.realexec.test_flight_recorder import dump, entry

    first = dump([entry(1), entry(2, state="scheduled")], "[0, 1]")
    sends = dump([entry(1), entry(1, op="send 1->0", is_p2p=True, p2p_seq_id=1)], "[0, 1]")
    return {"dump_0": first, "dump_1": sends}


def pickles(protocol: int) -> Callable[[], dict[str, bytes]]:
    return lambda: {name: pickle.dumps(said, protocol=protocol) for name, said in _dumps().items()}


def json_dumps() -> dict[str, bytes]:
    return {f"{name}.json": json.dumps(said).encode() for name, said in _dumps().items()}


# Monitors ------------------------------------------------------------------------------------------------


def _wire() -> dict[str, bytes]:
    from distsim.debug.monitor.sent_evidence import sent
    from distsim.text.codec import pack
    from tests.debug.builders import all_reduce, barrier, play

    evidence = play(2, {0: [all_reduce(3), barrier(4)], 1: [all_reduce(3)]})
    return {"said": pack(sent(evidence))}


def _use_wire(folder: Path) -> None:
    """What another host's monitor says, heard by a leader: nothing comes out of it but a note."""
    from distsim.debug.diagnosis.diagnose import diagnose
    from distsim.debug.monitor.host import Host
    from distsim.debug.monitor.peers import PeerSession
    from distsim.debug.monitor.protocol import Message
    from distsim.debug.monitor.sent_evidence import SentEvidence
    from distsim.debug.records import Evidence
    from distsim.text.codec import unpack

    class Leading:
        def __init__(self) -> None:
            self.notes: list[str] = []
            self.lost: list[Any] = []
            self.links: list[Any] = []

        def look(self, request: Any) -> list[Any]:
            try:
                return [(None, Message(evidence=unpack((folder / "said").read_bytes(), SentEvidence)))]
            except ValueError:
                return []

    together = PeerSession(folder)
    together.leader = Leading()  # type: ignore[assignment]
    evidence = Evidence(2, {}, {})
    together.add(evidence, Host(folder, None), False, {}, 0)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):
        diagnose(evidence)


def _calls() -> dict[str, bytes]:
    from distsim.text.codec import pack
    from tests.debug.pace_families import own_work
    from tests.debug.test_pace_hosts import OtherHosts, calls_of

    others = OtherHosts(calls_of(own_work("jitter of 2%", 0, steps=60), is_async=False), 4, None)
    return {"said": pack(others({})[0][0])}


def _use_calls(folder: Path) -> None:
    """The calls that another host's monitor says its ranks have made, judged by a leader."""
    from distsim.debug.monitor.sent_calls import SentCalls
    from distsim.debug.monitor.straggler_watch import PaceWatch
    from distsim.text.codec import unpack

    host: Any = SimpleNamespace(readers={}, world_size=4, notes=[])
    with contextlib.suppress(ValueError):
        sent = unpack((folder / "said").read_bytes(), SentCalls)
        PaceWatch().look(host, lambda since: [(sent, None)])


def _inspector() -> dict[str, bytes]:
    from tests.debug.pace_families import own_work
    from tests.debug.test_pace_durations import write_inspector

    with tempfile.TemporaryDirectory() as folder:
        write_inspector(Path(folder), own_work("jitter of 2%", 0, steps=60))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _handshake() -> dict[str, bytes]:
    from distsim.debug.monitor.protocol import LENGTH, Hello, Message, Status, sign
    from distsim.text.codec import pack

    hello = Hello("0" * 64, sign("s", "follower", "1" * 64, "0" * 64))
    frames = pack(hello), bytes(32) + pack(Message(status=Status()))
    return {"sent": b"".join(len(frame).to_bytes(LENGTH) + frame for frame in frames)}


def _use_link(folder: Path) -> None:
    from distsim.debug.monitor.protocol import PeerLink

    for leads in (True, False):
        ours, theirs = socket.socketpair()
        link = PeerLink(ours, "s", leads=leads, nonce="1" * 64)
        theirs.setblocking(False)
        with contextlib.suppress(OSError):
            theirs.send((folder / "sent").read_bytes()[:100_000])
        for _ in range(3):
            link.receive()
        link.close()
        theirs.close()


def _left_words() -> dict[str, bytes]:
    return {
        "lead.json": b'{"addresses": ["192.0.2.1"], "secret": "x", "salt": "y"}',
        "follow.json": b'{"address": "127.0.0.1", "port": 5, "secret": "x"}',
    }


def _use_left_words(folder: Path) -> None:
    from distsim.debug.monitor.peers import PeerSession

    host = SimpleNamespace(notes=[], feed=None)

    for name in ("lead.json", "follow.json"):
        together = PeerSession(folder)
        together._choose(SimpleNamespace(host=host))  # type: ignore[arg-type]
        if together.leader is not None:
            together.leader.close()
        (folder / name).unlink()


READERS = [
    _cluster("cluster TOML", toml, 8),
    _cluster("cluster TOML with a base", based_toml, 8),
    _cluster("node-link JSON", node_link, 6),
    _cluster("NCCL XML", xml, 6),
    _cluster("NCCL XML, direct NVLinks", other_xml, 4),
    _cluster("ASTRA YAML", astra, 6),
    Reader("scenario TOML", scenario, _use_scenario, "one.toml", 10),
    Reader("scenario's program", scenario, _use_scenario, "prog.py", 2),
    Reader("baseline", scenario, _use_baseline, "one.baseline.json", 10),
    Reader("sweep --vary", _vary, _use_vary, "words", 6),
    Reader("words", _words, _use_words, "words", 10),
    Reader(
        "validate --from: index", tables, lambda folder: _command("validate", "--from", str(folder)), "_index.csv", 3
    ),
    Reader("validate --from: rows", tables, lambda folder: _command("validate", "--from", str(folder)), "one.csv", 3),
    Reader("calibrate --from: logs", logs, _use_logs, "*.log", 8),
    Reader("rings", rings, _use_records, "*.ring", 12),
    Reader("verdict beside rings", _with_rings(beside), _use_records, "verdict.job.json", 4),
    Reader("exit codes beside rings", _with_rings(beside), _use_records, "exit.00001.a0.json", 2),
    Reader("stacks beside rings", _with_rings(beside), _use_records, "rank00001.job.stacks", 2),
    Reader("Flight Recorder pickle", pickles(2), _use_records, "dump_*", 10),
    Reader("Flight Recorder pickle, text", pickles(0), _use_records, "dump_*", 6),
    Reader("Flight Recorder pickle, framed", pickles(5), _use_records, "dump_*", 6),
    Reader("Flight Recorder JSON", json_dumps, _use_records, "dump_*", 8),
    Reader("NCCL's Inspector", _inspector, _use_records, "*.log", 6),
    Reader("evidence of another host", _wire, _use_wire, "*", 6),
    Reader("calls of another host", _calls, _use_calls, "*", 6),
    Reader("a stranger at a monitor's door", _handshake, _use_link, "*", 10),
    Reader("words of a rank to its monitor", _left_words, _use_left_words, "*", 6),
]
"""All of them."""
