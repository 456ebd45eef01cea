"""Level strict: contradictory calls raise on every rank before bytes go out, so no process is aborted."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import HERE, Case, Zygote

from tests.kin import one_in

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
@pytest.mark.parametrize("name", one_in(3, RAISING))
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
    assert result.codes == {0: 0, 1: 0}, (result.outputs, result.report)
    assert all(output.startswith("caught 2") for output in result.outputs.values()), result.outputs


NESTED = """
import faulthandler

import torch
import torch.distributed as dist

faulthandler.dump_traceback_later(25, exit=True)  # a deadlock is to fail the test, not to hang it
dist.init_process_group("gloo")


def summed(tensor):
    return dist.all_reduce(tensor, async_op=True).get_future()


def deeper(left):
    def callback(future):
        tensor = future.value()[0]
        return summed(tensor).then(deeper(left - 1)).wait() if left else tensor

    return callback


assert summed(torch.ones(2)).then(deeper(6)).wait()[0] == 2**7

for _ in range(20):
    first, second = summed(torch.ones(2)), summed(torch.ones(3))
    after = second.then(lambda future: future.value()[0])
    assert first.then(lambda _: after.wait()).wait().tolist() == [2, 2, 2]

handle = dist.all_reduce(torch.ones(2 + dist.get_rank()), async_op=True)
refused = handle.get_future().then(lambda future: (summed(torch.ones(1)).wait(), future.value())[1])
try:
    refused.wait()
except RuntimeError as error:
    print("refused", "shape_mismatch" in str(error))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_callbacks_may_wait_for_each_other(zygote: Zygote, folder: Path) -> None:
    """Callbacks that wait for further calls, for a later call's callback, or after a refusal hold up nothing."""
    script = folder / "nested.py"
    script.write_text(NESTED)
    result = zygote.run(script, 2, directory=folder, level="strict")
    assert result.codes == {0: 0, 1: 0}, (result.outputs, result.report)
    assert all(output.startswith("refused True") for output in result.outputs.values()), result.outputs


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


QUEUED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
for number in range(30):
    first, second = torch.ones(4), torch.full((4,), 2.0)
    if rank == 1:
        store.wait([f"made {number}"])
    work = dist.all_reduce(first, async_op=True)  # on rank 0 nobody is there yet
    if rank == 0:
        store.set(f"made {number}", "")
    dist.all_reduce(second)
    work.wait()
    assert first[0] == 2 and second[0] == 4, (first, second)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_no_call_overtakes_one_that_waits(zygote: Zygote, folder: Path) -> None:
    """A synchronous call, however often it was made before, goes out after the asynchronous one that is held."""
    script = folder / "queued.py"
    script.write_text(QUEUED)
    result = zygote.run(script, 2, directory=folder, level="strict")
    assert result.codes == {0: 0, 1: 0}, (result.outputs, result.report)


KEPT = """
import sys
import time
import weakref

import torch
import torch.distributed as dist

from distsim.realexec.install import current_session

dist.init_process_group("gloo")
current_session().heartbeat.stop()  # it would see to the leavings
rank, late = dist.get_rank(), sys.argv[1] == "late"
store = dist.distributed_c10d._get_default_store()
tensors = []
for number in range(8):
    one = torch.ones(4)
    tensors.append(weakref.ref(one))
    if rank == 1 and late:
        store.wait([f"made {number}"])
    work = dist.all_reduce(one, async_op=True)
    if rank == 0:
        store.set(f"made {number}", "")
    work.wait()
    del one, work
until = time.monotonic() + 20
while time.monotonic() < until and any(tensor() is not None for tensor in tensors):
    time.sleep(0.01)  # gloo's own thread lets go of the last one
print("kept", sum(tensor() is not None for tensor in tensors))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("level", "when"), [("check", "at once"), ("strict", "at once"), ("strict", "late")])
def test_a_call_that_was_waited_for_keeps_no_tensor(level: str, when: str, zygote: Zygote, folder: Path) -> None:
    """Whether it went out at once or was held: its tensors live as long as the program wants them."""
    script = folder / "kept.py"
    script.write_text(KEPT)
    result = zygote.run(script, 2, directory=folder, level=level, args=(when,))
    assert result.codes == {0: 0, 1: 0}, (result.outputs, result.report)
    assert all(output.startswith("kept 0") for output in result.outputs.values()), result.outputs


NOBODY = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

how = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
if dist.get_rank() == 0:
    one = torch.ones(3)
    try:
        if how == "recv":
            dist.recv(one, 1)
        elif how == "irecv":
            dist.irecv(one, 1).wait()
        elif how == "batch":
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, one, 1)])[0].wait()
        else:
            dist.irecv(one, 1).wait(timedelta(seconds=1))
    except RuntimeError as error:
        print("raised", "Timed out waiting" in str(error))
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 0:
    store.set("over", "")
    store.wait(["bye"], timedelta(seconds=40))  # it holds the store
else:
    store.wait(["over"], timedelta(seconds=40))
    store.set("bye", "")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["irecv", "batch", *(pytest.param(how, marks=pytest.mark.soak) for how in ("recv", "a shorter time"))]
)
def test_a_message_that_nobody_sends_ends_with_the_timeout(how: str, zygote: Zygote, folder: Path) -> None:
    """The group's, or that of the wait: as it does without a guard."""
    script = folder / "nobody.py"
    script.write_text(NOBODY)
    result = zygote.run(script, 2, directory=folder, level="strict", args=(how,))
    assert result.codes == {0: 0, 1: 0}, (result.outputs, result.report)
    assert result.outputs[0].startswith("raised True"), result.outputs


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
