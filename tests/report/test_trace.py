"""The trace, as Perfetto and Holistic Trace Analysis read it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.records import CallRecord, Group
from distsim.report import write_trace
from distsim.report.tracing import Tracks, collective_args, is_kernel, kernel_name, nest
from tests.report.made import call, finished, outcome

HTA_ARGS = [
    "Collective name",
    "dtype",
    "In msg nelems",
    "Out msg nelems",
    "In split size",
    "Out split size",
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Rank",
    "Src Rank",
    "Dst Rank",
    "Seq",
    "stream",
]


@pytest.fixture
def trace(tmp_path: Path) -> dict[str, Any]:
    """The trace of two ranks, written and read back."""
    write_trace(finished(), str(tmp_path / "trace.json"))
    loaded: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    return loaded


def _slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_the_top_level_is_kinetos(trace: dict[str, Any]) -> None:
    """PyTorch's own readers look for these keys."""
    assert set(trace) == {
        "schemaVersion",
        "deviceProperties",
        "distributedInfo",
        "displayTimeUnit",
        "baseTimeNanoseconds",
        "traceEvents",
        "traceName",
    }
    info = trace["distributedInfo"]
    assert (info["backend"], info["world_size"], info["pg_count"]) == ("nccl", 2, 1)
    assert info["pg_config"][0]["ranks"] == [0, 1]


def test_a_collective_is_a_kernel_with_all_that_hta_wants(trace: dict[str, Any]) -> None:
    """Category, name and arguments of facts.md; microseconds."""
    kernel = next(event for event in _slices(trace) if event["cat"] == "kernel" and event["pid"] == 0)
    assert kernel["name"] == "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert (kernel["ts"], kernel["dur"]) == (1000.0, 3000.0)
    assert [name for name in HTA_ARGS if name not in kernel["args"]] == []
    assert kernel["args"]["Process Group Ranks"] == "[0, 1]"
    assert kernel["args"]["Call site"] == "train.py:12"


def test_the_wait_for_the_last_member_lies_inside_the_collective(trace: dict[str, Any]) -> None:
    """Rank 0 came at 1 ms, rank 1 at 3 ms: two milliseconds are waiting."""
    wait = next(event for event in _slices(trace) if event["cat"] == "wait")
    assert wait["name"] == "waits for the others of all_reduce #2"
    assert (wait["pid"], wait["ts"], wait["dur"]) == (0, 1000.0, 2000.0)


def test_slices_of_one_track_nest_or_follow_each_other(trace: dict[str, Any]) -> None:
    """Perfetto draws slices that overlap halfway as nonsense."""
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in _slices(trace):
        track = by_track.setdefault((event["pid"], event["tid"]), [])
        track.append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_track) >= 4
    for spans in by_track.values():
        for start, end in spans:
            assert not any(start < other_start < end < other_end for other_start, other_end in spans)


def test_arrows_lead_from_the_late_rank_and_from_the_send(trace: dict[str, Any]) -> None:
    """One arrow a collective that somebody waited in, one a message."""
    arrows = [(event["name"], event["ph"], event["pid"]) for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert arrows == [("all_reduce", "s", 1), ("all_reduce", "f", 0), ("send", "s", 0), ("recv", "f", 1)]


def test_links_are_counters_of_a_process_of_their_own(trace: dict[str, Any]) -> None:
    """Utilisation in percent, named after the link."""
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [(event["name"], event["args"]) for event in counters] == [
        ("n0/gpu0->n0/nvswitch0", {"utilisation %": 97.0}),
        ("n0/gpu0->n0/nvswitch0", {"utilisation %": 0.0}),
    ]
    assert all(event["pid"] > 1_000 for event in counters)


def test_a_folder_gets_one_file_a_rank_as_hta_looks_for_them(tmp_path: Path) -> None:
    """HTA finds the rank with a regular expression that needs the space."""
    write_trace(finished(), f"{tmp_path}/traces/")
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == ["rank0.json", "rank1.json"]
    for rank, name in enumerate(names):
        text = (tmp_path / "traces" / name).read_text()
        found = re.search(r'"rank":\s+(\d+)', text)
        assert found is not None
        assert int(found[1]) == rank
        pids = {event["pid"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X"}
        assert pids == {rank}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_equal_runs_write_equal_bytes(tmp_path: Path, name: str) -> None:
    """A compressed trace carries no date."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_trace(finished(), str(tmp_path / folder / name))
    first = (tmp_path / "a" / name).read_bytes()
    assert first == (tmp_path / "b" / name).read_bytes()
    json.loads(gzip.decompress(first) if name.endswith(".gz") else first)


def test_a_call_that_never_ended_lasts_to_the_end_of_the_run(tmp_path: Path) -> None:
    """A hang is a slice to the right edge, all of it waiting."""
    stuck = call(0, "all_reduce", 1, 0.002, 0.0, 0.0)
    stuck.started_s = stuck.completed_s = None
    write_trace(outcome(1, records={0: [stuck]}), str(tmp_path / "trace.json"))
    slices = _slices(json.loads((tmp_path / "trace.json").read_text()))
    assert [(event["cat"], event["ts"], event["dur"]) for event in slices] == [
        ("kernel", 2000.0, 8000.0),
        ("wait", 2000.0, 8000.0),
        ("cpu_op", 2000.0, 0.0),
    ]


def test_a_cpu_has_steps_and_what_it_computed_in_them(tmp_path: Path) -> None:
    """HTA leaves out every kernel that no operator of the host launched in a step: all are told by their number."""
    ran = outcome(1, records={0: [call(0, "all_reduce", 1, 0.002, 0.002, 0.003)]})
    ran.compute = {0: [(0.0, 0.001, "aten::mm"), (0.001, 0.002, "aten::add"), (0.004, 0.005, "aten::mm")]}
    ran.step_ends = {0: [0.003, 0.005]}
    write_trace(ran, str(tmp_path / "trace.json"))
    slices = _slices(json.loads((tmp_path / "trace.json").read_text()))
    for kind in ("user_annotation", "gpu_user_annotation"):
        steps = [(e["name"], e["ts"], e["dur"]) for e in slices if e["cat"] == kind]
        assert steps == [("ProfilerStep#1", 0.0, 3000.0), ("ProfilerStep#2", 3000.0, 2000.0)]
    kernels = {e["args"]["correlation"]: e["ts"] for e in slices if e["cat"] == "kernel"}
    assert sorted(kernels.values()) == [0.0, 2000.0, 4000.0]
    assert min(kernels) > 1 << 16, "HTA takes the smallest type that holds them, and puts numbers of events into it"
    host = {e["args"]["correlation"]: e["ts"] for e in slices if e["cat"] == "cpu_op" and "correlation" in e["args"]}
    assert host == kernels


def test_a_run_without_events_is_a_valid_trace(tmp_path: Path) -> None:
    """Zero ranks, zero slices: still JSON."""
    write_trace(outcome(0), str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (
            call(0, "all_reduce", 1, 0, 0, 0, dtypes=("bfloat16",), reduce_op="MAX"),
            "AllReduce_MinMax_bf16_RING_LL",
        ),
        (call(0, "reduce_scatter_tensor", 1, 0, 0, 0), "ReduceScatter_Sum_f32_RING_LL"),
        (call(0, "all_gather_into_tensor", 1, 0, 0, 0), "AllGather_RING_LL"),
        (call(0, "broadcast", 1, 0, 0, 0), "Broadcast_RING_LL"),
        (call(0, "all_to_all_single", 1, 0, 0, 0), "SendRecv"),
        (call(0, "send", 1, 0, 0, 0, peer=1), "SendRecv"),
        (call(0, "barrier", 1, 0, 0, 0, dtypes=()), "AllReduce_Sum_i8_RING_LL"),
    ],
)
def test_kernels_have_nccls_names(record: CallRecord, name: str) -> None:
    """Whoever greps a real trace finds the same words here."""
    assert kernel_name(record) == f"ncclDevKernel_{name}"


def test_ends_of_a_transfer_are_kinetos() -> None:
    """Source and destination of rooted and point-to-point calls; -1 where there is none."""
    group = Group("0", "default_pg", (0, 1, 2))
    ends = {
        op: (args["Src Rank"], args["Dst Rank"])
        for op, more in (
            ("send", {"peer": 2}),
            ("recv", {"peer": 2}),
            ("broadcast", {"root": 1}),
            ("reduce", {"root": 1}),
            ("all_reduce", {}),
        )
        for args in [collective_args(call(0, op, 1, 0, 0, 0, group=group, **more), 20)]
    }
    assert ends == {
        "send": (0, 2),
        "recv": (2, 0),
        "broadcast": (1, -1),
        "reduce": (-1, 1),
        "all_reduce": (-1, -1),
    }


def test_new_group_is_no_kernel() -> None:
    """It moves no data on a stream."""
    assert not is_kernel(call(0, "new_group", 1, 0, 0, 0))


def test_rounding_opens_no_track() -> None:
    """0.1 + 0.2 ends after 0.3 begins, by nothing."""
    tracks = Tracks()
    assert [tracks.assign("host", 0.0, 0.1 + 0.2), tracks.assign("host", 0.3, 0.4)] == [1, 1]


def test_tracks_grow_only_where_slices_overlap() -> None:
    """Slices that follow each other share a track; a second one opens for what runs beside."""
    tracks = Tracks(20)
    placed = [
        tracks.assign("dp", 0, 2),
        tracks.assign("dp", 1, 3),
        tracks.assign("tp", 1, 2),
        tracks.assign("dp", 2, 4),
    ]
    assert placed == [20, 21, 22, 20]
    assert list(tracks.labels()) == [(20, "dp"), (21, "dp (2)"), (22, "tp")]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ([(0, 5), (4, 10)], [(0, 5), (5, 10)]),  # the second begins where the first ends
        ([(0, 10), (2, 4), (3, 8)], [(0, 10), (2, 4), (4, 8)]),  # within a third
        ([(0, 10), (0, 4), (4, 10)], [(0, 10), (0, 4), (4, 10)]),
        ([(0, 5), (3, 6), (4, 9)], [(0, 5), (5, 6), (6, 9)]),
    ],
)
def test_slices_that_overlap_in_part_are_cut(
    given: list[tuple[float, float]], written: list[tuple[float, float]]
) -> None:
    """A viewer takes slices of a track for a stack: one lies within another or beside it."""
    events = [{"ts": float(begin), "dur": float(end - begin)} for begin, end in given]
    nest(events)
    assert [(event["ts"], event["ts"] + event["dur"]) for event in events] == written
