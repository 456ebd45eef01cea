"""`distsim COMMAND ...`: chooses the command, imports only its module, turns errors into exit codes.

Nothing here may import torch, rich or networkx: `distsim --help` has to answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import itertools
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from distsim import __version__
from distsim.errors import DistsimError, UsageError
from distsim.text.untrusted_input import brief, printable, read_text, shortened

if TYPE_CHECKING:
    from distsim.watchdog.shared_state import ProcessOutcome

COMMANDS: dict[str, str] = {
    "run": "run a torch.distributed program, simulated or for real",
    "shell": "run a shell script whose torchrun, srun, python, nvidia-smi are simulated",
    "bench": "time one collective on a cluster, in nccl-tests' table",
    "topo": "list the built-in clusters, or show one",
    "diagnose": "diagnose a job from its records: which rank hung it, and where",
    "attach": "find the rank that hangs a running job, without distsim in the job",
    "watch": "show a live job, group by group",
    "html": "turn a JSON report into an HTML page",
    "scenario": "run scenario files: program, cluster, faults, expected outcome",
    "fits": "check whether a training script fits into GPU memory, and find a change that makes it fit",
    "sweep": "run one scenario or script under many settings",
    "buy": "compare machines for a training: how many nodes, how long, how much, which layout",
    "tune": "search the settings of a training script for the best layout",
    "equal": "run one program in two layouts and compare what they compute",
    "validate": "compare the network model with measurements",
    "calibrate": "fit a cluster file to your own measurements",
    "trace": "show who came last, and the critical path, in traces of all ranks",
    "health": "find the node that is slower than the others in logs of nccl-tests",
    "schema": "print the JSON Schema of a report",
    "mcp": "serve the commands to an agent (Model Context Protocol)",
    "doctor": "print versions, and what is supported and refused",
}
"""Every command with its one line of help; the module is `module_of(command)`."""
ROOMS = {
    "buy": "distsim.planning.buy.command",
    "calibrate": "distsim.calibration.calibrate",
    "validate": "distsim.calibration.validate",
    "equal": "distsim.planning.equal.command",
    "fits": "distsim.planning.fits",
    "health": "distsim.calibration.health",
    "mcp": "distsim.cli.agents.mcp",
    "schema": "distsim.cli.agents.schema",
    "shell": "distsim.cli.inputs.shell",
    "sweep": "distsim.planning.sweep",
    "trace": "distsim.calibration.traces.trace",
    "tune": "distsim.planning.tune",
}
"""Commands whose module is not in `distsim.cli` itself: in a sub-package, or with the subject that it belongs to."""

EXIT_CODES = """\
exit codes:
  0  finished
  1  the program raised
  2  wrong usage: a flag, a file or a cluster
  3  a hang or deadlock was diagnosed
  4  inconsistent collectives were diagnosed
  5  an expectation of a scenario failed, two layouts differ, a program does not fit (distsim fits), only some ranks \
ran (distsim run --ranks auto), a result is silently wrong (--silent strict), or a node is slow (distsim health)
 70  distsim itself failed: please report it
130  Ctrl-C ended it; 143: SIGTERM did
"""

REAL_BACKENDS = ("gloo", "nccl", "mpi")
"""Values of `distsim run --on` that mean a real run."""
NARROWEST = 20
INTERRUPTED = 130
BROKEN_PIPE = 141
INTERNAL = 70
"""Exit code of an error of distsim itself: EX_SOFTWARE of sysexits.h."""
TRACEBACK = "DISTSIM_TRACEBACK"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that fills the paragraphs of a description to the terminal, and wraps indented lines (commands)
    only where they are too long.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(filled(text, width))

    def _format_usage(self, *args: Any, **named: Any) -> str:
        text = super()._format_usage(*args, **named)
        return "\n".join(
            "\n".join(
                textwrap.wrap(line, max(self._width, NARROWEST), subsequent_indent=" " * 7, break_on_hyphens=False)
            )
            for line in text.split("\n")
        )


def filled(text: str, width: int) -> list[str]:
    """Return *text* as lines of at most *width* characters: paragraphs filled, indented lines kept as they are."""
    lines: list[str] = []
    width = max(width, NARROWEST)
    for is_paragraph, group in itertools.groupby(text.splitlines(), key=lambda line: line[:1].strip() != ""):
        for line in [" ".join(group)] if is_paragraph else group:
            # what a column explains goes on below it
            indent = "" if is_paragraph else " " * (max(match.end() for match in re.finditer(r"  +|^", line)) or 2)
            lines += textwrap.wrap(
                line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            ) or [""]
    return lines


class Parser(argparse.ArgumentParser):
    """An argument parser that fills its help with `HelpFormatter`, and raises a `UsageError` instead of exiting."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter} | named)

    def error(self, message: str) -> NoReturn:
        flag = re.fullmatch(r"argument (?:\S+/)?(--[\w-]+)(?:/\S+)?: expected one argument", message)
        hint = f"; a value that begins with a dash is written {flag[1]}=VALUE" if flag else ""
        raise UsageError(f"{message}{hint} (see {self.prog} --help)")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the flags that an abbreviation may stand for.

        Before 3.12 Python complains about an ambiguous word wherever it is, even among a script's own arguments, in
        which our flags are not searched.
        """
        options: list[Any] = super()._get_option_tuples(option_string)
        takes_the_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        return [] if takes_the_rest and len(options) > 1 else options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and answer the exit code; never raises for a user's mistake."""
    try:
        if argv is None:
            _open_streams()
            _check_folder()
            _watched(sys.argv[1:])
        code = _dispatch(list(sys.argv[1:] if argv is None else argv), own_process=argv is None)
        sys.stdout.flush()
    except UsageError as error:
        _complain(f"error: {error}")
        return 2
    except DistsimError as error:
        _complain(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has what it wanted
        _discard_stdout()
        return BROKEN_PIPE
    except Exception as error:
        refusal = _file_refusal(error) or _torch_refusal(error)
        code = INTERNAL if refusal is None else 2
        _complain(_internal(error) if refusal is None else f"error: {refusal}")
    if argv is None:
        _leave_threads_behind(code)
    return code


def _complain(text: str) -> None:
    """Print one line to stderr, if it can be written."""
    with contextlib.suppress(OSError):
        print(f"distsim: {shortened(printable(text))}", file=sys.stderr)


def _internal(error: Exception) -> str:
    """Return the line about an error of distsim itself, after its traceback if that is wanted."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"internal error: {type(error).__name__}: {brief(str(error), 200)} ({os.path.basename(last.filename)}:"
        f"{last.lineno}). This is a fault of distsim, not of your program: please report it, with the traceback that "
        f"{TRACEBACK}=1 prints"
    )


def _open_streams() -> None:
    """Open streams that the shell closed (`>&-`), so that no file that is opened later takes their numbers."""
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def _check_folder() -> None:
    """Raise UsageError if the working folder was deleted."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(f"the working folder cannot be used ({error.strerror}): change to one that exists") from None


def _discard_stdout() -> None:
    """Send what stdout still holds nowhere, because Python would complain again while it closes stdout."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _file_refusal(error: Exception) -> UsageError | None:
    """Return a one-line error if *error* says that a disk is full or that a file cannot be used, else None."""
    if not isinstance(error, OSError):
        return None
    if error.errno in _UNUSABLE and error.filename is not None:
        return UsageError(f"{brief(str(error.filename))}: cannot be used ({error.strerror})")
    if error.errno not in _FULL:
        return None
    try:
        sys.stdout.flush()
    except OSError:
        _discard_stdout()
    return UsageError(f"{error.filename or 'the output'} cannot be written ({error.strerror}); free some space")


def _torch_refusal(error: Exception) -> UsageError | None:
    """Return a one-line error if *error* was raised because torch or ctypes cannot be imported, else None."""
    lines = (frame.line or "" for frame in traceback.extract_tb(error.__traceback__))
    if not any(re.search(r"\b(import|from) _?(torch|ctypes)\b|import_module\(.torch\b", line) for line in lines):
        return None
    from distsim.torch_compat.names import SIM
    from distsim.torch_compat.releases import torch_refusal

    return torch_refusal(error, SIM)


def _leave_threads_behind(code: int) -> None:
    """End the process at once with *code*, without waiting for threads of abandoned ranks, which may never end.

    Only the command line's own process is ended this way; a program that calls `main` goes on.
    """
    beacons = sys.modules.get("distsim.watchdog.shared_state")
    shared_state = None if beacons is None else beacons.here()
    if shared_state is not None and shared_state.threads_left:
        sys.stderr.flush()
        os._exit(code)


def _watched(argv: Sequence[str]) -> None:
    """Simulate in a child process if the simulation could hang or crash; the parent then reports and ends with the
    exit code.
    """
    simulates = argv[:1] in (["sweep"], ["tune"], ["buy"], ["fits"]) or (argv[:1] == ["run"] and not _real(argv))
    if not simulates:
        return
    from distsim.watchdog.process import can_watch, fork_watched

    if can_watch():
        fork_watched(lambda fate: _explain(fate, argv))
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # it ends as with Ctrl-C: by saying where it was
            signal.signal(signal.SIGTERM, signal.default_int_handler)


def _explain(fate: ProcessOutcome, argv: Sequence[str]) -> int:
    """Print the report of a run that ended before it could report, and return its exit code."""
    if argv[0] == "run":
        return int(importlib.import_module("distsim.cli.run").explain(fate, argv))
    from distsim.report.fate import fatal_text

    print(fatal_text(fate), end="", file=sys.stderr)
    return 1 if fate.signal_name else 3


def _real(argv: Sequence[str]) -> bool:
    return any(word in REAL_BACKENDS for word in _places(argv))


def _places(argv: Sequence[str]) -> list[str]:
    """Return the values given after --on."""
    places = [after for word, after in itertools.pairwise((*argv, "")) if word == "--on"]
    return [*places, *(word.partition("=")[2] for word in argv if word.startswith("--on="))]


def _dispatch(argv: list[str], own_process: bool) -> int:
    """Run the command in *argv*. With *own_process*, the process belongs to distsim from start to end, and may fork."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"distsim {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        raise UsageError(_unknown(name))
    try:
        with many_imports(own_process):
            args = parse(argv)
    except SystemExit as stop:  # argparse ends here for --help
        return stop.code if isinstance(stop.code, int) else 0
    args.own_process = own_process
    args.argv = argv
    code = args.func(args)
    if own_process and "triton" in sys.modules:
        # triton 3.9 (torch 2.15), made with nanobind, prints 30 lines about its objects that Python does not free
        gc.unfreeze()
    return int(code)


@contextlib.contextmanager
def many_imports(own_process: bool) -> Iterator[None]:
    """Exclude the objects that importing torch and the simulator creates from Python's garbage collection.

    They live as long as the process, and examining them again and again would cost 0.6 s of CPU time.
    """
    if not own_process or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def module_of(command: str) -> str:
    """Return the module of a command, by its full name."""
    return ROOMS.get(command, f"distsim.cli.{command}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command that exists; `func` is what carries it out."""
    name = argv[0]
    parser = Parser(prog="distsim")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    module = importlib.import_module(module_of(name))
    module.add_parser(subparsers)
    argv = _own_first(argv, getattr(module, "AFTER_SCRIPT", ()))
    argv = getattr(module, "rewritten", list)(argv)
    try:
        args, unknown = parser.parse_known_args(argv)
    except UsageError:
        scripts = [word for word in _places(argv) if word.endswith(".py")]
        if name == "run" and scripts:  # what is wrong with the rest follows from it
            raise UsageError(
                f"--on {scripts[0]}: expected a cluster (a preset or a .toml file), got a Python script; the script "
                f"comes last: distsim run [--on CLUSTER] {scripts[0]}"
            ) from None
        raise
    if unknown:
        raise UsageError(_unknown_flag(name, unknown, _flags(subparsers.choices[name])))
    return args


def _own_first(argv: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return *argv* with those of the flags *own* that are after the script moved in front of it.

    Each takes a value. A flag whose name is in the script's text stays, because the script may define it. Nothing is
    moved from a launcher's command.
    """
    words = list(argv)
    script = next((index for index, word in enumerate(words[1:], 1) if word.endswith(".py") and word[0] != "-"), None)
    if script is None or "--" in words[:script]:
        return words
    try:
        text = read_text(words[script])
    except OSError:  # the command says so
        return words
    ours: dict[str, list[str]] = {}
    remaining: list[str] = []
    rest = words[script + 1 :]
    while rest:
        word = rest.pop(0)
        flag, has_value, _ = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if flag not in own or re.search(rf"['\"]{flag}\b|^\s*{name}\s*:", text, re.MULTILINE):
            remaining.append(word)
        else:
            count = 0 if has_value else 1
            if count > len(rest):
                raise UsageError(f"{flag} after {words[script]}: expected a value")
            ours.setdefault(flag, []).extend([word, *rest[:count]])
            rest = rest[count:]
    if ours:
        names = f"{', '.join(ours)} {'is a flag' if len(ours) == 1 else 'are flags'}"
        print(f"distsim: {names} of distsim, because {words[script]} has none of that name", file=sys.stderr)
    return [words[0], *itertools.chain(*ours.values()), *words[1 : script + 1], *remaining]


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: distsim COMMAND ...",
        "",
        "Run an unmodified torch.distributed program for real, or simulated on a cluster of any size;",
        "name the rank that hangs it.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items()),
        "",
        "options:",
        "  -h, --help     this text; distsim COMMAND --help says more",
        "  -V, --version  the version",
        "",
        EXIT_CODES,
    ]
    return "\n".join(filled("\n".join(lines), shutil.get_terminal_size().columns - 2)) + "\n"


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"expected a command, got the flag {name}; try distsim run {name} ..., or distsim --help"
    if name.endswith(".py"):
        return f"expected a command, got {name}; try distsim run {name}"
    return f"no command {name!r}; {_closest(name, list(COMMANDS))}the commands are {', '.join(COMMANDS)}"


def _unknown_flag(command: str, unknown: Sequence[str], flags: Sequence[str]) -> str:
    first = next((word for word in unknown if word.startswith("-")), unknown[0])
    guess = _closest(first.split("=", 1)[0], flags)
    return f"distsim {command} does not know {first}; {guess}see distsim {command} --help"


def _closest(word: str, known: Sequence[str]) -> str:
    """Return a question that suggests the name closest to *word*, apart from leading dashes; empty if none is close."""
    import difflib

    by_name = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-"), by_name, n=1)
    return f"did you mean {by_name[close[0]]}? " if close else ""


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]
