"""On GitHub a failure is a mark at its line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from plugin.conftest import HEAD, Run

FAILING = """
@pytest.mark.ranks(4)
def test_hang(rank):
    if rank != 2:
        dist.barrier()

@pytest.mark.ranks(2)
def test_value(rank):
    import json
    json.loads("{}" if rank == 0 else "50%, or: less")

@pytest.mark.ranks(2)
def test_fine(rank):
    dist.barrier()

@pytest.mark.xfail
@pytest.mark.ranks(2)
def test_known(rank):
    assert rank == 5

@pytest.mark.ranks(0)
def test_marker(rank):
    pass

@pytest.fixture
def broken():
    torch.ones(2).view(3)

@pytest.mark.ranks(2)
def test_fixture(rank, broken):
    pass

def test_not_ours():
    assert not "ours"
"""
LATE = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() != 1:
    dist.barrier()
print("done")
if dist.get_rank() == 1:
    import time
    time.sleep(1e6)
"""


def marks(result: pytest.RunResult) -> list[str]:
    """The lines that GitHub reads, from their beginning."""
    return [line for line in result.stdout.lines if "::error" in line]


@pytest.fixture(autouse=True)
def _on_github(monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path.parent))


def test_each_failure_on_ranks_is_annotated_at_its_line(run: Run, pytester: pytest.Pytester) -> None:
    """The diagnosis' line, the assertion's, a fixture's, or the test's; others' tests are other plugins' business."""
    text = HEAD + FAILING
    lines = text.strip().splitlines()
    found = marks(run(FAILING))
    file = f"{pytester.path.name}/test_each_failure_on_ranks_is_annotated_at_its_line.py"
    heads = {mark.partition("title=")[2].partition("%3A")[0]: mark for mark in found}
    assert sorted(heads) == ["test_fixture", "test_hang", "test_marker", "test_value"]
    assert len(found) == 4
    at = {}
    for name, mark in heads.items():
        assert mark.startswith(f"::error file={file},line=")
        at[name] = lines[int(mark.partition("line=")[2].partition(",")[0]) - 1].strip()
    assert at["test_hang"] == "dist.barrier()"
    assert at["test_value"].startswith("json.loads")
    assert at["test_fixture"].startswith("torch.ones(2).view(3)")
    assert at["test_marker"] == "@pytest.mark.ranks(0)"
    assert "50%25, or: less" in heads["test_value"]
    assert "missing rank  rank 2" in heads["test_hang"].partition("::error")[2].partition("::")[2]


def test_elsewhere_nothing_is_annotated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are noise for everybody but GitHub."""
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert not marks(run(FAILING))


def test_scenarios_are_annotated_at_the_culprit(run: Run, pytester: pytest.Pytester) -> None:
    """The line of the rank that others wait for; a fault of the file at its first line."""
    head = 'on = "ethernet-cpu:1"\nnproc_per_node = 2\n'
    (pytester.path / "late.py").write_text(LATE)
    (pytester.path / "late.toml").write_text(f'program = "late.py"\n{head}limits = {{host_timeout_s = 1}}\n[expect]\n')
    (pytester.path / "wrong.toml").write_text(f'program = "late.py"\n{head}bakend = 1\n[expect]\n')
    late, wrong = marks(run())
    folder = pytester.path.name
    assert late.startswith(f"::error file={folder}/late.py,line=9,title=scenario late%3A expect.kind")
    assert wrong.startswith(f"::error file={folder}/wrong.toml,line=1,title=scenario wrong%3A ")
    assert "bakend: unknown key" in wrong


@pytest.mark.soak
@pytest.mark.slow
def test_each_failure_is_annotated_once_under_xdist(pytester: pytest.Pytester) -> None:
    """Only the process that prints the summary prints them."""
    pytester.makepyfile(HEAD + FAILING)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "1", "-q")
    titles = sorted(mark.partition("title=")[2].partition("%3A")[0] for mark in marks(result))
    assert titles == ["test_fixture", "test_hang", "test_marker", "test_value"]


def test_annotations_do_not_import_torch() -> None:
    """xdist's first process runs no test, and has no need of it."""
    check = "import sys, distsim.plugin.annotations; sys.exit('torch' in sys.modules or 'simpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
