"""`--distsim-html DIR`: a page of each test on ranks that failed, and of each failed scenario."""

from __future__ import annotations

import errno
import os

import pytest
from plugin.conftest import Run

STUCK = """
@pytest.mark.ranks(2, on={on!r}, host_timeout_s=3)
def test_stuck(rank):
    if rank == 0:
        dist.barrier()

@pytest.mark.ranks(2)
def test_fine(rank):
    dist.barrier()
"""


def test_each_failure_has_a_page_and_says_where(run: Run, pytester: pytest.Pytester) -> None:
    """A hang on simulated ranks and a failed scenario: a file each, none for what passed."""
    pytester.makepyfile(p="import torch.distributed as dist\ndist.init_process_group()\n")
    pytester.makefile(".toml", bad="program = 'p.py'\non = 'ethernet-cpu:1'\n[expect]\nkind = 'missing_rank'\n")
    pytester.makepyfile(test_pages="import pytest, torch\nimport torch.distributed as dist\n" + STUCK.format(on="sim"))
    result = run("", "--distsim-html", "pages")
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(["*this run as a page: pages/*test-stuck*.html"])
    pages = {path.name: path.read_text() for path in (pytester.path / "pages").iterdir()}
    assert len(pages) == 2
    hang = next(text for name, text in pages.items() if "stuck" in name)
    assert "test_stuck" in hang
    assert "HANG" in hang
    assert "replay:" in hang


@pytest.mark.slow
def test_a_hang_on_gloo_has_a_page(run: Run, pytester: pytest.Pytester) -> None:
    """From the flight records, before they are gone."""
    result = run(STUCK.format(on="gloo"), "--distsim-html", "pages", "-k", "stuck")
    result.assert_outcomes(failed=1)
    (page,) = (pytester.path / "pages").iterdir()
    assert "all_reduce" in page.read_text() or "barrier" in page.read_text()


@pytest.mark.parametrize(
    ("folder", "expected"), [("no/where", "no folder no; create it first"), ("file", "expected a folder, got a file")]
)
def test_a_folder_that_cannot_be_is_refused_before_any_test(
    folder: str, expected: str, run: Run, pytester: pytest.Pytester
) -> None:
    """One line of pytest's own kind, and nothing has run."""
    (pytester.path / "file").touch()
    result = run("def test_never(): raise SystemExit", "--distsim-html", folder)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --distsim-html {folder}: {expected}"])


def test_a_page_that_cannot_be_written_hides_no_failure(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when a test fails: that it failed, and of what, is told all the same."""

    def full(path: str, text: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr("distsim.report.html.reports.write_text", full)
    result = run(STUCK.format(on="sim"), "--distsim-html", "pages", "-k", "stuck")
    result.assert_outcomes(failed=1)
    told = " ".join(result.stdout.str().split())
    assert "missing rank" in told
    assert "note: no page of this run: --distsim-html pages cannot be written (No space left on device)" in told
