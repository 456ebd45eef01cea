"""Which releases of torch are tested, and one line for a Python or torch that cannot simulate."""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distsim.errors import UsageError
from distsim.torch_compat import releases
from distsim.torch_compat.names import GUARD, SIM, TorchName


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What is known of this torch is looked up anew, and written to a folder of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(releases, "_failure", None)
    return tmp_path / "distsim" / "torch_compat.json"


def refusal() -> str:
    """The one line with which a simulation is refused."""
    with pytest.raises(UsageError) as refused:
        releases.check_simulation()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("version", "part", "side"),
    [
        ("2.13.0+cpu", SIM, 0),
        ("2.14.1+cu130", SIM, 0),
        ("2.15.0+cu132", SIM, 0),
        ("2.12.0+cu130", SIM, 0),
        ("2.11.0", SIM, -1),
        ("2.9.1", SIM, -1),
        ("2.16.0.dev20261120+cpu", SIM, 1),
        ("3.0", GUARD, 1),
        ("2.6.0", GUARD, 0),
        ("2.5.1", GUARD, -1),
        ("local", GUARD, -1),
    ],
)
def test_a_release_is_compared_with_those_that_are_tested(version: str, part: Any, side: int) -> None:
    """By its first two numbers; a nightly build is newer than its predecessor."""
    assert releases.compared(version, part) == side


def test_this_torch_simulates_and_nothing_is_said() -> None:
    """On a tested release: no refusal, no remark."""
    releases.check_simulation()
    is_tested = releases.compared(torch.__version__, SIM) == 0
    assert is_tested != any("than the" in line for line in releases.remarks(SIM))


def test_a_free_threaded_python_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take turns under Python's lock."""
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else real(name))
    assert "free-threaded" in refusal()


def test_a_python_without_ctypes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was built without libffi, and torch cannot be imported there."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "_ctypes" else real(name))
    error = ModuleNotFoundError("No module named '_ctypes'")
    assert "expected a Python with ctypes" in str(releases.torch_refusal(error, SIM))


def test_a_file_that_hides_torch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user's torch.py, and where the torch is that it hides; the first reason stays the reason."""
    hides = tmp_path / "torch.py"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__file__=str(hides)))
    monkeypatch.setattr(releases, "other_torches", lambda: ["/site-packages/torch"])
    refused = str(releases.torch_refusal(ModuleNotFoundError("'torch' is not a package"), GUARD))
    assert refused == (
        f"expected {releases.tested_range(GUARD)}, but {hides} hides it: rename that file; "
        "another torch is in /site-packages/torch"
    )
    assert str(releases.torch_refusal(RuntimeError("already defined"), GUARD)) == refused


def test_an_error_beside_a_torch_that_works_is_another_s() -> None:
    """Nothing is blamed on torch."""
    assert releases.torch_refusal(OSError("disk full"), SIM) is None


def test_what_the_guard_needs_and_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name and what it is for, in one line."""
    assert releases.guard_refusal() == ""
    monkeypatch.setattr(releases, "unmet", lambda part: [TorchName("torch._gone", "the end of calls", GUARD)])
    assert (
        "lacks what the guard of real jobs needs: torch._gone (the end of calls); expected" in releases.guard_refusal()
    )


def test_a_free_threaded_python_is_remarked_for_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, untested."""
    monkeypatch.setattr(releases, "is_free_threaded", lambda: True)
    assert "the guard of real jobs was not tested on a free-threaded Python" in releases.remarks(GUARD)


def test_a_torch_without_distributed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed can be imported there, and is not available."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert "expected a torch with torch.distributed, found" in refusal()


def test_a_torch_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises, several lines included."""

    def broken(name: str) -> Any:
        raise OSError("libcudart.so.13: cannot open\nshared object file")

    with monkeypatch.context() as patch:
        patch.setattr(releases.importlib, "import_module", broken)
        text = refusal()
    assert "cannot be imported (OSError: libcudart.so.13: cannot open shared object file)" in text
    assert text.endswith("install torch again")
    assert refusal() == text, "importing half of a torch again and again ends the process"


def test_a_torch_without_what_simulations_need_is_refused(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """By the features that rest on it; the answer is kept for the next run."""
    lacking = [TorchName("torch._not_there", "groups of ranks", SIM), TorchName("torch._nor_this", "a mode", SIM)]
    monkeypatch.setattr(releases, "unmet", lambda part: lacking)
    assert "which lacks what simulations need: a mode, groups of ranks; install one of those" in refusal()
    monkeypatch.setattr(releases, "unmet", lambda part: [])
    assert "groups of ranks" in refusal()
    (known,) = json.loads(own_cache.read_text()).values()
    assert known == ["a mode", "groups of ranks"]


def test_a_cache_that_is_damaged_or_not_writable_stops_nobody(own_cache: Path) -> None:
    """It is looked up anew."""
    own_cache.parent.mkdir()
    own_cache.write_text("{")
    releases.check_simulation()
    own_cache.unlink()
    own_cache.parent.rmdir()
    own_cache.parent.write_text("a file")
    releases.check_simulation()


def test_a_newer_torch_and_what_it_lacks_are_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on; two lines say what is not tested, and what is left out."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.16.0.dev1", __file__=torch.__file__))
    monkeypatch.setattr(releases, "left_out", {"torch._gone": "profiles"})
    monkeypatch.setattr(releases, "other_torches", list)
    newer, lacks = releases.remarks(SIM)
    assert newer == "torch 2.16.0.dev1 is newer than the newest that simulations were tested on (2.15.0)"
    assert lacks == "torch 2.16.0.dev1 lacks torch._gone; left out: profiles"
    assert isinstance(releases.unsupported(ImportError("cannot import name 'x'")), UsageError)


def test_an_error_of_ours_on_a_tested_torch_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of distsim is no user's mistake."""
    monkeypatch.setattr(releases, "compared", lambda version, part: 0)
    error = AttributeError("ours")
    assert releases.unsupported(error) is error


def test_two_torches_on_the_path_are_remarked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that is used, and the one to remove."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.1'")
    monkeypatch.setattr(sys, "path", [str(Path(torch.__file__).parents[1]), str(tmp_path)])
    assert releases.other_torches() == [str(tmp_path / "torch")]
    assert any("several torches are on the path" in line for line in releases.remarks(SIM))
