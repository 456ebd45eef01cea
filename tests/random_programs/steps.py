"""The steps of random programs: calls that torch has, in all their forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.random_programs.draw import Draw, bits, said, tensor
from tests.random_programs.stage import Answer, Call, Stage, ask, op_name, run, settle

__all__ = ["STEPS"]


def all_reduce(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    t = c.one()
    answer["op"] = op_name(c.op)
    run(stage, draw, answer, lambda **k: dist.all_reduce(t, c.op, c.group, **k), t)


def reduce(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    t = c.one()
    answer["op"] = op_name(c.op)
    run(stage, draw, answer, lambda **k: dist.reduce(t, c.root, c.op, c.group, **k), t if c.rank == c.root else None)


def broadcast(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    t = c.one()
    run(stage, draw, answer, lambda **k: dist.broadcast(t, c.root, c.group, **k), t)


def all_gather(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    uneven = draw.coin(0.2)
    out_layout = draw.layout() if draw.coin(0.2) else "plain"
    answer["uneven"], answer["out"] = uneven, out_layout
    if uneven:
        outs = [torch.zeros(i + 1, 2, dtype=c.dtype) for i in range(c.n)]
        t = c.one(shape=(max(c.place, 0) + 1, 2), layout="plain")
    else:
        outs, t = [c.one(9 + i, layout=out_layout) for i in range(c.n)], c.one()
    run(stage, draw, answer, lambda **k: dist.all_gather(outs, t, c.group, **k), outs)


def all_gather_into(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    stacked = draw.coin(0.3)
    shape = (c.n, *c.shape) if stacked or not c.shape else (c.n * c.shape[0], *c.shape[1:])
    out, t = c.zeros(shape), c.one(layout="plain" if c.layout == "leaf" else None)
    if draw.coin(0.1):
        out = tensor(c.rank, 1, shape, c.dtype, "strided")
        answer["out"] = "strided"
    answer["stacked"] = stacked
    run(stage, draw, answer, lambda **k: dist.all_gather_into_tensor(out, t, c.group, **k), out)


def gather(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    outs = [c.zeros() for _ in range(c.n)] if c.rank == c.root else None
    t = c.one()
    run(stage, draw, answer, lambda **k: dist.gather(t, outs, c.root, c.group, **k), outs)


def scatter(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    ins = [c.one(i) for i in range(c.n)] if c.rank == c.root else None
    out = c.zeros()
    run(stage, draw, answer, lambda **k: dist.scatter(out, ins, c.root, c.group, **k), out)


def reduce_scatter(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    ins, out = [c.one(i) for i in range(c.n)], c.zeros()
    answer["op"] = op_name(c.op)
    run(stage, draw, answer, lambda **k: dist.reduce_scatter(out, ins, c.op, c.group, **k), out)


def reduce_scatter_tensor(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    stacked = draw.coin(0.3)
    c.shape = c.shape or (2,)  # gloo ends the process for a result without dimensions
    shape = (c.n, *c.shape) if stacked else (c.n * c.shape[0], *c.shape[1:])
    t, out = c.one(shape=shape, layout="plain" if c.layout == "leaf" else None), c.zeros()
    answer["op"], answer["stacked"] = op_name(c.op), stacked
    run(stage, draw, answer, lambda **k: dist.reduce_scatter_tensor(out, t, c.op, c.group, **k), out)


def all_to_all(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    ins, outs = [c.one(i) for i in range(c.n)], [c.zeros() for _ in range(c.n)]
    if draw.coin(0.2):
        answer["uneven"] = True
        ins = [c.one(i, shape=(c.place + i + 1,), layout="plain") for i in range(c.n)]
        outs = [c.zeros((c.place + i + 1,)) for i in range(c.n)]
    run(stage, draw, answer, lambda **k: dist.all_to_all(outs, ins, c.group, **k), outs)


def splits_of(c: Call, draw: Draw) -> tuple[list[int], list[int]]:
    table = [[draw.randrange(3) for _ in range(c.n)] for _ in range(c.n)]
    return table[c.place], [row[c.place] for row in table]


def all_to_all_single(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    if draw.coin():
        sent, got = splits_of(c, draw)
        answer["splits"] = [sent, got]
        t, out = c.one(shape=(sum(sent), 2), layout="plain"), c.zeros((sum(got), 2))
        run(stage, draw, answer, lambda **k: dist.all_to_all_single(out, t, got, sent, c.group, **k), out)
        return
    shape = (c.n * 2, *c.shape[1:])
    t, out = c.one(shape=shape), c.zeros(shape)
    run(stage, draw, answer, lambda **k: dist.all_to_all_single(out, t, group=c.group, **k), out)


def barrier(stage: Stage, draw: Draw, answer: Answer) -> None:
    settle(stage, draw)  # on gloo it raises what another call's handle has not told yet
    c = Call(stage, draw, answer)
    run(stage, draw, answer, lambda **k: dist.barrier(c.group, **k), ())


def coalesced(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    ts = [c.one(i) for i in range(draw.randint(0, 3))]
    if draw.coin():
        if c.layout == "neg":  # gloo's result is lost
            ts = [t.contiguous() for t in ts]
        answer["op"] = op_name(c.op)
        run(stage, draw, answer, lambda **k: dist.all_reduce_coalesced(ts, c.op, c.group, **k), ts)
        return
    outs = [[c.zeros() for _ in ts] for _ in range(c.n)]
    run(stage, draw, answer, lambda **k: dist.all_gather_coalesced(outs, ts, c.group, **k), outs)


def coalescing_manager(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    which, asynchronous = draw.randrange(3), draw.coin()
    c.shape = c.shape or (2,)
    count = draw.randint(1, 3)
    shape = (c.n * (c.shape[0] if c.shape else 1), *c.shape[1:])
    ts = [c.one(i) for i in range(count)]
    larges = [c.one(i, shape=shape) for i in range(count)]
    answer["which"] = which
    try:
        with dist._coalescing_manager(c.group, async_ops=asynchronous) as manager:
            for t, large in zip(ts, larges, strict=True):
                if which == 0:
                    dist.all_reduce(t, c.op, c.group)
                elif which == 1:
                    dist.all_gather_into_tensor(large, t, c.group)
                else:
                    dist.reduce_scatter_tensor(t, large, c.op, c.group)
        if asynchronous:
            answer["wait"] = said(manager.wait)
    except Exception as error:
        answer["raised"] = bits(error)
    answer["tensors"] = bits([ts, larges])


def ring(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    if not c.inside or c.n < 2:
        return
    up, down = c.ranks[(c.place + 1) % c.n], c.ranks[(c.place - 1) % c.n]
    tag = draw.choice((0, 0, 1, 7))
    how = draw.randrange(3 if 0 in c.shape else 4)  # a message from anybody has a size
    t, out = c.one(layout=c.layout if how < 2 else "plain"), c.zeros()
    answer["how"] = how
    if how == 0:
        try:
            works = [dist.isend(t, up, c.group, tag), dist.irecv(out, down, c.group, tag)]
        except Exception as error:
            answer["raised"] = bits(error)
            return
        for i, work in enumerate(works):
            answer[f"work {i}"] = {}
            ask(work, Draw(stage.size * 7 + i + c.salt), answer[f"work {i}"], message=True)
    elif how == 1:
        ops = [dist.P2POp(dist.isend, t, up, c.group, tag), dist.P2POp(dist.irecv, out, down, c.group, tag)]
        if draw.coin():
            ops.reverse()
        try:
            works = dist.batch_isend_irecv(ops)
        except Exception as error:
            answer["raised"] = bits(error)
            return
        answer["number"] = len(works)
        for i, work in enumerate(works):
            answer[f"work {i}"] = {}
            ask(work, Draw(i + c.salt), answer[f"work {i}"], message=True)
    elif how == 2:
        pair = c.ranks[:2]
        if c.rank == pair[0]:
            answer["send"] = said(dist.send, t, pair[1], c.group, tag)
        elif c.rank == pair[1]:
            answer["recv"] = said(dist.recv, out, None if draw.coin() and t.numel() else pair[0], c.group, tag)
    else:
        if c.place == 0:
            for i in range(1, c.n):
                work = dist.irecv(out, None, c.group, tag + i)
                answer[f"from {i}"] = {}
                ask(work, Draw(i), answer[f"from {i}"], message=True)
        else:
            answer["sent"] = said(dist.send, t, c.ranks[0], c.group, tag + c.place)
    answer["tensors"] = bits(out)


def objects(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    if not c.inside:
        return
    mine = draw.choice(({"rank": c.rank}, [c.rank, "x" * c.rank], c.rank, None, (1.5, c.rank), {c.rank}))
    mine = sorted(mine) if isinstance(mine, set) else mine
    which = draw.randrange(5)
    answer["which"] = which
    if which == 0:
        outs: list[Any] = [None] * c.n
        answer["said"] = said(dist.all_gather_object, outs, mine, c.group)
        answer["got"] = repr(outs)
    elif which == 1:
        listed = [mine, c.one(), c.salt]
        answer["said"] = said(dist.broadcast_object_list, listed, c.root, c.group)
        answer["got"] = [repr(listed[0]), bits(listed[1]), listed[2]]
    elif which == 2:
        outs = [None] * c.n
        answer["said"] = said(dist.gather_object, mine, outs if c.rank == c.root else None, c.root, c.group)
        answer["got"] = repr(outs)
    elif which == 3:
        outs = [None]
        ins = [(i, mine) for i in range(c.n)] if c.rank == c.root else None
        answer["said"] = said(dist.scatter_object_list, outs, ins, c.root, c.group)
        answer["got"] = repr(outs)
    elif c.n > 1:
        listed = [mine, c.salt]
        if c.place == 0:
            answer["said"] = said(dist.send_object_list, listed, c.ranks[1], c.group)
        elif c.place == 1:
            answer["said"] = said(dist.recv_object_list, listed, c.ranks[0] if draw.coin() else None, c.group)
        answer["got"] = repr(listed)


def functional(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    if not c.inside:
        return
    group = c.group if c.group is not None else dist.group.WORLD
    t = c.one()
    large = c.one(shape=(c.n * (c.shape[0] if c.shape else 1), *c.shape[1:]))
    if not c.shape:
        c.shape = (2,)
        t, large = c.one(), c.one(shape=(c.n * 2,))
    op = draw.choice(("sum", "sum", "avg", "max", "min", "product"))
    count = draw.randint(1, 3)
    ts, larges = [c.one(i) for i in range(count)], [c.one(i, shape=tuple(large.shape)) for i in range(count)]
    sent, got = splits_of(c, draw)
    rows = c.one(shape=(sum(sent), 2), layout="plain")
    dim = draw.randrange(max(1, len(c.shape)))
    turn = draw.randrange(c.n)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: funcol.all_reduce(t, op, group),
        "all_reduce_coalesced": lambda: funcol.all_reduce_coalesced(ts, op, group),
        "all_gather_tensor": lambda: funcol.all_gather_tensor(t, dim, group),
        "all_gather_tensor_autograd": lambda: funcol.all_gather_tensor_autograd(t, dim, group),
        "all_gather_into_tensor_coalesced": lambda: funcol.all_gather_into_tensor_coalesced(ts, group),
        "reduce_scatter_tensor": lambda: funcol.reduce_scatter_tensor(large, op, 0, group),
        "reduce_scatter_tensor_autograd": lambda: funcol.reduce_scatter_tensor_autograd(large, op, 0, group),
        "reduce_scatter_tensor_coalesced": lambda: funcol.reduce_scatter_tensor_coalesced(
            larges, op, [0] * count, group
        ),
        "all_to_all_single": lambda: funcol.all_to_all_single(rows, got, sent, group),
        "all_to_all_single_even": lambda: funcol.all_to_all_single(large, None, None, group),
        "all_to_all_single_autograd": lambda: funcol.all_to_all_single_autograd(rows, got, sent, group),
        "broadcast": lambda: funcol.broadcast(t, c.ranks.index(c.root), group),
        "permute_tensor": lambda: funcol.permute_tensor(t, [(i + turn) % c.n for i in range(c.n)], group),
        "all_gather_inplace": lambda: funcol.all_gather_tensor_inplace(c.zeros(tuple(large.shape)), t, group),
        "wait": lambda: funcol.wait_tensor(funcol.all_reduce(t, op, group)),
        "then compute": lambda: funcol.all_reduce(t, op, group) + 1,
        "view": lambda: funcol.all_reduce(t, op, group).reshape(-1),
    }
    name = draw.choice(sorted(calls))
    answer["name"], answer["op"] = name, op
    answer["said"] = said(calls[name])
    answer["input"] = bits([t, ts])


def method(stage: Stage, draw: Draw, answer: Answer) -> None:
    """A method of the group itself, as C++ and old programs call it."""
    c = Call(stage, draw, answer)
    if not c.inside:
        return
    pg = c.group if c.group is not None else dist.group.WORLD
    c.shape = c.shape or (2,)
    t = c.one(layout="plain")
    place = c.ranks.index(c.root)
    outs = [c.zeros() for _ in range(c.n)]
    large = c.one(shape=(c.n * (c.shape[0] if c.shape else 1), *c.shape[1:]), layout="plain")
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: pg.allreduce(t),
        "allreduce list": lambda: pg.allreduce([t]),
        "allreduce op": lambda: pg.allreduce(t, dist.ReduceOp.MAX),
        "allreduce_coalesced": lambda: pg.allreduce_coalesced([t, c.one(3, layout="plain")]),
        "broadcast": lambda: pg.broadcast(t, place),
        "reduce": lambda: pg.reduce(t, place),
        "allgather": lambda: pg.allgather(outs, t),
        "allgather lists": lambda: pg.allgather([outs], [t]),
        "_allgather_base": lambda: pg._allgather_base(large, t),
        "allgather_into_tensor_coalesced": lambda: pg.allgather_into_tensor_coalesced([large], [t]),
        "gather": lambda: pg.gather(outs, t, place) if c.rank == c.root else pg.gather([], t, place),
        "scatter": lambda: pg.scatter(t, outs, place) if c.rank == c.root else pg.scatter(t, [], place),
        "reduce_scatter": lambda: pg.reduce_scatter(t, outs),
        "_reduce_scatter_base": lambda: pg._reduce_scatter_base(t, large),
        "reduce_scatter_tensor_coalesced": lambda: pg.reduce_scatter_tensor_coalesced([t], [large]),
        "alltoall_base": lambda: pg.alltoall_base(torch.zeros_like(large), large, [], []),
        "alltoall": lambda: pg.alltoall(outs, [c.one(i, layout="plain") for i in range(c.n)]),
        "barrier": lambda: pg.barrier(),
    }
    name = draw.choice(sorted(calls))
    answer["name"] = name
    try:
        work = calls[name]()
    except Exception as error:
        answer["raised"] = bits(error).split("\n")[0]
        return
    answer["work"] = isinstance(work, dist.Work)
    if name == "reduce" and c.rank != c.root:  # what gloo leaves there is half a sum
        answer["wait"] = said(work.wait)
        return
    ask(work, draw, answer)
    if answer["wait"] is True:
        answer["tensors"] = bits([t, outs, large])


def questions(stage: Stage, draw: Draw, answer: Answer) -> None:
    c = Call(stage, draw, answer)
    other = draw.choice(range(stage.size))
    group = c.group
    answer["rank"] = said(dist.get_rank, group)
    answer["size"] = said(dist.get_world_size, group)
    answer["backend"] = said(dist.get_backend, group)
    answer["config"] = said(dist.get_backend_config, group)
    answer["ranks"] = said(dist.get_process_group_ranks, group)
    answer["global"] = said(dist.get_global_rank, group if group is not None else dist.group.WORLD, 0)
    answer["group rank"] = said(dist.get_group_rank, group if group is not None else dist.group.WORLD, other)
    pg = group if c.inside and group is not None else dist.group.WORLD
    for name in ("name", "rank", "size", "_get_backend_name"):
        answer[name] = said(getattr(pg, name))
    for name in ("group_name", "group_desc", "bound_device_id"):
        answer[name] = said(lambda name=name: str(getattr(pg, name)))
    answer["is ProcessGroup"] = isinstance(pg, dist.ProcessGroup)
    answer["count"] = said(dist.get_pg_count)


def sparse(stage: Stage, draw: Draw, answer: Answer) -> None:
    """Sparse tensors, whose all_reduce gloo has."""
    c = Call(stage, draw, answer)
    rows = torch.tensor([[c.rank, (c.rank + 1) % 5]])
    t = torch.sparse_coo_tensor(rows, torch.tensor([1.0, 2.0 + c.salt]), (5,))
    if draw.coin():
        t = t.coalesce()
    run(stage, draw, answer, lambda **k: dist.all_reduce(t, group=c.group, **k), t)


def many(stage: Stage, draw: Draw, answer: Answer) -> None:
    """Several calls under way at once, waited for in another order, or through a future of all."""
    c = Call(stage, draw, answer)
    if not c.inside:
        return
    tensors = [tensor(c.rank, i, (3,), torch.float32) for i in range(3)]
    works = [dist.all_reduce(t, group=c.group, async_op=True) for t in tensors]
    order = draw.choice(list(itertools.permutations(range(3))))
    if draw.coin():
        futures = [works[i].get_future() for i in order]
        answer["all"] = said(lambda: [bits(f.value()) for f in torch.futures.collect_all(futures).wait()])
        answer["again"] = said(torch.futures.wait_all, futures)
    else:
        for i in order:
            answer[f"wait {i}"] = said(works[i].wait)
    answer["tensors"] = bits(tensors)


# fmt: off
STEPS = (
    all_reduce, all_reduce, reduce, broadcast, all_gather, all_gather, all_gather_into, gather, scatter,
    reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, barrier, coalesced, coalescing_manager,
    ring, ring, objects, functional, functional, method, method, questions, sparse, many,
)
# fmt: on
