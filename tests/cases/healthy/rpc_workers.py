"""Remote calls of every kind, mistakes among them that the program catches in torch's own words.

ranks: 2
kind: healthy
"""

import os
import time

import torch
import torch.distributed.rpc as rpc


class Counter:
    def __init__(self, start):
        self.value = start

    def add(self, amount):
        self.value += amount
        return self.value


def back(worker, depth):
    me = rpc.get_worker_info().name
    return depth if not depth else rpc.rpc_sync(worker, back, args=(me, depth - 1)) + 1


def nap(seconds):
    time.sleep(seconds)
    return seconds


@rpc.functions.async_execution
def later(worker, x):
    return rpc.rpc_async(worker, torch.add, args=(x, 1)).then(lambda future: future.wait() * 2)


def refuse():
    raise ValueError("expected")


def said(error, words, call):
    raised = ""
    try:
        call()
    except error as caught:
        raised = str(caught)
    assert words in raised, raised
    assert "distsim/realexec" not in raised, raised
    assert "distsim/sim" not in raised, raised


def program(me, other):
    x = torch.ones(4)
    assert rpc.rpc_sync(other, torch.add, args=(x, 1)).sum() == 8
    assert rpc.rpc_sync(rpc.get_worker_info(other), back, args=(me, 4)) == 4
    futures = [rpc.rpc_async(other, nap, args=(0.3,)) for _ in range(3)]
    assert torch.futures.wait_all(futures) == [0.3] * 3
    assert futures[0].wait() == 0.3
    assert rpc.rpc_async(other, back, args=(me, 2)).then(lambda future: future.wait() + 1).wait() == 3
    assert rpc.rpc_sync(other, later, args=(me, x)).sum() == 16
    counter = rpc.remote(other, Counter, args=(5,))
    assert counter.rpc_sync().add(2) == 7
    assert counter.rpc_async().add(1).wait() == 8
    assert counter.remote().add(1).to_here() == 9
    assert counter.to_here().value == 9
    said(ValueError, "On WorkerInfo", lambda: rpc.rpc_sync(other, refuse))
    said(ValueError, "in refuse", lambda: rpc.rpc_async(other, refuse).wait())
    said(RuntimeError, "could not find destination name nobody", lambda: rpc.rpc_sync("nobody", refuse))
    said(Exception, "pickle", lambda: rpc.rpc_sync(other, lambda: 1))
    said(RuntimeError, "RPC ran for more than set timeout", lambda: rpc.rpc_sync(other, nap, args=(1.5,), timeout=0.5))


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
program(f"worker{rank}", f"worker{1 - rank}")
rpc.shutdown()
