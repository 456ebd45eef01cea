"""Teaches: blocking and non-blocking send and recv, by a program that starts its own ranks.

Run it with `python point_to_point.py`, or `distsim run --on ethernet-cpu:2 point_to_point.py`:
processes that a script starts are simulated too.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

WORLD_SIZE = 2


def blocking(rank: int) -> None:
    """recv() returns when the message is here; send() when it may forget it."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=0)
    print(f"blocking: rank {rank} has {tensor[0].item()}", flush=True)


def non_blocking(rank: int) -> None:
    """isend() and irecv() return at once; the tensor must be left alone until wait() came back."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 2
        work = dist.isend(tensor, dst=1)
    else:
        work = dist.irecv(tensor, src=0)
    work.wait()
    print(f"non-blocking: rank {rank} has {tensor[0].item()}", flush=True)


def start(rank: int, world_size: int, function: Callable[[int], None], port: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    function(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.set_start_method("spawn")
    for i, function in enumerate((blocking, non_blocking)):
        port = int(os.environ.get("TUTORIAL_PORT", "29555")) + i
        ranks = [mp.Process(target=start, args=(r, WORLD_SIZE, function, port)) for r in range(WORLD_SIZE)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        assert all(one.exitcode == 0 for one in ranks)
