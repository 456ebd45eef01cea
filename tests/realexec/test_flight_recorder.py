"""PyTorch Flight Recorder dumps: pickle and JSON, gloo's broken configuration, and files that are none."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from distsim.cli import diagnose
from distsim.debug.evidence.from_dumps import read_dump
from distsim.debug.postmortem import examine
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.scenario.reproduce.reproduce import reproduce


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


def test_a_deep_recursion_is_read_from_its_end(tmp_path: Path) -> None:
    """A stack of more frames than are looked at."""
    deep = {"frames": [{"name": "walk", "filename": "train.py", "line": 7}] * 1100}
    for rank in (0, 1):
        write(tmp_path, rank, dump([entry(1), entry(2, state="scheduled", **deep)]))
    write(tmp_path, 2, dump([entry(1)]))
    first = examine(tmp_path).diagnoses[0]
    assert (first.kind, first.culprits, first.sites[0].line) == (Kind.MISSING_RANK, (2,), 7)


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
    """A pickle that wants to call a function is refused in one line; good dumps beside it are diagnosed. A file whose
    name has no rank is no dump, and not told."""
    write(tmp_path, 0, dump([entry(1, state="scheduled")], "[0, 1]"))
    write(tmp_path, 1, dump([], "[0, 1]"))
    (tmp_path / "dump_2").write_bytes(pickle.dumps({"version": "2.10", "entries": [Evil()]}))
    (tmp_path / "notes.txt").write_text("hello")
    found = examine(tmp_path)
    assert not Path("/tmp/distsim-was-here").exists()
    assert found.diagnoses[0].culprits == (1,)
    (line,) = found.complaints
    assert line.startswith("dump_2: neither a pickle of plain data nor JSON")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dump_0", b"junk", "neither a pickle of plain data nor JSON"),
        ("dump_0", b"{broken", "broken JSON"),
        ("dump_0", json.dumps({"version": "1.0", "entries": []}).encode(), "version 1.0, expected 2.x"),
        ("dump_0", pickle.dumps([1]), "not a Flight Recorder dump"),
        ("dump", json.dumps({"version": "2.4", "entries": []}).encode(), "a file name that ends in the rank"),
    ],
)
def test_what_is_no_dump_is_said_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """Each kind of bad file has its own sentence."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_dump(path)


def test_a_folder_of_other_files_has_no_records(tmp_path: Path) -> None:
    """`distsim diagnose .` in a checkout: one line, which does not list its files."""
    (tmp_path / "README.md").write_text("# a project")
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / ".git").write_text("gitdir: elsewhere")
    with pytest.raises(UsageError) as said:
        examine(tmp_path)
    assert str(said.value) == (
        f"{tmp_path}: no records here, neither rings of distsim (rank*.ring) nor Flight Recorder dumps; they are where "
        "--rings, DISTSIM_DIR or TORCH_FR_DUMP_TEMP_FILE said"
    )


def test_an_empty_folder_is_a_mistake(tmp_path: Path) -> None:
    """There is nothing to diagnose in an empty folder, nor in one that does not exist."""
    with pytest.raises(UsageError, match="neither rings"):
        examine(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        examine(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="it is a file"):
        examine(tmp_path / "file")


@pytest.mark.parametrize("left", ["nothing", "half a pickle", "hostile"])
def test_a_rank_without_a_dump_is_not_healthy(left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All is done in the dumps that are there, one is not: inconclusive, exit code 2, and what to do next."""
    for rank in (0, 2):
        write(tmp_path, rank, dump([entry(1)]))
    if left != "nothing":
        whole = pickle.dumps({"version": "2.10", "entries": [Evil()]} if left == "hostile" else dump([entry(1)]))
        (tmp_path / "dump_1").write_bytes(whole if left == "hostile" else whole[:-40])
    report = tmp_path.parent / "report.json"
    assert diagnose.run(argparse.Namespace(directory=tmp_path, report=str(report), sources=None, html=None)) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("INCONCLUSIVE nothing is wrong in the records of ranks 0,2, but rank 1 left none")
    assert "next: Find the dump of rank 1 (TORCH_FR_DUMP_TEMP_FILE" in out
    assert "HEALTHY" not in out
    said = json.loads(report.read_text())
    assert (said["exit_code"], said["diagnoses"]) == (2, [])
    assert "rank 1 left none" in said["inconclusive"]
    with pytest.raises(UsageError, match=r"inconclusive: Nothing is wrong .* rank 1 left none"):
        list(reproduce(tmp_path, tmp_path.parent / "found.toml"))


def test_with_all_dumps_it_is_healthy(tmp_path: Path) -> None:
    """Every rank of the group has its dump, and one is in a call that all came to: nothing is inconclusive."""
    for rank in range(3):
        write(tmp_path, rank, dump([entry(1), entry(2, state="started")]))
    found = examine(tmp_path)
    assert (found.diagnoses, found.inconclusive) == ([], None)


def test_those_who_wait_for_a_rank_without_a_dump(tmp_path: Path) -> None:
    """Ranks stand in a call of a group with the lost rank: it is the missing one, and nothing is made up of it."""
    for rank in (0, 2):
        write(tmp_path, rank, dump([entry(1), entry(2, state="scheduled")]))
    (first,) = examine(tmp_path).diagnoses
    assert (first.kind, first.culprits, first.victims) == (Kind.MISSING_RANK, (1,), (0, 2))
    assert first.explanation.startswith("Rank 1 left no record: whether it came to all_reduce #2 on group default_pg")
    assert "spend" not in first.suggestion
    assert "log" in first.suggestion


def test_who_is_known_to_be_absent_is_named_before_the_unknown(tmp_path: Path) -> None:
    """Rank 2's dump ends before the call, rank 1 has none: rank 2 is named."""
    write(tmp_path, 0, dump([entry(1), entry(2, state="scheduled")]))
    write(tmp_path, 2, dump([entry(1)]))
    (first,) = examine(tmp_path).diagnoses
    assert (first.kind, first.culprits) == (Kind.MISSING_RANK, (2,))


def test_many_ranks_without_a_dump_take_one_line(tmp_path: Path) -> None:
    """Of a large job, a few dumps are there: the others are named in one line, not in thousands."""
    write(tmp_path, 0, dump([entry(1)], str(list(range(1024)))))
    assert examine(tmp_path).complaints == ["no dump of ranks 1-1023"]


def test_a_contradiction_comes_before_the_unknown(tmp_path: Path) -> None:
    """Ranks contradict each other in a call that a rank without a dump should be in: the contradiction is first."""
    for rank in range(3):
        write(tmp_path, rank, dump([entry(1), entry(2, size=8 if rank == 1 else 4, state="started")], "[0, 1, 2, 3]"))
    first = examine(tmp_path).diagnoses[0]
    assert (first.kind, first.culprits) == (Kind.SHAPE_MISMATCH, (1,))


def test_a_message_for_a_rank_without_a_dump(tmp_path: Path) -> None:
    """A receive from the lost rank: it is the missing one, and whether it sent is left open."""
    said = entry(1, state="scheduled", is_p2p=True, p2p_seq_id=1, profiling_name="nccl:recv 0<-1", input_sizes=[])
    write(tmp_path, 0, dump([said], "[0, 1]"))
    (first,) = examine(tmp_path).diagnoses
    assert (first.kind, first.culprits) == (Kind.MISSING_RANK, (1,))
    assert "Rank 1 left no record: whether it sent it" in first.explanation


def test_a_group_that_may_hold_the_lost_rank(tmp_path: Path) -> None:
    """An open call of a group whose members no dump lists, beside a rank without a dump: said, blaming nobody."""
    for rank in (0, 2):
        open_call = entry(1, state="scheduled", process_group=("1", "dp"))
        write(tmp_path, rank, dump([entry(1), *([open_call] if rank == 0 else [])]))
    found = examine(tmp_path)
    assert found.diagnoses == []
    said = str(found.inconclusive)
    assert "Rank 0 is still in all_reduce #1 on group dp (rank 0), at train.py:11." in said
    assert said.endswith("The records do not show whether rank 1 should have joined.")


def test_open_calls_where_nobody_says_who_is_in_the_group(tmp_path: Path) -> None:
    """Gloo's dumps do not list members: a call that all ranks with a dump are in may lack a rank without one."""
    for rank in range(2):
        said = dump([entry(1, state="scheduled", retired=False)])
        said["pg_config"] = {}
        write(tmp_path, rank, said)
    found = examine(tmp_path)
    assert found.diagnoses == []
    assert "Ranks 0,1 are still in all_reduce #1 on group default_pg" in str(found.inconclusive)
