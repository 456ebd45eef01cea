"""A call made again is guessed by the one before it, and looked at before it counts as the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote
from operations import OPERATIONS

from distsim.debug.rings.reader import RingReader

IN_ORDER = (
    OPERATIONS
    + """
from distsim.realexec.guard import fast_path

find, searched = fast_path.find, []
fast_path.find = lambda *args: searched.append(args[1]) or find(*args)
for number in range(20):  # the interpreter, too, has another way of its own from the eighth time on
    before = len(searched)
    for call in ALL + MESSAGES:
        call()
    assert number < 14 or not searched[before:], (number, searched[before:])
for call in (all_reduce, all_reduce, barrier, all_reduce, barrier, barrier, messages, all_reduce):
    call()  # in another order all is found as well
for count in (3, 3, 3, 3, 2, 4, 3):
    many = [ones() for _ in range(count)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in many:
            dist.all_reduce(tensor)
    assert all(tensor.tolist() == [2, 2] for tensor in many), (count, many)
dist.destroy_process_group()
"""
)


@pytest.mark.slow
def test_calls_made_in_the_order_of_the_last_time_are_not_searched_for(zygote: Zygote, folder: Path) -> None:
    """In a loop each call soon is the one that came after the one before the last time, and known by that alone."""
    program = folder / "program.py"
    program.write_text(IN_ORDER)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    assert not result.diagnoses, result.report


CHANGED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def set_to(other):
    one.data = other


def reduced():
    dist.all_reduce(one)
    assert number > 13 or one.unique().tolist() == [2], (number, one)


def posted():
    dist.send(one, 1) if rank == 0 else dist.recv(one, 0)


def posted_later():
    (dist.isend(one, 1) if rank == 0 else dist.irecv(one, 0)).wait()


changes = {
    6: lambda: one.resize_(6),
    8: lambda: set_to(torch.ones(6, dtype=torch.float64)),
    10: lambda: set_to(torch.ones(2, 3)),
    12: lambda: one.resize_(3, 2),
    14: lambda: set_to(torch._neg_view(-torch.ones(2, 3))),
}
for call in (reduced, posted, posted_later):
    one = torch.ones(4)
    for number in range(16 if call is reduced else 14):
        changes.get(number, lambda: None)()
        one.fill_(1)
        call()
    one = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])  # no backend takes it, and it has no strides
    try:
        call()
    except (NotImplementedError, RuntimeError):
        continue
    raise AssertionError("no error")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_tensor_that_changed_since_the_last_call_is_recorded_as_it_is(zygote: Zygote, folder: Path) -> None:
    """The same tensor at the same line, of another size, dtype or sign than the last time."""
    program = folder / "program.py"
    program.write_text(CHANGED)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    shapes = [(4,)] * 6 + [(6,)] * 4 + [(2, 3)] * 2 + [(3, 2)] * 2 + [(2, 3)] * 2
    dtypes = ["float32"] * 8 + ["float64"] * 2 + ["float32"] * 6
    expected = list(zip(shapes, dtypes, strict=True))
    for path in sorted(folder.glob("rank*.ring")):
        reader = RingReader(path)
        calls = [reader.decode(record, 0) for record in reader.since(0)[0] if record["flags"]]
        found = [((c.input_shapes or c.output_shapes)[0], c.dtypes[0]) for c in calls if c.op in ("send", "recv")]
        assert found == expected[:14] * 2
        assert [(c.input_shapes[0], c.dtypes[0]) for c in calls if c.op == "all_reduce"] == expected


MANY_WAYS = """
import gc

import torch
import torch.distributed as dist

from distsim.realexec.guard.fast_path import CachedCall
from distsim.realexec.guard.recorder import UNKNOWN


def num_seen():
    return sum(type(one) in (CachedCall, type(UNKNOWN)) for one in gc.get_objects())


dist.init_process_group("gloo")
dist.destroy_process_group(dist.new_group())  # the making of groups has a log of its own
gc.disable()
for _ in range(5):
    dist.all_reduce(torch.ones(1))  # at the start, and never again
counts, one, Op = [], torch.ones(1, dtype=torch.int), dist.ReduceOp
ways = [(dst, op) for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR) for dst in range(2)]
for step in range(12):
    for dst, op in ways:  # more than are kept of one line
        for _ in range(4):
            dist.reduce(one, dst, op)
    counts.append(num_seen())
assert counts[-1] <= counts[1], counts
for size in range(1, 9):  # each is learnt, and none is in the place of another
    for _ in range(3):
        dist.all_reduce(torch.ones(size))
assert num_seen() <= counts[-1] + size, (num_seen(), counts)
counts.append(num_seen())
other = dist.new_group()
for _ in range(9):
    dist.barrier(group=other)
    dist.all_reduce(torch.ones(1), group=other)
assert num_seen() > counts[-1]
dist.destroy_process_group(other)
del other
assert num_seen() <= counts[-1], (num_seen(), counts)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_calls_that_are_not_kept_are_gone_without_a_garbage_collector(zygote: Zygote, folder: Path) -> None:
    """A line that is called in more ways than are kept, again and again, leaves no more behind than at first, and a
    group none of its own."""
    program = folder / "program.py"
    program.write_text(MANY_WAYS)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
