"""Traces of all ranks: our own there and back, torch's by hand, and files that are damaged or do not fit."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distsim.calibration.traces import kineto
from distsim.calibration.traces.answers import Answers, answer
from distsim.calibration.traces.kineto import JobTrace, TracedKernel, read_folder
from distsim.cli.dispatch import main
from distsim.cluster import load_cluster
from distsim.network.critical_path import Ran, critical_path
from distsim.report import report_document, write_trace
from distsim.sim import simulate
from tests.documents import checked

Event = dict[str, Any]
SLOW = 3


def steps() -> None:
    """Four ranks that sum their gradients; one multiplies once more before each of its sums."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    with torch.device("cuda"):
        layer = torch.nn.Linear(2048, 2048, dtype=torch.bfloat16)
        x = torch.empty(4096, 2048, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(4):
        layer(x).sum().backward()
        if rank == SLOW:
            torch.mm(x, x.T)
        dist.all_reduce(layer.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The report's section of training, and the folder of traces of the same run."""
    outcome = simulate(steps, "dgx-h100:1", nproc_per_node=4, trace=True)
    folder = tmp_path_factory.mktemp("own")
    write_trace(outcome, f"{folder}/")
    return report_document(outcome)["training"], folder


def test_the_critical_path_comes_back_as_the_report_has_it(own: tuple[dict[str, Any], Path]) -> None:
    """Of the same step, part by part."""
    section, folder = own
    answers = answer(read_folder(folder))
    reported = {(part["kind"], part["name"]): part["time_s"] for part in section["critical_path"]}
    read = {(part.kind, part.name): part.time_s for part in answers.path}
    assert read.keys() == reported.keys()
    assert read == pytest.approx(reported, rel=1e-3, abs=2e-8)


def test_the_planted_slow_rank_causes_the_waiting(own: tuple[dict[str, Any], Path]) -> None:
    """Nearly all of it, because its kernels take longer; the bandwidth is what the cluster is expected to have."""
    answers = answer(read_folder(own[1]), load_cluster("dgx-h100:1"))
    row = next(row for row in answers.ops if row.op == "all_reduce")
    assert next(iter(row.caused_s)) == SLOW
    assert row.caused_s[SLOW] >= 0.99 * row.waited_s > 0.0
    assert max(row.why_s[SLOW], key=lambda name: row.why_s[SLOW][name]) == "compute"
    assert row.busbw_GBps is not None
    assert row.expected_GBps is not None
    assert row.expected_GBps[0] <= row.busbw_GBps <= row.expected_GBps[1]


# Traces by hand ---------------------------------------------------------------------------------------


def kernel(begin_us: float, end_us: float, name: str = "gemm_kernel<float>(int)") -> Event:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin_us, "dur": end_us - begin_us, "args": {"stream": 7}}


def nccl(begin_us: float, end_us: float, seq: int | None = 1, ranks: int = 2, **more: Any) -> Event:
    args = {
        "Collective name": "allreduce", "Process Group Name": "0", "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(ranks))), "In msg nelems": 1_000_000, "dtype": "Float", "Seq": seq,
        **more,
    }  # fmt: skip
    args = {key: value for key, value in args.items() if value is not None}
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return {**kernel(begin_us, end_us, name), "args": args}


def step(number: int, begin_us: float, end_us: float) -> Event:
    return {**kernel(begin_us, end_us, f"ProfilerStep#{number}"), "cat": "user_annotation"}


def write(folder: Path, ranks: dict[int, Sequence[Event]], info: bool = True, indent: int | None = 1) -> None:
    folder.mkdir(exist_ok=True)
    for rank, events in ranks.items():
        head = {"distributedInfo": {"backend": "nccl", "rank": rank}} if info else {"schemaVersion": 1}
        text = json.dumps(
            {**head, "traceEvents": [{"ph": "M", "name": "process_name"}, *events], "end": [1]}, indent=indent
        )
        (folder / f"rank-{rank}.json").write_text(text)


def late(offset_us: float = 0.0, slow_us: float = 300.0) -> dict[int, Sequence[Event]]:
    """Rank 1 computes longer by *slow_us* in each of three steps; its clock is off."""
    events: dict[int, list[Event]] = {0: [], 1: []}
    for number in range(3):
        at = 1.7e15 + 1000.0 * number
        for rank in (0, 1):
            off, work = (offset_us, 200 + slow_us) if rank else (0.0, 200)
            end = at + 200 + slow_us + 100
            events[rank] += [
                step(number + 1, at + off, at + 1000 + off), kernel(at + off, at + work + off),
                nccl(at + work + off, end + off, number + 1),
            ]  # fmt: skip
    return dict(events)


def answers_of(folder: Path) -> tuple[JobTrace, Answers]:
    job = read_folder(folder)
    return job, answer(job)


@pytest.mark.parametrize("offset_us", [0.0, 5e6, -3e9])
@pytest.mark.parametrize("indent", [None, 1])
def test_who_came_last_whatever_the_clocks(offset_us: float, indent: int | None, tmp_path: Path) -> None:
    """Ranks are put on one clock by the ends of their collectives."""
    write(tmp_path, late(offset_us), indent=indent)
    _, answers = answers_of(tmp_path)
    (row,) = answers.ops
    assert (row.op, row.group, row.calls, row.last) == ("all_reduce", "default_pg", 3, {1: 3})
    assert row.waited_s == pytest.approx(900e-6, abs=2e-6)
    assert row.moved_s == pytest.approx(300e-6, abs=2e-6)
    assert row.busbw_GBps == pytest.approx(3 * 4e6 / 300e-6 / 1e9, rel=0.01)
    assert row.exposed_s == pytest.approx((3 * 400e-6 + 3 * 100e-6) / 2, abs=2e-6)
    assert answers.step == 3
    path = {part.name: part.time_s for part in answers.path}
    assert path["gemm_kernel"] == pytest.approx(500e-6, abs=2e-6)
    assert path["all_reduce of default_pg"] == pytest.approx(100e-6, abs=2e-6)


def test_events_are_read_across_the_borders_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a file is split."""
    write(tmp_path, late())
    whole = answers_of(tmp_path)[1]
    for chunk in (1, 7, 101):
        monkeypatch.setattr(kineto, "CHUNK", chunk)
        assert answers_of(tmp_path)[1] == whole


def test_calls_without_numbers_are_matched_by_their_order(tmp_path: Path) -> None:
    """Within a group and an operation, from the first step on."""
    ranks = {rank: [{**event, "args": {k: v for k, v in event["args"].items() if k != "Seq"}} for event in events]
             for rank, events in late().items()}  # fmt: skip
    ranks[0] = [nccl(1.7e15 - 500, 1.7e15 - 400, None), *ranks[0]]
    write(tmp_path, ranks)
    job, answers = answers_of(tmp_path)
    assert answers.ops[0].last == {1: 3}
    assert job.notes == ["1 communication kernels are messages, or have no partner in another trace"]


NAMELESS = {"Process Group Name": None, "Process Group Ranks": None, "Process Group Description": None, "Seq": None}


@pytest.mark.parametrize(("calls", "matched"), [((2, 2), 2), ((2, 3), 0)])
def test_calls_without_groups_are_a_guess_or_nothing(calls: tuple[int, int], matched: int, tmp_path: Path) -> None:
    """Torch before 2.3: taken for calls of all ranks if these have the same ones."""
    write(tmp_path, {rank: [nccl(100 * n, 100 * n + 50, **NAMELESS) for n in range(calls[rank])] for rank in (0, 1)})
    job = read_folder(tmp_path)
    assert len(job.meetings) == matched
    assert ("cannot be matched" in job.notes[0]) is (matched == 0)


def test_one_of_eight_traces_is_missing(tmp_path: Path) -> None:
    """Said in one line; the others are compared."""
    write(tmp_path, {rank: [nccl(10.0 * rank, 200, ranks=8)] for rank in range(8) if rank != 6})
    job, answers = answers_of(tmp_path)
    assert job.notes == ["no trace of 1 rank (6): when they came is not known"]
    assert answers.ops[0].last == {7: 1}


@pytest.mark.parametrize("is_compressed", [True, False])
def test_a_file_that_is_cut_is_used_up_to_there(is_compressed: bool, tmp_path: Path) -> None:
    """With a note."""
    write(tmp_path, late())
    path = tmp_path / "rank-1.json"
    data = path.read_bytes()
    path.unlink()
    if is_compressed:
        (tmp_path / "rank-1.json.gz").write_bytes(gzip.compress(data)[:-60])
    else:
        path.write_bytes(data[: int(len(data) * 0.8)])
    job, answers = answers_of(tmp_path)
    assert "it is cut off or damaged" in job.notes[0]
    assert answers.ops[0].last[1] >= 1


def test_which_kernels_take_longer_than_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of one rank: computation, transfers and waiting apart."""
    write(tmp_path / "now", late())
    write(tmp_path / "before", late(slow_us=0.0))
    assert main(["trace", str(tmp_path / "now"), "--against", str(tmp_path / "before")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "kernels of a step of one rank: 0.3 -> 0.6 ms" in lines
    assert "  gemm_kernel: 0.20 -> 0.35 ms" in lines
    assert "  all_reduce (waiting): 0.00 -> 0.15 ms" in lines


def test_what_is_printed_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who came last and why, a table within 80 columns, the path; the same as a document."""
    write(tmp_path, late())
    assert main(["trace", str(tmp_path), "--on", "dgx-h100:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 1 comes last in 3 of 3 all_reduce of default_pg: others wait 0.9 ms"
    assert lines[1] == "  its kernels take longer (0.6 ms)"
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("critical path of step 3 (0.6 ms): gemm_kernel 0.5") for line in lines)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    document = checked(capsys.readouterr().out)
    assert (document["schema"], document["collectives"], document["ops"][0]["last"]) == ("distsim.trace/1", 3, {"1": 3})


def empty(folder: Path) -> None:
    """Nothing in it."""


def no_kernels(folder: Path) -> None:
    write(folder, {0: []})


def no_trace(folder: Path) -> None:
    (folder / "rank0.json").write_text('{"a": 1}')


def garbage(folder: Path) -> None:
    (folder / "rank0.json.gz").write_bytes(b"\x00" * 50)


def twice(folder: Path) -> None:
    write(folder, {0: [kernel(0, 1)]})
    (folder / "other.json").write_text((folder / "rank-0.json").read_text())


def nested(folder: Path) -> None:
    (folder / "rank0.json").write_text('{"traceEvents": [' + "[" * 100_000)


def no_rank(folder: Path) -> None:
    write(folder, {0: [kernel(0, 1)]}, info=False)
    (folder / "rank-0.json").rename(folder / "a.json")
    (folder / "b.json").write_text((folder / "a.json").read_text())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (empty, "no trace with kernels in 0 files"), (no_kernels, "it has no kernels"), (no_trace, "no traceEvents"),
        (garbage, "damaged"), (twice, "two traces of rank 0"), (nested, "damaged"),
        (no_rank, "neither its distributedInfo nor its name has a rank"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_one_line(made: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was expected, what came."""
    made(tmp_path)
    assert main(["trace", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [(["{0}/none"], "expected a folder"), (["{0}", "--on", "dgx-h100:0"], "dgx-h100"),
     (["{0}", "--against", "{0}/one"], "expected traces of 2 ranks, got 1")],
)  # fmt: skip
def test_a_wrong_flag_is_one_line(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not there, a cluster without nodes, traces of another size."""
    write(tmp_path, late())
    write(tmp_path / "one", {0: [kernel(0, 1)]})
    assert main(["trace", *(word.format(tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_cluster_that_is_too_small_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More ranks than GPUs."""
    write(tmp_path, {rank: [nccl(rank, 200, ranks=9)] for rank in range(9)})
    assert main(["trace", str(tmp_path), "--on", "dgx-h100:1"]) == 2
    assert "it has 8 GPUs, but the traces are of rank 8: give more nodes (:N)" in capsys.readouterr().err


def test_names_from_files_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape codes are shown."""
    write(tmp_path, {0: [kernel(0, 500, "\x1b[2Jgemm")]})
    assert main(["trace", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_long_kernel_beside_many_short_ones_is_on_the_path() -> None:
    """However many began after it: the path goes back in time alone."""
    items = [TracedKernel("long", 0.0, 10.0), *(TracedKernel("short", 0.1 * n, 0.1 * n + 0.05) for n in range(1, 50))]
    parts, from_s = critical_path({0: Ran(items)}, 0, 0.0, 10.0)
    assert ({part.name: part.time_s for part in parts}, from_s) == ({"long": pytest.approx(10.0)}, 0.0)
