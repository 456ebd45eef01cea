"""What every test run of the house needs: no GPU, few threads, nothing left behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from jobs import Zygote

pytest_plugins = ["pytester"]

# Before anybody imports torch: ranks share two cores, and a test means the same with and without a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DISTSIM_TRACEBACK", "1")  # an error of distsim is seen where it was raised
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)  # a shell left inside somebody's job must not reach the tests

# The suite starts some hundred interpreters: without bytecode on file each compiles all of distsim, nearly a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What a shell starts with & ignores Ctrl-C, and so would every process that a test sends it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers of a test folder are imported as `conformance.arms`, by pytest and by the processes it starts.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module for `-m smoke` that has no such test: all of them together take half a minute."""
    if config.getoption("markexpr") != "smoke" or not collection_path.match("test_*.py"):
        return None
    return True if b"mark.smoke" not in collection_path.read_bytes() else None


def pytest_configure(config: pytest.Config) -> None:
    """Print the name of a test that fails at once, where the tests are reported and not in xdist's processes."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))


WITHOUT_SIMULATIONS = {
    *("attach", "cases", "debug", "house", "launch", "realexec", "recovery", "silent", "torch_compat", "watchdog")
}
"""Folders of which tests are about real jobs, records and the package itself, besides those that simulate."""
SIMULATING = {"test_budget.py", "test_first_look.py", "test_readme.py"}
"""Files there that simulate, or whose own pytest skips what fails."""
LACKS = re.compile(
    r"module 'torch.distributed[\w.]*' has no attribute '\w+_single'|[Gg]loo does not support \w+|"
    r"getBackendName is not implemented|'Stream\\?' object has no attribute \\?'record_event|"
    r"in a call that\s+holds the GIL"
)
"""What torch 2.6 says of what it lacks of later releases, in its own words, and what distsim says where it waits for
ever to free a group of gloo, whose thread wants the GIL (up to torch 2.7).
"""
UNTESTED = "simulations are not tested on this torch"
Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module that needs simulations where distsim refuses them."""
    return _skipped_if_refused((yield), collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that needs simulations where distsim refuses them."""
    return _skipped_if_refused((yield), item.path)


def _skipped_if_refused(report: Report, path: Path) -> Report:
    """Turn a failure into a skip if distsim refuses simulations on this torch, and the failure is one of them or of
    what this torch lacks.
    """
    if report.failed and (refusal := _refusal()):
        folder = path.relative_to(Path(__file__).parent).parts[0]
        text = "".join([report.longreprtext, *(section for _, section in report.sections)])
        lacks = LACKS.search(text)
        simulates = folder not in WITHOUT_SIMULATIONS or path.name in SIMULATING
        if lacks or (refusal != UNTESTED and (refusal in text or simulates)):
            report.outcome, report.longrepr = "skipped", (str(path), 1, lacks[0] if lacks else refusal)
    return report


@functools.cache
def _refusal() -> str:
    """Return why distsim refuses simulations on this torch, UNTESTED if it runs them on an older one; empty else."""
    from distsim.cli.doctor import lines
    from distsim.torch_compat.names import SIM
    from distsim.torch_compat.releases import compared, imported_torch

    if compared(imported_torch(SIM).__version__, SIM) >= 0:
        return ""
    told = next(text for subject, text in lines() if subject == "simulations")
    return told.removeprefix("refused: ") if told.startswith("refused: ") else UNTESTED


class _FailuresAtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)  # behind the letter that pytest prints
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and terminal.verbosity <= 0:
            terminal.write(f"\n{'FAILED' if report.when == 'call' else 'ERROR'} {report.nodeid}\n", red=True)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks the ranks of real jobs; killed and started anew if a job got stuck."""
    from jobs import shared_zygote  # with torch

    yield shared_zygote()
    shared_zygote().close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where one job's rings go."""
    from jobs import ring_directory

    with ring_directory() as place:
        yield place


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Whatever a test does to the environment ends with it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
