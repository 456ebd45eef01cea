"""Rows 1 and 2: initialization, and the questions one may ask."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform, Place, own_init
from conformance.plain import error_of, says


def works() -> dict[str, Any]:
    """What a group just made answers."""
    t = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(t)
    return {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "initialized": dist.is_initialized(),
        "sum": t,
    }


def meet(place: Place, name: str, world_size: int) -> None:
    """Wait for all by another way than the group under test, so that ports are not reused too early."""
    store = dist.FileStore(f"{place.directory}/meet-{name}", world_size)
    store.add("count", 1)
    store.set(f"here {os.environ['RANK']}", "1")
    store.wait([f"here {i}" for i in range(world_size)], timedelta(seconds=20))


@own_init
def env(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {"before": dist.is_initialized()}
    found["returns"] = dist.init_process_group("gloo")
    found["first"] = works()
    found["destroy"] = dist.destroy_process_group()
    found["after"] = dist.is_initialized()
    found["rank after"] = says(dist.get_rank)
    found["all_reduce after"] = says(dist.all_reduce, torch.ones(1))
    found["destroy again"] = error_of(dist.destroy_process_group)
    meet(place, "env", world_size)
    os.environ["MASTER_PORT"] = str(place.ports[0])
    dist.init_process_group(backend="gloo", init_method="env://", timeout=timedelta(seconds=30))
    found["second"] = works()
    dist.destroy_process_group()
    # The arguments win over the environment. The last rank's machine is then the master's.
    meet(place, "arguments", world_size)
    if os.environ["MASTER_ADDR"] != "127.0.0.1":
        os.environ["MASTER_ADDR"] = "node1"
    os.environ["MASTER_PORT"] = str(place.ports[1])
    dist.init_process_group("gloo", rank=world_size - 1 - rank, world_size=world_size)
    found["turned round"] = works()
    dist.destroy_process_group()
    return found


@own_init
def env_missing(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """What is missing from the environment is named."""
    found: dict[str, Any] = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.pop(name)
        found[name] = says(dist.init_process_group, "gloo")
        os.environ[name] = value
    found["initialized"] = dist.is_initialized()
    dist.init_process_group("gloo")
    found["at last"] = works()
    dist.destroy_process_group()
    return found


@own_init
def tcp(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    master = os.environ["MASTER_ADDR"]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ["RANK"] = str(rank)
    found: dict[str, Any] = {}
    url = f"tcp://{master}:{place.ports[0]}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    found["arguments"] = works()
    dist.destroy_process_group()
    meet(place, "tcp", world_size)
    url = f"tcp://{master}:{place.ports[1]}?rank={rank}&world_size={world_size}"
    dist.init_process_group("gloo", init_method=url)
    found["in the address"] = works()
    dist.destroy_process_group()
    return found


@own_init
def file(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {}
    url = f"file://{place.directory}/rendezvous"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    found["first"] = works()
    dist.destroy_process_group()
    url = f"file://{place.directory}/other?rank={rank}&world_size={world_size}"
    dist.init_process_group("gloo", init_method=url)
    found["in the address"] = works()
    dist.destroy_process_group()
    return found


@own_init
def store(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tcp_store = dist.TCPStore(os.environ["MASTER_ADDR"], place.ports[0], world_size, rank == 0)
    dist.init_process_group("gloo", store=tcp_store, rank=rank, world_size=world_size)
    found["tcp"] = works()
    dist.destroy_process_group()
    file_store = dist.FileStore(f"{place.directory}/store", world_size)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world_size, group_name="mine")
    found["file"] = works()
    dist.destroy_process_group()
    prefixed = dist.PrefixStore("again", tcp_store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size)
    found["prefix"] = works()
    dist.destroy_process_group()
    found["no rank"] = error_of(dist.init_process_group, "gloo", store=file_store)
    found["no world"] = error_of(dist.init_process_group, "gloo", store=file_store, rank=rank)
    found["two ways"] = says(
        dist.init_process_group,
        "gloo",
        store=file_store,
        init_method="env://",
        rank=rank,
        world_size=world_size,
    )
    meet(place, "store", world_size)
    return found


@own_init
def backends(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """The backend in all its spellings."""
    found: dict[str, Any] = {}
    kinds = ["gloo", "GLOO", "Gloo", dist.Backend.GLOO, dist.Backend("gloo"), "cpu:gloo"]
    kinds += ["cpu:gloo,cuda:gloo", None, "undefined"]
    for i, kind in enumerate(kinds):
        name = f"{i} {kind}"
        method = f"file://{place.directory}/{i}"
        said = says(dist.init_process_group, kind, init_method=method, rank=rank, world_size=world_size)
        found[name] = said
        if dist.is_initialized():
            found[f"{name} backend"] = dist.get_backend()
            found[f"{name} config"] = dist.get_backend_config()
            if kind != "undefined":
                found[f"{name} works"] = works()["sum"]
            meet(place, f"backend-{i}", world_size)
            dist.destroy_process_group()
    for kind in ("nonsense", "cpu:nonsense", "cpu", "cpu:gloo,cpu:gloo"):
        said = error_of(
            dist.init_process_group,
            kind,
            init_method=f"file://{place.directory}/bad-{kind}",
            rank=rank,
            world_size=world_size,
        )
        found[f"bad {kind}"] = said
        if dist.is_initialized():
            meet(place, f"bad-{kind}", world_size)
            dist.destroy_process_group()
    return found


@own_init
def arguments(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """Arguments that torch refuses."""

    def start(**kwargs: Any) -> str:
        said = error_of(dist.init_process_group, "gloo", **kwargs)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return said

    file_method = f"file://{place.directory}/"
    known = {"rank": rank, "world_size": world_size}
    found: dict[str, Any] = {
        "timeout is a number": start(timeout=3, init_method=file_method + "a", **known),
        "unknown scheme": start(init_method="http://127.0.0.1:1", **known),
        "not an address": start(init_method=3, **known),
        "file without path": start(init_method="file://", **known),
        "tcp without port": start(init_method="tcp://127.0.0.1", **known),
        "unknown argument": start(nonsense=1),
        "group_name": start(group_name="job 7", init_method=file_method + "b", **known),
        "pg_options": start(pg_options=None, init_method=file_method + "c", **known),
        "device_id is a number": start(device_id="cpu", init_method=file_method + "d", **known),
    }
    return found


@own_init
def timeout_given(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """The timeout of init_process_group is that of its calls."""
    found: dict[str, Any] = {}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.directory}/a",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=1),
    )
    if rank == 0:
        found["recv"] = error_of(dist.recv, torch.zeros(1), 1)
    else:
        found["rank"] = rank
    meet(place, "timeout", world_size)
    dist.destroy_process_group()
    return found


@own_init
def nobody_comes(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """A rendezvous with too few ranks ends with the store's error."""
    if rank > 1:
        return {"rank": rank}
    meet(place, "nobody", 2)  # a rank that comes later than the timeout hears that there is no server
    said = error_of(
        dist.init_process_group,
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{place.ports[0]}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=2),
    )
    return {"says": said}


def questions(rank: int, world_size: int) -> dict[str, Any]:
    """Row 2, in a world of gloo."""
    found: dict[str, Any] = {
        "available": dist.is_available(),
        "initialized": dist.is_initialized(),
        "gloo": dist.is_gloo_available(),
        "backend gloo": dist.is_backend_available("gloo"),
        "backend GLOO": dist.is_backend_available("GLOO"),
        "backend nonsense": dist.is_backend_available("nonsense"),
        "elastic": dist.is_torchelastic_launched(),
        "backend": dist.get_backend(),
        "backend of world": dist.get_backend(dist.group.WORLD),
        "backend type": type(dist.get_backend()).__name__,
        "rank": dist.get_rank(),
        "rank of world": dist.get_rank(dist.group.WORLD),
        "world": dist.get_world_size(),
        "local": dist.get_node_local_rank(),
        "local again": dist.get_node_local_rank(fallback_rank=7),
        "group is WORLD": dist.group.WORLD is dist.distributed_c10d._get_default_group(),
        "size": dist.group.WORLD.size() if dist.group.WORLD else None,
        "pg rank": dist.group.WORLD.rank() if dist.group.WORLD else None,
        "name": dist.group.WORLD.group_name if dist.group.WORLD else None,
        "description": dist.group.WORLD.group_desc if dist.group.WORLD else None,
        "is ProcessGroup": isinstance(dist.group.WORLD, dist.ProcessGroup),
        "debug level": dist.get_debug_level() == dist.DebugLevel.OFF,
        "pg count": dist.get_pg_count(),
        "default device": dist.distributed_c10d._get_pg_default_device().type,
        "object device": str(dist.distributed_c10d._get_object_coll_device()),
        "default for cpu": dist.get_default_backend_for_device("cpu"),
        "default for device": dist.get_default_backend_for_device(torch.device("cpu")),
        "default for nonsense": error_of(dist.get_default_backend_for_device, "nonsense"),
        "pg options": error_of(dist.get_backend, 3),
    }
    del os.environ["LOCAL_RANK"]
    found["without LOCAL_RANK"] = says(dist.get_node_local_rank)
    found["fallback"] = dist.get_node_local_rank(fallback_rank=7)
    return found


class Doubling(dist.ProcessGroup):
    """A process group written in Python: its all_reduce doubles, nobody else is asked."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        for t in tensors:
            t.mul_(2)
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Done()

    def getBackendName(self) -> str:
        return "doubling"


class _Done(dist.Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def _make_doubling(store: Any, rank: int, size: int, timeout: timedelta) -> Doubling:
    return Doubling(rank, size)


@own_init
def third_party(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """A backend that the program registers is the program's own, in a simulation too."""
    found: dict[str, Any] = {}
    dist.Backend.register_backend("doubling", _make_doubling, devices=["cpu"])
    found["attribute"] = dist.Backend.DOUBLING
    found["again"] = error_of(dist.Backend.register_backend, "doubling", _make_doubling)
    found["available"] = dist.is_backend_available("doubling")
    dist.init_process_group("doubling", init_method=f"file://{place.directory}/a", rank=rank, world_size=world_size)
    t = torch.tensor([3.0])
    dist.all_reduce(t)
    found["t"] = t
    found["backend"] = dist.get_backend()
    found["rank"] = dist.get_rank()
    dist.destroy_process_group()
    return found


def uninitialized(rank: int, world_size: int) -> dict[str, Any]:
    """The same questions after destroy_process_group."""
    dist.destroy_process_group()
    t = torch.ones(1)
    found: dict[str, Any] = {
        "initialized": dist.is_initialized(),
        "world": dist.group.WORLD,
        "get_rank": says(dist.get_rank),
        "get_world_size": says(dist.get_world_size),
        "get_backend": says(dist.get_backend),
        "new_group": says(dist.new_group),
        "barrier": says(dist.barrier),
        "send": error_of(dist.send, t, 0),
        "broadcast": says(dist.broadcast, t, 0),
        "destroy": error_of(dist.destroy_process_group),
    }
    # run_body ends with destroy_process_group: leave it one.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found["alone"] = [dist.get_rank(), dist.get_world_size()]
    dist.all_reduce(t)
    found["t"] = t
    return found


BODIES = [
    env,
    env_missing,
    tcp,
    file,
    store,
    backends,
    arguments,
    timeout_given,
    nobody_comes,
    questions,
    third_party,
    uninitialized,
]


@pytest.mark.parametrize("body", BODIES)
def test_initialization(conform: Conform, body: Any) -> None:
    """Every way to begin, end and begin again, and every question, answers what gloo answers."""
    conform(body)
