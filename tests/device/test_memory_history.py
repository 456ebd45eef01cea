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
from distsim.sim.device.allocator import Allocator
from distsim.sim.device.allocator.history import BASE, History, segments_of

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


@pytest.mark.parametrize(
    ("context", "have_stacks", "block_has"),
    [
        (None, set(), False),
        ("state", set(), True),
        ("alloc", {"segment_alloc", "alloc"}, True),
        ("all", {"segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"}, True),
    ],
)
def test_stacks_are_kept_of_what_the_context_names(context: Any, have_stacks: set[str], block_has: bool) -> None:
    """Of blocks alone, of allocations, or of frees as well; addresses and sizes are those of the allocator."""
    allocator, begin = Allocator(64 * MIB), BASE + 2 * MIB
    allocator.allocate(1, stream=1)
    allocator.history = History(now_us=lambda: 7, context=context)
    first, second = allocator.allocate(MIB), allocator.allocate(100)
    _, segment = segments_of(allocator.segments, 3)
    allocator.free(first)
    allocator.let_go(second)
    _, freed = segments_of(allocator.segments, 3)
    allocator.reclaim(second)
    allocator.empty_cache()
    trace = allocator.history.trace()
    assert [(entry["action"], entry["addr"] - begin, entry["size"]) for entry in trace] == [
        *(("segment_alloc", 0, 2 * MIB), ("alloc", 0, MIB), ("alloc", MIB, 100)),
        *(("free_requested", 0, MIB), ("free_completed", 0, MIB)),
        *(("free_requested", MIB, 100), ("free_completed", MIB, 100)),
        ("segment_free", 0, 2 * MIB),
    ]
    assert {entry["action"] for entry in trace if entry["frames"]} == have_stacks
    assert all(
        entry["frames"][0]["name"] == "test_stacks_are_kept_of_what_the_context_names"
        for entry in trace
        if entry["frames"]
    )
    assert segment["address"] == begin
    assert [(block["address"] - begin, block["size"], block["state"]) for block in segment["blocks"]] == [
        (0, MIB, "active_allocated"),
        (MIB, 512, "active_allocated"),
        (MIB + 512, MIB - 512, "inactive"),
    ]
    assert [bool(block["frames"]) for block in segment["blocks"]] == [block_has, block_has, False]
    assert [block["state"] for block in freed["blocks"]] == ["inactive", "active_awaiting_free", "inactive"]
    sums = ("device", "total_size", "allocated_size", "active_size", "requested_size")
    assert [segment[name] for name in sums] == [3, 2 * MIB, MIB + 512, MIB + 512, MIB + 100]
    assert [freed[name] for name in sums] == [3, 2 * MIB, 0, 512, 100]


def test_the_history_of_pinned_memory_alone_has_no_entry_of_a_gpu() -> None:
    """torch 2.14 passes two more arguments to C++: whether pinned memory, and whether the GPU's is recorded."""

    def body() -> list[int]:
        lengths = []
        for record_cuda in (True, False):
            torch._C._cuda_record_memory_history(*("all", "all", "all", 9, True, False, False, [], True, record_cuda))
            torch.ones(10, device="cuda")
            lengths.append(len(torch.cuda.memory._snapshot()["device_traces"][0]))
        return lengths

    on_gpu, without = distsim.simulate(body, nproc_per_node=1).results[0]
    assert on_gpu > 0
    assert without == 0


def test_a_shortage_is_an_entry() -> None:
    """With the bytes that were asked for and those that were free."""

    def body() -> Any:
        torch.cuda.memory._record_memory_history()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        held = torch.empty(1 << 34, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        del held
        with pytest.raises(RuntimeError, match="enabled expected state or all, or None, got 'some'"):
            torch.cuda.memory._record_memory_history("some")
        return [entry for entry in torch.cuda.memory._snapshot()["device_traces"][0] if entry["action"] == "oom"]

    entries = distsim.simulate(body, nproc_per_node=1).results[0]
    assert [entry["size"] for entry in entries] == [1 << 40] * 2
    assert 70e9 < entries[0]["device_free"] < 90e9
    assert entries[0]["device_free"] - entries[1]["device_free"] == 1 << 34
