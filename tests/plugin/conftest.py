"""pytest in pytest, in one process: torch must stay imported between the inner runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

HEAD = """
import unittest
import pytest, torch
import torch.distributed as dist
"""

ALREADY_IMPORTED = "ignore:Module already imported so cannot be rewritten"
"""What the inner pytest says of the plugin that the outer one has loaded: no warning of a test's."""

Run = Callable[..., pytest.RunResult]


@pytest.fixture(scope="session", autouse=True)
def _torch_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """pytester forgets every module that an inner run imports; torch cannot be imported twice."""
    root = str(tmp_path_factory.getbasetemp())
    import distsim

    distsim.simulate(lambda: None, nproc_per_node=2)  # torch's first imports are no part of a test's time

    def snapshot(_: pytest.Pytester) -> SimpleNamespace:
        before = set(sys.modules)

        def restore() -> None:
            for name in set(sys.modules) - before:
                if (getattr(sys.modules[name], "__file__", None) or "").startswith(root):
                    del sys.modules[name]

        return SimpleNamespace(restore=restore)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.Pytester, "_Pytester__take_sys_modules_snapshot", snapshot)
        yield


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run a test file with the plugin; without a text, whatever lies in the folder. What may end the process runs
    apart, in one of its own."""

    def call(text: str = "", *flags: str, apart: bool = False) -> pytest.RunResult:
        if text:
            pytester.makepyfile(HEAD + text)
        start = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return start("-p", "distsim.pytest_plugin", "-p", "no:cacheprovider", *flags, "-W", ALREADY_IMPORTED)

    return call


@pytest.fixture(autouse=True)
def _not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CI pytest writes each failure a second time, whole, into its last lines."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
