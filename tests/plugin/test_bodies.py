"""Test bodies on every rank: pytest in pytest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from plugin.conftest import Run

from distsim.debug.evidence.processes import own_process


def test_the_body_runs_on_every_rank(run: Run) -> None:
    """Fixtures rank, world and mesh are each rank's own; others are shared, and may build on world_size."""
    result = run(
        """
@pytest.fixture
def ranks():
    return []

@pytest.fixture
def batch(world_size):
    return 8 * world_size

@pytest.mark.ranks(4, mesh=(2, 2), mesh_dim_names=("dp", "tp"))
def test_all(rank, world, world_size, batch, mesh, ranks, tmp_path):
    assert (world.rank, world.size, world.on) == (rank, 4, "sim")
    assert (world_size, batch) == (4, 32)
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    assert t.item() == 6
    assert mesh["tp"].size() == 2
    ranks.append(rank)
    dist.barrier()
    assert sorted(ranks) == [0, 1, 2, 3]
"""
    )
    result.assert_outcomes(passed=1)


def test_equal_failures_are_one_with_introspection(run: Run) -> None:
    """The values of the assertion are there, for each different failure once."""
    result = run(
        """
@pytest.mark.ranks(4)
def test_sum(rank):
    total = 6 if rank < 3 else 7
    assert total == 7
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*ranks 0-2: AssertionError: assert 6 == 7*", "*ranks 0-2 of 4 on sim*", ">*assert total == 7*"]
    )
    assert result.stdout.str().count(">       assert total == 7") == 1


def test_the_report_reaches_junit(run: Run, pytester: pytest.Pytester) -> None:
    """xunit2 keeps the failure's text and nothing else, so it has to be there."""
    run(
        """
@pytest.mark.ranks(2)
def test_hang(rank):
    if rank:
        dist.barrier()
""",
        "--junitxml=out.xml",
        "-o",
        "junit_family=xunit2",
    )
    text = (pytester.path / "out.xml").read_text()
    assert "missing rank  rank 0  barrier #1" in text
    assert "never called barrier #1" in text


def test_output_is_shown_behind_its_rank(run: Run) -> None:
    """What ranks print is under the failure, each line with its rank."""
    result = run(
        """
@pytest.mark.ranks(2)
def test_print(rank):
    print("here", rank)
    assert False
"""
    )
    result.stdout.fnmatch_lines(["*Captured stdout*", "[[]0] here 0", "[[]1] here 1"])


def test_parametrize_classes_skip_and_xfail(run: Run) -> None:
    """Markers of pytest mean what they mean."""
    result = run(
        """
@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.ranks([1, 2])
def test_sizes(x, world, world_size):
    assert world_size == world.size
    assert world.size in (1, 2) and dist.get_world_size() == world.size

class TestPlain:
    @pytest.mark.ranks(2)
    def test_method(self, rank):
        assert rank in (0, 1)

class TestUnit(unittest.TestCase):
    def setUp(self):
        self.size = 2

    @pytest.mark.ranks([1, 2], on=["sim"])
    def test_all_sizes(self):
        self.assertLessEqual(dist.get_world_size(), self.size)

    @pytest.mark.ranks(3)
    def test_too_many(self):
        self.assertEqual(dist.get_world_size(), self.size)

@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("not here")

@pytest.mark.xfail(reason="known", strict=True)
@pytest.mark.ranks(2)
def test_known(rank):
    if rank:
        dist.barrier()

def test_without_ranks():
    assert not dist.is_initialized()
"""
    )
    result.assert_outcomes(passed=7, failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*ranks 0-2: AssertionError: 3 != 2*"])


def test_faults_strike_in_a_test(run: Run) -> None:
    """The tables of a scenario file, as arguments of the marker."""
    result = run(
        """
@pytest.mark.ranks(2, faults=[{"what": "crash", "ranks": [1], "call": "barrier #2"}])
def test_crash():
    for _ in range(3):
        dist.barrier()
"""
    )
    result.stdout.fnmatch_lines(
        ["HANG  rank killed  rank 1*", "*note: injected: rank 1 killed by SIGKILL, at barrier #2*"]
    )


MISTAKES = [
    ("ranks(0)", "expected a number of ranks, 1 or more, got 0"),
    ("ranks()", "expected a number of ranks, 1 or more, got None"),
    ("ranks(2, wrold=1)", "expected arguments n, on"),
    ("ranks(2, on='nccl')", "expected on='sim' or on='gloo'"),
    ("ranks(9, cluster='dgx-h100:1')", "has room for 8 ranks"),
    ("ranks(2, faults=[{'what': 'crash'}])", "faults*ranks: expected a value"),
    ("ranks(2, on='gloo', cluster='dgx-h100:1')", "cluster, faults and guards mean simulated ranks"),
    ("ranks('4')", "expected a number of ranks, 1 or more, got '4'"),
    ("ranks(-1)", "expected a number of ranks, 1 or more, got -1"),
    ("ranks(2, 3)", "expected one number of ranks, got ranks(2, 3)"),
    ("ranks(2, timeout_s=0)", "timeout_s: expected a number of seconds above 0, got 0"),
    ("ranks(2, host_timeout_s='x')", "host_timeout_s: expected a number of seconds above 0, got 'x'"),
    ("ranks(2, seed='x')", "seed: expected a whole number, 0 or more, got 'x'"),
    ("ranks(2, cluster=3)", "cluster: expected a cluster's name or the path of its file, got 3"),
    ("ranks(2, cluster='nope')", "unknown cluster 'nope'"),
    ("ranks(4, mesh=(3,))", "a mesh over 3 ranks, expected 4"),
    ("ranks(4, mesh=4)", "mesh: expected the sizes of its dimensions, such as (2, 4), got 4"),
    ("ranks(4, mesh_dim_names=('a', 'b'))", "expected a name for each dimension of mesh=(4,)"),
    ("ranks(2, faults={'what': 'crash'})", "faults: expected a list of tables"),
    ("ranks(2, guards=['nope'])", "guards: expected nan, buffers, payloads, got 'nope'"),
]


def test_a_mistake_in_the_marker_is_one_line(run: Run) -> None:
    """What was expected and what came, no traceback of ours."""
    tests = (f"@pytest.mark.{marker}\ndef test_{number}():\n    pass\n" for number, (marker, _) in enumerate(MISTAKES))
    result = run("\n".join(tests))
    result.assert_outcomes(failed=len(MISTAKES))
    result.stdout.fnmatch_lines([f"*{told}*" for _, told in MISTAKES])
    assert "distsim/plugin" not in result.stdout.str()


def test_a_rank_fixture_without_ranks_is_refused(run: Run) -> None:
    """And one that is used by another fixture, which is set up once for all ranks."""
    result = run(
        """
def test_alone(rank):
    pass

@pytest.fixture
def seed(rank):
    return rank + 1

@pytest.mark.ranks(2)
def test_seed(seed):
    pass
"""
    )
    result.stdout.fnmatch_lines(["*mark the test with @pytest.mark.ranks(n)*", "*fixtures are set up once*"])
    assert "_per_rank" not in result.stdout.str()


@pytest.mark.soak
@pytest.mark.slow
def test_xdist_and_x(run: Run) -> None:
    """Distributed over workers, and stopped at the first failure."""
    text = """
@pytest.mark.parametrize("i", range(4))
@pytest.mark.ranks(2)
def test_many(i, rank):
    assert i < 2
"""
    run(text, "-n", "2").assert_outcomes(passed=2, failed=2)
    run(text, "-x").assert_outcomes(passed=2, failed=1)


@pytest.mark.soak
def test_nothing_grows(run: Run) -> None:
    """Many tests leave no thread behind."""
    text = """
@pytest.mark.parametrize("i", range({}))
@pytest.mark.ranks(8)
def test_trivial(i):
    dist.barrier()
"""
    run(text.format(2)).assert_outcomes(passed=2)
    before = len(sys._current_frames())
    run(text.format(40)).assert_outcomes(passed=40)
    assert len(sys._current_frames()) <= before


def test_the_monitor_of_real_ranks_knows_their_launcher(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one it would go as soon as it sees no rank."""
    said: list[object] = []

    def start_none(_: object, directory: Path, *__: object) -> NoReturn:
        said.append(json.loads((directory / "launcher.json").read_text()))
        raise pytest.UsageError("enough seen")

    monkeypatch.setattr("distsim.debug.monitor.start.Series.begin", start_none)
    result = run("@pytest.mark.ranks(2, on='gloo')\ndef test_real(rank): pass")
    result.stdout.fnmatch_lines(["enough seen"])
    assert said == [own_process()]


def test_scenario_files_are_tests(run: Run, pytester: pytest.Pytester) -> None:
    """A .toml file with a program and an expectation is collected; other TOML is not."""
    pytester.makefile(".toml", cluster="name = 'x'")
    pytester.makefile(".toml", good="program = 'p.py'\non = 'ethernet-cpu:1'\n[expect]\nkind = 'healthy'\n")
    pytester.makefile(".toml", bad="program = 'p.py'\non = 'ethernet-cpu:1'\n[expect]\nkind = 'missing_rank'\n")
    pytester.makefile(".toml", wrong="program = 'p.py'\nprogramm = 1\n[expect]\n")
    pytester.makefile(".toml", half="program = 'p.py'\n[expect\n")
    pytester.path.joinpath("p.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    result = run("", "-v")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "good.toml::good PASSED*",
            "*expect.kind: expected missing_rank, got healthy*",
            "*replay: distsim scenario run *bad.toml*",
            "*half.toml: expected TOML: *",
            "*programm: unknown key*did you mean 'program'*",
        ]
    )


def test_the_plugin_imports_no_torch() -> None:
    """It is loaded in every pytest run of the environment, and asked at every prompt of a debugger."""
    code = (
        "import sys; import distsim.pytest_plugin as plugin; plugin.pytest_enter_pdb(); "
        "print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
