"""Whole programs in the simulator: each faulty one is found by its kind, and is silent once repaired."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distsim.cli import main
from distsim.debug.diagnosis.silent.collect.collector import Collector
from distsim.debug.diagnosis.silent.facts import SilentFinding, SilentKind
from distsim.sim.run import RunRequest, run_program, simulate
from tests.golden import assert_golden

PROGRAMS = Path(__file__).parent / "programs"
GOLDEN = Path(__file__).parent / "golden"
FAULTY = {
    "s01_skip_load": "replicas_differ_at_start",
    "s03_update_one": "changed_outside_step",
    "s13_wrong_group": "replicas_differ_at_start",
    "s05_tp_batches": "replicate_is_not",
    "s07_sp_layernorm": "replicas_diverge",
    "s09_div_twice": "gradient_scale",
    "s10_same_batch": "same_batch",
    "s12_gather_alias": "aliased_outputs",
    "s14_dropout_differs": "dropout_differs",
    "s18_token_norm": "tokens_weigh_differently",
    "s16_opt_state": "optimizer_state_differs",
    "s24_no_sync_always": "replicas_diverge",
    "s25_bypass_ddp": "replicas_diverge",
    "s40_unsharded_write": "unsharded_write_lost",
    "s43_buffers": "buffers_differ",
    "s46_clip_then_average": "clipped_by_local_norm",
    "s51_frozen_on_one": "replicas_diverge",
    "s54_router_not_reduced": "replicas_diverge",
    "s61_input_gradient": "replicas_diverge",
    "s66_fsdp_same_batch": "same_batch",
    "s67_shared_key_value": "replicas_diverge",
    "s69_equal_dropout": "equal_dropout",
    "s73_reduction_dropped": "replicas_diverge",
    "s80_reduced_each_time": "mixed_scale",
    "s81_fsdp_lr": "hyperparameter_differs",
    "s87_no_zero_grad": "stale_gradient",
    "s92_reduce": "replicas_diverge",
    "s93_one_left_out": "mixed_scale",
    "s94_updated_by_hand": "replicas_diverge",
}
"""Programs with one fault each, and the kind that names it; with the argument `fixed` they have none."""
HEALTHY = sorted(path.stem for path in PROGRAMS.glob("h*.py"))


def findings(name: str, *arguments: str, silent: str = "watch") -> tuple[int, list[SilentFinding]]:
    """Exit code and silent findings of a program in the simulator."""
    path = PROGRAMS / f"{name}.py"
    ranks = re.search(r"ranks: (\d+)", path.read_text(encoding="utf-8"))
    assert ranks is not None
    nproc = min(int(ranks[1]), 2)
    outcome = run_program(
        RunRequest(
            program=str(path),
            args=list(arguments),
            on="ethernet-cpu:2",
            nproc_per_node=nproc,
            nnodes=int(ranks[1]) // nproc,
            silent=silent,
        )
    )
    return outcome.exit_code, outcome.silent


def whole(finding: SilentFinding) -> str:
    """Return all fields of *finding* that are not empty."""
    distance = "" if finding.distance is None else f", {finding.distance:.2g} apart"
    site = None if finding.site is None else f"{Path(finding.site.file).name}:{finding.site.line}"
    head = f"{finding.kind.value} ({finding.level.value}) of {finding.ranks}, step {finding.step} at {site}{distance}"
    sentences = [", ".join(finding.tensors), finding.evidence, finding.explanation, finding.suggestion]
    return "\n  ".join([head, *filter(None, sentences)]).replace("tests/silent/programs/", "")


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("name", sorted(FAULTY))
def test_a_faulty_program_is_found_by_its_kind(name: str) -> None:
    """Each planted fault is a finding, and the program still ends with exit code 0; the whole finding is in a table."""
    code, silent = findings(name)
    assert code == 0
    assert FAULTY[name] in [finding.kind.value for finding in silent]
    assert_golden(GOLDEN / f"{name}.txt", "\n".join(map(whole, silent)) + "\n")


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("name", sorted(FAULTY))
def test_a_repaired_program_is_silent(name: str) -> None:
    """Without its fault the same program has no finding."""
    assert findings(name, "fixed") == (0, [])


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_look_alike_is_silent(name: str) -> None:
    """What looks like a fault and is none is not accused."""
    assert findings(name) == (0, [])


def test_strict_makes_an_error_an_exit_code() -> None:
    """Exit code 5: the ranks finished, and the end alone proves nothing."""
    assert findings("s01_skip_load", silent="strict")[0] == 5
    assert findings("s01_skip_load", "fixed", silent="strict")[0] == 0


def test_off_looks_at_nothing() -> None:
    """Without the search there is no finding."""
    assert findings("s01_skip_load", silent="off") == (0, [])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--level", "off"], "--level off turns the guard off"),
        (["--nnodes", "2"], "jobs of several hosts are not searched"),
        (["--silent-allow", "replica_diverge:*"], "expected KIND:TENSOR"),
    ],
)
def test_a_real_job_that_cannot_be_searched_is_refused(
    flags: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search that does not take place is not promised."""
    script = str(PROGRAMS / "s01_skip_load.py")
    assert main(["run", "--on", "gloo", "--silent", "watch", *flags, script]) == 2
    assert line in capsys.readouterr().err


def test_every_kind_has_its_section_in_the_documentation() -> None:
    """A report's `see` leads somewhere."""
    text = (Path(__file__).parents[2] / "docs" / "silent.md").read_text(encoding="utf-8")
    assert [kind.value for kind in SilentKind if f"\n## {kind.value}\n" not in text] == []


def _train_with(kind: type[torch.nn.Linear]) -> None:
    part = kind(4, 4)
    model = torch.nn.Sequential(part)
    dist.init_process_group("gloo")
    optimizer = torch.optim.SGD([part.weight, part.bias], 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


class Closed(torch.nn.Linear):
    """A module that refuses to list its parts, as RemoteModule does."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("not supported")


def test_a_module_that_refuses_its_parts_trains_as_without_the_search() -> None:
    """The search walks past methods that a class has replaced."""
    outcome = simulate(lambda: _train_with(Closed), nproc_per_node=2)
    assert (outcome.exit_code, outcome.silent, [n for n in outcome.notes if "silent" in n]) == (0, [], [])


def test_a_fault_of_the_search_is_a_note_and_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be recorded ends the record; the program goes on."""

    def fail(*args: object) -> None:
        raise TypeError("nobody has thought of this")

    monkeypatch.setattr(Collector, "add_model", fail)
    outcome = simulate(lambda: _train_with(torch.nn.Linear), nproc_per_node=2)
    assert (outcome.exit_code, outcome.silent) == (0, [])
    assert "rank 0 was searched for silent faults only until the search itself failed with TypeError" in outcome.notes
