"""One call of torch's, two builders' records: the simulated group's and the guard's say the same of its arguments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import distsim
from distsim.debug.records import CallRecord
from distsim.debug.records.arguments import FIELDS, METHODS
from distsim.debug.records.signature import REDUCE_OPS, Signature
from distsim.debug.rings.reader import RingReader
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard.group import GuardedGroup
from distsim.realexec.guard.recorder import Recorder

SIZE = 4
SAID = (
    "op",
    "seq",
    "input_shapes",
    "output_shapes",
    "dtypes",
    "reduce_op",
    "root",
    "peer",
    "tag",
    "input_splits",
    "output_splits",
    "nbytes",
    "device",
    "is_async",
)
"""What a record says of a call's arguments, in the words of `CallRecord`."""

MAX, LATER = dist.ReduceOp.MAX, timedelta(seconds=50)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def public(rank: int) -> Iterator[Any]:
    """What programs call: every function of torch.distributed that moves data."""
    n = SIZE
    at_root = rank == 1
    yield dist.all_reduce(x(3))
    yield dist.all_reduce(x(2, 3, dtype=torch.int64), MAX)
    yield dist.all_reduce(x(2, 2, dtype=torch.complex64), async_op=True)
    yield dist.all_reduce(x())
    yield dist.all_reduce(x(0))
    yield dist.all_reduce_coalesced([x(3), x(2, 2)], MAX)
    yield dist.broadcast(x(5), src=2)
    yield dist.broadcast(x(5), src=1, async_op=True)
    yield dist.reduce(x(4, dtype=torch.float64), dst=3, op=MAX)
    yield dist.all_gather([x(2) for _ in range(n)], x(2))
    yield dist.all_gather_coalesced([[x(2), x(3)] for _ in range(n)], [x(2), x(3)])
    yield dist.all_gather_into_tensor(x(2 * n), x(2))
    yield dist.gather(x(2), [x(2) for _ in range(n)] if at_root else None, dst=1)
    yield dist.scatter(x(2), [x(2) for _ in range(n)] if at_root else None, src=1)
    yield dist.reduce_scatter(x(2), [x(2) for _ in range(n)], MAX)
    yield dist.reduce_scatter_tensor(x(2, 5), x(2 * n, 5), MAX, async_op=True)
    yield dist.all_to_all([x(2) for _ in range(n)], [x(2) for _ in range(n)])
    yield dist.all_to_all_single(x(n, 2), x(n, 2))
    splits = [1 + (rank + other) % 2 for other in range(n)]
    yield dist.all_to_all_single(x(6, 2), x(6, 2), splits, splits)
    for kind in (np.array, lambda some: [np.int64(one) for one in some], lambda some: [*torch.tensor(some)]):
        yield dist.all_to_all_single(x(6, 2), x(6, 2), kind(splits), kind(splits))
    yield dist.barrier()
    yield dist.barrier(async_op=True)


def messages(rank: int) -> Iterator[Any]:
    """Each rank to the next, and what makes two messages of two names."""
    after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
    sent = dist.isend(x(3), after, tag=7)
    yield dist.recv(x(3), before, tag=7)
    yield sent
    sent = dist.isend(x(2, 2, dtype=torch.int8), after)
    yield dist.irecv(x(2, 2, dtype=torch.int8), before)
    yield sent
    sent = dist.isend(x(1), after)
    yield dist.irecv(x(1))
    yield sent
    operations = [dist.P2POp(dist.isend, x(4), after), dist.P2POp(dist.irecv, x(4), before)]
    yield from dist.batch_isend_irecv(operations)
    ends = [lambda: dist.send(x(2), after), lambda: dist.recv(x(2), before)]
    for end in ends if rank % 2 else reversed(ends):
        end()


def by_group(rank: int) -> Iterator[Any]:
    """What libraries call: methods of the group, by place and by name, with options and without."""
    n, group = SIZE, c10d._get_default_group()
    outs, ins, me = [x(2) for _ in range(n)], [x(2) for _ in range(n)], x(2)
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = MAX, False
    yield group.allreduce([me], options)
    yield group.allreduce([me])
    yield group.allreduce(me)
    yield group.allreduce(me, MAX)
    yield group.allreduce(tensor=me, op=MAX, timeout=LATER)
    yield group.allreduce(tensors=[me], opts=options)
    yield group.broadcast(me, 2)
    yield group.broadcast(tensor=me, root=2)
    yield group.broadcast([me])
    yield group.reduce(me, 2, MAX)
    yield group.reduce(tensor=me, root=3, op=MAX)
    yield group.allgather([outs], [me])
    yield group.allgather(outs, me)
    yield group.allgather(output_tensors=outs, input_tensor=me)
    yield group.all_gather_single(x(2 * n), me)
    yield group._allgather_base(output=x(2 * n), input=me)
    yield group.allgather_coalesced([[x(2)] for _ in range(n)], [me])
    yield group.allgather_coalesced(output_lists=[[x(2)] for _ in range(n)], input_list=[me])
    yield group.all_gather_single_coalesced([x(2 * n), x(n)], [me, x(1)])
    yield group.allgather_into_tensor_coalesced(outputs=[x(2 * n)], inputs=[me])
    yield group.gather(outs if rank == 0 else [], me, 0)
    yield group.gather(output_tensors=outs if rank == 3 else [], input_tensor=me, root=3)
    yield group.scatter(me, ins if rank == 0 else [], 0)
    yield group.scatter(output_tensor=me, input_tensors=ins if rank == 3 else [], root=3)
    yield group.reduce_scatter(me, ins, MAX)
    yield group.reduce_scatter(output=me, input=ins, op=MAX)
    yield group.reduce_scatter_single(me, x(2 * n))
    yield group._reduce_scatter_base(outputTensor=me, inputTensor=x(2 * n))
    yield group.reduce_scatter_single_coalesced([me, x(1)], [x(2 * n), x(n)])
    yield group.reduce_scatter_tensor_coalesced(outputs=[me], inputs=[x(2 * n)])
    yield group.alltoall(outs, ins)
    yield group.alltoall(output_tensors=outs, input_tensors=ins)
    yield group.all_to_all_single(x(n), x(n), [], [])
    yield group.alltoall_base(output=x(n), input=x(n), output_split_sizes=[1] * n, input_split_sizes=[1] * n)
    yield group.barrier()
    yield group.barrier(timeout=LATER)
    after, before = (rank + 1) % n, (rank - 1) % n
    sent = group.send([me], after, 3)
    yield group.recv([me], before, 3)
    yield sent
    sent = group.send(tensors=[me], dstRank=after, tag=4)
    yield group.recv(tensors=[me], srcRank=before, tag=4)
    yield sent
    sent = group.send([me], after, 5)
    yield group.recv_anysource([me], 5)
    yield sent


BODIES: dict[str, Callable[[int], Iterator[Any]]] = {"public": public, "messages": messages, "by_group": by_group}


def said_of(record: CallRecord) -> dict[str, Any]:
    """The arguments; a receive from any source has its sender once one came, which a guard on gloo is not told."""
    said = {name: getattr(record, name) for name in SAID}
    if record.op == "recv":
        del said["peer"]
    return said


def run_body(name: str) -> None:
    """A simulated rank."""
    dist.init_process_group("gloo")
    for work in BODIES[name](dist.get_rank()):
        if isinstance(work, dist.Work):
            work.wait()


def simulated(name: str) -> list[list[dict[str, Any]]]:
    """Each rank's records, as the simulated group made them."""
    outcome = distsim.simulate(run_body, on="ethernet-cpu:1", nproc_per_node=SIZE, args=(name,))
    assert outcome.exit_code == 0, outcome.diagnoses
    return [
        [said_of(r) for r in outcome.records[rank] if r.op not in ("init_process_group", "new_group")]
        for rank in range(SIZE)
    ]


@contextlib.contextmanager
def guarded_group(rank: int, folder: Path) -> Iterator[tuple[GuardedGroup, RingReader]]:
    """The default group of this process under guard; the one inside moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    try:
        path = folder / f"{rank}.ring"
        ring = RingWriter(path, rank=rank, world_size=SIZE, local_rank=rank, job="parity", attempt=0)
        recorder = Recorder(ring)
        inner, world = c10d._get_default_group(), c10d._world
        guard = GuardedGroup(inner, recorder.group_log("0", "default_pg", list(range(SIZE))), recorder)
        with contextlib.ExitStack() as undo:
            for made in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
                made[guard] = made[inner]
                undo.callback(made.pop, guard)
            world.default_pg = guard
            undo.callback(setattr, world, "default_pg", inner)
            yield guard, RingReader(path)
    finally:
        dist.destroy_process_group()


def guarded(name: str, rank: int, folder: Path) -> list[dict[str, Any]]:
    """One rank's records, as the guard wrote them into its ring."""
    with guarded_group(rank, folder) as (_, reader):
        list(BODIES[name](rank))
        return [said_of(reader.decode(record, 0)) for record in reader.since(0)[0]]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", [pytest.param("public", marks=pytest.mark.slow), "messages", "by_group"])
def test_both_records_say_the_same(name: str, tmp_path: Path) -> None:
    """Every field that comes from a call's arguments is equal, on every rank, for every call of the body."""
    for rank, virtual in enumerate(simulated(name)):
        real = guarded(name, rank, tmp_path)
        assert [said["op"] for said in real] == [said["op"] for said in virtual]
        for number, (one, other) in enumerate(zip(virtual, real, strict=True)):
            differing = {key: (one[key], other[key]) for key in one if one[key] != other[key]}
            assert not differing, f"call {number} of rank {rank}, {one['op']}: (simulated, guarded) = {differing}"


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_the_bodies_call_every_operation(tmp_path: Path) -> None:
    """No operation of the table is without its parity (a monitored barrier has no arguments that a record keeps)."""
    called = {said["op"] for name in BODIES for said in guarded(name, 0, tmp_path)}
    assert called == FIELDS.keys() - {"monitored_barrier"}


VALUES: dict[str, Any] = {
    "torch.Tensor": x(SIZE),
    "collections.abc.Sequence[torch.Tensor]": [x(SIZE)] * 2,
    "collections.abc.Sequence[collections.abc.Sequence[torch.Tensor]]": [[x(SIZE)] * 2],
    "collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]": [1] * SIZE,
    "typing.SupportsInt | typing.SupportsIndex": 3,
    "datetime.timedelta | None": LATER,
    "bool": True,
    "torch._C._distributed_c10d.ReduceOp": MAX,
}
"""One of each type of argument, as pybind writes it."""


def forms(method: str) -> list[dict[str, Any]]:
    """The arguments of each form of a method of the installed torch, by name and in order, of values of their types."""
    found = []
    for line in str(getattr(dist.ProcessGroup, method).__doc__).splitlines():
        told = re.search(r"\(self: [\w.]+, (.*)\) -> ", line)
        if told is None:
            continue
        given = {}
        for name, kind in re.findall(r"(\w+): ((?:[\w.]+\[[^=]*?\]|[\w.]+)(?: \| [\w.]+)?)(?: = |, |$)", told[1]):
            options = kind.rpartition(".")[2]
            given[name] = getattr(_distributed_c10d, options)() if options.endswith("Options") else VALUES[kind]
        found.append(given)
    return found


@pytest.mark.parametrize("method", sorted(method for method in METHODS if hasattr(dist.ProcessGroup, method)))
def test_every_form_of_every_method_is_read_by_place_and_by_name(method: str) -> None:
    """Whatever names the installed torch has for its arguments: read by name they say what they say by place."""
    ranks = tuple(range(10, 10 + SIZE))
    of_method = forms(method)
    assert of_method, "no form was understood"
    for given in of_method:
        by_place = METHODS[method](ranks, tuple(given.values()), {})
        by_name = METHODS[method](ranks, (), given)
        told, same = ((c.key, c.is_async, c.peer, c.tag) for c in (by_name, by_place))
        assert told == same, given
        said = Signature.of(by_place.key)
        fields = FIELDS[said.op]
        if said.op not in ("barrier", "monitored_barrier"):
            assert by_place.first is not None
            assert said.nbytes > 0
        if "root" in given:
            assert said.root == 13
        if "op" in given:
            assert said.reduce_op == "MAX"
        assert (said.reduce_op is None) == (not fields.reduces)
        assert (said.root is None) == (not fields.rooted)


def test_reduce_ops_have_torchs_numbers() -> None:
    """A reduce op is its number in a key: the names stand in torch's order."""
    kinds = dist.ReduceOp.RedOpType.__members__
    numbers = {name: hash(kind) for name, kind in kinds.items() if name in REDUCE_OPS}
    assert numbers == {name: number for number, name in enumerate(REDUCE_OPS)}
    plain = [name for name in numbers if name != "PREMUL_SUM"]
    assert [hash(dist.ReduceOp(kinds[name])) for name in plain] == [numbers[name] for name in plain]


WRONG: dict[str, Callable[[Any], Any]] = {
    "an argument that it has not": lambda group: group.allreduce(bad=1),
    "none at all": lambda group: group.allreduce(),
    "no tensor": lambda group: group.allreduce("abc"),
    "no list": lambda group: group.allgather(3, x(1)),
}


def type_errors(group: Any) -> dict[str, str]:
    """The first line of what each wrong call raises."""
    told = {}
    for name, call in WRONG.items():
        with pytest.raises(TypeError) as error:
            call(group)
        told[name] = str(error.value).splitlines()[0]
    return told


def ask_wrongly() -> dict[str, str]:
    """A simulated rank."""
    dist.init_process_group("gloo")
    return type_errors(c10d._get_default_group())


def test_wrong_arguments_are_refused_in_torchs_words(tmp_path: Path) -> None:
    """By both groups, and neither has a record of a call that never was one."""
    with guarded_group(0, tmp_path) as (guard, reader):
        real = type_errors(guard)
        assert len(reader.since(0)[0]) == 0
    outcome = distsim.simulate(ask_wrongly, on="ethernet-cpu:1", nproc_per_node=1)
    assert outcome.results == [real]
    assert [r.op for r in outcome.records[0]] == ["init_process_group"]


def test_a_root_beyond_the_group_is_the_backends_to_refuse(tmp_path: Path) -> None:
    """The guard looks up no rank that there is not: gloo says what is wrong, and the simulation in its words."""
    with guarded_group(0, tmp_path) as (guard, reader):
        guard.broadcast(x(1), SIZE)  # the fake group refuses nothing
        guard.send([x(1)], SIZE, 0)
        assert [(r.root, r.peer) for r in map(partial(reader.decode, origin_ns=0), reader.since(0)[0])] == [
            (None, None),
            (None, None),
        ]
    outcome = distsim.simulate(root_beyond, on="ethernet-cpu:1", nproc_per_node=2)
    assert outcome.results == ["broadcast: invalid root rank: 4, in a group of 2"] * 2


def root_beyond() -> str:
    """A simulated rank."""
    dist.init_process_group("gloo")
    with pytest.raises(RuntimeError) as error:
        dist.broadcast(x(1), group_src=SIZE)
    return str(error.value)
