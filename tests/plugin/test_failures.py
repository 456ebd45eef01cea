"""The text of a failure: who failed, what they said, once; whole where somebody asks for it."""

from __future__ import annotations

import pytest
from plugin.conftest import Run

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.plugin.verdict import Verdict
from tests.debug.builders import all_reduce, fail, play

LATE = """
import time

@pytest.mark.ranks(4)
def test_late(rank):
    if rank == 1:
        time.sleep(1e6)
    dist.all_reduce(torch.ones(2))
"""

VALUES = """
@pytest.mark.ranks(64)
def test_values(rank):
    assert float(rank) == 0
"""

RAISE = """
@pytest.mark.ranks(3)
def test_raise(rank):
    if rank == 1:
        raise ValueError("no data")
    dist.barrier()
"""

HANG = """
@pytest.mark.ranks(4)
def test_hang(rank):
    if rank != 2:
        dist.barrier()
"""


def test_a_rank_that_is_waited_for_until_the_timeout_is_named(run: Run) -> None:
    """torch's timeout error of the others first, without our frames, then the report on the rank that slept."""
    result = run(LATE)
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "missing rank: rank 1 (*.py:10); rank 0: RuntimeError: *Timed out waiting*",
            "*ranks 2,3 of 4 on sim*",
            "HANG  missing rank  rank 1  all_reduce #1*",
            "*time.sleep(1e6)",
        ]
    )
    assert "distsim/sim" not in text
    assert "c10d" not in text, "neither torch's frames nor what it logs for nobody"


def test_failures_that_differ_only_in_values_are_folded(run: Run) -> None:
    """Two whole, eight in a line each, the rest as ranges."""
    result = run(VALUES)
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "rank 1: AssertionError: assert 1.0 == 0 (62 more ranks failed, too)",
            "_____ rank 1 of 64 on sim _____",
            "_____ rank 2 of 64 on sim _____",
            "_____ 61 more ranks fail at *.py:7, with other values _____",
            "rank 3: AssertionError: assert 3.0 == 0",
            "rank 10: AssertionError: assert 10.0 == 0",
            "and ranks 11-63",
            "-vv shows each of them whole",
        ]
    )
    assert text.count(" of 64 on sim _____") == 2
    assert len(text.splitlines()) < 70


def test_the_short_summary_has_a_terminals_columns_in_ci_too(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked wrongly is at the test's own line, not at one of pytest's; all that is said stands above."""
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("COLUMNS", "80")
    pytester.makepyfile(
        test_it="""
import pytest

@pytest.mark.ranks(2)
def test_fixture(rank, capfd):
    pass

@pytest.mark.ranks(2)
def test_long(rank):
    assert rank == "a text that is longer than what is left of eighty columns behind the test's own name"
"""
    )
    text, _, summary = run().stdout.str().partition("short test summary")
    lines = [line for line in summary.splitlines() if line.startswith("FAILED ")]
    assert lines[0].startswith("FAILED test_it.py::test_fixture - line 3: fixture 'capfd'")
    assert lines[1].startswith("FAILED test_it.py::test_long - line 9: rank 0: AssertionError")
    assert [len(line) for line in lines] == [80, 80]
    assert "captures for all ranks together; capsys is each rank's own" in text


def test_the_short_summary_has_file_and_line(run: Run, pytester: pytest.Pytester) -> None:
    """Within 80 columns: the line that hangs; the file, too, where it is not the test's own."""
    pytester.makepyfile(helper="def check(rank):\n    assert rank == 0\n")
    pytester.makepyfile(
        test_it="import pytest, torch.distributed as dist\nfrom helper import check\n"
        + HANG
        + "\n@pytest.mark.ranks(2)\ndef test_far(rank):\n    check(rank)\n"
    )
    lines = [line for line in run().stdout.lines if line.startswith("FAILED")]
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("FAILED test_it.py::test_hang - line 7: HANG  missing rank")
    assert lines[1].startswith("FAILED test_it.py::test_far - helper.py:2: rank 1: AssertionError")


def test_the_replay_works_where_pytest_was_started(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder below the project's: the names that pytest prints there are relative to it."""
    pytester.makeini("[pytest]\n")
    below = pytester.mkdir("below")
    (below / "test_it.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\ndef test_no(rank):\n    assert rank is None\n"
    )
    monkeypatch.chdir(below)
    run().stdout.fnmatch_lines(["replay: pytest 'test_it.py::test_no'  (seed 0)"])


def test_vv_shows_every_rank_whole(run: Run) -> None:
    """Nothing is lost for who asks."""
    text = run(VALUES, "-vv").stdout.str()
    assert text.count(" of 64 on sim _____") == 63
    assert "more ranks fail at" not in text


def test_failures_at_different_lines_are_not_folded(run: Run) -> None:
    """What differs in more than its values is shown, whoever else failed."""
    text = run(
        """
@pytest.mark.ranks(8)
def test_lines(rank):
    if rank == 0: raise ValueError("zero")
    if rank == 1: raise ValueError("one")
    if rank == 2: raise ValueError("two")
    if rank == 3: raise KeyError("three")
    assert rank < 4
"""
    ).stdout.str()
    for error in ("zero", "one", "two"):
        assert f"E           ValueError: {error}" in text or f"ValueError: {error}\n" in text
    assert "KeyError: 'three'" in text
    assert "2 more ranks fail at" in text


def test_many_diagnoses_are_bounded(run: Run) -> None:
    """Every rank but one raises something else, and one waits for them all."""
    text = run(
        """
@pytest.mark.ranks(32)
def test_values(rank):
    assert float(rank) == 0
    dist.barrier()
"""
    ).stdout.str()
    assert text.count("ERROR  rank raised") <= 3
    assert len(text.splitlines()) < 120


def test_a_cut_traceback_says_what_shows_it_in_pytest() -> None:
    """-vv, which shows it to its last line; no flag of the command line."""
    evidence = play(2, {0: [all_reduce(5)], 1: [fail("ValueError: bad batch", 7)]})
    frames = "".join(f'  File "train.py", line {n}, in f{n}\n    f{n + 1}()\n' for n in range(300))
    evidence.ranks[1].traceback = f"Traceback (most recent call last):\n{frames}ValueError: bad batch\n"
    short, long = Verdict(), Verdict()
    short.explain(diagnose(evidence), evidence, every=False)
    assert "more lines; pytest -vv has them)" in short.report
    assert "--report" not in short.report
    long.explain(diagnose(evidence), evidence, every=True)
    assert "pytest -vv" not in long.report
    assert "line 150, in f150" in long.report


def test_the_report_is_there_once(run: Run) -> None:
    """Its first line is the failure's, and all that the summary repeats, with -vv and in CI, too."""
    for flag in ("-v", "-vv"):
        text, _, summary = run(HANG, flag).stdout.str().partition("short test summary")
        assert text.count("missing rank") == 1
        assert summary.count("HANG  missing") == 1
        assert "never called" not in summary


@pytest.mark.parametrize("style", ["short", "line", "no", "native", "long"])
def test_every_style_of_traceback(run: Run, style: str) -> None:
    """The report is not a traceback and stays; what a rank raised is never without its line."""
    result = run(RAISE, f"--tb={style}")
    text = result.stdout.str()
    assert "distsim/sim" not in text
    if style == "no":
        assert "ERROR" not in text
        return
    result.stdout.fnmatch_lines(["rank 1: ValueError: no data", "*.py*8*", "ERROR  rank raised  rank 1*"])


def test_a_failure_is_at_the_users_line(run: Run, pytester: pytest.Pytester) -> None:
    """Where editors and annotations look: the culprit's line, or the first failed rank's."""
    run(HANG + VALUES, "--tb=line").stdout.fnmatch_lines(
        ["*.py:8: HANG*", f"{pytester.path}/*.py:12: rank 1: AssertionError*"]
    )


def test_a_rank_that_spins_is_named_by_its_line(run: Run) -> None:
    """It may stay away for as long as the marker or the configuration says, and the text tells so."""
    text = """
@pytest.mark.ranks(2{})
def test_spin(rank):
    while rank: pass
    dist.barrier()
"""
    for marker, flags in ((", host_timeout_s=0.5", ()), ("", ("-o", "distsim_host_timeout_s=0.5"))):
        run(text.format(marker), *flags).stdout.fnmatch_lines(
            [
                "HANG  host stuck  rank 1*",
                "*|  while rank: pass",
                "note: a rank may compute for host_timeout_s=0.5 seconds without a call*",
            ]
        )


def test_the_note_names_the_limit_that_struck(run: Run) -> None:
    """Where the test's own limit is the shorter one, a longer host_timeout_s would be of no use."""
    run(
        """
@pytest.mark.ranks(2, timeout_s=0.5)
def test_spin(rank):
    while rank:
        pass
    dist.barrier()
"""
    ).stdout.fnmatch_lines(
        [
            "* host stuck  rank 1*",
            "note: a rank may compute for 0.5 seconds without a call, because of*",
            "* timeout_s=... in the marker*",
        ]
    )


def test_a_rank_that_computes_is_alive(run: Run) -> None:
    """host_timeout_s is for ranks without a sign of life: operators go on until the test's own limit."""
    result = run(
        """
import time

@pytest.mark.ranks(2, host_timeout_s=0.3, timeout_s=60)
def test_busy(rank, real_clock):
    until = real_clock() + 0.8
    t = torch.ones(1)
    while real_clock() < until:
        t = t + 1
    dist.barrier()

@pytest.fixture
def real_clock(real=time.perf_counter):
    return real
"""
    )
    result.assert_outcomes(passed=1)


def test_a_limit_in_the_configuration_is_checked(run: Run) -> None:
    """One line, with the name of the option."""
    run(HANG, "-o", "distsim_timeout_s=soon").stdout.fnmatch_lines(
        ["*distsim_timeout_s: expected a number of seconds above 0, got 'soon'"]
    )


def test_some_ranks_skipped(run: Run) -> None:
    """That is a failure, told in its first line, equal reasons once; where all are skipped the test is."""
    result = run(
        """
@pytest.mark.ranks(4)
def test_some(rank):
    if rank:
        pytest.skip("not me")

class TestAll(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_all(self):
        self.skipTest("not us")
"""
    )
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["ranks 1-3 were skipped, others were not: not me"])
    result.stdout.fnmatch_lines(["FAILED *- line 8: ranks 1-3 were skipped*"])  # not a line of pytest's own


PRESSED = """
import ctypes, time

@pytest.mark.ranks(2)
def test_pressed(rank):
    libc = ctypes.CDLL(None)
    libc.kill(libc.getpid(), 2)
    while True:
        time.sleep(1)

@pytest.mark.ranks(2)
def test_after(rank):
    print("went on")
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_session(run: Run) -> None:
    """pytest says so in its one line, with its own exit code; no test comes after it."""
    result = run(PRESSED, "-s", apart=True)
    assert result.ret is pytest.ExitCode.INTERRUPTED
    result.stdout.re_match_lines([r"!+ KeyboardInterrupt !+$"])
    result.stdout.no_fnmatch_line("*went on*")
