"""`distsim doctor` prints what this machine can do, and never breaks."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import SimpleNamespace

import pytest
import torch

from distsim import __version__
from distsim.cli import doctor, main
from distsim.errors import UsageError
from distsim.torch_compat.names import GUARD, SIM
from distsim.torch_compat.releases import TESTED, VERSIONS

SUBJECTS = (
    "distsim", "python", "system", "torch", "beside it", "real jobs", "simulations", "simulated GPUs", "left out",
    *["tested"] * len(VERSIONS), "ptrace", "/dev/shm",
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

    def broken(part: object) -> str:
        raise error

    monkeypatch.setattr("distsim.torch_compat.releases.imported_torch", broken)
    texts = dict(doctor.lines())
    expected = "refused: no torch here" if isinstance(error, UsageError) else "failed: RuntimeError: half of one"
    assert texts["torch"] == expected
    parts = ("real jobs", "simulations", "simulated GPUs", "left out")
    assert {texts[part] for part in parts} == {f"{expected.partition(':')[0]}, as torch above"}


def test_memory_of_others_that_may_not_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without the right to trace, with what to add."""

    real = os.open

    def denied(path: str, *args: int) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(1, "Operation not permitted")
        return real(path, *args)

    monkeypatch.setattr(os, "open", denied)
    assert "cannot be read (Operation not permitted); in a container add SYS_PTRACE" in dict(doctor.lines())["ptrace"]


def test_a_torch_built_without_gloo_is_refused_for_real_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With neither NCCL nor MPI there is no backend at all; with NCCL it is a line less."""
    available = {"gloo": False, "nccl": False, "mpi": False}
    monkeypatch.setattr(torch.distributed, "is_backend_available", available.__getitem__)
    texts = dict(doctor.lines())
    assert "backends none" in texts["torch"]
    assert texts["real jobs"] == "refused: this torch was built without gloo, NCCL and MPI; install torch with pip"
    available["nccl"] = True
    texts = dict(doctor.lines())
    assert "backends nccl" in texts["torch"]
    assert not texts["real jobs"].startswith("refused")


def test_a_torch_between_tested_releases_is_not_called_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release within the guard's range on which no test ran; each tested release is a column of the table."""
    older = SimpleNamespace(__version__="2.11.0+cpu")
    monkeypatch.setitem(TESTED, GUARD, tuple(release for release in TESTED[GUARD] if not release.startswith("2.11")))
    monkeypatch.setattr("distsim.torch_compat.releases.imported_torch", lambda part: older)
    assert doctor.supported(GUARD).startswith("not tested: this torch lies between the tested releases (2.6.0, ")
    assert doctor.supported(SIM).startswith("not tested: this torch is older")
    monkeypatch.undo()
    (tested,) = [text for subject, text in doctor.lines() if subject == "tested" and text.startswith("guard")]
    assert f"torch {', '.join(TESTED[GUARD])};" in tested


def test_a_free_threaded_python_is_not_called_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real jobs run there, simulations do not."""
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else real(name))
    assert dict(doctor.lines())["real jobs"] == "not tested: a free-threaded Python; everything needed is available"
