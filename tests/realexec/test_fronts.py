"""torch's public functions under guard: errors are torch's, and what a program has put there stays its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

WRONG_GROUP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one, two, SUM = torch.ones(1), torch.ones(2), dist.ReduceOp.SUM
for call in (
    lambda: dist.all_reduce(one, SUM, "dp"),
    lambda: dist.barrier("dp"),
    lambda: dist.all_gather([one, one], one, "dp"),
    lambda: dist.all_gather_single(two, one, "dp"),
    lambda: dist.reduce_scatter_single(one, two, SUM, "dp"),
    lambda: dist.all_to_all_single(two, two, None, None, "dp"),
):
    try:
        call()
    except AttributeError as error:  # and none that comes of noting it in torch's log
        assert "'str' object" in str(error), error
    else:
        raise AssertionError("no error")
dist.destroy_process_group()
"""

REPLACED = """
import functools
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import distsim.debug

dist.init_process_group("gloo")
distsim.debug.remove()
made = []
with (
    mock.patch.object(c10d, "barrier", made.append),
    mock.patch.object(c10d, "broadcast", functools.partial(c10d.broadcast)),
    mock.patch.object(c10d, "batch_isend_irecv", functools.partial(c10d.batch_isend_irecv)),
):
    distsim.debug.install("check")
    c10d.barrier("mine")
    for _ in range(5):
        one = torch.ones(1)
        dist.all_reduce(one)
        c10d.broadcast(one, 0)
        assert one.item() == 2
assert made == ["mine"]
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [WRONG_GROUP, REPLACED], ids=["wrong group", "replaced"])
def test_a_program_finds_torchs_functions_as_they_are(program: str, zygote: Zygote, folder: Path) -> None:
    """A group that is none, given by position; functions that were something else before the guard came."""
    script = folder / "program.py"
    script.write_text(program)
    result = zygote.run(script, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
