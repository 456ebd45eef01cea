"""Every operation that training makes, made again and again at one line: it is recorded, compared and answered as the
first time, though all but the first go a shorter way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Zygote

from distsim.debug.rings.reader import RingReader

AGAIN = """
from tests.cases.operations import *

for call in ALL + MESSAGES:
    for number in range(4):
        answer = call()
        assert answer.unique().tolist() == [2], (call.__name__, number, answer)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["check", "strict"])
def test_a_call_made_again_is_recorded_as_the_first_was(level: str, zygote: Zygote, folder: Path) -> None:
    """Each of four rounds gives the right values, and its records differ from the first round's in their numbers."""
    program = folder / "program.py"
    program.write_text(AGAIN)
    result = zygote.run(program, 2, directory=folder, level=level)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    assert not result.diagnoses, result.report
    for path in sorted(folder.glob("rank*.ring")):
        reader = RingReader(path)
        records = [record for record in reader.since(0)[0] if record["flags"]]
        decoded = [(reader.decode(record, 0), int(record["ordinal"])) for record in records]
        decoded = [one for one in decoded if one[0].op != "init_process_group"]
        calls = [call for call, _ in decoded]
        assert all(call.done and call.error is None for call in calls), [c for c in calls if not c.done]
        sites: dict[str, list[list[object]]] = {}
        for call in calls:
            rest = [call.op, call.input_shapes, call.output_shapes, call.dtypes, call.reduce_op, call.root]
            rest += [call.is_async, call.peer, call.tag, call.nbytes, call.thread, call.waited]
            sites.setdefault(f"{call.site}{call.op}", []).append(rest)
        assert len(sites) == 15 + 6
        for rounds in sites.values():
            assert len(rounds) == 4
            assert all(one == rounds[0] for one in rounds), rounds
        collectives = [call.seq for call in calls if call.op not in ("send", "recv")]
        assert collectives == list(range(1, 61))
        ends: dict[tuple[object, ...], list[object]] = {}
        for call, ordinal in decoded:
            if call.op in ("send", "recv"):
                ends.setdefault((call.op, call.tag), []).append(ordinal)
        assert ends == {(op, tag): list(range(1, n + 1)) for op in ("send", "recv") for tag, n in ((0, 8), (5, 4))}


HANGING = """
from tests.cases.operations import *

import sys

call = globals()[sys.argv[1]]
for number in range(4):
    if number == 3 and rank == 1:
        if sys.argv[2] == "left":
            sys.exit(0)
        all_reduce(7)  # another call in its place
        sys.exit(0)
    call()
"""
ONE_BY_ONE = [
    "all_reduce_async",
    "all_reduce_future",
    "all_reduce_coalesced",
    "broadcast_async",
    "all_gather",
    "all_gather_into_tensor_async",
    "reduce_scatter_tensor_async",
    "all_to_all_single",
    "barrier",
    "messages",
    "messages_async",
    "messages_batched",
]
SAID_OTHERWISE = {("messages_async", "left"), ("messages_batched", "left")}
"""gloo breaks the send at rank 0, which ends with that: its exception is what is told."""
ALWAYS = {("all_gather_into_tensor_async", "left"), ("barrier", "left"), ("reduce_scatter_tensor_async", "other")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[] if (name, how) in ALWAYS else pytest.mark.soak)
        for name in ONE_BY_ONE
        for how in ("left", "other")
        if (name, how) not in SAID_OTHERWISE
    ],
)
def test_a_rank_that_does_not_come_again_is_named(name: str, how: str, zygote: Zygote, folder: Path) -> None:
    """At check, in the fourth round: rank 1 has left, or makes another call."""
    program = folder / "program.py"
    program.write_text(HANGING)
    result = zygote.run(program, 2, directory=folder, args=(name, how))
    told = [d for d in result.diagnoses if d.exit_code]
    assert told, result.report
    assert told[0].culprits == (1,), result.report


HANDLES = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
said = []
for number in range(4):
    t, last = torch.ones(2) * (number + 1), number == 3
    if last and rank == 1:
        store.wait(["timed out"])
    work = dist.all_reduce(t, async_op=True)
    said.append((isinstance(work, dist.Work), type(work.is_completed())))
    if last and rank == 0:
        try:
            work.wait(timedelta(milliseconds=200))
        except RuntimeError as error:
            said.append("imed out" in str(error))
        store.set("timed out", "")
        break
    said.append(work.wait(timedelta(seconds=20)))
    said.append((work.wait(), work.is_completed(), work.is_success(), t.tolist()))
    future = work.get_future()
    said.append((type(future).__name__, future.done(), [one.tolist() for one in future.value()]))
    said.append(future.then(lambda done: [one.tolist() for one in done.value()]).wait())
    said.append([one.tolist() for one in work.result()])
    ended = []
    later = dist.all_reduce(t, async_op=True).get_future()
    later.add_done_callback(lambda done: ended.append(done.value()[0].tolist()))
    later.wait()
    while not ended:
        pass
    said.append(ended)
    try:
        dist.all_reduce(t, async_op=True).get_future().then(lambda done: 1 / 0).wait()
    except Exception as error:
        said.append("ZeroDivisionError" in str(error) or type(error).__name__)
print("\\n".join(f"said {one}" for one in said), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["check", pytest.param("strict", marks=pytest.mark.soak)])
def test_handles_and_futures_are_as_torchs(level: str, zygote: Zygote, folder: Path) -> None:
    """A program that looks at all of a handle, and waits with a limit for a rank that is late, says what it says
    without a guard."""
    program = folder / "program.py"
    program.write_text(HANDLES)
    guarded = zygote.run(program, 2, directory=folder, level=level, on_hang="wait")
    alone = folder / "alone"
    alone.mkdir()
    plain = zygote.run(program, 2, directory=alone, guarded=False)
    said, expected = (
        {rank: re.findall("(?m)^said .*$", out) for rank, out in one.outputs.items()} for one in (guarded, plain)
    )
    assert len(expected[0]) > 20, plain.outputs
    assert said == expected, guarded.outputs


BLOCKS = """
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager as block
from torch.overrides import TorchFunctionMode

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
other, said = 1 - rank, []
alone = dist.new_group([rank], use_local_synchronization=True)
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Own(torch.Tensor):
    pass


class Watching(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "").startswith("torch.distributed"):
            said.append(function.__name__)
        return function(*args, **(kwargs or {}))


def ones(n=2, dtype=torch.float32):
    return torch.ones(n, dtype=dtype) * (1 + rank)


def told(call):
    for _ in range(4):  # the third goes the short way
        try:
            said.append(call())
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            dist.distributed_c10d._world.pg_coalesce_state.clear()


def coalesced(call, **how):
    def made():
        with block(**how) as manager:
            answer = call()
        if how:
            manager.wait()
        return [t.tolist() if isinstance(t, torch.Tensor) else t for t in answer]

    return made


def reduced(make=ones, op=SUM, **how):
    def call():
        many = [make(), make(3)]
        return many + [dist.all_reduce(t, op=op, **how) for t in many]

    return call


def gathered():
    outs = [torch.zeros(2 * world), torch.zeros(3 * world)]
    return outs + [gather(outs[0], ones()), gather(outs[1], ones(3))]


def scattered(op=SUM):
    outs = [torch.zeros(1), torch.zeros(2)]
    return outs + [scatter(outs[0], ones(world), op), scatter(outs[1], ones(2 * world), op=op)]


for call in (reduced(), reduced(op=MAX), gathered, scattered, lambda: scattered(MAX)):
    told(coalesced(call))
    told(coalesced(call, async_ops=True))
told(coalesced(lambda: reduced()() + gathered()))
told(coalesced(lambda: [dist.all_reduce(ones(), async_op=True).wait()]))
for op in ("SUM", None):
    told(coalesced(reduced(op=op)))
for make in (lambda n=2: ones(n, torch.complex64), lambda n=2: ones(n).as_subclass(Own), lambda n=2: [ones(n)]):
    told(coalesced(reduced(make)))
told(coalesced(lambda: [dist.all_reduce(ones(), group=alone)]))  # of another group: it goes out at once
with Watching():
    told(coalesced(reduced()))


def batch(*ways, group=None):
    def call():
        ops, outs = [], []
        for way, tag in ways:
            outs.append(ones() * (1 + tag) if way is dist.isend else torch.zeros(2))
            ops.append(dist.P2POp(way, outs[-1], other, tag=tag, group=group))
        works = dist.batch_isend_irecv(ops)
        answers = [(isinstance(work, dist.Work), work.wait()) for work in works]
        return [t.tolist() for t in outs] + answers

    return call


S, R = dist.isend, dist.irecv
told(batch((S, 0), (R, 0)))
told(batch((R, 0), (S, 0)))
told(batch((S, 1), (S, 2), (S, 1), (R, 1), (R, 2), (R, 1)))
told(lambda: dist.batch_isend_irecv([]))
told(lambda: dist.batch_isend_irecv([dist.P2POp(S, ones(), other), "text"]))
told(lambda: dist.batch_isend_irecv((dist.P2POp(S, ones(), other),)))
told(lambda: dist.batch_isend_irecv([dist.P2POp(S, ones(), other), dist.P2POp(S, ones(), rank, group=alone)]))
with Watching():
    told(batch((S, 0), (R, 0)))
for _ in range(4):  # a group's own methods: C++ calls them, and takes nothing but a Work
    got, group = torch.zeros(2), dist.group.WORLD
    works = [group.send([ones()], other, 3), group.recv([got], other, 3)]
    said.append([(dist.Work in type(work).__mro__, work.wait()) for work in works] + got.tolist())
for work in (dist.isend(ones(), other), dist.irecv(torch.zeros(2), other)):
    said.append((isinstance(work, dist.Work), work.wait(), work.is_success()))
print("\\n".join(f"said {one}" for one in said), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_blocks_and_batches_are_as_torchs(zygote: Zygote, folder: Path) -> None:
    """Coalesced calls and batches of messages, made right and wrong: values, errors and handles are those of a program
    without a guard."""
    program = folder / "program.py"
    program.write_text(BLOCKS)
    alone = folder / "alone"
    alone.mkdir()
    guarded = zygote.run(program, 2, directory=folder)
    plain = zygote.run(program, 2, directory=alone, guarded=False)
    said, expected = (
        {rank: re.findall("(?m)^said .*$", out) for rank, out in one.outputs.items()} for one in (guarded, plain)
    )
    assert len(expected[0]) > 100, plain.outputs
    assert [pair for rank in said for pair in zip(said[rank], expected[rank], strict=True) if pair[0] != pair[1]] == []
