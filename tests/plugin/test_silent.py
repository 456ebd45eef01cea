"""`silent=` of the marker: a test whose ranks train wrongly fails, is warned of, or is left alone."""

from __future__ import annotations

import pytest
from plugin.conftest import Run

CLAMPED = """
import distsim
from torch.nn.parallel import DistributedDataParallel

@pytest.mark.ranks(2, {silent})
def test_training(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    {before}
    torch.manual_seed(rank)
    for step in range(4):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                model.module.weight.clamp_(-0.01, 0.01)
"""


def test_strict_fails_a_test_whose_ranks_train_wrongly(run: Run) -> None:
    """The failure is the finding, with its cure."""
    result = run(CLAMPED.format(silent="silent='strict'", before=""))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["SILENT  error  changed outside step  weight*", "*next: *"])


def test_watch_warns_of_it(run: Run) -> None:
    """The test passes; pytest's summary of warnings has the finding."""
    result = run(CLAMPED.format(silent="silent='watch'", before=""), "-W", "default")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*SILENT  error  changed outside step*"])


@pytest.mark.slow
@pytest.mark.parametrize(("silent", "failed"), [("strict", 1), pytest.param("watch", 0, marks=pytest.mark.soak)])
def test_real_ranks_are_searched_too(run: Run, silent: str, failed: int) -> None:
    """With on='gloo' a test fails over the same finding, or is warned of it."""
    text = "import torch._dynamo  # which each rank would import with its optimizer\n" + CLAMPED
    result = run(text.format(silent=f"on='gloo', silent='{silent}'", before=""), "-W", "default", apart=True)
    result.assert_outcomes(passed=1 - failed, failed=failed, warnings=1 - failed)
    result.stdout.fnmatch_lines(["*SILENT  error  changed outside step  *"])


@pytest.mark.parametrize(
    ("silent", "before"), [("", ""), ("silent='off'", ""), ("silent='strict'", "distsim.varies(model)")]
)
def test_nothing_is_said_where_nobody_asks_or_the_program_allows_it(run: Run, silent: str, before: str) -> None:
    """Without the argument, switched off, or with the model marked by `distsim.varies`."""
    run(CLAMPED.format(silent=silent, before=before)).assert_outcomes(passed=1, warnings=0)


@pytest.mark.parametrize(
    ("marker", "line"),
    [
        ("silent='yes'", "ranks: silent: expected off, watch or strict, got 'yes'"),
    ],
)
def test_what_cannot_be_searched_is_one_line(run: Run, marker: str, line: str) -> None:
    """A word that is none."""
    result = run(CLAMPED.format(silent=marker, before=""))
    assert any(line in text for text in (*result.outlines, *result.errlines))
