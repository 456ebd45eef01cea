"""The command that says what a release of torch changes: which differences count, and its exit code."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from distsim.torch_compat import cuda_api
from distsim.torch_compat.names import GUARD, OPTIONAL, SIM, TorchName
from tools.benchmarks import new_torch

RELEASE = "99.2.1"
"""Newer than any: every entry is judged."""


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put entries in the place of the package's."""

    def put(*names: TorchName) -> None:
        monkeypatch.setattr(new_torch, "all_names", lambda: {name.path: name for name in names})

    return put


@pytest.mark.slow
def test_this_torch_is_as_its_entries_say() -> None:
    """On the release that the suite runs on, nothing is there, missing, or behaves otherwise."""
    command = [sys.executable, "-m", "tools.benchmarks.new_torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_as_said_exits_with_0(entries: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that came later or went earlier, that only some builds have, or whose test was for earlier releases."""
    entries(
        TorchName("torch.Tensor", "tensors"),
        TorchName("torch._later", "a novelty", since="99.3"),
        TorchName("torch._earlier", "a relic", until="99.1"),
        TorchName("torch._of_some_builds", "a build flag", only="a build with it"),
        TorchName("torch.Size", "sizes", test=lambda: False, passes_until="99.1"),
    )
    assert new_torch.report(RELEASE, RELEASE, new_torch.looks()) == 0
    assert "5 names, 0 not as said, 0 other changes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (TorchName("torch._gone", "the end"), "missing, but said to be 2.6 to the newest: torch._gone"),
        (TorchName("torch.Tensor", "t", until="99.1"), "there, but said to be 2.6 to 99.1: torch.Tensor"),
        (TorchName("torch.Tensor", "t", since="99.3"), "there, but said to be 99.3 to the newest: torch.Tensor"),
        (
            TorchName("torch.Tensor", "tensors", SIM, test=lambda: False),
            "fails its test, but said to pass it: torch.Tensor: tensors (SIM)",
        ),
        (
            TorchName("torch.Tensor", "tensors", OPTIONAL, test=lambda: True, passes_until="99.1"),
            "passes its test, but said to pass it until 99.1: torch.Tensor: tensors (OPTIONAL)",
        ),
    ],
)
def test_what_is_not_as_said_is_named_and_exits_with_1(
    entries: Any, capsys: pytest.CaptureFixture[str], name: TorchName, line: str
) -> None:
    """Each kind of difference from what an entry says."""
    entries(name)
    assert new_torch.report(RELEASE, RELEASE, new_torch.looks()) == 1
    assert line in capsys.readouterr().out


def test_another_signature_counts_and_another_body_does_not(entries: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What calls a function breaks by its signature; a body is for reading."""
    entries(
        TorchName("torch.broadcast_tensors", "shapes"),
        TorchName("torch.einsum", "sums"),
        TorchName("torch.Size", "sizes"),
    )
    record = new_torch.looks()
    assert record["torch.broadcast_tensors"] is not None
    signature, _ = record["torch.broadcast_tensors"]
    del record["torch.Size"]
    assert new_torch.report(RELEASE, "99.1", {**record, "torch.broadcast_tensors": [signature, "0"]}) == 0
    said = capsys.readouterr().out
    assert "other body       torch.broadcast_tensors" in said
    assert "not recorded     torch.Size" in said
    assert new_torch.report(RELEASE, "99.1", {**record, "torch.broadcast_tensors": ["(a)", "0"]}) == 1
    assert f"other signature  torch.broadcast_tensors: (a) -> {signature}" in capsys.readouterr().out


def test_below_the_simulator_s_releases_the_guard_s_names_are_judged(entries: Any) -> None:
    """Nobody simulates there."""
    entries(
        TorchName("torch._a", "a", SIM), TorchName("torch._b", "b", GUARD | SIM), TorchName("torch._c", "c", OPTIONAL)
    )
    assert new_torch.judged("2.6.0") == {"torch._b"}
    assert new_torch.judged(RELEASE) == {"torch._a", "torch._b", "torch._c"}


def test_the_record_of_the_same_minor_is_compared_with() -> None:
    """Or else the newest one."""
    assert new_torch.record_of("2.13.1", ["2.12.0", "2.13.0", "2.14.1"]) == "2.13.0"
    assert new_torch.record_of("2.16.0", ["2.12.0", "2.14.1", "2.9.0"]) == "2.14.1"


def test_a_signature_is_the_same_for_every_python_and_build(entries: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an Enum and of a C function without text none is compared; what a build without CUDA replaces is listed."""
    registry = TorchName("torch.distributed.rpc.backend_registry.BackendType", "agents")
    qengine = TorchName("torch._C._get_qengine", "quantized operators")
    entries(registry, qengine, cuda_api.NVTX)
    looks = new_torch.looks()
    assert (looks[registry.path] or [])[0] == "enum"
    assert (looks[qengine.path] or [])[0] == ""
    assert new_torch.report(RELEASE, RELEASE, {**looks, cuda_api.NVTX.path: ["another kind", "0"]}) == 0
    assert f"other build      {cuda_api.NVTX.path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("(a: typing.Any | None)", "(a: Any | None)", False),
        ("(a: typing.Any | None)", "(a: Any)", True),
        (f"(a: typing.Any, {'b' * 300}"[:200], f"(a: Any, {'b' * 300}"[:200], False),
        (f"(a: typing.Any, {'b' * 180})"[:200], f"(a: Any, {'b' * 180})", False),
        (f"(a, {'b' * 300}"[:200], f"(c, {'b' * 300}"[:200], True),
    ],
)
def test_signatures_are_compared_as_far_as_they_are_recorded(old: str, new: str, expected: bool) -> None:
    """Python 3.14 prints `Any` where those before print `typing.Any`."""
    assert new_torch.differ(old, new) is expected
