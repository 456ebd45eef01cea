"""The pytest plugin (entry point `pytest11`): test bodies that run on every rank, scenario files as tests.

    @pytest.mark.world_size(4)
    def test_sum(rank, world):
        t = torch.tensor([float(rank)])
        dist.all_reduce(t)
        assert t.item() == 6

A rank may stay away for `host_timeout_s` (10 seconds: a rank that spins is then named), the whole test may
take `timeout_s` (60); pytest's options `distsim_host_timeout_s` and `distsim_timeout_s` set both for a project.
Ranks that fail alike are shown once, those that differ only in values in a line each; `-vv` shows all.

Fixtures are set up once, for all ranks: `tmp_path` is one folder. Tensors, models, optimizers and learning rate
schedulers from fixtures (also inside dicts, lists and tuples), `capsys` and the environment are each rank's own.
On sim the ranks share a process: other objects, and what `monkeypatch.setattr` changes, are everybody's; on gloo
every rank is a fork of pytest's process.

It is imported in every pytest run of an environment that has distsim, so it imports neither torch nor
the rest of distsim before a test asks for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distsim.plugin.terminal import keep_stderr

if TYPE_CHECKING:
    from distsim.plugin.options import World

__all__ = ["mesh", "rank", "world", "world_size"]

MARK = (
    "world_size(n, on='sim', cluster=None, init=True, backend='gloo', mesh=None, mesh_dim_names=None, seed=0, "
    "timeout_s=60, host_timeout_s=10, faults=(), guards=()): run the body on n ranks, simulated (sim) or as real "
    "processes (gloo); n and on may be lists"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The limits that a project may set for all its tests on ranks."""
    from distsim.plugin.options import LIMITS

    for name, what in LIMITS.items():
        parser.addini(f"distsim_{name}", what, default="")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", MARK)
    keep_stderr()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A list of world sizes or of arms makes one test of each."""
    marker = metafunc.definition.get_closest_marker("world_size")
    if marker is None:
        return
    sizes = marker.args[0] if marker.args else marker.kwargs.get("n")
    for name, values, label in (
        ("distsim_on", marker.kwargs.get("on", "sim"), str),
        ("distsim_world_size", sizes, "{} ranks".format),
    ):
        if isinstance(values, list | tuple):
            metafunc.fixturenames.append(name)
            metafunc.parametrize(name, values, ids=[label(value) for value in values])


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A TOML file with a program and an expectation is a test."""
    if file_path.suffix != ".toml" or not _looks_like_scenario(file_path):
        return None
    from distsim.plugin.scenario_item import ScenarioFile

    return ScenarioFile.from_parent(parent, path=file_path)


def _looks_like_scenario(path: Path) -> bool:
    from distsim.text.strangers import load_toml, read_bytes

    try:
        data = load_toml(read_bytes(path, 1 << 24).decode("utf-8"))
    except OSError:
        return False
    except ValueError:  # perhaps a scenario with a slip of the pen: as a test it says so
        from distsim.scenario import is_scenario

        return is_scenario(path)
    return "program" in data and ("expect" in data or "faults" in data or data.get("schema", "") != "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """Put in place of the test's body one that runs it on every rank."""
    marker = item.get_closest_marker("world_size")
    if marker is None or not isinstance(item, pytest.Function):
        return (yield)
    from distsim.plugin.body import everywhere

    body = item.obj
    item.obj = everywhere(item, body, marker)
    try:
        return (yield)
    finally:
        item.obj = body


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """pytest-timeout's method 'thread' ends all of pytest: on simulated ranks it is enough to end the test."""
    marker = item.get_closest_marker("world_size")
    if marker is None or settings.method != "thread" or "sim" not in marker.kwargs.get("on", "sim"):
        return None
    from distsim.plugin.timeouts import set_timer

    return set_timer(item, settings)


def pytest_enter_pdb() -> None:
    """Somebody thinks at a prompt inside a simulated rank: no limit of wall time ends that."""
    task = sys.modules.get("distsim.sim.kernel.task")  # which nobody imports for a prompt outside of it
    process = task.current_process() if task is not None else None
    if process is not None:
        process.world.host_timeout_s = float("inf")
        if process.world.limits is not None:
            process.world.limits.wall_time_s = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The first line of a failure on ranks is its summary; pytest would repeat the whole text there in CI."""
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    on_ranks = item.get_closest_marker("world_size") is not None
    if crash is not None and call.when == "call" and on_ranks:
        crash.message = crash.message.partition("\n")[0].removeprefix("Failed: ")
    if report.failed and (on_ranks or hasattr(item, "culprit")):
        from distsim.plugin.annotations import place

        vars(report)["distsim_place"] = place(item, report)  # travels with the report where xdist runs the test
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """On GitHub a failure of ours is a mark at its line. Of xdist's processes only the first has a summary."""
    from distsim.text.github import on_github

    if on_github(os.environ):
        from distsim.plugin.annotations import error_lines

        reports = {id(report): report for some in terminalreporter.stats.values() for report in some}
        for line in error_lines(reports.values()):
            terminalreporter.ensure_newline()
            terminalreporter.write_line(line)


def _per_rank(request: pytest.FixtureRequest, what: str) -> Any:
    if request.node.get_closest_marker("world_size") is None:
        raise pytest.UsageError(f"fixture {what!r}: mark the test with @pytest.mark.world_size(n)")
    from distsim.plugin.options import PerRank

    return PerRank(what)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank this body runs on."""
    return _per_rank(request, "rank")  # type: ignore[no-any-return]


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """How many ranks this test runs on. Equal on all of them, so other fixtures may use it."""
    marker = request.node.get_closest_marker("world_size")
    if marker is None:
        raise pytest.UsageError("fixture 'world_size': mark the test with @pytest.mark.world_size(n)")
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    size = marker.args[0] if marker.args else marker.kwargs.get("n")
    return params.get("distsim_world_size", size)  # type: ignore[no-any-return]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """`world.rank`, `world.size`, `world.local_rank`, `world.on` of the rank this body runs on."""
    return _per_rank(request, "world")  # type: ignore[no-any-return]


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """A DeviceMesh over all ranks, of the shape that the marker asks for (default: one dimension)."""
    return _per_rank(request, "mesh")
