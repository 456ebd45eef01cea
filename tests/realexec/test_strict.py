"""Level strict: contradictory calls raise on every rank before bytes go out, so no process is aborted."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import HERE, Case, Zygote

RAISING = [
    "op_mismatch",
    "wrong_order",
    "shape_mismatch",
    "dtype_mismatch",
    "reduce_op_mismatch",
    "root_mismatch",
    "splits_mismatch",
    "p2p_size_mismatch",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", RAISING)
def test_every_rank_raises(name: str, zygote: Zygote, folder: Path) -> None:
    """Every rank ends with CollectiveMismatch, none by a signal, and the diagnosis is the same as at check."""
    case = Case.read(HERE / "faults" / f"{name}.py")
    result = zygote.run(case.path, case.ranks, directory=folder, level="strict")
    assert set(result.codes.values()) == {1}, result.outputs
    assert all("CollectiveMismatch" in output for output in result.outputs.values()), result.outputs
    assert result.diagnoses[0].kind.value == name, result.report
    assert result.diagnoses[0].culprits == case.culprits, result.report
    assert result.exit_code == 4


CAUGHT = """
import torch
import torch.distributed as dist

from distsim.debug import CollectiveMismatch

dist.init_process_group("gloo")
rank = dist.get_rank()
works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(300)]
bad = dist.all_reduce(torch.ones(4 + rank), async_op=True)
after = dist.all_reduce(torch.ones(2), async_op=True)
for work in works:
    work.wait()
try:
    bad.wait()
except CollectiveMismatch as error:
    print("caught", len(error.records))
after.wait()
t = torch.ones(3)
dist.all_reduce(t)
assert t[0] == 2
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_caught_mismatch_leaves_the_group_usable(zygote: Zygote, folder: Path) -> None:
    """Asynchronous calls return at once in any number; a mismatch raises in wait(), and the group goes on."""
    script = folder / "caught.py"
    script.write_text(CAUGHT)
    result = zygote.run(script, 2, directory=folder, level="strict")
    assert result.codes == {0: 0, 1: 0}, result.outputs
    assert all(output.startswith("caught 2") for output in result.outputs.values()), result.outputs
