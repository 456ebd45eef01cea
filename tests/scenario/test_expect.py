"""Expectations that do not hold are named, one line each; those that hold say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.cli import main
from distsim.debug.diagnosis.silent.facts import Severity, SilentFinding, SilentKind
from distsim.errors import UsageError
from distsim.text.units import format_time
from tests.scenario.made import STEPS, made, ran

HANG = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
if dist.get_rank() != 2:
    dist.all_reduce(t)  # <- waits
dist.barrier()  # <- culprit
"""
FUNCTION = """\
import torch
import torch.distributed as dist


def total(times="1"):
    dist.init_process_group("gloo")
    t = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(t)
    return t * int(times)
"""


def test_a_healthy_run_passes(tmp_path: Path) -> None:
    """Nothing expected but health, and it is healthy."""
    result = ran(tmp_path, "[expect]\nexit_code = 0\nprints = { all = [], 1 = ['rank 1 has 256'] }")
    assert result.wrong == []
    assert result.kind == "healthy"


@pytest.mark.parametrize(
    ("expect", "wrong"),
    [
        ("kind = 'missing_rank'", "expect.kind: expected missing_rank, got healthy"),
        ("exit_code = 3", "expect.exit_code: expected 3, got 0"),
        ("output = ['rank 0 has 1']", "expect.output: no rank printed 'rank 0 has 1'"),
        ("prints = { 3 = ['rank 2 has 256'] }", "expect.prints.3: rank 3 did not print 'rank 2 has 256'"),
        ("virtual_time_below_s = '1us'", "expect.virtual_time_below_s: expected below 1 us"),
        (
            "busbw_above = { all_reduce = '900GB/s' }",
            "expect.busbw_above.all_reduce: expected above 900.0 GB/s",
        ),
        (
            "busbw_above = { broadcast = '1GB/s' }",
            "expect.busbw_above.broadcast: no rank ever called broadcast",
        ),
        ("utilisation_below = { 'n0/nic*' = 0.01 }", "expect.utilisation_below: expected n0/nic* below 1%"),
        (
            "utilisation_below = { 'n0/nic*' = 0.0002 }",
            "expect.utilisation_below: expected n0/nic* below 0.02%, got 31.40% on n0/nic",
        ),
        ("utilisation_below = { 'x->y' = 0.5 }", "expect.utilisation_below: no link 'x->y'"),
        ("call = { op = 'all_reduce', seq = 9 }", "expect.call: no rank ever called all_reduce #9"),
        (
            "memory_below = '64KiB'",
            "expect.memory_below: expected every rank below 64 KiB, got 304 KiB (311,296 bytes) on rank 0 (and too",
        ),
        ("step_time = { line = '# <- step' }", "expect.step_time: no baseline made.baseline.json"),
    ],
)
def test_what_a_healthy_run_does_not_do(tmp_path: Path, expect: str, wrong: str) -> None:
    """Each is a line that begins with its path in the file."""
    result = ran(tmp_path, f"[expect]\n{expect}")
    assert len(result.wrong) == 1
    assert result.wrong[0].startswith(wrong)


@pytest.mark.parametrize(
    ("expect", "wrong"),
    [
        ("kind = 'missing_rank'\nculprits = [2]\nline = '# <- culprit'\nstuck_line = '# <- waits'", None),
        ("kind = 'missing_rank'\ngroup = 'default_pg'\ncall = { op = 'all_reduce', seq = 1 }", None),
        ("kind = 'healthy'", "expect.kind: expected healthy, got missing_rank"),
        ("kind = 'missing_rank'\nculprits = [1]", "expect.culprits: expected [1], got [2]"),
        ("kind = 'missing_rank'\ngroup = 'dp'", "expect.group: expected 'dp', got 'default_pg'"),
        ("kind = 'missing_rank'\nline = '# <- waits'", "expect.line: expected a culprit at line 7"),
        ("kind = 'missing_rank'\nstuck_line = '# <- culprit'", None),
        ("kind = 'missing_rank'\ncall = { seq = 2 }", "expect.call.seq: expected 2, got 1"),
        ("kind = 'missing_rank'\nexplanation = 'the moon'", "expect.explanation: expected 'the moon'"),
    ],
)
def test_the_diagnosis_is_compared_part_by_part(tmp_path: Path, expect: str, wrong: str | None) -> None:
    """Kind, culprits, group, call and the marked lines."""
    result = ran(tmp_path, f"[expect]\n{expect}", HANG)
    told = [line for line in result.wrong if not line.startswith("expect.call: no rank")]
    assert [line[: len(wrong or "")] for line in told] == ([] if wrong is None else [wrong])


def test_the_failure_has_the_report_and_the_way_to_see_it_again(tmp_path: Path) -> None:
    """What a pull request needs: difference, diagnosis, command."""
    result = ran(tmp_path, "[expect]", HANG)
    assert "missing rank  rank 2  all_reduce #1" in result.text
    assert "next: " in result.text
    assert "replay: distsim scenario run" in result.text
    assert result.site == (str(tmp_path / "made.py"), 8)


def test_results_of_a_function_are_compared(tmp_path: Path) -> None:
    """Tensors are lists, `all` is every rank."""
    head = 'program = "made.py:total"\nargs = ["2"]\n'
    assert ran(tmp_path, head + "[expect]\nresults = { all = [12.0] }", FUNCTION).wrong == []
    wrong = ran(tmp_path, head + "[expect]\nresults = { 1 = [6.0] }", FUNCTION).wrong
    assert wrong == ["expect.results.1: expected [6.0], got [12.0] on rank 1"]


def test_a_step_is_held_against_its_baseline(tmp_path: Path) -> None:
    """Written with --update-baselines; a slower link breaks the band."""
    from distsim.scenario import run_scenario

    toml = "[expect]\nstep_time = { band = 0.1, line = '# <- step' }"
    scenario = made(tmp_path, toml)
    assert run_scenario(scenario, update_baseline=True).wrong == []
    assert run_scenario(scenario).wrong == []
    slow = "faults = [{ what = 'link_slow', link = 'n0/nic0->leaf0', factor = 0.1 }]\n"
    wrong = run_scenario(made(tmp_path, slow + toml)).wrong
    assert len(wrong) == 1
    assert wrong[0].startswith("expect.step_time: expected ")
    (tmp_path / "made.baseline.json").write_text("[]")
    assert "expected figures by name" in run_scenario(scenario).wrong[0]


TRAINING = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.ones(4096, 4096, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
"""


def test_the_step_is_that_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step of a training is stored, and not the whole run; the lines of a stored and of a passing run say it."""
    place = 'on = "dgx-h100:1"\nnproc_per_node = 2\n'
    made(tmp_path, place + "[expect]\nstep_time = { band = 0.02 }", TRAINING)
    monkeypatch.chdir(tmp_path)
    assert main(["scenario", "run", "made.toml", "--update-baselines"]) == 0
    stored_s = json.loads((tmp_path / "made.baseline.json").read_text())["step_time_s"]
    assert f"(healthy, step {format_time(stored_s)}, stored in made.baseline.json, " in capsys.readouterr().out
    assert main(["run", "--on", "dgx-h100:1", "--nproc-per-node", "2", "--report", "report.json", "made.py"]) == 0
    assert stored_s == json.loads((tmp_path / "report.json").read_text())["training"]["step_time_s"]
    capsys.readouterr()
    assert main(["scenario", "run", "made.toml"]) == 0
    assert f"(healthy, step {format_time(stored_s)}, +0.0% from its baseline, " in capsys.readouterr().out
    slower = {"step_time_s": stored_s / 1.034}
    (tmp_path / "made.baseline.json").write_text(json.dumps(slower))
    assert main(["scenario", "run", "made.toml"]) == 5
    assert f"got {format_time(stored_s)} (+3.4%)" in capsys.readouterr().out


def test_a_run_without_a_training_step_has_no_step_time(tmp_path: Path) -> None:
    """Nothing else is taken for a step; the line says what could be expected instead."""
    result = ran(tmp_path, "[expect]\nstep_time = {}")
    assert len(result.wrong) == 1
    assert result.wrong[0].startswith("expect.step_time: expected a training step on a GPU, and the run made none")
    assert not (tmp_path / "made.baseline.json").exists()


def test_a_raise_is_no_health(tmp_path: Path) -> None:
    """A program that raises fails an expectation of health, with its exception."""
    result = ran(tmp_path, "[expect]", STEPS + "raise ValueError('no')\n")
    assert result.exit_code == 1
    assert "got rank_raised" in result.wrong[0]
    assert "ValueError: no" in result.text


CLAMPED = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for step in range(4):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.module.weight.clamp_(-0.01, 0.01)
"""


@pytest.mark.parametrize(
    ("toml", "wrong"),
    [
        ("expect_silent = 'changed_outside_step'", []),
        ("expect_silent = 'none'", ["expect_silent: expected none, got changed_outside_step"]),
        (
            "expect_silent = ['same_batch', 'changed_outside_step']",
            ["expect_silent: expected changed_outside_step, same_batch, got changed_outside_step"],
        ),
        ("expect_silent = 'none'\nsilent_allow = ['changed_outside_step:weight']", []),
        ("silent = 'strict'", ["expect.kind: expected healthy, got exit code 5"]),
        ("silent = 'strict'\nexpect_silent = 'changed_outside_step'\n[expect]\nexit_code = 5", []),
    ],
)
def test_silent_findings_are_expected_by_kind(tmp_path: Path, toml: str, wrong: list[str]) -> None:
    """None, one or several kinds; what is allowed is no finding."""
    assert ran(tmp_path, toml, CLAMPED).wrong == wrong


@pytest.mark.parametrize(
    ("toml", "search", "wrong"),
    [
        ("expect_silent = 'changed_outside_step'", "watch", []),
        ("expect_silent = 'none'", "watch", ["expect_silent: expected none, got changed_outside_step"]),
        ("silent = 'strict'\nsilent_allow = ['replicas_diverge']", "strict --silent-allow replicas_diverge", []),
    ],
)
def test_what_a_launcher_reports_of_silent_faults_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml: str, search: str, wrong: list[str]
) -> None:
    """On gloo the launcher is asked for the search, and its report's findings are held against what is expected."""
    finding = SilentFinding(SilentKind("changed_outside_step"), Severity.ERROR, (0,), ("weight",), 1, None, "", "", "")

    def launched(words: list[str], **_: object) -> Any:
        assert f"--silent {search} " in " ".join(words)
        Path(words[words.index("--report") + 1]).write_text(json.dumps({"silent": [finding.to_json()]}))
        return SimpleNamespace(poll=lambda: 0, wait=lambda: 0, returncode=0)

    monkeypatch.setattr("distsim.scenario.real.real.subprocess.Popen", launched)
    assert ran(tmp_path, f"backend = 'gloo'\n{toml}", CLAMPED).wrong == wrong


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("toml", "wrong"),
    [
        ("expect_silent = 'changed_outside_step'", []),
        (
            "expect_silent = 'none'\nsilent = 'strict'\nsilent_allow = ['replicas_diverge']",
            [
                "expect.kind: expected healthy, got exit code 5",
                "expect_silent: expected none, got changed_outside_step",
            ],
        ),
    ],
)
def test_silent_findings_of_real_ranks_are_expected_alike(tmp_path: Path, toml: str, wrong: list[str]) -> None:
    """On gloo, too, the search is on where something is expected of it."""
    head = "on = 'ethernet-cpu:1'\nnproc_per_node = 2\nbackend = 'gloo'"
    assert ran(tmp_path, f"{head}\n{toml}\n[limits]\nwall_time_s = 200", CLAMPED).wrong == wrong


@pytest.mark.parametrize(
    ("toml", "wrong"),
    [
        ("silent_allow = ['replicas_diverges:*']", "silent_allow: expected KIND:TENSOR with a kind"),
        ("expect_silent = 'drift'", "expect_silent"),
    ],
)
def test_what_cannot_be_expected_of_silent_findings_is_one_line(tmp_path: Path, toml: str, wrong: str) -> None:
    """Kinds that do not exist."""
    with pytest.raises(UsageError, match=wrong):
        made(tmp_path, toml, CLAMPED)
