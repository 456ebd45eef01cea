"""scenarios/training/fsdp2.py: what the logits need at the peak, as in torchtitan's trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.sim import RunRequest, run_program

PROGRAM = Path(__file__).parents[2] / "scenarios" / "training" / "fsdp2.py"
TOKENS, VOCAB = 4096, 65536
SHAPE = ("--arch", "llama", "--layers", "1", "--hidden", "64", "--heads", "4", "--seq", str(TOKENS), "--steps", "2")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_backward_holds_no_logits_in_16_bits() -> None:
    """The loss keeps three tensors of the logits' shape in float32: backward begins without those in bfloat16."""
    args = (*SHAPE, "--vocab", str(VOCAB), "--mbs", "1")
    training = run_program(RunRequest(program=str(PROGRAM), args=args, on="dgx-h100:1", nproc_per_node=1)).training
    assert training is not None
    assert 12 <= training.peak_allocated_bytes / (TOKENS * VOCAB) < 13.5
