"""Row 19: what torch has dropped, one body for both arms: in torch's own names, and as `distsim.deprecated`."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform, Place, own_init
from conformance.plain import mine, says

import distsim.deprecated as old


def put_into_torch() -> None:
    """What a simulation and the guard do; the gloo arm runs without a guard."""
    warnings.simplefilter("ignore")
    if not hasattr(dist, "all_reduce_multigpu"):
        from distsim.deprecated.guarded import DroppedHook

        DroppedHook(lambda *_: None).install()


def no_launcher() -> None:
    """As where each process was started by hand."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def met(tag: int) -> dict[str, Any]:
    """What all ranks of the group just made see of each other, in any order, and leave it."""
    sight = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.all_gather(sight, torch.tensor([float(dist.get_rank()), float(tag), 1.0]))
    found = {
        "ranks": [int(t[0]) for t in sight],
        "tags": sorted({int(t[1]) for t in sight}),
        "backend": dist.get_backend(),
    }
    dist.destroy_process_group()
    return found


def ways(rank: int, place: Place) -> dict[str, str]:
    """An address of each kind under which nobody needs a rank."""
    return {
        "file": f"file://{place.directory}/meet",
        "multicast": f"tcp://239.255.77.{place.ports[0] % 250 + 1}:{place.ports[0]}",
    }


@own_init
def given_ranks(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """Ranks are given to processes that have none; group_name keeps two jobs at one address apart; a process that has
    started as a launcher's rank keeps its number."""
    put_into_torch()
    launched = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
    no_launcher()
    found: dict[str, Any] = {}
    for kind, url in ways(rank, place).items():
        dist.init_process_group("gloo", init_method=url, world_size=world_size)
        found[kind] = met(0)
        dist.init_process_group("gloo", init_method=f"{url}?world_size={world_size}")
        found[f"{kind}, again"] = met(0)
        half = rank % 2
        dist.init_process_group("gloo", init_method=url, world_size=2, group_name=f"job {half}")
        found[f"{kind}, two jobs"] = met(half)
        old.init_process_group("tcp", init_method=url, world_size=2, group_name=f"old {half}")
        found[f"{kind}, as of old"] = met(half)
    url = ways(rank, place)["multicast"]
    wish = {0: 2, 1: -1, 2: 0, 3: -1}[rank]
    dist.init_process_group("gloo", init_method=url, world_size=world_size, rank=wish)
    found["some say theirs"] = dist.get_rank() == wish if wish >= 0 else dist.get_rank() in (1, 3)
    dist.destroy_process_group()
    os.environ.update(launched)
    for kind, url in ways(rank, place).items():
        turn = dist.FileStore(f"{place.directory}/{kind}", world_size)  # the last comes first
        if rank < world_size - 1:
            turn.wait([str(rank + 1)], timedelta(seconds=20))
        turn.set(str(rank), "begins")
        dist.init_process_group("gloo", init_method=url, world_size=world_size, group_name="launched")
        found[f"{kind}, launched"] = dist.get_rank()
        assert dist.get_rank() == rank, f"a launcher said {rank}"
        met(0)
    return found


@own_init
def wrong_meetings(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """What cannot become a job is said in a line."""
    put_into_torch()
    no_launcher()
    found: dict[str, Any] = {}
    second = timedelta(seconds=1)
    for kind, url in ways(rank, place).items():
        found[f"{kind}, no size"] = says(dist.init_process_group, "gloo", init_method=url)
        found[f"{kind}, of old"] = says(old.init_process_group, "gloo", init_method=url)
        found[f"{kind}, beyond"] = says(old.init_process_group, "gloo", init_method=url + "?rank=4", world_size=4)
    multicast = ways(rank, place)["multicast"]
    found["multicast, a rank too many"] = says(
        dist.init_process_group, "gloo", init_method=multicast, world_size=4, rank=4
    )
    assert "rank 4 of 4 processes: expected 0 to 3" in str(found["multicast, a rank too many"])
    found["no port"] = says(dist.init_process_group, "gloo", init_method="tcp://239.255.1.1", world_size=4)
    twice = says(dist.init_process_group, "gloo", init_method=multicast, world_size=4, rank=min(rank, 2))
    # A real rank that holds the store may be gone before another has read who is there twice.
    found["twice"] = "rank 2 was given to" in str(twice) or str(twice).startswith("DistNetworkError")
    came = says(
        dist.init_process_group, "gloo", init_method=multicast, world_size=2, group_name=str(rank), timeout=second
    )
    found["alone"] = came.replace(multicast, "ADDRESS").partition(", on ")[0]
    found["no multicast"] = says(dist.init_process_group, "gloo", init_method="tcp://127.0.0.1:29000", world_size=4)
    found["backend"] = says(old.init_process_group, "carrier pigeon", world_size=4, rank=0)
    found["keyword"] = says(old.init_process_group, "tcp", world_sise=4)
    found["master and workers"] = says(old.init_master_worker, "tcp")
    return {
        name: str(text).replace(place.directory, "FOLDER").replace(multicast, "URL") for name, text in found.items()
    }


def devices(rank: int, world_size: int) -> dict[str, Any]:
    """The five collectives of several devices a rank, on three CPU tensors a rank."""
    put_into_torch()
    found: dict[str, Any] = {}
    number = 3

    def own(scale: float = 1.0) -> list[torch.Tensor]:
        return [mine(rank, 2, 2) * scale + 100 * j for j in range(number)]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        tensors = own()
        dist.all_reduce_multigpu(tensors, op)
        found[f"all_reduce {op}"] = tensors
    tensors = own()
    dist.broadcast_multigpu(tensors, 1, src_tensor=2)
    found["broadcast"] = tensors
    tensors = own()
    work = dist.reduce_multigpu(tensors, 2, async_op=True, dst_tensor=1)
    work.wait()
    found["reduce"] = [work.is_completed(), tensors[1] if rank == 2 else 0]
    places = [[torch.zeros(2, 2) for _ in range(number * world_size)] for _ in range(number)]
    dist.all_gather_multigpu(places, own())
    found["all_gather"] = places
    outputs = [torch.zeros(2, 2) for _ in range(number)]
    inputs = [[t * (k + 1) for k in range(world_size) for t in own()] for _ in range(number)]
    dist.reduce_scatter_multigpu(outputs, inputs)
    found["reduce_scatter"] = outputs
    group = dist.new_group([1, 3])
    tensors = own()
    if rank in (1, 3):
        old.all_reduce_multigpu(tensors, group=group)
    found["group"] = tensors
    bits = [torch.tensor([1 << rank]), torch.tensor([16])]
    dist.all_reduce_multigpu(bits, dist.ReduceOp.BOR)
    found["bits"] = bits
    found["one tensor"] = says(dist.all_reduce_multigpu, torch.ones(1))
    found["none"] = says(dist.broadcast_multigpu, [], 0)
    found["unlike"] = says(dist.all_reduce_multigpu, [torch.ones(1), torch.ones(2)])
    found["lists"] = says(dist.all_gather_multigpu, [[torch.ones(1)]], [torch.ones(1)])
    found["places"] = says(dist.reduce_scatter_multigpu, [torch.ones(1)], [[torch.ones(1)]])
    found["device"] = says(dist.broadcast_multigpu, [torch.ones(1)], rank, src_tensor=1)
    found["to device"] = says(dist.reduce_multigpu, [torch.ones(1)], rank, dst_tensor=1)
    found["operation"] = says(dist.all_reduce_multigpu, [torch.ones(1)], dist.ReduceOp.PREMUL_SUM)
    return found


@own_init
def of_old(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """A program of torch 0.4, with `import distsim.deprecated as dist` for its import."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"before": [old.is_available(), old.is_initialized()]}
    found["none"] = old.init_process_group(  # type: ignore[func-returns-value]
        backend="tcp", init_method=f"file://{place.directory}/old", world_size=world_size, rank=rank, group_name="g"
    )
    found["who"] = [old.get_rank(), old.get_world_size(), dist.get_backend(), old.is_initialized()]
    found["twice"] = says(old.init_process_group, "tcp", rank=rank, world_size=world_size)
    for name in ("SUM", "PRODUCT", "MAX", "MIN"):
        t = mine(rank, 3) + 1
        old.all_reduce(t, op=getattr(old.reduce_op, name), group=old.group.WORLD)
        found[name] = t
    t = mine(rank, 3)
    old.broadcast(t, 1)
    found["broadcast"] = t.clone()
    old.reduce(t, 2, old.reduce_op.SUM)
    found["reduce"] = t if rank == 2 else 0
    parts = [torch.zeros(3) for _ in range(world_size)]
    old.all_gather(parts, mine(rank, 3))
    found["all_gather"] = parts
    got = [torch.zeros(3) for _ in range(world_size)]
    if rank == 1:
        old.gather(mine(rank, 3), gather_list=got)
    else:
        old.gather(mine(rank, 3), dst=1)
    found["gather"] = got
    t = torch.zeros(3)
    if rank == 3:
        old.scatter(t, scatter_list=parts)
    else:
        old.scatter(t, src=3)
    found["scatter"] = t
    if rank == 0:
        requests = [old.isend(mine(9, 2) + dst, dst=dst) for dst in range(1, world_size)]
        for request in requests:
            request.wait()
        senders = {old.recv(torch.zeros(1)) for _ in range(1, world_size)}
        found["senders"] = sorted(senders)
    else:
        t = torch.zeros(2)
        request = old.irecv(t, src=0)
        request.wait()
        found["received"] = [t, request.is_completed()]
        old.send(torch.ones(1), 0)
    group = old.new_group([0, 2])
    t = mine(rank, 2)
    if rank in (0, 2):
        old.all_reduce(t, group=group)
    found["group"] = t
    old.barrier()
    found["no list"] = says(old.gather, torch.ones(1))
    found["a list too many"] = says(old.scatter, torch.ones(1), src=(rank + 1) % 2, scatter_list=[torch.ones(1)])
    found["word"] = says(old.scatter, torch.ones(1), sauce=1)
    old.destroy_process_group()
    found["after"] = old.is_initialized()
    return found


@own_init
def tcp_backend(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """`tcp` is gloo, in init_process_group, new_group and beside a device; the name of another is as it was."""
    put_into_torch()
    url = f"file://{place.directory}/tcp"
    dist.init_process_group("TCP", init_method=url, world_size=world_size, rank=rank)
    found = {"backend": dist.get_backend(), "config": dist.get_backend_config(), "class": dist.Backend("tcp")}
    group = dist.new_group([0, 1], backend="tcp")
    found["group"] = dist.get_backend(group) if rank < 2 else None
    t = mine(rank, 2)
    dist.all_reduce(t)
    dist.destroy_process_group()
    return found | {"sum": t, "other": dist.Backend("NCCL")}


@pytest.mark.parametrize("body", [given_ranks, devices, of_old, tcp_backend])
def test_dropped(conform: Conform, body: Any) -> None:
    """It does on both arms what torch's documentation of its time says."""
    conform(body)


def test_wrong_meetings(conform: Conform) -> None:
    """The same line on both arms, which says what was expected."""
    conform(wrong_meetings)
