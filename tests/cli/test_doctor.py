"""`distsim doctor` prints what this machine can do, and never breaks."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from distsim import __version__
from distsim.cli import doctor, main
from distsim.errors import UsageError

SUBJECTS = (
    "distsim", "python", "system", "torch", "beside it", "real jobs", "simulations", "simulated GPUs", "left out",
    "ptrace", "/dev/shm",
)  # fmt: skip


def test_each_subject_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, what is supported, and rights: one line each, to paste into an issue."""
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:20].strip() for line in lines] == list(SUBJECTS)
    text = "\n".join(lines)
    assert __version__ in text
    assert sys.executable in text
    assert torch.__version__ in text
    assert text.count("supported; this torch is one of the tested releases") == 2


@pytest.mark.parametrize("error", [UsageError("no torch here"), RuntimeError("half\nof one")])
def test_what_is_broken_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A refusal says why, and a failure of torch's own stands behind its subject."""

    def broken() -> str:
        raise error

    monkeypatch.setattr(doctor, "_imported_torch", broken)
    texts = dict(doctor.lines())
    expected = "refused: no torch here" if isinstance(error, UsageError) else "failed: RuntimeError: half of one"
    assert texts["torch"] == texts["real jobs"] == expected


def test_memory_of_others_that_may_not_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without the right to trace, with what to add."""

    real = os.open

    def denied(path: str, *args: int) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(1, "Operation not permitted")
        return real(path, *args)

    monkeypatch.setattr(os, "open", denied)
    assert "cannot be read (Operation not permitted); in a container add SYS_PTRACE" in doctor._ptrace()
