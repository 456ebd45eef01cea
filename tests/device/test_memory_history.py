"""torch.cuda.memory._record_memory_history and _dump_snapshot of a simulated GPU."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import distsim

MIB = 1 << 20


def test_a_snapshot_is_what_memory_viz_reads(tmp_path: Path) -> None:
    """Segments, blocks, and each allocation and free with the line that made it; every view of torch's own viewer can
    be made of it, and its counts are the allocator's."""

    def body() -> Any:
        torch.cuda.memory._record_memory_history(max_entries=1000)
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")  # kept
        gone = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        del gone
        small = torch.ones(10, device="cuda")
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
        stats = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.memory._record_memory_history(enabled=None)
        del kept, small
        return stats, torch.cuda.memory._snapshot()["device_traces"][0], len(torch.cuda.memory_snapshot())

    (stats, after, segments) = distsim.simulate(body, nproc_per_node=1).results[0]
    with (tmp_path / "snapshot.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    active = [block for block in blocks if block["state"] == "active_allocated"]
    assert sum(block["size"] for block in active) == stats[0]
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == stats[1]
    trace = snapshot["device_traces"][0]
    assert [entry["action"] for entry in trace] == [
        *("segment_alloc", "alloc") * 2,
        *("free_requested", "free_completed"),
        *("segment_alloc", "alloc", "snapshot"),
    ]
    frame = trace[1]["frames"][0]
    lines = Path(__file__).read_text().splitlines()
    mine = next(f for f in trace[1]["frames"] if f["filename"] == __file__)
    assert lines[mine["line"] - 1].endswith("# kept")
    assert {"filename", "line", "name"} == set(frame)
    assert all(one["time_us"] <= two["time_us"] for one, two in itertools.pairwise(trace))
    assert _memory_viz.trace(snapshot).count("alloc") >= 3
    assert "segments: 3" in _memory_viz.segsum(snapshot)
    for view in (_memory_viz.memory, _memory_viz.segments):
        assert isinstance(view(snapshot, format_flamegraph=str), str)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert after == []
    assert segments == 3


def test_a_history_is_as_long_as_it_may_be() -> None:
    """The last entries, those that are not skipped, and stacks of what was asked for alone."""

    def body() -> Any:
        torch.cuda.memory._record_memory_history(context=None, max_entries=3, skip_actions=["segment_alloc"])
        for _ in range(5):
            torch.empty(3 * MIB, device="cuda")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history("state")
        held = torch.empty(3 * MIB, device="cuda")
        (block,) = [
            block
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        del held
        return [entry["action"] for entry in trace], {len(entry["frames"]) for entry in trace}, len(block["frames"]) > 0

    actions, depths, has_stack = distsim.simulate(body, nproc_per_node=1).results[0]
    assert (actions, depths, has_stack) == (["free_requested", "free_completed", "snapshot"], {0}, True)


def test_a_shortage_is_an_entry() -> None:
    """With the bytes that were asked for and those that were free."""

    def body() -> Any:
        torch.cuda.memory._record_memory_history()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        with pytest.raises(RuntimeError, match="enabled expected state or all, or None, got 'some'"):
            torch.cuda.memory._record_memory_history("some")
        return torch.cuda.memory._snapshot()["device_traces"][0][0]

    entry = distsim.simulate(body, nproc_per_node=1).results[0]
    assert (entry["action"], entry["size"]) == ("oom", 1 << 40)
    assert 70e9 < entry["device_free"] < 90e9
