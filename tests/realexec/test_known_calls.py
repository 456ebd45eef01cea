"""Which calls go the shorter way, and which never: far below a loop, of complex numbers, DDP's; and what is left
of one that was held."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader

DEEP = """
import torch
import torch.distributed as dist
from distsim.realexec.guard.recorder import Recorder

dist.init_process_group("gloo")
begin, long_ways = Recorder.begin, []
Recorder.begin = lambda *args: long_ways.append(args) or begin(*args)


def below(depth, call):
    return below(depth - 1, call) if depth else call()


def loop(depth):
    counts = []
    for number in range(6):
        before = len(long_ways)
        below(depth, lambda: dist.all_reduce(torch.ones(3 + depth)))
        counts.append(len(long_ways) - before)
    return counts


def step(number):
    dist.all_reduce(torch.ones(100 + number))  # new each time
    before = len(long_ways)
    dist.all_reduce(torch.ones(2))
    return len(long_ways) - before


for depth in range(14):
    counts = loop(depth)
    assert not any(counts[2:]), (depth, counts)
counts = [step(number) for number in range(10)]
assert not any(counts[6:]), counts
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_loop_may_stand_far_above_the_call_or_beside_others_that_are_new(zygote: Zygote, folder: Path) -> None:
    """However many frames are made anew for each call, the third goes the short way; a new call in the same function
    spoils another's way but once."""
    program = folder / "program.py"
    program.write_text(DEEP)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs


COMPLEX = """
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.group.WORLD
for number in range(5):  # what the long way sends, the short way sends
    sent, got = (torch.ones(2, dtype=torch.complex64) * (1 + 2j)).conj(), torch.zeros(2, dtype=torch.complex64)
    if rank == 0:
        group.send([sent], 1, 0).wait()
    else:
        group.recv([got], 0, 0).wait()
        assert got.tolist() == [1 - 2j] * 2, (number, got)
for number in range(5):
    one, more = torch.ones(2, dtype=torch.complex64) * 1j, torch.ones(3)
    with _coalescing_manager():
        dist.all_reduce(one)
    with _coalescing_manager():
        dist.all_reduce(more)
    assert one.tolist() == [2j] * 2 and more.tolist() == [2] * 3, (number, one, more)
try:
    with _coalescing_manager():
        dist.all_reduce(one, op=dist.ReduceOp.MAX)  # of complex numbers there is none
except ValueError as error:
    assert "complex" in str(error), error
    dist.distributed_c10d._world.pg_coalesce_state.clear()
else:
    raise AssertionError("no error")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_complex_numbers_never_take_the_shorter_way(zygote: Zygote, folder: Path) -> None:
    """A conjugate view that a method of the group sends again and again arrives conjugated; a block of complex numbers
    is summed up, and refused where torch refuses it."""
    program = folder / "program.py"
    program.write_text(COMPLEX)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs


REDUCER = """
import torch
import torch.distributed as dist
from distsim.realexec.guard.handle import Handle
from distsim.realexec.guard.recorder import Recorder
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
begin, long_ways, asked = Recorder.begin, [], []
Recorder.begin = lambda *args: long_ways.append(args) or begin(*args)
for kind in (Handle, *Handle.__subclasses__()):
    if "get_future" in vars(kind):
        kind.get_future = lambda handle, take=kind.get_future: asked.append(handle) or take(handle)
model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
for step in range(6):
    before = len(long_ways), len(asked)
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5 * (step + 1)] * 2], step
    assert step < 3 or before == (len(long_ways), len(asked)), step
model = None
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_reducer_gets_the_work_of_gloo_itself(zygote: Zygote, folder: Path) -> None:
    """DDP takes the future of a call and nothing else: from the fourth step on it has gloo's own, and the record says
    all the same that somebody has it, and when the call ended."""
    program = folder / "program.py"
    program.write_text(REDUCER)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    for path in sorted(folder.glob("rank*.ring")):
        records = [record for record in RingReader(path).since(0)[0] if int(record["flags"]) & rings.FUTURE]
        assert len(records) == 6
        assert len({int(record["flags"]) for record in records}) == 1, [int(record["flags"]) for record in records]
        assert all(int(record["completed"]) >= int(record["issued"]) for record in records)


HELD = """
import gc
import weakref

import torch
import torch.distributed as dist

gc.disable()
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
for number in range(4):
    tensor = torch.ones(4)
    if rank == 1:
        store.wait([f"made {number}"])  # so the other's call is held
    work = dist.all_reduce(tensor, async_op=True)
    known = weakref.ref(work)
    future = work.get_future() if number % 2 else None
    store.set(f"made {number}", "")
    (future or work).wait()
    work.wait()
    assert tensor.tolist() == [2] * 4, tensor
    del tensor, work, future
    for _ in range(100):
        dist.barrier()  # the thread that lets calls out may be in the middle of that
    assert known() is None, number
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_handle_of_a_call_that_was_held_is_freed(zygote: Zygote, folder: Path) -> None:
    """At strict, without any garbage collection: its handle and what lets it out know each other only until it is."""
    program = folder / "program.py"
    program.write_text(HELD)
    result = zygote.run(program, 2, directory=folder, level="strict")
    assert result.codes == {0: 0, 1: 0}, result.outputs
