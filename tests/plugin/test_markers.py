"""Which tests are ours, beside harnesses that have a marker `world_size`, too."""

from __future__ import annotations

import pytest
from plugin.conftest import Run

THEIRS = """
@pytest.mark.world_size(2)
def test_theirs():
    assert not dist.is_initialized()

@pytest.mark.ranks(2)
def test_ours(rank):
    assert dist.get_world_size() == 2
"""

SIZES = """
class TestSizes:
    world_size = [1, 2]

    def test_sizes(self, world_size):
        assert dist.get_world_size() == world_size

    @pytest.mark.ranks(3)
    def test_own(self):
        assert dist.get_world_size() == 3
"""


def test_world_size_is_ours_where_nobody_else_registers_it(run: Run) -> None:
    """Who uses it today need not change a line."""
    result = run("@pytest.mark.world_size(2)\ndef test_it(rank):\n    dist.barrier()\n", "--strict-markers", "-v")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("by", ["configuration", "conftest", "false"])
def test_a_marker_of_another_harness_is_left_alone(run: Run, pytester: pytest.Pytester, by: str) -> None:
    """Registered by the project, by a conftest.py, or refused by the configuration; `ranks` is ours all the same."""
    if by == "conftest":
        line = "'world_size(n): how many ranks a launcher starts'"
        pytester.makeconftest(f"def pytest_configure(config): config.addinivalue_line('markers', {line})")
    else:
        line = "distsim_world_size = false" if by == "false" else "markers = world_size(val): composer's"
        pytester.makeini(f"[pytest]\n{line}\n")
    run(THEIRS, "-W", "ignore::pytest.PytestUnknownMarkWarning").assert_outcomes(passed=2)


def test_the_configuration_has_the_last_word(run: Run, pytester: pytest.Pytester) -> None:
    """Ours though somebody else has registered it; what is neither yes nor no is told."""
    ini = "[pytest]\nmarkers = world_size(val): old line\ndistsim_world_size = {}\n"
    pytester.makeini(ini.format("true"))
    run(THEIRS).assert_outcomes(passed=1, failed=1)
    pytester.makeini(ini.format("perhaps"))
    run().stderr.fnmatch_lines(["*distsim_world_size: expected true or false, got 'perhaps'"])


def test_the_attribute_of_a_class_is_asked_only_where_the_configuration_says_so(run: Run) -> None:
    """DeepSpeed's way: every test of the class on each of the numbers; a marker is nearer."""
    run(SIZES).assert_outcomes(passed=1, errors=1)
    run(SIZES, "-o", "distsim_class_world_size=true").assert_outcomes(passed=3)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_under_a_launcher_the_plugin_stays_out(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`torchrun -m pytest`: their tests run as they are, ours are skipped, and a line says so."""
    monkeypatch.setenv(name, "2")
    result = run(THEIRS, "-rs", "-W", "ignore::pytest.PytestUnknownMarkWarning")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines([f"distsim: a launcher has started pytest*({name}=2)", f"SKIPPED*unset {name}=2*"])
    monkeypatch.setenv(name, "1")
    run(THEIRS).assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize("flags", [[], ["-q"], ["-qq"]])
def test_of_a_launchers_processes_one_says_so_once(run: Run, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    """Quiet or not: the first one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, times in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        said = str(run(THEIRS, *flags, "-W", "ignore::pytest.PytestUnknownMarkWarning").stdout)
        assert said.count("distsim: a launcher has started pytest") == times


def test_the_marker_can_be_imported(run: Run) -> None:
    """`distsim.test.ranks` is `pytest.mark.ranks`."""
    result = run(
        """
from distsim.test import ranks

@ranks([1, 2], on="sim")
def test_it(world):
    assert world.size == dist.get_world_size()
"""
    )
    result.assert_outcomes(passed=2)


@pytest.mark.soak
@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_at_collection(pytester: pytest.Pytester) -> None:
    """Where there are tests on ranks, and where they are to be run; else torch is not imported at all."""
    pytester.makeconftest(
        """
import sys

def pytest_runtestloop():
    print("RUN", "distsim.sim.run" in sys.modules, "distsim.realexec" in sys.modules)

def pytest_unconfigure():
    print("END", "torch" in sys.modules)
"""
    )
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(2)\ndef test_it(rank): pass\ndef test_plain(): pass\n")
    run = ("-p", "no:cacheprovider", "-s")
    pytester.runpytest_subprocess(*run).stdout.fnmatch_lines(["*RUN True False", "*END True"])
    for less in (("-k", "plain"), ("--collect-only",)):
        pytester.runpytest_subprocess(*run, *less).stdout.fnmatch_lines(["*END False"])
