"""PyTorch Flight Recorder dumps: pickle and JSON, gloo's broken configuration, and files that are none."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.flight_recorder import read_dump
from distsim.debug.kinds import Kind
from distsim.debug.postmortem import examine
from distsim.errors import UsageError


def entry(seq: int, op: str = "all_reduce", state: str = "completed", size: int = 4, **more: Any) -> dict[str, Any]:
    """One entry as torch 2.13 writes it."""
    return {
        "record_id": seq - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "is_p2p": False,
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": state == "completed",
        "time_created_ns": 1_000_000_000 + seq,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 600000,
        "frames": [
            {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "step", "filename": "train.py", "line": 10 + seq},
        ],
        **more,
    }


def dump(entries: list[dict[str, Any]], ranks: str = "[0, 1, 2]") -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "pg_config": config, "entries": entries}


def write(folder: Path, rank: int, said: dict[str, Any], as_json: bool = False) -> None:
    path = folder / f"dump_{rank}"
    path.write_bytes(json.dumps(said).encode() if as_json else pickle.dumps(said))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_missing_rank_is_named(tmp_path: Path, as_json: bool) -> None:
    """Two ranks stand in a call that the third never made: the third is the culprit, with the user's line."""
    for rank in (0, 1):
        write(tmp_path, rank, dump([entry(1), entry(2, state="scheduled")]), as_json)
    write(tmp_path, 2, dump([entry(1)]), as_json)
    found = examine(tmp_path)
    first = found.diagnoses[0]
    assert (first.kind, first.culprits, first.victims) == (Kind.MISSING_RANK, (2,), (0, 1))
    assert first.sites[0].line == 12
    assert found.complaints == []


def test_the_minority_is_the_culprit_also_as_rank_0(tmp_path: Path) -> None:
    """Where rank 0 differs from all others, rank 0 is named (torchfrtrace names the others)."""
    write(tmp_path, 0, dump([entry(1, size=8, state="started")]))
    for rank in (1, 2):
        write(tmp_path, rank, dump([entry(1, state="started")]))
    first = examine(tmp_path).diagnoses[0]
    assert (first.kind, first.culprits) == (Kind.SHAPE_MISMATCH, (0,))


def test_gloo_says_nothing_of_its_groups(tmp_path: Path) -> None:
    """An empty pg_config and states that stay at scheduled are read as gloo means them."""
    for rank in range(2):
        entries = [entry(1, state="scheduled", retired=True)]
        if rank == 0:
            entries.append(entry(2, state="scheduled", retired=False))
        said = dump(entries)
        said["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        write(tmp_path, rank, said)
    first = examine(tmp_path).diagnoses[0]
    assert (first.kind, first.culprits) == (Kind.MISSING_RANK, (1,))
    assert first.group is not None
    assert first.group.ranks == (0, 1)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/distsim-was-here",)


def test_reading_a_pickle_executes_nothing(tmp_path: Path) -> None:
    """A pickle that wants to call a function is refused in one line; good dumps beside it are diagnosed."""
    write(tmp_path, 0, dump([entry(1, state="scheduled")], "[0, 1]"))
    write(tmp_path, 1, dump([], "[0, 1]"))
    (tmp_path / "dump_2").write_bytes(pickle.dumps({"version": "2.10", "entries": [Evil()]}))
    (tmp_path / "notes.txt").write_text("hello")
    found = examine(tmp_path)
    assert not Path("/tmp/distsim-was-here").exists()
    assert found.diagnoses[0].culprits == (1,)
    assert len(found.complaints) == 2
    assert all("\n" not in line for line in found.complaints)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dump_0", b"junk", "neither a pickle of plain data nor JSON"),
        ("dump_0", b"{broken", "broken JSON"),
        ("dump_0", json.dumps({"version": "1.0", "entries": []}).encode(), "version 1.0, expected 2.x"),
        ("dump_0", pickle.dumps([1]), "no Flight Recorder dump"),
        ("dump", json.dumps({"version": "2.4", "entries": []}).encode(), "which rank is it"),
    ],
)
def test_what_is_no_dump_is_said_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """Each kind of bad file has its own sentence."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_dump(path)


def test_an_empty_folder_is_a_mistake(tmp_path: Path) -> None:
    """There is nothing to diagnose in an empty folder, nor in one that does not exist."""
    with pytest.raises(UsageError, match="neither rings"):
        examine(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        examine(tmp_path / "none")
