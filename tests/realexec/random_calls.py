"""A program of random calls, the same for the same seed: prints what each of them did. Three ranks.

Its lines are the same whether a guard is there or not: values, exceptions, and what handles and futures say.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist

DTYPES = [
    torch.float32,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND]
SHAPES: list[tuple[int, ...]] = [(1,), (4,), (2, 3), (0,), (), (3, 1, 2)]
ENDS = ["none", "wait", "wait", "future", "then", "twice", "result", "polled", "list"]


def said(value: Any) -> str:
    """Of tensors: dtype, shape, and a sum of their bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        return f"{str(value.dtype)[6:]}{list(value.shape)}:{zlib.crc32(data):08x}"
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(said(one) for one in value) + "]"
    return str(value) if isinstance(value, (bool, int, str, type(None))) else type(value).__name__


def kind(handle: Any) -> str:
    return "Work" if isinstance(handle, dist.Work) else type(handle).__name__


def attempt(call: Any) -> str:
    try:
        return said(call())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def poll(work: Any) -> None:
    while not work.is_completed():
        pass


def end(how: str, work: Any, composite: bool) -> str:
    """Wait for a handle, in one way or another, and say what it says."""
    if work is None:
        return "none"
    words = [kind(work)]
    if how == "future":
        words.append(attempt(lambda: work.get_future().wait()))
    elif how == "then":
        words.append(attempt(lambda: work.get_future().then(lambda future: said(future.value())).wait()))
    elif how == "polled" and words[0] == "Work" and not composite:  # gloo's reduce_scatters end only with wait()
        words.append(attempt(lambda: poll(work)))
    words.append(attempt(work.wait))
    if how == "twice":
        words.append(attempt(work.wait))
    if how == "result":
        words += [attempt(work.result), attempt(work.is_completed), attempt(work.exception)]
        words.append(attempt(lambda: work.get_future().value()))
    return " ".join(words)


class Calls:
    """Draws calls; every rank draws the same."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.groups = [None, None, dist.new_group([0, 1]), dist.new_group([2, 0])]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
        size = max(torch.Size(shape).numel(), 1)
        values = torch.arange(size) % 3 + number % 2 + self.rank
        return values[: torch.Size(shape).numel()].to(torch.float32).to(dtype).reshape(shape)

    def next(self, number: int) -> str:
        """One call, made three times from one line: the guard has a shorter way for what it knows."""
        draw = self.draw
        name = draw.choice(NAMES)
        dtype, shape, op = draw.choice(DTYPES), draw.choice(SHAPES), draw.choice(OPS)
        if name in REDUCING and dtype not in DTYPES[:9]:  # torch's block stays open, gloo's next call waits for ever
            dtype = torch.float32
        if name in REDUCING:
            op = OPS[0]
        group, how, root = draw.choice(self.groups), draw.choice(ENDS), draw.randrange(2)
        ranks = dist.get_process_group_ranks(group) if group is not None else list(range(self.world))
        if self.rank not in ranks:
            return f"{name} not here"
        lines = [f"{name} {str(dtype)[6:]} {list(shape)} {how}"]
        for turn in range(3):
            one = self.tensor(shape, dtype, number + turn)
            many = [self.tensor(shape, dtype, number + turn + i) for i in range(len(ranks))]
            flat = self.tensor((len(ranks) * 2,), dtype, number + turn)
            lines.append(self.made(name, one, many, flat, op, group, how, ranks, root))
        return " | ".join(lines)

    def made(
        self,
        name: str,
        one: torch.Tensor,
        many: list[torch.Tensor],
        flat: torch.Tensor,
        op: Any,
        group: Any,
        how: str,
        ranks: list[int],
        root: int,
    ) -> str:
        later = how not in ("none", "list")
        mine, src = ranks.index(self.rank), ranks[root]
        part = flat[:2].clone()
        try:
            if name == "all_reduce":
                work, outs = dist.all_reduce(one, op, group, later), [one]
            elif name == "broadcast":
                work, outs = dist.broadcast(one, src, group, later), [one]
            elif name == "reduce":
                work = dist.reduce(one, src, op, group, later)
                outs = [one] if self.rank == src else []
            elif name == "all_gather":
                work, outs = dist.all_gather(many, one, group, later), many
            elif name == "gather":
                into = many if self.rank == src else None
                work, outs = dist.gather(one, into, src, group, later), into or []
            elif name == "scatter":
                work = dist.scatter(one, many if self.rank == src else None, src, group, later)
                outs = [one]
            elif name == "all_gather_into_tensor":
                work, outs = dist.all_gather_into_tensor(flat, part, group, later), [flat]
            elif name == "reduce_scatter_tensor":
                work, outs = dist.reduce_scatter_tensor(part, flat, op, group, later), [part]
            elif name == "reduce_scatter":
                work, outs = dist.reduce_scatter(one, many, op, group, later), [one]
            elif name == "all_to_all_single":
                out = torch.zeros_like(flat)
                work, outs = dist.all_to_all_single(out, flat, group=group, async_op=later), [out]
            elif name == "barrier":
                work, outs = dist.barrier(group, later), []
            elif name == "coalesced":
                more = [one.clone(), one.clone()]
                with dist._coalescing_manager(group, async_ops=later) as works:
                    for tensor in more:
                        dist.all_reduce(tensor, op, group)
                work, outs = (works if later else None), more
            elif name == "objects":
                objects: list[Any] = [None] * len(ranks)
                dist.all_gather_object(objects, (self.rank, how), group)
                return str(objects)
            else:
                return self.ring(one, group, ranks, mine, name == "batch")
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        if name == "coalesced":
            return f"{attempt(work.wait) if work is not None else ''} {said(outs)}"
        return f"{end(how, work, name.startswith('reduce_scatter'))} {said(outs)}"

    def ring(self, one: torch.Tensor, group: Any, ranks: list[int], mine: int, batch: bool) -> str:
        """To the next, from the one before."""
        after, before = ranks[(mine + 1) % len(ranks)], ranks[mine - 1]
        into = torch.zeros_like(one)
        if batch:
            ops = [dist.P2POp(dist.isend, one, after, group), dist.P2POp(dist.irecv, into, before, group)]
            works: list[Any] = dist.batch_isend_irecv(ops)
        else:
            works = [dist.isend(one, after, group, 3), dist.irecv(into, before, group, 3)]
        return " ".join([*(kind(work) for work in works), *(attempt(work.wait) for work in works), said(into)])


REDUCING = {"coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
NAMES = [
    "all_reduce",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_to_all_single",
    "barrier",
    "coalesced",
    "objects",
    "messages",
    "batch",
]


def main(seed: int, number: int) -> None:
    dist.init_process_group("gloo")
    calls = Calls(seed)
    for i in range(number):
        print(i, calls.next(i), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch's groups may wait for the interpreter's lock in their destructors, which hold it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
