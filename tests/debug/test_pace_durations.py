"""Who is slow by durations on the device: dumps of the Flight Recorder, and records of NCCL's Inspector."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distsim.cli.dispatch import main
from tests.debug.pace_families import Floats, own_work

MOVED_S = 0.02
Write = Callable[[Path, Floats], None]


def durations(work_s: Floats) -> tuple[Floats, Floats]:
    """Durations of one collective a step by rank, which begin when the rank has worked, and when they end."""
    return work_s.max(axis=0) - work_s + MOVED_S, np.cumsum(work_s.max(axis=0) + MOVED_S)


def write_dumps(folder: Path, work_s: Floats, *, lost: tuple[int, int] = (-1, 0), timed: bool = True) -> None:
    """Dumps of the Flight Recorder; rank *lost* [0] has not recorded each call of number *lost* [1] or its multiples.

    The clocks of the ranks differ by hours.
    """
    spent, ended = durations(work_s)
    for rank in range(len(work_s)):
        entries = []
        for step in range(work_s.shape[1]):
            if rank == lost[0] and step % lost[1] == 0:
                continue
            entry: dict[str, Any] = {
                "profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"], "record_id": step,
                "collective_seq_id": step + 1, "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
                "output_dtypes": ["Float"], "state": "completed", "retired": True,
                "frames": [{"filename": "/home/me/train.py", "line": 12, "name": "step"}],
                "time_created_ns": int((ended[step] + 3600 * rank) * 1e9),
            }  # fmt: skip
            entries.append(entry | ({"duration_ms": float(spent[rank, step]) * 1e3} if timed else {}))
        ranks = list(range(len(work_s)))
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(ranks)}}
        document = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"dump_{rank}.json").write_text(json.dumps(document))


def write_inspector(folder: Path, work_s: Floats, *, lost: tuple[int, int] = (-1, 0), later: bool = False) -> None:
    """Logs of the Inspector; *later*: header and metadata are in a line of their own, and the file is packed."""
    spent, ended = durations(work_s)
    for rank in range(len(work_s)):
        lines = []
        for step in range(work_s.shape[1]):
            if rank == lost[0] and step % lost[1] == 0:
                continue
            header = {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": len(work_s), "nnodes": 1}
            metadata = {
                "inspector_output_format_version": "v4.0", "dump_timestamp_us": int(1e15 + ended[step] * 1e6),
                "hostname": "gpu-01", "pid": 100 + rank,
            }  # fmt: skip
            record = {"coll": "AllReduce", "coll_sn": step, "coll_msg_size_bytes": 1 << 20}
            record |= {"coll_exec_time_us": float(spent[rank, step]) * 1e6, "coll_timing_source": "kernel_gpu"}
            about = {"header": header, "metadata": metadata}
            lines += [{**about, "dump_stats": {}}, {"coll_perf": record}] if later else [{**about, "coll_perf": record}]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        path = folder / f"gpu-01-pid{100 + rank}.log"
        if later:
            path.with_suffix(".log.gz").write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (write_dumps, {}),
        (write_dumps, {"lost": (1, 7)}),
        (write_inspector, {}),
        (write_inspector, {"lost": (1, 7)}),
        (write_inspector, {"later": True}),
    ],
)
@pytest.mark.parametrize("slow", [False, True])
def test_who_is_slow(
    write: Any, words: dict[str, Any], slow: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank whose collectives are shortest, also where a rank has lost records: they are matched by number."""
    work_s = own_work("jitter of 2%", 0)
    work_s[2] *= 1.1 if slow else 1.0
    write(tmp_path, work_s, **words)
    report = tmp_path / "report" / "report.json"
    report.parent.mkdir()
    assert main(["diagnose", str(tmp_path), "--report", str(report)]) == 0
    found = json.loads(report.read_text())["diagnoses"]
    assert [(one["kind"], one["culprits"]) for one in found] == ([("straggler", [2])] if slow else [])
    out = capsys.readouterr().out
    assert ("left out: 29 calls that not all ranks have recorded" in out) is ("lost" in words)
    assert "a rank 10% slower would be named after" in out


def test_json_is_printed_as_other_commands_print_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document alone on stdout, the report for people on stderr."""
    write_dumps(tmp_path, own_work("jitter of 2%", 0))
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["diagnoses"] == []


def test_dumps_without_durations_say_nothing_of_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times at which the watchdog looked are no durations."""
    write_dumps(tmp_path, own_work("jitter of 2%", 0), timed=False)
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "pace" not in capsys.readouterr().out


def test_a_log_that_is_cut_off_counts_up_to_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a line that names it."""
    work_s = own_work("jitter of 2%", 0)
    work_s[2] *= 1.1
    write_inspector(tmp_path, work_s)
    path = tmp_path / "gpu-01-pid103.log"
    path.write_text(path.read_text()[:-40])
    assert main(["diagnose", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "straggler  rank 2" in captured.out
    assert "gpu-01-pid103.log: damaged, what is before it counts" in captured.err


def test_two_jobs_in_one_folder_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of which each process has its own rank 0."""
    for job in ("one", "two"):
        (tmp_path / job).mkdir()
        write_inspector(tmp_path / job, own_work("jitter of 2%", 0))
    for path in (tmp_path / "two").iterdir():
        path.write_text(path.read_text().replace('"pid": 1', '"pid": 2'))
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "rank 0 of communicator 0x7f8c496ae9f661 is two processes: two jobs in one folder" in capsys.readouterr().err
