"""The silent search as its user meets it: refusals, documentation, and programs that it must not disturb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distsim.cli import main
from distsim.debug.diagnosis.silent.collect.collector import Collector
from distsim.debug.diagnosis.silent.facts import SilentKind
from distsim.sim.run import simulate
from tests.cases.corpus import Case


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
    script = str(Case.named("silent/skip_load").path)
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
