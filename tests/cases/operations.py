"""Every operation that training makes, as functions for programs of two ranks."""

import torch
import torch.distributed as dist
from torch.distributed import irecv, isend, recv, send

from tests.cases.releases import gather_single, scatter_single

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
other = 1 - rank
T = torch.float32


def ones(n=2, dtype=T):
    return torch.ones(n, dtype=dtype)


def waited(work):
    assert work.wait() is True


def all_reduce(n=2, dtype=T, op=dist.ReduceOp.SUM):
    t = ones(n, dtype)
    dist.all_reduce(t, op=op)
    return t


def all_reduce_async(n=2, dtype=T, op=dist.ReduceOp.SUM):
    t = ones(n, dtype)
    waited(dist.all_reduce(t, op=op, async_op=True))
    return t


def all_reduce_future(n=2, dtype=T, op=dist.ReduceOp.SUM):
    t = ones(n, dtype)
    then = dist.all_reduce(t, op=op, async_op=True).get_future().then(lambda future: future.value()[0] + 1)
    return then.wait() - 1


def all_reduce_coalesced(n=2, dtype=T, op=dist.ReduceOp.SUM):
    many = [ones(n, dtype), ones(3, dtype)]
    with dist.distributed_c10d._coalescing_manager():
        for t in many:
            dist.all_reduce(t, op=op)
    return many[0]


def broadcast(n=2, dtype=T, root=0):
    t = ones(n, dtype) * (1 + rank)
    dist.broadcast(t, root)
    return t * 2 - root * 2


def broadcast_async(n=2, dtype=T, root=0):
    t = ones(n, dtype) * (1 + rank)
    waited(dist.broadcast(t, root, async_op=True))
    return t * 2 - root * 2


def reduce(n=2, dtype=T, op=dist.ReduceOp.SUM, root=0):
    t = ones(n, dtype)
    dist.reduce(t, root, op=op)
    return t if rank == root else t * 2


def all_gather(n=2, dtype=T):
    outs = [torch.zeros(n, dtype=dtype) for _ in range(world)]
    dist.all_gather(outs, ones(n, dtype))
    return sum(outs)


def all_gather_into_tensor(n=2, dtype=T):
    out = torch.zeros(n * world, dtype=dtype)
    gather_single(out, ones(n, dtype))
    return out * 2


def all_gather_into_tensor_async(n=2, dtype=T):
    out = torch.zeros(n * world, dtype=dtype)
    waited(gather_single(out, ones(n, dtype), async_op=True))
    return out * 2


def reduce_scatter_tensor(n=2, dtype=T, op=dist.ReduceOp.SUM):
    out = torch.zeros(n, dtype=dtype)
    scatter_single(out, ones(n * world, dtype), op=op)
    return out


def reduce_scatter_tensor_async(n=2, dtype=T, op=dist.ReduceOp.SUM):
    out = torch.zeros(n, dtype=dtype)
    waited(scatter_single(out, ones(n * world, dtype), op=op, async_op=True))
    return out


def all_to_all_single(n=2, dtype=T):
    out = torch.zeros(n * world, dtype=dtype)
    dist.all_to_all_single(out, ones(n * world, dtype))
    return out * 2


def barrier():
    dist.barrier()
    return ones() * 2


def barrier_async():
    waited(dist.barrier(async_op=True))
    return ones() * 2


def messages(n=2, dtype=T):
    t = torch.zeros(n, dtype=dtype)
    if rank == 0:
        send(ones(n, dtype), 1)
        assert recv(t, 1) == 1
    else:
        assert recv(t, 0) == 0
        send(ones(n, dtype), 0)
    return t * 2


def messages_async(n=2, dtype=T):
    t = torch.zeros(n, dtype=dtype)
    works = [isend(ones(n, dtype), other, tag=5), irecv(t, other, tag=5)]
    for work in works:
        work.wait()
    return t * 2


def messages_batched(n=2, dtype=T):
    t = torch.zeros(n, dtype=dtype)
    ops = [dist.P2POp(isend, ones(n, dtype), other), dist.P2POp(irecv, t, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return t * 2


ALL = [
    all_reduce,
    all_reduce_async,
    all_reduce_future,
    all_reduce_coalesced,
    broadcast,
    broadcast_async,
    reduce,
    all_gather,
    all_gather_into_tensor,
    all_gather_into_tensor_async,
    reduce_scatter_tensor,
    reduce_scatter_tensor_async,
    all_to_all_single,
    barrier,
    barrier_async,
]
MESSAGES = [messages, messages_async, messages_batched]
