"""`distsim COMMAND`: which command, which exit code, which one line."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from distsim.cli import main
from distsim.cli.dispatch import COMMANDS, Parser, filled, module_of, parse
from distsim.errors import DistsimError, UsageError
from tests.golden import assert_golden

pytestmark = pytest.mark.smoke

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the command `bench`; its `act` is what the handler does."""
    control = SimpleNamespace(act=lambda args: 0)

    def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
        parser = subparsers.add_parser("bench")
        parser.add_argument("--size", type=int, default=8)
        parser.set_defaults(func=lambda args: control.act(args))

    module = ModuleType("distsim.cli.bench")
    module.add_parser = add_parser  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distsim.cli.bench", module)
    monkeypatch.setattr("distsim.cli.dispatch.COMMANDS", {"run": "", "bench": ""})
    return control


def test_help_names_every_command_that_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, what they are for, and the exit codes, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    assert_golden(GOLDEN / "help.txt", capsys.readouterr().out)


def test_a_description_is_filled_and_its_commands_stay_lines() -> None:
    """What a column explains goes on below it."""
    text = "A word and\nanother word.\n\n  distsim run   simulated, on a cluster\n\nexit codes: 0"
    assert filled(text, 28) == [
        "A word and another word.",
        "",
        "  distsim run   simulated,",
        "                on a cluster",
        "",
        "exit codes: 0",
    ]


def test_nothing_at_all_is_a_mistake_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The bare word answers with the help, and with exit code 2 for scripts."""
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_every_command_of_the_table_has_a_module() -> None:
    """The table and the modules agree: none is forgotten."""
    folder = Path(str(sys.modules["distsim"].__file__)).parent
    paths = [path for path in folder.rglob("*.py") if "def add_parser(" in path.read_text()]
    modules = {path.parent.name if path.stem == "command" else path.stem for path in paths}
    assert modules == set(COMMANDS)


def _lines(parser: argparse.ArgumentParser, path: str) -> list[str]:
    """`topo show --json` for every flag, `topo show CLUSTER` for what is positional."""
    lines = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                lines += _lines(inner, f"{path} {name}")
        elif action.option_strings:
            lines += [f"{path} {flag}" for flag in action.option_strings]
        else:
            lines.append(f"{path} {action.metavar or action.dest}")
    return lines


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "run"])
def test_flags_are_frozen(command: str) -> None:
    """A flag that somebody's script uses does not vanish unseen (run's are in test_run.py)."""
    parser = Parser(prog="distsim")
    subparsers = parser.add_subparsers()
    importlib.import_module(module_of(command)).add_parser(subparsers)
    text = "\n".join(sorted(_lines(subparsers.choices[command], command))) + "\n"
    assert_golden(GOLDEN / f"flags_{command}.txt", text)


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    """One number, in one place."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"distsim {metadata.version('torch-distsim')}\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["rnu"], "no command 'rnu'; did you mean run? the commands are run, bench"),
        (["xyzzy"], "no command 'xyzzy'; the commands are run, bench"),
        (["train.py"], "expected a command, got train.py; try distsim run train.py"),
        (
            ["--on", "gloo"],
            "expected a command, got the flag --on; try distsim run --on ..., or distsim --help",
        ),
        (
            ["bench", "--sixe", "3"],
            "distsim bench does not know --sixe; did you mean --size? see distsim bench --help",
        ),
        (["bench", "--size", "x"], "argument --size: invalid int value: 'x' (see distsim bench --help)"),
        (
            ["bench", "--size"],
            "argument --size: expected one argument; a value that begins with a dash is written --size=VALUE "
            "(see distsim bench --help)",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], line: str, bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was expected, what came, what to do; never a traceback."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err == f"distsim: error: {line}\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no such cluster"), 2, "distsim: error: no such cluster\n"),
        (DistsimError("broken"), 1, "distsim: error: broken\n"),
        (KeyboardInterrupt(), 130, "distsim: interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "a" * 5000),
            2,
            f"distsim: error: {'a' * 77}...: cannot be used (File name too long)\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "d"),
            2,
            "distsim: error: d: cannot be used (Permission denied)\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "report.json"),
            2,
            "distsim: error: report.json cannot be written (No space left on device); free some space\n",
        ),
    ],
)
def test_an_error_of_a_command_is_an_exit_code(
    error: BaseException, code: int, line: str, bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's mistake, our own refusal, Ctrl-C, and a reader that left."""

    def act(args: argparse.Namespace) -> int:
        raise error

    bench.act = act
    assert main(["bench"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("wants_traceback", [False, True])
def test_a_fault_of_ours_is_one_line_with_a_code_of_its_own(
    wants_traceback: bool, bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CI does not take it for the program's, and its traceback is there for who asks."""

    def act(args: argparse.Namespace) -> int:
        raise ZeroDivisionError("x" * 5000)

    bench.act = act
    monkeypatch.delenv("DISTSIM_TRACEBACK", raising=False)
    if wants_traceback:
        monkeypatch.setenv("DISTSIM_TRACEBACK", "1")
    assert main(["bench"]) == 70
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[-1].startswith("distsim: internal error: ZeroDivisionError: xxx")
    assert "(test_main.py:" in lines[-1]
    assert "DISTSIM_TRACEBACK=1" in lines[-1]
    assert len(lines[-1]) < 600
    assert captured.err.startswith("Traceback") == wants_traceback
    assert wants_traceback or len(lines) == 1


def test_a_long_refusal_is_cut(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of it, or a file's one word fills the terminal."""

    def act(args: argparse.Namespace) -> int:
        raise UsageError("expected a name, got " + "x" * 100_000 + "\nand more")

    bench.act = act
    assert main(["bench"]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert (len(first) < 1100, last) == (True, "and more")


@pytest.mark.parametrize("columns", ["0", "1", "2", "-5", "nan", "99999999999999999999"])
@pytest.mark.parametrize("words", [["--help"], ["topo", "--help"]])
def test_help_fits_any_width(
    columns: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that no terminal has is as good as the nearest."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(words) == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e999", "1e300", "x", "9" * 5000])
@pytest.mark.parametrize(
    "words",
    [
        ["watch", ".", "--interval"],
        ["run", "--on", "gloo", "x.py", "--hang-after"],
        ["run", "--host-timeout"],
        ["run", "--budget"],
        ["calibrate", "--on", "gloo", "--seconds"],
    ],
    ids=lambda words: words[-1],
)
def test_seconds_are_seconds(words: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not a number, or no time, is refused with its flag, or it would turn off what it bounds."""
    flag = words[-1]
    assert (
        main(
            [*words[:-1], f"{flag}={value}"]
            if "x.py" not in words
            else ["run", "--on", "gloo", f"{flag}={value}", "x.py"]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith(f"distsim: error: argument {flag}: expected seconds, from 0 to 1e+09, got ")
    assert len(error) < 300


def test_the_handler_gets_its_arguments_and_gives_the_exit_code(bench: SimpleNamespace) -> None:
    """What the handler answers is what the shell sees."""
    bench.act = lambda args: args.size
    assert main(["bench", "--size", "5"]) == 5


def test_python_dash_m_distsim_works_from_a_bare_clone() -> None:
    """`python -m distsim` needs no installed script, and a closed pipe needs no words."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-S", "-m", "distsim", "--help"], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: distsim")


@pytest.mark.parametrize(
    ("shell", "code", "line"),
    [
        ("{} --help >&-", 0, ""),
        ("{} --help 2>&- <&-", 0, ""),
        (
            "{} --help >/dev/full",
            2,
            "distsim: error: the output cannot be written (No space left on device); free some space\n",
        ),
        ("{} nosuch 2>/dev/full", 2, ""),
        (
            "mkdir gone && cd gone && rmdir ../gone && {} --help",
            2,
            "distsim: error: the working folder cannot be used (No such file or directory): change to one that "
            "exists\n",
        ),
    ],
)
def test_a_stream_or_folder_that_cannot_be_used_is_one_line(shell: str, code: int, line: str, tmp_path: Path) -> None:
    """A closed stdout is no fault; a full disk and a deleted folder are named."""
    root = Path(__file__).resolve().parents[2]
    command = shell.format(f"PYTHONPATH={root} {sys.executable} -S -m distsim")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (code, line)


def test_who_calls_it_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation of this process has left a thread behind: only the command line's own process ends over that."""
    from distsim.watchdog.shared_state import SharedState

    page = SharedState()
    page.leave_threads_behind()
    monkeypatch.setattr("distsim.watchdog.shared_state.here", lambda: page)
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    assert main(["topo", "list"]) == 0
    for number in (page.page_fd, page.stack_fd):
        os.close(number)
    assert ended == []


@pytest.mark.parametrize(
    ("argv", "on", "rest"),
    [
        (["fits", "train.py", "--on", "dgx-a100:2", "--mbs", "2"], "dgx-a100:2", ["--mbs", "2"]),
        (["run", "train.py", "--mbs=2", "--on=dgx-a100:2"], "dgx-a100:2", ["--mbs=2"]),
        (["run", "has_on.py", "--on", "2"], None, ["--on", "2"]),
        (["run", "--", "torchrun", "train.py", "--on", "2"], None, ["train.py", "--on", "2"]),
    ],
)
def test_a_flag_after_the_script_is_read_unless_the_script_has_one_of_that_name(
    argv: list[str], on: str | None, rest: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation of another cluster than the one that was asked for would be a wrong answer."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("parser.add_argument('--mbs')\n")
    Path("has_on.py").write_text("parser.add_argument('--on')\n")
    args = parse(argv)
    assert (args.on, args.training_script_args) == (on, rest)


def test_what_is_varied_may_follow_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of the words of a command is no reason to refuse it."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("parser.add_argument('--mbs')\n")
    args = parse(["tune", "train.py", "--vary", "--mbs=1,2", "--budget", "5m", "--mbs", "1", "--vary", "--tp=1,2"])
    assert args.vary == ["--mbs=1,2", "--tp=1,2"]
    assert args.script_arguments == "--mbs 1"
    assert "--vary, --budget are flags of distsim, because train.py has none of that name" in capsys.readouterr().err


def test_a_flag_after_the_script_without_its_value_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not the script that is missing."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert main(["fits", "train.py", "--on"]) == 2
    assert capsys.readouterr().err == "distsim: error: --on after train.py: expected a value\n"
