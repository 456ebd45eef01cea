"""A call like one before goes a shorter way: its record says what it was, and nothing of torch is lost on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

from distsim.debug.ring_reader import RingReader

PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
x, y = torch.ones(4), torch.ones(4, dtype=torch.float64)
for op in (SUM, SUM, MAX, SUM):
    dist.all_reduce(x, op=op)
for tensor in (x, x, y, torch.ones(2), x):
    dist.all_reduce(tensor)
for root in (0, 0, 1, 0):
    dist.broadcast(x, root)
for later in (False, False, True, False):
    work = dist.all_reduce(x, async_op=later)
    if work is not None:
        work.wait()
try:
    dist.all_reduce(x, op=dist.ReduceOp.BXOR)
except (RuntimeError, ValueError):
    dist.all_reduce(x)
dist.destroy_process_group()
"""


OTHERS = """
import torch
import torch.distributed as dist
from torch.distributed import all_reduce
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group("gloo")
world = dist.get_world_size()


def total(tensor):
    all_reduce(tensor)  # one line for all of them
    return tensor


def one():
    return torch.ones(2)


for _ in range(3):
    assert total(one()).tolist() == [world, world]
assert total(torch.ones(2, dtype=torch.complex64) * 1j).tolist() == [world * 1j, world * 1j]
assert total(torch.ones(4)[::2].contiguous()).tolist() == [world, world]
columns = torch.ones(2, 2).t()
assert total(columns).sum() == 4 * world
with CommDebugMode() as counted:
    total(one())
assert counted.get_total_counts() == 1, counted.get_comm_counts()
with torch.profiler.profile() as profile:
    total(one())
assert any("all_reduce" in event.name or "allreduce" in event.name for event in profile.events()), profile.events()
inner = torch.compile(total, backend="eager")
assert inner(one()).tolist() == [world, world]
group = dist.new_group([0])
if dist.get_rank() == 0:
    for _ in range(2):
        dist.all_reduce(torch.ones(2), group=group)
else:
    for _ in range(2):
        dist.all_reduce(torch.ones(2), group=group)  # a warning, and nothing else
try:
    dist.all_reduce("text")
except TypeError as error:
    assert "tensor" in str(error), error

import distsim.debug

distsim.debug.remove()
assert total(one()).tolist() == [world, world]
assert "distsim" not in dist.all_reduce.__closure__[0].cell_contents.__code__.co_filename
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["check", "strict"])
def test_the_shorter_way_loses_nothing_of_torch(level: str, zygote: Zygote, folder: Path) -> None:
    """Complex numbers, views, modes, the profiler, torch.compile, non-members and wrong arguments act as in torch."""
    program = folder / "program.py"
    program.write_text(OTHERS)
    result = zygote.run(program, 2, directory=folder, level=level)
    assert result.codes == {0: 0, 1: 0}, result.outputs


@pytest.mark.slow
@pytest.mark.parametrize("level", ["check", "strict"])
def test_what_differs_from_the_call_before_is_recorded(level: str, zygote: Zygote, folder: Path) -> None:
    """Reduce op, dtype, shape, root and async_op of calls at one line are those that were given, in their order."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    result = zygote.run(program, 2, directory=folder, level=level)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    for path in sorted(folder.glob("rank*.ring")):
        reader = RingReader(path)
        calls = [reader.decode(record, 0) for record in reader.since(0)[0]]
        calls = [call for call in calls if call.op in ("all_reduce", "broadcast")]
        said = [(c.seq, c.reduce_op, c.root, c.dtypes[0], c.input_shapes[0], c.is_async) for c in calls]
        f, d = "float32", "float64"
        expected = [(op, None, f, (4,), False) for op in ("SUM", "SUM", "MAX", "SUM")]
        expected += [("SUM", None, f, (4,), False)] * 2 + [("SUM", None, d, (4,), False)]
        expected += [("SUM", None, f, (2,), False), ("SUM", None, f, (4,), False)]
        expected += [(None, root, f, (4,), False) for root in (0, 0, 1, 0)]
        expected += [("SUM", None, f, (4,), later) for later in (False, False, True, False)]
        expected += [("BXOR", None, f, (4,), False), ("SUM", None, f, (4,), False)]
        assert said == [(seq, *one) for seq, one in enumerate(expected, 1)]
        assert all(call.done for call in calls)
        assert len({call.site.line for call in calls if call.site}) == 6


MISMATCH = """
import torch
import torch.distributed as dist
from distsim.debug import CollectiveMismatch

dist.init_process_group("gloo")
rank = dist.get_rank()
for round in range(4):
    tensor = torch.ones(6 if (rank, round) == (1, 3) else 4)
    try:
        dist.all_reduce(tensor)
    except CollectiveMismatch as error:
        assert round == 3 and "all_reduce #4" in str(error), error
        print("refused", flush=True)
"""


@pytest.mark.slow
def test_a_known_call_is_compared_too(zygote: Zygote, folder: Path) -> None:
    """At strict, a rank that comes the shorter way learns that another one calls with another shape."""
    program = folder / "program.py"
    program.write_text(MISMATCH)
    result = zygote.run(program, 2, directory=folder, level="strict")
    assert all("refused" in result.outputs[rank] for rank in (0, 1)), result.outputs
