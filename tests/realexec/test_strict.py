"""Level strict: contradictory calls raise on every rank before bytes go out, so no process is aborted."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

from tests.kin import one_in

MESSAGES = """
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
first, good, bad = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
store = dist.distributed_c10d._get_default_store()
for number in range(good + 1):
    dtype = bad if rank == 0 and number == good else torch.float16
    t = torch.ones(4, 8, dtype=dtype)
    if rank != first:
        store.wait([f"made {number}"])
    work = dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)
    if rank == first:
        store.set(f"made {number}", "")
    work.wait()
"""

MESSAGE_CASES = {
    "size": (0, "float32", "p2p_size_mismatch", "float32[4,8] (128 bytes)", (0, 1)),
    "size, once": (2, "float32", "p2p_size_mismatch", "float32[4,8] (128 bytes)", (0,)),
    "dtype": (0, "bfloat16", "dtype_mismatch", "bfloat16[4,8] (64 bytes)", (0, 1)),
}
ALWAYS = {("size, once", 1), ("dtype", 0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("good", "bad", "kind", "sent", "culprits", "first"),
    [
        pytest.param(*case, first, id=f"{name}-{first}", marks=[] if (name, first) in ALWAYS else pytest.mark.soak)
        for name, case in MESSAGE_CASES.items()
        for first in (0, 1)
    ],
)
def test_both_ends_of_a_message_raise(
    first: int, good: int, bad: str, kind: str, sent: str, culprits: tuple[int, ...], zygote: Zygote, folder: Path
) -> None:
    """Whichever end comes second, both raise and say what each brought and where; there is one diagnosis."""
    script = folder / "messages.py"
    script.write_text(MESSAGES)
    result = zygote.run(script, 2, directory=folder, level="strict", args=(str(first), str(good), bad))
    assert set(result.codes.values()) == {1}, result.outputs
    for output in result.outputs.values():
        assert f"CollectiveMismatch: {kind}: message number {good + 1} from rank 0 to rank 1" in output
        assert f"rank 0 sends {sent} at " in output
        assert "rank 1 receives float16[4,8] (64 bytes) at " in output
        assert output.count("messages.py:16;") == output.count("messages.py:16.") == 1
    assert [d.kind.value for d in result.diagnoses] == [kind], result.report
    told = result.diagnoses[0]
    assert (told.culprits, {*told.culprits, *told.victims}) == (culprits, {0, 1}), result.report
    assert result.exit_code == 4


LATE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
bad = dist.all_reduce(torch.ones(4 + (dist.get_rank() == 1)), async_op=True)
dist.all_reduce(torch.ones(2), async_op=True).wait()
bad.wait()
"""


@pytest.mark.slow
def test_a_mismatch_that_raises_late_is_told_once(zygote: Zygote, folder: Path) -> None:
    """A rank that dies of it in a later wait() is the contradiction's victim, not a diagnosis of its own."""
    script = folder / "late.py"
    script.write_text(LATE)
    result = zygote.run(script, 3, directory=folder, level="strict")
    assert all("CollectiveMismatch" in output for output in result.outputs.values()), result.outputs
    assert [(d.kind.value, d.culprits, d.victims) for d in result.diagnoses] == [("shape_mismatch", (1,), (0, 2))]
    assert result.exit_code == 4


REFUSED = """
import sys

import torch
import torch.distributed as dist

from distsim.debug import CollectiveMismatch

dist.init_process_group("gloo")
rank, how, first = dist.get_rank(), sys.argv[1], int(sys.argv[2])
store = dist.distributed_c10d._get_default_store()
t = torch.ones(4 + rank)
if rank != first:
    store.wait(["made"])
try:
    if how == "message":
        work = dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)
    elif how == "batch":
        work = dist.batch_isend_irecv([dist.P2POp(dist.irecv if rank else dist.isend, t, 1 - rank)])[0]
    else:
        work = dist.all_reduce(t, async_op=True)
    store.set("made", "")
    while how == "collective" and not work.is_completed():
        pass
    work.wait()
except CollectiveMismatch:
    print("caught")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "first"),
    one_in(2, [pytest.param(how, first) for first in (0, 1) for how in ("message", "batch", "collective")]),
)
def test_what_was_refused_need_not_be_waited_for(how: str, first: int, zygote: Zygote, folder: Path) -> None:
    """Who has caught the exception has no handle, or has waited for it: one diagnosis, and that is the mismatch."""
    script = folder / "refused.py"
    script.write_text(REFUSED)
    result = zygote.run(script, 2, directory=folder, level="strict", args=(how, str(first)))
    assert result.outputs == {0: "caught\n", 1: "caught\n"}
    kinds = [diagnosis.kind.value for diagnosis in result.diagnoses]
    assert kinds == ["shape_mismatch" if how == "collective" else "p2p_size_mismatch"], result.report


DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(3):
    if dist.get_rank() == 1 and step == 2:
        dist.barrier()
    model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.slow
def test_a_refused_call_of_ddp_raises_in_backward(zygote: Zygote, folder: Path) -> None:
    """DDP's reducer waits in C++ for a call that is held: it raises what strict raised, and no process crashes."""
    script = folder / "ddp.py"
    script.write_text(DDP)
    result = zygote.run(script, 2, directory=folder, level="strict")
    assert result.codes == {0: 1, 1: 1}, (result.outputs, result.report)
    assert all("CollectiveMismatch: extra_collective: " in output for output in result.outputs.values()), result.outputs
    assert [(d.kind.value, d.culprits) for d in result.diagnoses] == [("extra_collective", (1,))], result.report
