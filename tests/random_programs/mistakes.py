"""What every rank gets wrong in the same way, so that nobody waits for anybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

from tests.random_programs.draw import DTYPES, Draw, said
from tests.random_programs.stage import Answer, Call, Stage

__all__ = ["mistakes"]


def mistakes(stage: Stage, draw: Draw, answer: Answer) -> None:
    """What every rank gets wrong in the same way, so that nobody waits for anybody."""
    c = Call(stage, draw, answer)
    t, n = c.one(), c.n
    group = c.group
    other = draw.choice([d for d in DTYPES if d != c.dtype])
    odd = torch.zeros(c.shape, dtype=other)
    big = c.zeros((5, 7))
    op = c.op
    sparse = torch.eye(3).to_sparse()
    calls: dict[str, Callable[[], Any]] = {
        "all_gather few": lambda: dist.all_gather([c.zeros() for _ in range(n + 1)], t, group),
        "all_gather none": lambda: dist.all_gather([], t, group),
        "all_gather dtype": lambda: dist.all_gather([odd.clone() for _ in range(n)], t, group),
        "all_gather size": lambda: dist.all_gather([big.clone() for _ in range(n)], t, group),
        "all_gather no list": lambda: dist.all_gather(t, t, group),
        "all_gather no tensor": lambda: dist.all_gather([1] * n, t, group),
        "into size": lambda: dist.all_gather_into_tensor(big, t, group),
        "into dtype": lambda: dist.all_gather_into_tensor(torch.zeros((n, *c.shape), dtype=other), t, group),
        "scatter few": lambda: dist.scatter(c.zeros(), [c.zeros()] * (n + 1), c.root, group),
        "gather few": lambda: dist.gather(t, [c.zeros()] * (n + 1), c.root, group),
        "gather list everywhere": lambda: dist.gather(t, [c.zeros()], 99, group),
        "reduce_scatter few": lambda: dist.reduce_scatter(c.zeros(), [c.zeros()] * (n + 1), op, group),
        "reduce_scatter size": lambda: dist.reduce_scatter(c.zeros(), [big] * n, op, group),
        "reduce_scatter dtype": lambda: dist.reduce_scatter(c.zeros(), [odd] * n, op, group),
        "rst size": lambda: dist.reduce_scatter_tensor(c.zeros(), c.zeros((n + 9, 7)), op, group),
        "rst dtype": lambda: dist.reduce_scatter_tensor(c.zeros(), torch.zeros((n, *c.shape), dtype=other), op, group),
        "all_to_all few": lambda: dist.all_to_all([c.zeros()], [c.zeros()] * (n + 1), group),
        "all_to_all dtype": lambda: dist.all_to_all([odd] * n, [c.zeros()] * n, group),
        "a2as splits": lambda: dist.all_to_all_single(c.zeros((n,)), c.zeros((n,)), [2] * n, [2] * n, group),
        "a2as few splits": lambda: dist.all_to_all_single(
            c.zeros((n,)), c.zeros((n,)), [n + 1, -1], [1] * (n + 1), group
        ),
        "a2as dtype": lambda: dist.all_to_all_single(torch.zeros(n, dtype=other), c.zeros((n,)), group=group),
        "no tensor": lambda: dist.all_reduce([1, 2], op, group),
        "list": lambda: dist.all_reduce([t], op, group),
        "op": lambda: dist.all_reduce(t, "SUM", group),
        "op none": lambda: dist.all_reduce(t, None, group),
        "root none": lambda: dist.broadcast(t, None, group),
        "root far": lambda: dist.broadcast(t, 17, group),
        "root both": lambda: dist.broadcast(t, 0, group, group_src=0),
        "group_src far": lambda: dist.broadcast(t, group=group, group_src=17),
        "reduce far": lambda: dist.reduce(t, 17, op, group),
        "send self": lambda: dist.send(torch.ones(3), stage.rank, group),
        "isend self": lambda: dist.isend(torch.ones(3), stage.rank, group),
        "send tag": lambda: dist.send(t, (stage.rank + 1) % stage.size, None, -3),
        "send none": lambda: dist.send(None, 0, group),
        "batch none": lambda: dist.batch_isend_irecv([]),
        "batch odd": lambda: dist.batch_isend_irecv([1]),
        "P2POp": lambda: dist.P2POp(dist.all_reduce, t, 0),
        "sparse gather": lambda: dist.all_gather([sparse] * n, sparse, group),
        "sparse broadcast": lambda: dist.broadcast(sparse, c.root, group),
        "sparse op": lambda: dist.all_reduce(sparse.clone(), dist.ReduceOp.MAX, group),
        "coalesced dtypes": lambda: dist.all_reduce_coalesced([t, odd], op, group),
        "coalesced none": lambda: dist.all_reduce_coalesced([], op, group),
        "coalesced no list": lambda: dist.all_reduce_coalesced(t, op, group),
        "objects few": lambda: dist.all_gather_object([], 1, "x"),
        "new_group twice": lambda: dist.new_group([0, 0]),
        "new_group far": lambda: dist.new_group([0, 17]),
        "new_subgroups": lambda: dist.new_subgroups(3),
        "new_subgroups far": lambda: dist.new_subgroups(9),
        "no group": lambda: dist.all_reduce(t, op, "group"),
        "get_rank": lambda: dist.get_rank("group"),
        "init twice": lambda: dist.init_process_group("gloo"),
        "backend": lambda: dist.new_group([0, 1], backend="nothing"),
        "mesh": lambda: init_device_mesh("cpu", (3, 3)),
        "mesh names": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a",)),
        "mesh twice": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "a")),
        "funcol op": lambda: funcol.all_reduce(t, "nothing", dist.group.WORLD),
        "funcol rows": lambda: funcol.reduce_scatter_tensor(torch.zeros(stage.size + 1), "sum", 0, dist.group.WORLD),
        "future": lambda: torch.futures.Future().value(),
        "timeout": lambda: dist.new_group([0], timeout=5),
    }
    name = draw.choice(sorted(calls))
    answer["name"] = name
    answer["said"] = said(calls[name])
