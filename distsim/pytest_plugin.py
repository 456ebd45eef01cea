"""The pytest plugin: tests whose bodies run on every rank, and scenario files as tests.

    @pytest.mark.ranks(4)
    def test_sum(rank, world):
        t = torch.tensor([float(rank)])
        dist.all_reduce(t)
        assert t.item() == 6

`from distsim.test import ranks` is the same marker; `pytest --markers` lists its arguments, and docs/pytest.md explains
them. The marker `world_size(4)` means the same if no other plugin has registered a marker of that name, or if
`distsim_world_size = true` is configured. `distsim_class_world_size = true` does the same for the attribute
`world_size = [1, 2, 4]` of a test class. Under a launcher (`torchrun -m pytest`) the plugin skips tests marked `ranks`.

A rank that makes no call for `host_timeout_s` (10 seconds) is reported as stuck, and the test as a whole may take
`timeout_s` (60). The options `distsim_host_timeout_s` and `distsim_timeout_s` set both for a project.

Fixtures are set up once for all ranks. Tensors, models, optimizers and schedulers from fixtures, `self`, `capsys`,
`caplog`, changes by `monkeypatch` and the environment belong to each rank; `tmp_path` is shared. Simulated ranks also
share other objects and the globals of the test file. On gloo every rank is a fork of pytest's process.

Every pytest run of an environment with distsim imports this module, so it imports neither torch nor the rest of distsim
before a test needs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distsim.plugin.body import MARK, MEANINGS, SHORT, is_first, launched, marker_of, owns_world_size, sizes_of
from distsim.plugin.terminal import keep_stderr

if TYPE_CHECKING:
    from distsim.plugin.options import WorldFixture

__all__ = ["mesh", "rank", "world", "world_size"]

IN_CI = ("CI", "BUILD_NUMBER")
"""Environment variables that pytest uses to detect CI."""
LEAST_SAID = 30
"""Minimum number of columns for the summary that follows the name of a test."""
_STAYS_OUT = "a launcher has started pytest on several ranks, so no test is run on ranks of its own"
_UNMARKED = "fixture {!r}: mark the test with @pytest.mark.ranks(n)"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The limits that a project may set for all its tests on ranks."""
    from distsim.plugin.options import LIMITS

    for name, help_ in LIMITS.items():
        parser.addini(f"distsim_{name}", help_, default="")
    for name, help_ in MEANINGS.items():
        parser.addini(name, help_, default="")
    parser.addoption(
        "--distsim-explore",
        metavar="all|200|60s",
        default=None,
        help="run each simulated test on ranks in every order of its operations, or as many as the budget allows",
    )
    parser.addoption(
        "--distsim-replay",
        metavar="STRING",
        default=None,
        help="run a test on ranks in the order that an exploration has printed",
    )
    parser.addoption(
        "--distsim-html",
        metavar="DIR",
        default=None,
        help="write an HTML page of each failed test on ranks, and of each failed scenario, to DIR (extra: html)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    if config.getoption("--distsim-explore") is not None:
        from distsim.errors import UsageError
        from distsim.scenario.explore.budget import Budget

        try:
            Budget.read(config.getoption("--distsim-explore"))
        except UsageError as mistake:
            raise pytest.UsageError(f"--distsim-explore: {mistake}") from None
    if config.getoption("--distsim-html"):
        from distsim.errors import UsageError
        from distsim.report.html.reports import check_pages

        try:
            check_pages(config.getoption("--distsim-html"))
        except UsageError as mistake:
            raise pytest.UsageError(str(mistake)) from None
    config.addinivalue_line("markers", MARK)
    if not launched() and owns_world_size(config):
        config.addinivalue_line("markers", SHORT)
    keep_stderr()


def pytest_report_header() -> str | None:
    """Return a line that the plugin is inactive under a launcher, in the first of its processes."""
    return f"distsim: {_STAYS_OUT} ({launched()})" if launched() and is_first() else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Skip tests on ranks under a launcher, where every process would run all ranks."""
    if launched() and item.get_closest_marker("ranks") is not None:
        item.add_marker(pytest.mark.skip(f"{_STAYS_OUT}: run it without the launcher, or unset {launched()}"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each world size and of each value of `on`."""
    marker = marker_of(metafunc.definition)
    if marker is None:
        return
    for name, values, label in (
        ("distsim_on", marker.kwargs.get("on", "sim"), str),
        ("distsim_world_size", sizes_of(marker), "{} ranks".format),
    ):
        if isinstance(values, list | tuple):
            metafunc.fixturenames.append(name)
            metafunc.parametrize(name, values, ids=[label(value) for value in values])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import slow modules before the first test, so that they do not count towards its time."""
    if not session.config.option.collectonly and any(marker_of(item) is not None for item in session.items):
        from distsim.plugin.body import import_for

        import_for(session.items)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a TOML file with a program and an expectation as a test."""
    if file_path.suffix != ".toml" or not _looks_like_scenario(file_path):
        return None

    return ScenarioFile.from_parent(parent, path=file_path)


def _looks_like_scenario(path: Path) -> bool:
    from distsim.text.untrusted_input import load_toml, read_bytes

    try:
        data = load_toml(read_bytes(path, 1 << 24).decode("utf-8"))
    except OSError:
        return False
    except ValueError:  # perhaps a scenario with a slip of the pen: as a test it says so
        from distsim.scenario import is_scenario

        return is_scenario(path)
    return "program" in data and ("expect" in data or "faults" in data or data.get("schema", "") != "")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """Replace the body of a marked test by one that runs it on every rank."""
    marker = marker_of(item)
    if marker is None or not isinstance(item, pytest.Function):
        return (yield)
    from distsim.plugin.body import everywhere
    from distsim.plugin.hypothesis import draws, one_engine

    body = item.obj
    if draws(body):
        with one_engine(item, lambda inner: everywhere(item, inner, marker)):
            return (yield)
    item.obj = everywhere(item, body, marker)
    try:
        return (yield)
    finally:
        item.obj = body


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """End only the test on simulated ranks, where pytest-timeout's method 'thread' would end all of pytest."""
    marker = marker_of(item)
    if marker is None or settings.method != "thread" or "sim" not in marker.kwargs.get("on", "sim"):
        return None
    from distsim.plugin.timeouts import set_timer

    return set_timer(item, settings)


def pytest_enter_pdb() -> None:
    """Suspend limits of wall time while a simulated rank is at the prompt of a debugger."""
    task = sys.modules.get("distsim.sim.kernel.task")  # which nobody imports for a prompt outside of it
    process = task.current_process() if task is not None else None
    if process is not None:
        process.port.lift_limits()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Summarize a failure on ranks by its first line with file and line; in CI pytest would repeat the whole text."""
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    on_ranks = marker_of(item) is not None
    if crash is not None and call.when == "call" and on_ranks:
        headline = crash.message.partition("\n")[0].removeprefix("Failed: ")
        vars(report)["distsim_headline"] = headline
        own = os.path.abspath(crash.path) == str(item.path)  # its name is in the test's, and columns are few
        at = f"line {crash.lineno}" if own else f"{os.path.basename(crash.path)}:{crash.lineno}"
        crash.message = headline if item.config.option.tbstyle == "line" else _brief(f"{at}: {headline}", item)
    if report.failed and (on_ranks or hasattr(item, "culprit")):
        from distsim.plugin.annotations import annotated_line

        vars(report)["distsim_place"] = annotated_line(
            item, report
        )  # travels with the report where xdist runs the test
    return report


def _brief(summary: str, item: pytest.Item) -> str:
    """Shorten a summary to the width of the terminal in CI too, where pytest does not."""
    from distsim.plugin.verdict import columns, from_here

    room = columns() - len(f"FAILED {from_here(item)} - ")
    cut = any(map(os.environ.get, IN_CI)) and len(summary) > room
    return f"{summary[: max(room, LEAST_SAID) - 3]}..." if cut else summary


def pytest_unconfigure() -> None:
    """End the monitor of the tests on gloo."""
    gloo = sys.modules.get("distsim.plugin.run_gloo")
    if gloo is not None:
        gloo.MONITOR.end()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Annotate failures on GitHub, and print the line of the header that -q leaves out."""
    from distsim.plugin.terminal import write_orders
    from distsim.text.github import on_github

    write_orders(terminalreporter)
    line = None if terminalreporter.showheader else pytest_report_header()
    if line is not None:
        terminalreporter.write_line(line)
    if on_github(os.environ):
        from distsim.plugin.annotations import error_lines

        reports = {id(report): report for some in terminalreporter.stats.values() for report in some}
        for line in error_lines(reports.values()):
            terminalreporter.ensure_newline()
            terminalreporter.write_line(line)


def _per_rank(request: pytest.FixtureRequest, name: str) -> Any:
    if marker_of(request.node) is None:
        pytest.fail(_UNMARKED.format(name), pytrace=False)
    from distsim.plugin.options import PerRank, WorldOfAll

    return WorldOfAll(name) if name == "world" else PerRank(name)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """Return the global rank on which the body runs."""
    return _per_rank(request, "rank")  # type: ignore[no-any-return]


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks. Other fixtures may use it, because it is equal on all ranks."""
    marker = marker_of(request.node)
    if marker is None:
        pytest.fail(_UNMARKED.format("world_size"), pytrace=False)
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    return params.get("distsim_world_size", sizes_of(marker))  # type: ignore[no-any-return]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> WorldFixture:
    """Return the rank on which the body runs: `world.rank`, `world.size`, `world.local_rank`, `world.on`.

    In another fixture, after its `yield`, `world.results` holds what the body returned on each rank.
    """
    return _per_rank(request, "world")  # type: ignore[no-any-return]


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """Return a DeviceMesh over all ranks, in the shape of the marker's argument `mesh` (default: one dimension)."""
    return _per_rank(request, "mesh")


class ScenarioFile(pytest.File):
    """One .toml file; it holds one test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the file's only item."""
        yield ScenarioItem.from_parent(self, name=self.path.stem)


class ScenarioFailure(Exception):
    """An expectation that failed; its text is the report."""


class ScenarioItem(pytest.Item):
    """Runs the scenario; a failed expectation is its failure, a fault of the file too."""

    culprit: tuple[str, int] | None = None
    """File and line that an annotation points at, once it has run."""

    def setup(self) -> None:
        """Do nothing: a scenario sets up its own world."""

    def runtest(self) -> None:
        """Run it and print what its ranks printed, so that pytest shows it under the failure."""
        from distsim.scenario import load_scenario, run_scenario

        folder = self.config.getoption("--distsim-html")
        scenario = load_scenario(self.path)
        if scenario.spec.explore is None:
            result = run_scenario(scenario, picture=bool(folder))
        else:
            from distsim.scenario.explore.budget import Budget
            from distsim.scenario.explore.scenarios import explore_scenario

            budget, kinds = Budget.read(scenario.spec.explore), scenario.spec.explore_faults
            explored = explore_scenario(scenario, budget, kinds, lambda _: None)
            result = explored.result
            self.user_properties.append(("orders", "\n".join(explored.lines).partition(": ")[2]))
        if result.output:
            print(result.output, end="" if result.output.endswith("\n") else "\n")
        if not result.passed:
            self.culprit = result.site
            if folder and result.document:
                from distsim.report.html.reports import page_of_report

                result.notes.append(page_of_report(folder, self.nodeid, result.document))
                print(result.notes[-1])
            output, result.output = result.output, ""
            text = result.text
            result.output = output
            raise ScenarioFailure(text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the report itself, without a traceback of ours."""
        from distsim.errors import UsageError

        if isinstance(excinfo.value, ScenarioFailure | UsageError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return the file's first line."""
        return self.path, 0, f"scenario {self.path.stem}"
