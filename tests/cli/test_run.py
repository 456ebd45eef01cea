"""`distsim run`: torchrun's flags and ours, what they ask of the simulator, what is refused."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from distsim.cli import main
from distsim.cli import run as run_command
from distsim.sim import RunRequest
from distsim.text.output_files import output_file
from tests.golden import assert_golden
from tests.report.made import outcome

pytestmark = pytest.mark.smoke

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return "train.py"


class Simulator:
    """Stands for the simulator: remembers what it was asked, answers a healthy run."""

    request: RunRequest

    def __init__(self) -> None:
        self.answer = outcome(2)

    def __call__(self, request: RunRequest) -> Any:
        self.request = request
        return self.answer


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    """The simulator's entry point, replaced."""
    stand_in = Simulator()
    monkeypatch.setattr("distsim.sim.run_program", stand_in)
    return stand_in


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    run_command.add_parser(subparsers)
    chosen: argparse.ArgumentParser = subparsers.choices["run"]
    return chosen


def test_every_torchrun_flag_is_taken() -> None:
    """Whatever torchrun of the installed torch knows, `distsim run` knows."""
    ours = set(_parser()._option_string_actions)
    assert set(get_args_parser()._option_string_actions) - ours == set()


def test_our_own_flags_are_frozen() -> None:
    """A flag that somebody's script uses does not vanish unseen."""
    torchrun = set(get_args_parser()._option_string_actions)
    own = sorted(set(_parser()._option_string_actions) - torchrun)
    assert_golden(GOLDEN / "run_flags.txt", "\n".join(own) + "\n")


def test_the_help_begins_with_what_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Examples and our flags; torchrun's thirty are shown by a flag of their own."""
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.index("distsim run --on gloo --nproc-per-node 4") < text.index("--report FILE")
    assert text.index("--report FILE") < text.index("--help-torchrun")
    assert "--rdzv-backend" not in text
    assert main(["run", "--help-torchrun"]) == 0
    theirs = capsys.readouterr().out
    assert theirs.startswith("usage: torchrun ")
    assert all(flag in theirs for flag in get_args_parser()._option_string_actions)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(("ranks", "enough"), [("auto", False), ("sample", True)])
def test_only_who_asks_for_a_sample_takes_it_for_enough(
    ranks: str, enough: bool, is_terminal: bool, script: str, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code does not depend on where the command is typed: on a terminal, in a pipe or in CI."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    assert main(["run", "--ranks", ranks, script]) == 0
    assert simulator.request.sample_is_enough is enough


def test_without_on_it_is_one_node_and_says_so(
    script: str, simulator: Simulator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default cluster is named, in the run and in the report."""
    assert main(["run", script, "--lr", "3e-4", "--seed", "9"]) == 0
    request = simulator.request
    assert (request.on, request.nnodes, request.nproc_per_node, request.seed) == ("dgx-h100:1", None, None, 0)
    assert request.args == ["--lr", "3e-4", "--seed", "9"]
    assert "no --on given: simulated on dgx-h100:1" in capsys.readouterr().out


def test_a_scripts_flags_may_begin_as_ours_do(
    script: str, simulator: Simulator, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--num` and `--n` are its own, though they would be short for several of torchrun's."""
    assert main(["run", script, "--num", "3", "--n", "4", "--f"]) == 0
    assert simulator.request.args == ["--num", "3", "--n", "4", "--f"]
    assert main(["run", "--nu", "3", script]) == 2
    assert "distsim run does not know --nu" in capsys.readouterr().err


def test_our_flags_reach_the_simulator(script: str, simulator: Simulator) -> None:
    """Cluster, seed, fidelity, algorithm, protocol, NCCL's version, the watchdog."""
    flags = "--on dgx-h100:4 --seed 3 --fidelity message --algo ring --proto LL --nccl-version 2.27"
    assert main(["run", *flags.split(), "--host-timeout", "5", script]) == 0
    request = simulator.request
    assert (request.program, request.on, request.seed) == (script, "dgx-h100:4", 3)
    assert (request.fidelity, request.algo) == ("message", "ring")
    assert (request.proto, request.nccl_version) == ("LL", "2.27")
    assert request.host_timeout_s == 5.0


@pytest.mark.parametrize(
    ("flags", "nnodes", "nproc_per_node"),
    [
        ([], None, None),
        (["--nnodes", "2"], 2, None),
        (["--nnodes", "1:4"], 4, None),
        (["--nproc-per-node", "4"], None, 4),
        (["--nproc_per_node=auto"], None, None),
        (["--nproc-per-node", "gpu"], None, None),
        (["--standalone", "--nnodes=1", "--nproc-per-node=2"], 1, 2),
    ],
)
def test_the_size_of_the_world_is_torchruns(
    flags: list[str], nnodes: int | None, nproc_per_node: int | None, script: str, simulator: Simulator
) -> None:
    """Numbers, ranges and words as torchrun takes them; without any, the whole cluster."""
    assert main(["run", *flags, script]) == 0
    assert (simulator.request.nnodes, simulator.request.nproc_per_node) == (nnodes, nproc_per_node)


def test_flags_without_meaning_are_accepted_and_named(script: str, simulator: Simulator) -> None:
    """A launch line copied from a cluster works, and says what it no longer does."""
    flags = "--rdzv-backend c10d --rdzv-endpoint host:29500 --rdzv-id 7 --max-restarts 3 --monitor-interval 5"
    assert main(["run", *flags.split(), script]) == 0
    (note,) = [note for note in simulator.answer.notes if "ignored" in note]
    for flag in flags.split()[::2]:
        assert flag in note


@pytest.mark.parametrize("variable", ["PET_NNODES", "PET_NPROC_PER_NODE"])
def test_torchruns_environment_counts(
    variable: str, script: str, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun reads PET_* for every flag, so do we."""
    monkeypatch.setenv(variable, "2")
    assert main(["run", script]) == 0
    assert 2 in (simulator.request.nnodes, simulator.request.nproc_per_node)


def test_a_module_is_not_looked_for_as_a_file(script: str, simulator: Simulator) -> None:
    """`-m pkg.train` names a module."""
    assert main(["run", "-m", "pkg.train", "--x"]) == 0
    assert (simulator.request.program, simulator.request.module) == ("pkg.train", True)
    assert simulator.request.args == ["--x"]


def test_log_dir_is_passed_on_and_redirects_alone_get_one(
    script: str, simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-r 3` without a folder makes one and says where, as torchrun does."""
    assert main(["run", "--log-dir", "logs", script]) == 0
    assert simulator.request.log_dir == "logs"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["run", "-r", "3", script]) == 0
    assert simulator.request.log_dir is not None
    assert any(simulator.request.log_dir in note for note in simulator.answer.notes)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["nope.py"], "no script nope.py: no such file"),
        (["folder"], "expected a Python script, got the folder folder; for a package use -m folder"),
        (["--no-python", "train.py"], "only Python can be simulated"),
        (["--nnodes", "two", "train.py"], "--nnodes: expected a number of nodes, or MIN:MAX, got 'two'"),
        (["--nnodes", "0", "train.py"], "--nnodes: expected a number of nodes, or MIN:MAX, got '0'"),
        (["--nproc-per-node", "many", "train.py"], "--nproc-per-node: expected a number, auto, gpu or cpu"),
        (["--fidelity", "exact", "train.py"], "argument --fidelity: invalid choice: 'exact'"),
        (["--report", "no/where.json", "train.py"], "--report no/where.json: no folder no; create it first"),
        (["--report", "folder", "train.py"], "--report folder: expected a file, got a folder"),
        (["--report", "/proc/x.json", "train.py"], "--report /proc/x.json: cannot be written"),
        (["--html", "-", "train.py"], "--html -: expected a file, got standard output; try --html report.html"),
        (["--trace", "-", "train.py"], "--trace -: expected a file, got standard output; try --trace trace.json"),
        (["--trace", "no/where.json", "train.py"], "--trace no/where.json: no folder no; create it first"),
        (["--trace", "train.py/", "train.py"], "--trace train.py/: expected a folder, got a file"),
        (["--trace", "no/no/", "train.py"], "--trace no/no/: no folder no; create it first"),
        (["--seed", "-1", "train.py"], "--seed: expected 0 or a larger number, got -1"),
        (["--seed", "x", "train.py"], "argument --seed: invalid int value: 'x'"),
        ([], "the following arguments are required: training_script"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(
    flags: list[str],
    line: str,
    script: str,
    simulator: Simulator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one line that names the flag, and the simulator was never asked."""
    (tmp_path / "folder").mkdir()
    assert main(["run", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("distsim: error: ")
    assert line in error
    assert error.count("\n") == 1
    assert not hasattr(simulator, "request")


def test_a_report_on_standard_output_is_alone_there(
    script: str, simulator: Simulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reader is a program: the summary for people is on standard error, and no file is named -."""
    assert main(["run", "--report", "-", script]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == "distsim.report/1"
    assert "\nfinished after " in captured.err
    assert "wrote" not in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_report_and_trace_are_written_and_the_probe_leaves_nothing(
    script: str, simulator: Simulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paths were tried before the run; only the run's own files stay, and a line says so of each."""
    assert main(["run", "--report", "r.json", "--trace", "traces/", script]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "wrote" in line] == [
        "wrote r.json",
        "wrote traces/",
    ]
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["r.json", "traces/rank0.json", "traces/rank1.json", "train.py"]


def test_a_report_of_before_survives_a_refused_run(script: str, tmp_path: Path) -> None:
    """Trying whether a file can be written does not empty it."""
    (tmp_path / "r.json").write_text("old")
    output_file("--report")("r.json")
    assert (tmp_path / "r.json").read_text() == "old"


@pytest.mark.parametrize("code", [0, 1, 3, 4, 130])
def test_the_exit_code_is_the_runs(code: int, script: str, simulator: Simulator) -> None:
    """Finished, raised, hung, inconsistent, interrupted."""
    simulator.answer.exit_code = code
    assert main(["run", script]) == code


def test_a_full_disk_does_not_lose_the_summary(
    script: str, simulator: Simulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables were printed, the file's fate is one line, the exit code says so."""

    def write(outcome: object, path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distsim.report.write_trace", write)
    assert main(["run", "--trace", "t.json", script]) == 2
    captured = capsys.readouterr()
    assert "time by rank" in captured.out
    assert captured.err == "distsim: error: --trace t.json: cannot be written (No space left on device)\n"


@pytest.mark.parametrize(("code", "silent"), [(0, True), (3, False)])
def test_quiet_speaks_only_when_something_is_wrong(
    code: int, silent: bool, script: str, simulator: Simulator, capsys: pytest.CaptureFixture[str]
) -> None:
    """A healthy quiet run prints nothing of ours; a hang is never quiet."""
    simulator.answer.exit_code = code
    main(["run", "--quiet", script])
    assert (capsys.readouterr().out == "") is silent


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], argparse.Namespace]:
    """The real launcher, replaced; gives what it was called with."""
    calls: list[argparse.Namespace] = []
    module = ModuleType("distsim.realexec.launch")
    module.launch = lambda args: calls.append(args) or 3  # type: ignore[attr-defined, func-returns-value]
    module.__spec__ = sys.modules["distsim"].__spec__
    monkeypatch.setitem(sys.modules, "distsim.realexec.launch", module)
    return lambda: calls[0]


def test_a_real_backend_goes_to_the_launcher_with_torchruns_defaults(
    script: str, simulator: Simulator, launched: Callable[[], argparse.Namespace]
) -> None:
    """`--on gloo` simulates nothing; what was not said is as torchrun has it."""
    assert main(["run", "--on", "gloo", "--nproc-per-node", "2", script, "--lr", "1"]) == 3
    args = launched()
    assert (args.on, args.nnodes, args.nproc_per_node) == ("gloo", "1:1", "2")
    assert args.training_script_args == ["--lr", "1"]
    assert not hasattr(simulator, "request")
