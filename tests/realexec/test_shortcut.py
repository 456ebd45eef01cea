"""A call like one before goes a shorter way: its record says what it was, and nothing of torch is lost on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

from distsim.debug.rings.reader import RingReader
from tests.cases.releases import SHORT_WAY

pytestmark = pytest.mark.skipif(not SHORT_WAY, reason="torch does not tell a group that a call goes on by itself")

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


THREADS = """
import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def three():
    for _ in range(3):
        dist.all_reduce(torch.ones(5))


threading.Thread(target=three).run()  # here, called from the very line of the other thread's
thread = threading.Thread(target=three, name="another")
thread.start()
thread.join()
dist.destroy_process_group()
"""


WAYS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def helper():
    dist.all_reduce(torch.ones(3))


def one():
    helper()


def two():  # the same bytes as one's
    helper()


def deeper(function):
    function()


def lines():
    for function in (one, two, one, two, two):
        function()
        deeper(function)


def resumed():
    while True:
        helper()
        yield


def epoch():
    for _ in range(3):
        one()
        next(generator)


def elsewhere():
    next(generator)


generator = resumed()
copies = {}
for name in ("first.py", "second.py"):  # equal code, of two files
    exec(compile("def copied(call):\\n    call()\\n", name, "exec"), copies.setdefault(name, {}))
for _ in range(3):
    lines()
    epoch()
    elsewhere()
    for members in copies.values():
        members["copied"](helper)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_line_is_recorded_with_the_way_that_led_to_it_each_time(zygote: Zygote, folder: Path) -> None:
    """Functions alike byte for byte, equal code of two files, a function called anew, a generator resumed from
    elsewhere: each call has its own callers in its record, in the third round as in the first."""
    program = folder / "program.py"
    program.write_text(WAYS)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    reader = RingReader(next(iter(folder.glob("rank*.ring"))))
    calls = [reader.decode(record, 0) for record in reader.since(0)[0]]
    stacks = [call.stack for call in calls if call.op == "all_reduce"]
    ways = [[frame.function for frame in stack[1:]] for stack in stacks]
    ways = [way[: way.index("<module>") + 1] for way in ways]  # beyond it is what runs these tests
    files = [Path(stack[1].file).name for stack in stacks]
    expected = []
    for name in ("one", "two", "one", "two", "two"):
        expected += [[name, "lines", "<module>"], [name, "deeper", "lines", "<module>"]]
    expected += [["one", "epoch", "<module>"], ["resumed", "epoch", "<module>"]] * 3
    expected += [["resumed", "elsewhere", "<module>"], ["copied", "<module>"], ["copied", "<module>"]]
    assert ways == expected * 3
    copied = [file for way, file in zip(ways, files, strict=True) if way[0] == "copied"]
    assert copied == ["first.py", "second.py"] * 3


@pytest.mark.slow
def test_the_thread_is_the_one_that_calls(zygote: Zygote, folder: Path) -> None:
    """What one thread has learnt of a line is not said of another thread's calls."""
    program = folder / "program.py"
    program.write_text(THREADS)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    reader = RingReader(next(iter(folder.glob("rank*.ring"))))
    calls = [reader.decode(record, 0) for record in reader.since(0)[0]]
    threads = [call.thread for call in calls if call.op == "all_reduce"]
    assert threads == ["MainThread"] * 3 + ["another"] * 3


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
