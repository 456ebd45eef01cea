"""Programs on the simulator whose orders are searched."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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
