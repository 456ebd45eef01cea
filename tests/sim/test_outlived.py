"""A simulated rank raises while the others have long work before their next call."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.debug.records.kinds import Kind
from distsim.sim.run import RunRequest, run_program
from distsim.sim.world import world

PROGRAM = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    raise ValueError("bad batch")
t = torch.ones(2)
while True:
    t = t * {factor}
"""


@pytest.mark.parametrize("factor", ["1", "torch.ones(2)"])
def test_ranks_that_go_on_after_another_has_raised_are_ended(
    factor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As torchrun does it; the rank that raised is reported at once, and nobody else is at fault."""
    monkeypatch.setattr(world, "GRACE_S", 0.5)
    monkeypatch.setattr(world, "SAID_AFTER_S", 0.1)
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(factor=factor))
    outcome = run_program(RunRequest(str(program), on="ethernet-cpu:1", nproc_per_node=2))
    (raised,) = outcome.diagnoses
    assert (raised.kind, raised.culprits, outcome.exit_code) == (Kind.RANK_RAISED, (0,), 1)
    assert "rank 0 raised ValueError: bad batch" in capfd.readouterr().err
    assert any("after rank 0 had raised" in note for note in outcome.notes)
