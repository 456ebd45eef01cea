"""Programs on the simulator whose orders are searched."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from distsim.cluster import load_cluster
from distsim.sim import Outcome, simulate
from distsim.sim.kernel.chooser import Orders
from distsim.sim.kernel.limits import Limits
from distsim.sim.world.conditions import Conditions

CLUSTER = load_cluster("dgx-h100:1")


def runs(body: Callable[..., Any], ranks: int, *args: Any) -> Callable[[Orders], Outcome]:
    """Return a function that runs *body* on some ranks in an order."""

    def run(orders: Orders) -> Outcome:
        conditions = Conditions(limits=Limits(wall_time_s=60.0), orders=orders)
        return simulate(body, CLUSTER, args, nproc_per_node=ranks, conditions=conditions, check=False)

    return run


def store() -> Any:
    """Join the group, and return its store."""
    dist.init_process_group("gloo")
    return dist.distributed_c10d._get_default_store()


Operation = tuple[Any, ...]


def random_calls(seed: int) -> list[list[Operation]]:
    """Return store operations and messages for three or two ranks."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3])
    kinds = draw.choice([("set", "check", "add", "get"), ("send", "any", "from"), ("send", "any", "set", "check")])
    programs: list[list[Operation]] = []
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        program: list[Operation] = []
        for _ in range(draw.randint(1, 3 if ranks == 3 else 4)):
            kind = draw.choice(kinds)
            program.append((kind, draw.choice("ab"), draw.choice(others), draw.randrange(2)))
        programs.append(program)
    return programs


def make_calls(programs: Sequence[Sequence[Operation]]) -> None:
    """Make the calls of this rank; messages are waited for at the end."""
    held = store()
    works = []
    for kind, key, peer, tag in programs[dist.get_rank()]:
        if kind == "set":
            held.set(key, "1")
        elif kind == "check":
            held.check([key])
        elif kind == "add":
            held.add(key, 1)
        elif kind == "get":
            held.wait([key], timedelta(seconds=1))
        elif kind == "send":
            works.append(dist.isend(torch.ones(1), peer, tag=tag))
        else:
            works.append(dist.irecv(torch.zeros(1), peer if kind == "from" else None, tag=tag))
    for work in works:
        work.wait()


def random_threads(seed: int) -> list[list[int]]:
    """Return for two or three threads which locks each takes, one after the other and in one another."""
    draw = random.Random(seed)
    return [[draw.randrange(3) for _ in range(draw.randint(1, 3))] for _ in range(draw.choice([2, 2, 3]))]


def take_locks(programs: Sequence[Sequence[int]], nested: bool) -> None:
    """Take locks in threads."""
    locks = [threading.Lock() for _ in range(3)]

    def work(numbers: Sequence[int]) -> None:
        if nested:
            for number in dict.fromkeys(numbers):
                locks[number].acquire()
            for number in dict.fromkeys(numbers):
                locks[number].release()
        else:
            for number in numbers:
                with locks[number]:
                    pass

    threads = [threading.Thread(target=work, args=(numbers,)) for numbers in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def random_shared(seed: int) -> list[list[Operation]]:
    """Return for two or three ranks remote calls with store operations, or accesses of two files."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3])
    kinds = draw.choice([("call", "later", "value", "set", "check"), ("write", "look", "remove", "list", "rename")])
    return [
        [
            (draw.choice(kinds), draw.choice("ab"), draw.randrange(ranks))
            for _ in range(draw.randint(1, 3 if ranks == 2 else 2))
        ]
        for _ in range(ranks)
    ]


def set_key(key: str) -> None:
    dist.distributed_c10d._get_default_store().set(key, "1")


def share(programs: Sequence[Sequence[Operation]], folder: Path) -> None:
    """Make the operations of this rank."""
    held, rank = store(), dist.get_rank()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=len(programs))
    replies = []
    for kind, key, peer in programs[rank]:
        worker, file = f"worker{peer}", folder / key
        if kind == "call":
            rpc.rpc_sync(worker, set_key, (key,))
        elif kind == "later":
            replies.append(rpc.rpc_async(worker, set_key, (key,)))
        elif kind == "value":
            rpc.remote(worker, set_key, (key,)).to_here()
        elif kind == "set":
            held.set(key, "1")
        elif kind == "check":
            held.check([key])
        elif kind == "write":
            file.write_text("1")
        elif kind == "look":
            file.exists()
        elif kind == "list":
            os.listdir(folder)
        else:
            with contextlib.suppress(FileNotFoundError):
                file.unlink() if kind == "remove" else file.rename(folder / "c")
    for reply in replies:
        reply.wait()
    rpc.shutdown()


def random_jobs(seed: int) -> list[list[Operation]]:
    """Return for two or three jobs of a pool what each does with queues, locks and an event."""
    draw = random.Random(seed)
    kinds = ("put", "empty", "take", "lock", "set", "asked", "clear")
    return [
        [(draw.choice(kinds), draw.randrange(2)) for _ in range(draw.randint(1, 3))]
        for _ in range(draw.choice([2, 2, 3]))
    ]


def do_jobs(programs: Sequence[Sequence[Operation]]) -> None:
    """Run the jobs."""
    queues: list[Any] = [queue.Queue(), queue.SimpleQueue()]
    locks, event = [threading.Lock(), threading.Lock()], threading.Event()

    def job(operations: Sequence[Operation]) -> None:
        for kind, number in operations:
            if kind == "put":
                queues[number].put(1)
            elif kind == "empty":
                queues[number].empty()
            elif kind == "take":
                with contextlib.suppress(queue.Empty):
                    queues[number].get(False)
            elif kind == "lock":
                with locks[number]:
                    pass
            else:
                {"set": event.set, "asked": event.is_set, "clear": event.clear}[kind]()

    with ThreadPoolExecutor(len(programs)) as pool:
        for future in [pool.submit(job, operations) for operations in programs]:
            future.result()
