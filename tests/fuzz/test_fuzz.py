"""What once broke a reader does so no more, and mutated files break none; `python -m tests.fuzz` tries 20,000."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distsim.errors import UsageError
from tests.fuzz.attempt import attempt, bounded_memory, tried
from tests.fuzz.commands import COMMANDS
from tests.fuzz.readers import READERS, Reader

CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(path for path in CORPUS.rglob("*@*"))
QUICK_MEMORY = 1 << 30


def _folder(reader: Reader) -> str:
    return reader.name.replace(" ", "_").replace(":", "").replace(",", "")


@pytest.mark.parametrize("path", CASES, ids=[f"{path.parent.name}/{path.name}" for path in CASES])
def test_what_once_broke_is_refused_or_read(path: Path) -> None:
    """One line and exit 2, or an answer, within bounds of time and memory."""
    (reader,) = [reader for reader in (*READERS, *COMMANDS) if _folder(reader) == path.parent.name]
    files = {**reader.seeds(), path.name.partition("@")[2].removesuffix("~"): path.read_bytes()}
    with bounded_memory(QUICK_MEMORY):
        found = tried(reader, files, path.name)
    assert found is None, found.trace or str(found)


@pytest.mark.parametrize("reader", READERS, ids=_folder)
def test_the_files_that_are_mutated_are_good_ones(reader: Reader, tmp_path: Path) -> None:
    """A reader that refuses its own seed would have nothing to lose."""
    for name, content in reader.seeds().items():
        (tmp_path / name).write_bytes(content)
    reader.act(tmp_path)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=_folder)
def test_mutated_files_break_no_reader(reader: Reader) -> None:
    """A hundred of each, other ones than the corpus holds."""
    with bounded_memory():
        breaks = [found for seed in range(50_000, 50_100) if (found := attempt(reader, seed)) is not None]
    assert breaks == [], "\n".join(map(str, breaks))


def _forever(folder: Path) -> None:
    while True:
        pass


def _greedy(folder: Path) -> None:
    bytearray(1 << 33)


def _long(folder: Path) -> None:
    raise UsageError("x" * 5000)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda folder: {}["x"], "KeyError"),
        (_greedy, "MemoryError"),
        (_long, "a refusal of 5000 letters"),
        (lambda folder: int("x"), "ValueError"),
    ],
)
def test_a_break_is_seen(act: Callable[[Path], None], why: str) -> None:
    """The net has no holes: what should be found is found."""
    with bounded_memory(QUICK_MEMORY):
        found = tried(Reader("made up", lambda: {"x": b""}, act), {"x": b""}, 0)
    assert found is not None
    assert found.why.startswith(why)


def test_an_endless_reader_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its CPU time, so that a busy machine breaks nothing."""
    monkeypatch.setattr("tests.fuzz.attempt.CPU_S", 0.05)
    found = tried(Reader("made up", lambda: {"x": b""}, _forever), {"x": b""}, 0)
    assert found is not None
    assert found.why.startswith("TooLong")
