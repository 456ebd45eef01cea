"""Logs of nccl-tests: what is read, and one line for all that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.calibration.logs.folder import agreed, fits, read_logs
from distsim.calibration.logs.parse import LogRun, parse_log
from distsim.errors import UsageError
from tests.calibration.logs import log, table_line

TIMES = [(1024, 30.0), (65536, 40.0), (1 << 20, 60.0), (1 << 26, 500.0)]
IB = ("NCCL version 2.21.5+cuda12.4", "node0:1:2 [0] NCCL INFO Using network IB")


def _read(tmp_path: Path, text: str, name: str = "a.log") -> tuple[list[LogRun], list[str]]:
    path = tmp_path / name
    path.write_text(text)
    return parse_log(path, name)[:2]


def _one(tmp_path: Path, text: str, name: str = "a.log") -> LogRun:
    runs, notes = _read(tmp_path, text, name)
    assert notes == []
    (run,) = runs
    return run


def test_a_log_is_read(tmp_path: Path) -> None:
    """Operation, nodes, GPUs, version, every size."""
    run = _one(tmp_path, log("all_gather", TIMES, nodes=2))
    assert (run.op, run.where, run.launcher, run.gpu) == ("all_gather", "2 x 8", "process", "NVIDIA H100 80GB HBM3")
    assert (run.library, run.version) == ("nccl", "2.27.3")
    assert [(row.size_bytes, row.time_us) for row in run.rows] == TIMES


@pytest.mark.parametrize(
    "prefix", ["[1,0]<stdout>:", "0: ", "(head, rank=0, pid=3808) [1,0]<stdout>:", "2026-01-02T03:04:05.678Z "]
)
def test_a_launchers_prefix_is_no_part_of_a_line(prefix: str, tmp_path: Path) -> None:
    """mpirun --tag-output, srun -l, SkyPilot, kubectl."""
    text = "".join(f"{prefix}{line}\n" for line in log("all_reduce", TIMES, nodes=2).splitlines())
    assert len(_one(tmp_path, text).rows) == 4


def test_nccl_may_speak_inside_a_line(tmp_path: Path) -> None:
    """NCCL_DEBUG=INFO writes where a line of the table has begun: as on Snellius, glued to its root."""
    line = table_line("all_reduce", 8, 1 << 20, 60.0)
    spoken = "node0:7:9 [0] NCCL INFO Channel 00/0 : 7[3] -> 0[0] via NET/IB\nnode0:7:8 [1] NCCL INFO x\n"
    torn = f"{line[:52]}{spoken}{line[52:]}"
    run = _one(tmp_path, log("all_reduce", TIMES).replace(line, torn))
    assert [(row.size_bytes, row.time_us) for row in run.rows] == TIMES


def test_what_nccl_says_of_itself(tmp_path: Path) -> None:
    """Version, network, plugin, and settings that change times; where a file of its own lies changes none."""
    said = (
        "node0:1:1 [0] NCCL INFO NCCL version 2.21.5+cuda12.4",
        "node0:1:2 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.9.2-aws",
        "node0:1:2 [0] NCCL INFO Using network AWS Libfabric",
        "node0:1:2 [0] NCCL INFO NCCL_ALGO set by environment to Ring.",
        "node0:1:2 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0",
        "+ export FI_CXI_RX_MATCH_MODE=software",
    )
    run = _one(tmp_path, log("all_reduce", TIMES, heard=said))
    assert (run.version, run.net, run.plugin) == ("2.21.5", "libfabric", "aws-ofi-nccl 1.9.2")
    assert run.settings == {"NCCL_ALGO": "Ring", "FI_CXI_RX_MATCH_MODE": "software"}


def test_the_first_nics_of_a_host_may_be_of_another_network(tmp_path: Path) -> None:
    """NCCL lists all; those that are most carry the traffic."""
    said = "node0:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_2:1/IB [2]mlx5_3:1/IB [RO]; OOB eth0:1<0>"
    assert _one(tmp_path, log("all_reduce", TIMES, heard=(said,))).net == "ib"


@pytest.mark.parametrize(
    ("line", "version"),
    [("nccl-headers=22602 nccl-library=22902", "2.29.2"), ("nccl-headers=2806 nccl-library=2806", "2.8.6")],
)
def test_the_library_says_its_version_as_a_number(line: str, version: str, tmp_path: Path) -> None:
    """nccl-tests 2.17 and later print NCCL_VERSION_CODE."""
    text = f"# nccl-tests version 2.17.8 {line}\n" + log("all_reduce", TIMES, heard=())
    assert _one(tmp_path, text).version == version


def test_rccl_tests(tmp_path: Path) -> None:
    """Older widths, no count of ranks' groups, its own name of the version."""
    text = (
        log("all_reduce", TIMES, gpu="AMD Instinct MI300X", heard=("RCCL version 2.20.5+hip6.2 HEAD:d8b7f5c",))
        .replace("# Using", "rccl-tests: Version develop:a7809b3\n# Using")
        .replace(" Group  0", "")
        .replace("  #wrong", " #wrong")
    )
    run = _one(tmp_path, text)
    assert (run.library, run.version, run.gpu) == ("rccl", "2.20.5", "AMD Instinct MI300X")


def test_several_runs_in_a_file(tmp_path: Path) -> None:
    """A script that runs one operation after the other; what NCCL said once holds for all."""
    text = log("all_reduce", TIMES) + "# nccl-tests version 2.17.8\n" + log("alltoall", TIMES, heard=())
    runs, notes = _read(tmp_path, text)
    assert [(run.op, run.version, len(run.rows)) for run in runs] == [
        ("all_reduce", "2.27.3", 4),
        ("alltoall", "2.27.3", 4),
    ]
    assert notes == []


def test_a_table_ends_where_its_summary_begins(tmp_path: Path) -> None:
    """Lines of a table without a head behind it are nobody's: somebody's notes on the run."""
    text = f"{log('all_reduce', TIMES)}{table_line('all_reduce', 8, 65536, 1.0)}\n"
    assert [row.time_us for row in _one(tmp_path, text).rows] == [time for _, time in TIMES]


def test_gpus_without_a_name_are_those_of_the_cluster(tmp_path: Path) -> None:
    """As rccl-tests prints them on MI355X: it is said for what they are taken."""
    said = ("RCCL version : 2.26.6-HEAD:6ade506",)
    (tmp_path / "a.log").write_text(log("all_reduce", TIMES, gpu="", heard=said))
    logs = agreed(read_logs(tmp_path))
    assert fits(logs, "mi355x")[1] == ["the logs do not name their GPUs: assuming the mi355x of mi355x"]


def test_cycles_give_the_quickest_time(tmp_path: Path) -> None:
    """-N prints every size again."""
    text = log("all_reduce", [*TIMES, *((size, time * 0.9) for size, time in TIMES)])
    assert [row.time_us for row in _one(tmp_path, text).rows] == pytest.approx([time * 0.9 for _, time in TIMES])


@pytest.mark.parametrize("name", ["all_gather_2nodes.log", "AllGather.txt", "out-all-gather-N2.out"])
def test_an_old_log_is_named_by_its_file(name: str, tmp_path: Path) -> None:
    """Before nccl-tests 2.14 nothing in it said which operation it was."""
    assert _one(tmp_path, log("all_gather", TIMES, named=False), name).op == "all_gather"


def test_one_column_of_times_is_taken_and_said(tmp_path: Path) -> None:
    """rccl-tests -O 0 prints in-place alone."""
    head = "#  size  count  type  redop  root  time  algbw  busbw  #wrong\n#  (B)  (elements)  (us)  (GB/s)  (GB/s)"
    text = log("all_reduce", TIMES, head=head)
    half = [" ".join(line.split()[:9]) if line.strip()[:1].isdigit() else line for line in text.splitlines()]
    runs, notes = _read(tmp_path, "\n".join(half))
    assert len(runs[0].rows) == 4
    assert notes == ["a.log: only one column of times instead of out-of-place and in-place"]


LINE = table_line("all_reduce", 8, 1 << 20, 60.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (log("all_reduce", TIMES).replace(LINE, LINE[:90]), ":20: left out: the line is cut (10 of 13 columns)"),
        (log("all_reduce", TIMES).replace(LINE, LINE.replace("  60.00", "  6o.00")), "a figure that is not a number"),
        (log("all_reduce", TIMES).replace(LINE, LINE.replace("  60.00", "    inf")), "not a number (inf or nan)"),
        (
            log("all_reduce", TIMES).replace(LINE, table_line("all_reduce", 8, 1 << 20, 60.0, wrong="7")),
            ":20: left out: 1048576 bytes came with 14 wrong values",
        ),
        (
            log("all_reduce", TIMES).replace(LINE, LINE.replace("  60.00", "  30.00")),
            ":20: left out: 1048576 bytes in 30.00 us make 34.95 GB/s of algbw, it says 17.48",
        ),
        (
            log("all_reduce", TIMES).replace(LINE, LINE.replace("  30.58", "  60.58")),
            ":20: left out: 1048576 bytes in 60.00 us make 30.58 GB/s of busbw, it says 60.58",
        ),
        (log("all_reduce", TIMES).replace("(us)", "(ms)"), ": left out: line 17 has (ms) where (us) is expected"),
        (
            log("all_reduce", TIMES).replace("  60.00  ", "   0.06  ").replace(" 500.00  ", "   0.50  "),
            ": left out: its algbw is not size / time in bytes and us (line 20): other units?",
        ),
        (
            log("all_reduce", TIMES).replace("all_reduce_perf", "all_gather_perf"),
            ": left out: named all_gather, but its busbw is 1.75 times algbw on 8 ranks, as that of all_reduce",
        ),
        (log("all_reduce", TIMES).replace(" time ", " cputime "), ": left out: it has the CPU's time (-C 1)"),
        (log("all_reduce", TIMES).replace("   busbw", ""), ": left out: its table has no column busbw"),
        (log("all_reduce", TIMES, named=False), ": left out: it does not name its operation: put that into the file's"),
        (log("all_reduce", TIMES).replace("Rank", "Rnk"), ": left out: no '# Rank' line: on how many GPUs"),
        (log("all_reduce", TIMES).replace("#  Rank  3", "#  Rnk 3"), ": left out: of 8 ranks 7 have a '# Rank' line"),
        (log("all_reduce", TIMES).replace("Rank  3", "Rank  2"), ": left out: it contains a rank twice"),
        (log("all_reduce", TIMES, gpus=1), ": left out: it ran on one GPU"),
        (log("all_reduce", []), ": left out: it has the head of a run and no line of figures"),
        (log("all_reduce", [*TIMES[:2], *TIMES[1:]]), ": left out: 65536 bytes come after 65536: lines of two runs"),
        (log("all_reduce", TIMES).replace("Rank  3 Group  0", "Rank  3 Group  1"), "split into 2 groups"),
        (log("all_reduce", TIMES, options="agg iters: 4"), ": left out: 4 calls were started together (-m)"),
        (log("all_reduce", TIMES, options="agg iters: 1 graph: 20"), ": left out: it ran as a CUDA graph (-G)"),
        (log("all_reduce", TIMES, nodes=2).replace("node1 device  7", "node2 device  7"), "unequal numbers of GPUs"),
    ],
    ids=str.split(
        "cut torn inf wrong halved doubled ms us factor cpu column unnamed ranks lost twice one empty mixed groups agg "
        "graph uneven"
    ),
)
def test_what_is_left_out_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    """Which file, which line, what is wrong."""
    runs, notes = _read(tmp_path, text)
    assert len(notes) == 1
    assert notes[0].startswith("a.log:")
    assert said in notes[0]
    assert all(len(run.rows) == 3 for run in runs), "only a bad line leaves the others"


def test_a_run_without_a_whole_line_says_what_is_missing(tmp_path: Path) -> None:
    """The in-place columns were lost on the way: a note for each line, then what the run lacks."""
    lines = log("all_reduce", TIMES).splitlines(keepends=True)
    text = "".join(" ".join(line.split()[:9]) + "\n" if line.split()[0].isdigit() else line for line in lines)
    runs, notes = _read(tmp_path, text)
    assert not runs
    assert len(notes) == len(TIMES) + 1
    assert notes[-1] == "a.log: left out: all 4 of its lines are cut (9 of 13 columns), as its head has them"


@pytest.mark.parametrize("time_us", [3.36, 59.97, 4321.4, 123456.0])
def test_what_was_not_printed_is_no_contradiction(time_us: float, tmp_path: Path) -> None:
    """A time and its bandwidths are rounded each by itself; of small sizes hardly a digit is left."""
    for size in (8, 1000, 1 << 13, 1 << 20):
        short = f"{time_us:.0f}" if time_us > 1000 else f"{time_us:.2f}"
        text = log("all_reduce", [(size, time_us + 0.004)])
        runs, notes = _read(tmp_path, text.replace(f"{time_us + 0.004:7.2f}", f"{short:>7s}"))
        assert notes == []
        assert len(runs[0].rows) == 1


def test_ranks_dealt_out_in_turn_are_left_out(tmp_path: Path) -> None:
    """mpirun --map-by node: neighbours in rank are not neighbours on a host."""
    text = log("all_reduce", TIMES, nodes=2, gpus=2)
    for rank, host in ((1, 1), (2, 0)):
        text = text.replace(
            f"on      node{rank // 2} device {rank % 2:2d}", f"on      host{host} device {rank % 2:2d}", 1
        )
    text = text.replace("host", "node")
    assert "dealt out to the hosts in turn" in _read(tmp_path, text)[1][0]


def _folder(tmp_path: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (tmp_path / f"{name}.log").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (log("all_reduce", TIMES, gpu="NVIDIA H200"), "several GPUs: NVIDIA H100 80GB HBM3 in a.log, NVIDIA H200 in b"),
        (
            log("all_reduce", TIMES, nodes=2, heard=("NCCL version 2.18.3+cuda12.2",)),
            "several versions of the library: 2.21.5 in a.log, 2.18.3 in b.log",
        ),
        (
            log("all_reduce", TIMES, nodes=2, heard=("n:1:2 [0] NCCL INFO Using network Socket",)),
            "several networks: ib in a.log, tcp in b.log",
        ),
        (
            log("all_reduce", TIMES, heard=("n:1:2 [0] NCCL INFO NCCL_MAX_NCHANNELS set by environment to 4.",)),
            "several values of NCCL_MAX_NCHANNELS: 8 in a.log, 4 in b.log",
        ),
    ],
)
def test_logs_of_mixed_runs_are_refused(other: str, said: str, tmp_path: Path) -> None:
    """One line with both, and what to do."""
    mine = (*IB, "n:1:2 [0] NCCL INFO NCCL_MAX_NCHANNELS set by environment to 8.")
    folder = _folder(tmp_path, a=log("all_reduce", TIMES, nodes=2, heard=mine), b=other)
    with pytest.raises(UsageError, match="put each into a folder of its own") as caught:
        agreed(read_logs(folder))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_release_that_nobody_has_is_refused_before_it_is_taken_for_another(tmp_path: Path) -> None:
    """One line, and no note before it that says what it is taken for."""
    folder = _folder(tmp_path, a=log("all_reduce", TIMES, heard=("NCCL version 9.99.1+cuda12.9",)))
    with pytest.raises(
        UsageError, match=r"a\.log: it says NCCL 9\.99\.1: expected a release 2\.x, .* leave that log out"
    ):
        fits(agreed(read_logs(folder)), "dgx-h100")


def test_a_contradiction_is_said_with_both_figures(tmp_path: Path) -> None:
    """Two logs of one configuration that differ by half, in the sizes where they do."""
    slow = [(size, time * (1.5 if size > 1 << 24 else 1.0)) for size, time in TIMES]
    folder = _folder(tmp_path, a=log("all_reduce", TIMES), b=log("all_reduce", slow))
    logs = agreed(read_logs(folder))
    assert logs.notes == (
        "all_reduce on 1 x 8 contradicts itself at > 16 MiB: 67108864 bytes take 500.0 us in a.log and 750.0 us in "
        "b.log; both count, and the uncertainty is as large",
    )
    assert len(logs.runs) == 2


def test_a_folder_without_logs(tmp_path: Path) -> None:
    """Other files are passed over; nothing at all is one line, with the first reason if there was one."""
    (tmp_path / "env.txt").write_text("PATH=/bin\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(UsageError, match=r"no log of nccl-tests or rccl-tests with a table in 2 files$"):
        read_logs(tmp_path)
    (tmp_path / "a.log").write_text(log("all_reduce", []))
    with pytest.raises(UsageError, match=r"in 3 files \(a\.log: left out: it has the head"):
        read_logs(tmp_path)
    with pytest.raises(UsageError, match="no such folder: "):
        read_logs(tmp_path / "no")


def test_why_a_run_is_left_out_comes_before_a_lines_reason(tmp_path: Path) -> None:
    """A cut line above the fault that makes the whole run useless is not what has to be mended."""
    lines = log("all_reduce", TIMES).splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:1] == [str(TIMES[0][0])])
    cut = " ".join(lines[first].split()[:-2])
    (tmp_path / "a.log").write_text("\n".join([*lines[: first + 3], cut, *lines[first + 1 :]]))
    with pytest.raises(UsageError, match=r"in 1 file \(a\.log: left out: \d+ bytes come after \d+: lines of two runs"):
        read_logs(tmp_path)


@pytest.mark.parametrize(
    ("text", "like", "said"),
    [
        (
            log("all_reduce", TIMES),
            None,
            "expected --like CLUSTER, the most similar cluster (presets with such GPUs: aws-p5,",
        ),
        (log("all_reduce", TIMES, gpu="Tesla V100"), None, "no preset has such GPUs: make a file"),
        (log("all_reduce", TIMES), "dgx-a100", "its GPUs are a100, those of the logs NVIDIA H100 80GB HBM3"),
        (log("all_reduce", TIMES, gpu="NVIDIA GB200"), "dgx-b200", "its GPUs are b200, those of the logs NVIDIA GB200"),
        (log("all_reduce", TIMES), "snellius-h100", "it has 4 GPUs a node, a.log has 8"),
        (log("all_reduce", TIMES, nodes=2, heard=IB), "aws-p5", "its nodes are joined by efa, NCCL used ib in a.log"),
        (
            log("all_reduce", TIMES, heard=("RCCL version 2.20.5+hip6.2",)),
            "dgx-h100",
            "its library is NCCL, but the logs are of RCCL",
        ),
        (
            log("all_gather", [(1 << 30, 1000.0)], nodes=2),
            "dgx-h100",
            "all_gather of 1073741824 bytes on 2 x 8 took 1,000 us, and 8 NICs of 400 Gbit/s need 1,342 us at least",
        ),
    ],
)
def test_logs_of_another_machine_are_refused(text: str, like: str | None, said: str, tmp_path: Path) -> None:
    """Nothing is guessed: GPUs, their number, network, library and what links can do have to fit --like."""
    with pytest.raises(UsageError) as caught:
        fits(agreed(read_logs(_folder(tmp_path, a=text))), like)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("heard", "said"),
    [
        ((), ["no log names its version of NCCL: taken for 2.27.3, as dgx-h100 has it (NCCL_DEBUG=VERSION prints it)"]),
        (
            ("NCCL version 2.99.1+cuda14.0",),
            [
                "NCCL 2.99.1 is not among the releases whose choices are known (2.16 to 2.30): distsim uses the "
                "algorithms and protocols of 2.30"
            ],
        ),
        (("NCCL version 2.21.5+cuda12.4",), []),
    ],
)
def test_what_the_preset_lends_is_said(heard: tuple[str, ...], said: list[str], tmp_path: Path) -> None:
    """A version that no log names, and one that the tables do not know."""
    logs = agreed(read_logs(_folder(tmp_path, a=log("all_reduce", TIMES, heard=heard))))
    assert fits(logs, "dgx-h100")[1] == said
