"""A program that asks for a GPU is told of none, and its user is told who asked."""

from __future__ import annotations

import pytest
from sim.running import HEAD, Scripts

import distsim
from distsim.sim import RunRequest, run_program

GATED = """
import torch
if torch.{question}:
    raise SystemExit("no GPU here")
print("skipped")
"""


@pytest.mark.parametrize(
    "question",
    ["cuda.is_available()", "cuda.device_count()", "accelerator.is_available()", "accelerator.device_count()"],
)
def test_who_asked_is_noted(script: Scripts, question: str) -> None:
    """On a cluster of GPUs a note names the line that asked and says that none is simulated yet."""
    path = script.write(GATED.format(question=question))
    outcome = run_program(RunRequest(program=str(path), on="dgx-h100:1", nproc_per_node=2))
    assert outcome.exit_code == 0
    (note,) = [note for note in outcome.notes if "accelerators are not simulated yet" in note]
    assert "program.py:3 asked torch." + question in note


def test_no_note_where_there_is_none(script: Scripts) -> None:
    """A cluster without GPUs has answered truly."""
    ran = script(HEAD + GATED.format(question="cuda.is_available()"))
    assert not ran.outcome.notes


def test_torchs_own_questions_are_no_ones() -> None:
    """What torch asks itself while a program uses CPU tensors is not noted."""

    def body() -> None:
        import torch

        with torch.autocast("cpu"):
            torch.random.fork_rng()
        torch.manual_seed(0)

    assert not distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2).notes
