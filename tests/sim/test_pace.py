"""A simulated job's pace is judged by the code that judges real ones: slow ranks, pauses, links."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import distsim
import distsim as dist
from distsim.scenario import load_scenario, run_scenario

LINK = """
teaches = "A link that becomes slow."
program = "steps.py"
on = "ethernet-cpu:4"
nproc_per_node = 1
faults = [{ what = "link_slow", link = "n1/nic0->leaf0", factor = 0.2, at_s = 6.0 }]
[expect]
kind = "healthy"
"""
STEPS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
gradient = torch.ones(4_000_000)
for step in range(180):
    time.sleep(0.05)
    dist.all_reduce(gradient)
dist.destroy_process_group()
"""


def slow() -> None:
    dist.init_process_group("gloo")
    gradient = torch.ones(1000)
    for _ in range(60):
        time.sleep(0.05 * (1.1 if dist.get_rank() == 2 else 1.0))
        dist.all_reduce(gradient)


def saves() -> None:
    dist.init_process_group("gloo")
    gradient = torch.ones(1000)
    for step in range(120):
        time.sleep(0.05 + (0.3 if dist.get_rank() == 0 and step % 10 == 9 else 0.0))
        dist.all_reduce(gradient)


def test_a_rank_ten_percent_slower_is_named() -> None:
    """With its milliseconds and its share of a step."""
    outcome = distsim.simulate(slow, nproc_per_node=4)
    (diagnosis,) = outcome.diagnoses
    assert (diagnosis.kind, diagnosis.culprits, outcome.exit_code) == ("straggler", (2,), 0)
    assert diagnosis.explanation.startswith("Rank 2 works 5 ms longer than the others in each step of 55")


def test_a_checkpoint_is_a_note() -> None:
    """The rank, the distance, the cost; no diagnosis."""
    outcome = distsim.simulate(saves, nproc_per_node=4)
    assert outcome.diagnoses == []
    assert "rank 0 keeps the others waiting 0.3 s each 10 steps: 38% of the time" in outcome.notes


def test_a_link_that_becomes_slow_is_a_note(tmp_path: Path) -> None:
    """Ranks work as before, transfers take longer."""
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "link.toml").write_text(LINK)
    result = run_scenario(load_scenario(tmp_path / "link.toml"))
    assert result.wrong == []
    text = " ".join(result.text.split())
    assert "every step takes" in text
    assert "the ranks work as before, the transfers of group default_pg after the last arrival take longer" in text
