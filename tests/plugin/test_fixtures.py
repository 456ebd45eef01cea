"""Fixtures and kinds of tests that pytest users bring along."""

from __future__ import annotations

from plugin.conftest import Run


def test_capsys_is_each_ranks_own(run: Run) -> None:
    """It holds what this rank printed; what nobody reads is shown under the failure as ever."""
    result = run(
        """
import sys

@pytest.mark.world_size(3)
def test_print(rank, capsys):
    print("hello", rank)
    print("careful", rank, file=sys.stderr)
    dist.barrier()
    assert capsys.readouterr() == (f"hello {rank}\\n", f"careful {rank}\\n")
    assert capsys.readouterr().out == ""

@pytest.mark.world_size(2)
def test_left(rank, capsys):
    print("left by", rank)
    with capsys.disabled():
        print("not kept by", rank)
    assert "not kept" not in capsys.readouterr().out
    print("last word of", rank)
    assert False
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Captured stdout*", "[[]0] not kept by 0", "[[]0] last word of 0"])


def test_fixtures_that_mean_nothing_on_a_rank_are_refused_by_name(run: Run) -> None:
    """With what to use instead; in a test without ranks they are pytest's."""
    result = run(
        """
@pytest.mark.world_size(2)
def test_fd(capfd):
    pass

@pytest.mark.world_size(2)
def test_property(record_property):
    pass

def test_plain(capfd, record_property):
    print("x")
    assert capfd.readouterr().out == "x\\n"
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["fixture 'capfd'*capsys is each rank's own", "fixture 'record_property'*use it in a fixture"]
    )


def test_tmp_path_monkeypatch_and_the_users_own(run: Run) -> None:
    """One folder for all ranks, an environment for each, fixtures of a conftest file once for all."""
    result = run(
        """
import os

@pytest.fixture
def seven():
    return 7

@pytest.mark.world_size(2)
def test_one(rank, tmp_path, monkeypatch, caplog, seven, request):
    (tmp_path / str(rank)).write_text("x")
    monkeypatch.setenv("MINE", str(rank))
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2 and seven == 7
    assert os.environ["MINE"] == str(rank)
    assert request.getfixturevalue("seven") == 7
    with pytest.raises(ValueError, match="x"):
        raise ValueError("x")

def test_after():
    assert "MINE" not in os.environ
"""
    )
    result.assert_outcomes(passed=2)


def test_a_failing_subtest_fails_its_rank(run: Run) -> None:
    """And says which it was, with unittest's subTest and with pytest's fixture."""
    result = run(
        """
class TestUnit(unittest.TestCase):
    @pytest.mark.world_size(2)
    def test_parts(self):
        for part in range(3):
            with self.subTest("step", part=part):
                self.assertTrue(part < 2 or dist.get_rank() == 0)

    def test_plain(self):
        with self.subTest(part=1):
            pass
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["rank 1: AssertionError: False is not true", "E*in the subtest [[]step[]] (part=2)"])


def test_async_functions_are_refused(run: Run) -> None:
    """A coroutine that nobody awaits would pass."""
    result = run(
        """
@pytest.mark.world_size(2)
async def test_async(rank):
    assert False
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["world_size: expected a plain function, got an async one*"])
