"""Commands given hostile files answer or refuse; `python -m tests.fuzz --commands --inputs 10000` tries that many."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.errors import UsageError
from tests.fuzz.attempt import attempt, bounded_memory, tried
from tests.fuzz.commands import COMMANDS, InternalError, run, spoiled
from tests.fuzz.mutate import SPOILED
from tests.fuzz.readers import Reader

IN_EVERY_RUN = (
    *("topo show made.toml", "bench --on made.json", "run with a GPU file", "diagnose rings", "diagnose JSON dumps"),
    *("watch --metrics", "scenario run one.toml", "scenario run with a baseline", "html report.json", "attach --hosts"),
    *("validate --from", "run -- deepspeed"),
)
"""One command for each way to read a file; the others are the soak's."""
NOT_GLAD = ("distsim attach", "distsim scenario from")
"""Hosts that do not answer; records whose hang no program has."""


def _marked(command: Reader) -> object:
    marks = () if command.name.removeprefix("distsim ") in IN_EVERY_RUN else (pytest.mark.soak, pytest.mark.slow)
    return pytest.param(command, id=command.name, marks=marks)


EACH = [_marked(command) for command in COMMANDS]


@pytest.mark.parametrize("command", EACH)
def test_the_files_that_are_changed_are_good_ones(command: Reader, tmp_path: Path) -> None:
    """A command that refuses its own files would have nothing to lose."""
    for name, content in command.seeds().items():
        (tmp_path / name).write_bytes(content)
    try:
        command.act(tmp_path)
    except UsageError:
        assert command.name.startswith(NOT_GLAD)


@pytest.mark.parametrize("command", EACH)
def test_what_is_no_such_file_is_refused_or_left_out(command: Reader) -> None:
    """A folder, a pipe, a device without end, a file of 3 GiB: none blocks a command or fills the memory."""
    with bounded_memory():
        broken = [found for kind in SPOILED if (found := tried(command, spoiled(command, kind), kind)) is not None]
    assert broken == [], "\n".join(map(str, broken))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_mutated_files_break_no_command(command: Reader) -> None:
    """Forty of each, other ones than the corpus holds."""
    with bounded_memory():
        breaks = [found for seed in range(50_000, 50_040) if (found := attempt(command, seed)) is not None]
    assert breaks == [], "\n".join(map(str, breaks))


@pytest.mark.parametrize(
    "words",
    [
        ("html", "."),
        *(("diagnose", "a" * 5000), ("watch", "a" * 5000), ("html", "a" * 5000), ("scenario", "run", "a" * 5000)),
        *(("run", "a" * 5000 + ".py"), ("topo", "show", "a" * 5000), ("sweep", "a" * 5000)),
        *(("run", "--report", "a" * 5000, "x.py"), ("bench", "all_reduce", "--on", "dgx-h100:" + "9" * 5000)),
        *(("run", "--nnodes", "9" * 5000, "x.py"), ("run", "--nproc-per-node", "\u00b2", "x.py")),
        *(("bench", "all_reduce", "-g", "9" * 5000), ("bench", "all_reduce", "-g", "\u00b2")),
        ("fits", "--nnodes", "9" * 5000, "x.py"),
        ("bench", "all_reduce", "--nccl-version", "2." + "9" * 5000),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_a_word_that_names_nothing_is_refused_in_short(words: tuple[str, ...], tmp_path: Path) -> None:
    """However long it is, and whatever letters Python counts as digits."""
    (tmp_path / "x.py").write_text("")
    with pytest.raises(UsageError) as refused:
        run(tmp_path, words)
    assert max(map(len, str(refused.value).splitlines())) <= 1100


def test_a_command_that_fails_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The net has no holes: an error of ours, and a letter that a terminal obeys."""
    monkeypatch.setattr("tests.fuzz.commands.main", lambda words: 70)
    with pytest.raises(InternalError, match="exit code 70"):
        run(tmp_path, ("topo", "list"))
    monkeypatch.setattr("tests.fuzz.commands.main", lambda words: print("\x1b[2J") or 0)
    with pytest.raises(InternalError, match="in the output"):
        run(tmp_path, ("topo", "list"))
