"""A random healthy program of several worlds: `random_worlds.py SEED PORT`, as a rank of a job.

All processes draw the same plan from SEED: a world before the job's (of one rank, of some, of each half), the job's own
with the launcher's numbers or others, groups of it, worlds made by hand beside it, calls and messages on all of them,
processes that come late; once or several times over. PORT and those behind it are for its rendezvous.
"""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

LATE_S = (0.0, 0.0, 0.0, 0.3, 0.9)


@dataclass
class Group:
    """A process group, and the processes in it by their rank there."""

    processes: list[int]
    pg: Any = None
    names: list[int] = field(default_factory=list)
    """What torch calls each of them."""


class Program:
    """One process's run of the plan."""

    def __init__(self, seed: int, port: int) -> None:
        self.draw = random.Random(seed)
        self.process, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.port = port
        self.number = 0

    def run(self) -> None:
        """Worlds one after the other."""
        for _ in range(self.draw.choice((1, 1, 2, 3))):
            getattr(self, self.draw.choice(("alone", "halves", "some", "job", "job", "job")))()
        self.job()

    def late(self) -> None:
        """Some process comes later than others."""
        who, seconds = self.draw.randrange(self.size), self.draw.choice(LATE_S)
        if who == self.process:
            time.sleep(seconds)

    def store(self) -> tuple[str, int]:
        """Where the next rendezvous is; its name tells it from others in one store."""
        self.number += 1
        return f"w{self.number}", self.port + self.number

    def init(self, processes: list[int]) -> Group | None:
        """A default group of these, the first as rank 0."""
        name, port = self.store()
        how = self.draw.choice(("url", "store", "prefix", "env"))
        self.late()
        if self.process not in processes:
            return None
        rank, size = processes.index(self.process), len(processes)
        if how == "url":
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        elif how == "env":
            os.environ["MASTER_PORT"] = str(port)
            dist.init_process_group("gloo", rank=rank, world_size=size)
        else:
            store: Any = dist.TCPStore("127.0.0.1", port, size, rank == 0)
            if how == "prefix":
                store = dist.PrefixStore(name, store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return Group(processes, None, list(range(size)))

    def beside(self, processes: list[int]) -> Group:
        """A further world of these, made by hand as RLHF frameworks do."""
        name, port = self.store()
        group = Group(processes, None, list(range(len(processes))))
        if self.process in processes:
            rank, size = processes.index(self.process), len(processes)
            rendezvous = c10d.rendezvous(f"tcp://127.0.0.1:{port}", rank, size, timeout=c10d.default_pg_timeout)
            store, rank, size = next(rendezvous)
            store = dist.PrefixStore(name, store)
            pg, _ = c10d._new_process_group_helper(
                size, rank, [], c10d.Backend("gloo"), store, group_name=name, timeout=c10d.default_pg_timeout
            )
            c10d._world.pg_group_ranks[pg] = {i: i for i in range(size)}
            group.pg = pg
        return group

    def alone(self) -> None:
        """A process has a group of its own for a moment."""
        who = self.draw.randrange(self.size)
        if who == self.process:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(torch.ones(2))
            dist.destroy_process_group()

    def halves(self) -> None:
        """Two default groups at once, in one store or in two."""
        order = self.shuffled()
        cut = self.draw.randint(1, self.size - 1)
        one, two = order[:cut], order[cut:]
        groups = [self.init(one), self.init(two)]
        own = groups[0] or groups[1]
        assert own is not None
        self.play([own])
        dist.destroy_process_group()

    def some(self) -> None:
        """A default group of some processes; the others go on."""
        group = self.init(self.shuffled()[: self.draw.randint(1, self.size)])
        self.play([group] if group is not None else [])
        if group is not None:
            dist.destroy_process_group()

    def job(self) -> None:
        """A default group of all, with groups of it and worlds beside it."""
        processes = self.draw.choice((list(range(self.size)), self.shuffled(), self.shuffled()))
        world = self.init(processes)
        assert world is not None
        groups = [world]
        for _ in range(self.draw.randrange(3)):
            ranks = self.some_of(list(range(self.size)))
            pg = dist.new_group(ranks)
            groups.append(Group([processes[rank] for rank in sorted(ranks)], pg, sorted(ranks)))
        for _ in range(self.draw.randrange(3)):
            groups.append(self.beside(self.some_of(list(range(self.size)))))
        self.play(groups)
        dist.barrier()
        dist.destroy_process_group()

    def shuffled(self) -> list[int]:
        """All processes in another order."""
        return self.draw.sample(range(self.size), self.size)

    def some_of(self, numbers: list[int]) -> list[int]:
        """Two of them at least."""
        return self.draw.sample(numbers, self.draw.randint(2, len(numbers)))

    def play(self, groups: list[Group]) -> None:
        """Calls on groups; every process draws all of them, members make them."""
        for _ in range(self.draw.randrange(1, 10)):
            self.late()
            which, op = self.draw.randrange(8), self.draw.choice(("reduce", "bcast", "gather", "chain", "async"))
            root, tag = self.draw.randrange(8), self.draw.randrange(3)
            if groups:
                group = groups[which % len(groups)]
                if self.process in group.processes:
                    self.call(op, group, root % len(group.processes), tag)

    def call(self, op: str, group: Group, root: int, tag: int) -> None:
        """One call of all members."""
        place, names, pg = group.processes.index(self.process), group.names, group.pg
        value = torch.full((4,), float(place))
        if op == "reduce":
            dist.all_reduce(value, group=pg)
        elif op == "bcast":
            dist.broadcast(value, src=names[root], group=pg)
        elif op == "gather":
            dist.all_gather([torch.empty(4) for _ in names], value, group=pg)
        elif op == "async":
            works = [dist.all_reduce(value.clone(), group=pg, async_op=True) for _ in range(2)]
            for work in works:
                work.wait()
        else:
            if place > 0:
                dist.recv(value, src=names[place - 1], group=pg, tag=tag)
            if place + 1 < len(names):
                dist.send(value, dst=names[place + 1], group=pg, tag=tag)


if __name__ == "__main__":
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    Program(int(sys.argv[1]), int(sys.argv[2])).run()
