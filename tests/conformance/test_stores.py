"""Row 11: stores."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from conformance.arms import Conform, Place, own_init
from conformance.plain import error_of, says

SHORT = timedelta(milliseconds=200)


def make(kind: str, rank: int, world_size: int, place: Place) -> Any:
    if kind == "TCPStore":
        return dist.TCPStore(os.environ["MASTER_ADDR"], place.ports[0], world_size, rank == 0)
    if kind == "TCPStore without libuv":
        return dist.TCPStore(os.environ["MASTER_ADDR"], place.ports[1], world_size, rank == 0, use_libuv=False)
    if kind == "FileStore":
        return dist.FileStore(f"{place.directory}/store", world_size)
    if kind == "FileStore of one":
        return dist.FileStore(f"{place.directory}/store-{rank}", 1)
    if kind == "HashStore":
        return dist.HashStore()
    if kind == "PrefixStore over TCPStore":
        return dist.PrefixStore("p", make("TCPStore", rank, world_size, place))
    if kind == "PrefixStore over FileStore":
        return dist.PrefixStore("p", make("FileStore", rank, world_size, place))
    if kind == "PrefixStore over FileStore of one":
        return dist.PrefixStore("p", make("FileStore of one", rank, world_size, place))
    return dist.PrefixStore("outer", dist.PrefixStore("inner", make("TCPStore", rank, world_size, place)))


def ask(function: Callable[..., Any], *args: Any) -> Any:
    """What the call returns, or the type of what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__


@own_init
def alone(rank: int, world_size: int, place: Place, kind: str) -> dict[str, Any]:
    """Each rank under keys of its own."""
    store = make(kind, rank, world_size, place)
    k = f"rank {rank} "
    found: dict[str, Any] = {
        "set": ask(store.set, k + "a", "one"),
        "get": ask(store.get, k + "a"),
        "set bytes": ask(store.set, k + "b", b"\x00\xff"),
        "get bytes": ask(store.get, k + "b"),
        "set again": ask(store.set, k + "a", "two"),
        "get again": ask(store.get, k + "a"),
        "empty value": [ask(store.set, k + "e", ""), ask(store.get, k + "e")],
        "add": [ask(store.add, k + "n", 5), ask(store.add, k + "n", -2), ask(store.add, k + "n", 0)],
        "get number": ask(store.get, k + "n"),
        "check": [ask(store.check, [k + "a"]), ask(store.check, [k + "a", k + "x"])],
        "check nothing": ask(store.check, []),
        "compare new": ask(store.compare_set, k + "c", "", "first"),
        "compare right": ask(store.compare_set, k + "c", "first", "second"),
        "compare wrong": ask(store.compare_set, k + "c", "first", "third"),
        "compare absent": ask(store.compare_set, k + "absent", "old", "new"),
        "append": [ask(store.append, k + "l", "ab"), ask(store.append, k + "l", "cd")],
        "appended": ask(store.get, k + "l") if "FileStore" not in kind else None,
        "delete": ask(store.delete_key, k + "a"),
        "delete absent": ask(store.delete_key, k + "never"),
        "wait there": ask(store.wait, [k + "c"]),
        "wait there with timeout": ask(store.wait, [k + "c"], SHORT),
        "extended": ask(store.has_extended_api),
        "multi_set": ask(store.multi_set, [k + "m1", k + "m2"], ["x", "y"]),
        "multi_get": ask(store.multi_get, [k + "m1", k + "m2"]),
        "multi_set uneven": ask(store.multi_set, [k + "m1"], ["x", "y"]),
        "set number": ask(store.set, k + "z", 3),
        "add text": ask(store.add, k + "z", "3"),
        "get number key": ask(store.get, 3),
        "timeout": store.timeout,
    }
    found["set_timeout"] = ask(store.set_timeout, SHORT)
    found["timeout now"] = store.timeout
    found["get absent"] = ask(store.get, k + "nothing")
    found["wait absent"] = ask(store.wait, [k + "nothing"])
    found["wait absent with timeout"] = ask(store.wait, [k + "nothing"], SHORT)
    found["multi_get absent"] = ask(store.multi_get, [k + "m1", k + "nothing"])
    found["still works"] = [ask(store.set, k + "y", "1"), ask(store.get, k + "y")]
    # The server, which is rank 0, must outlive the others.
    end = dist.FileStore(f"{place.directory}/end", world_size)
    end.set(f"end {rank}", "")
    end.wait([f"end {i}" for i in range(world_size)], timedelta(seconds=20))
    return found


@own_init
def together(rank: int, world_size: int, place: Place, kind: str) -> dict[str, Any]:
    """The ranks meet over the store."""
    store = make(kind, rank, world_size, place)
    found: dict[str, Any] = {}
    if rank == 0:
        store.set("greeting", "hello")
    found["greeting"] = store.get("greeting")  # waits for rank 0
    store.add("count", rank + 1)
    store.set(f"done {rank}", "yes")
    store.wait([f"done {i}" for i in range(world_size)], timedelta(seconds=20))
    found["count"] = store.add("count", 0)
    store.set(f"read {rank}", "yes")
    store.wait([f"read {i}" for i in range(world_size)])
    winner = store.compare_set("winner", "", "taken")
    found["winner"] = winner
    store.set(f"end {rank}", "yes")
    store.wait([f"end {i}" for i in range(world_size)])
    if "FileStore" not in kind:
        if rank == 0:
            found["keys"] = store.num_keys()
            store.set("counted", "yes")
        store.wait(["counted"])
        if rank != 0:
            store.set(f"left {rank}", "yes")
        else:  # the server must outlive its clients, also behind prefixes
            store.wait([f"left {i}" for i in range(1, world_size)])
    return found


@own_init
def queues(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    store = make("TCPStore", rank, world_size, place)
    found: dict[str, Any] = {}
    if rank == 0:
        found["push"] = [ask(store.queue_push, "q", "one"), ask(store.queue_push, "q", "two")]
        found["len"] = ask(store.queue_len, "q")
        found["pop"] = [ask(store.queue_pop, "q"), ask(store.queue_pop, "q", False)]
        found["pop empty"] = ask(store.queue_pop, "q", False)
        found["len empty"] = ask(store.queue_len, "q")
        store.queue_push("to 1", "for you")
    if rank == 1:
        found["blocking pop"] = ask(store.queue_pop, "to 1")
    if rank == 2:
        store.set_timeout(SHORT)
        found["pop nothing"] = ask(store.queue_pop, "nothing")
    store.set_timeout(timedelta(seconds=20))
    store.add("left", 1)
    store.set(f"left {rank}", "")
    if rank == 0:
        store.wait([f"left {i}" for i in range(world_size)])
    hash_store = dist.HashStore()
    found["hash push"] = ask(hash_store.queue_push, "q", "v")
    found["hash len"] = ask(hash_store.queue_len, "q")
    found["hash pop"] = ask(hash_store.queue_pop, "q")
    return found


@own_init
def attributes(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {}
    store = make("TCPStore", rank, world_size, place)
    found["host"] = store.host == os.environ["MASTER_ADDR"]
    found["port"] = store.port == place.ports[0]
    found["libuv"] = store.libuvBackend
    found["is Store"] = isinstance(store, dist.Store)
    found["is TCPStore"] = isinstance(store, dist.TCPStore)
    file_store = dist.FileStore(f"{place.directory}/f", world_size)
    found["path"] = file_store.path == f"{place.directory}/f"
    prefixed = dist.PrefixStore("p", file_store)
    found["underlying"] = isinstance(prefixed.underlying_store, dist.FileStore)
    prefixed.set(f"k{rank}", "v")
    found["under the prefix"] = file_store.get(f"p/k{rank}")
    found["clone"] = error_of(store.clone)
    found["is PrefixStore"] = isinstance(prefixed, dist.PrefixStore)
    found["has HashStore"] = isinstance(dist.HashStore(), dist.Store)
    store.set(f"left {rank}", "")
    store.wait([f"left {i}" for i in range(world_size)])
    store.set(f"gone {rank}", "")
    if rank == 0:
        store.wait([f"gone {i}" for i in range(world_size)])
    return found


@own_init
def refusals(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """Constructors that fail, with their errors."""
    found: dict[str, Any] = {}
    if rank == 0:
        found["nobody listens"] = error_of(
            dist.TCPStore, "127.0.0.1", place.ports[2], 2, False, timedelta(milliseconds=300)
        )
        found["clients missing"] = error_of(
            dist.TCPStore, "127.0.0.1", place.ports[3], 2, True, timedelta(milliseconds=300)
        )
        server = dist.TCPStore("127.0.0.1", place.ports[4], None, True, wait_for_workers=False)
        found["taken"] = error_of(dist.TCPStore, "127.0.0.1", place.ports[4], None, True, wait_for_workers=False)
        found["works"] = [server.set("a", "b"), server.get("a")]
        # The server and a client in one process.
        client = dist.TCPStore("127.0.0.1", place.ports[4], None, False, wait_for_workers=False)
        found["client reads"] = client.get("a")
        free = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        found["port 0"] = free.port > 0
    else:
        found["rank"] = rank
    found["no arguments"] = error_of(dist.TCPStore)
    found["port is text"] = error_of(dist.TCPStore, "127.0.0.1", "1")
    found["store itself"] = error_of(dist.FileStore)
    return found


def default_store(rank: int, world_size: int) -> dict[str, Any]:
    """The store of the group that init_process_group made."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"mine {rank}", str(rank))
    return {
        "neighbour": store.get(f"mine {(rank + 1) % world_size}"),
        "is Store": isinstance(store, dist.Store),
        "type": type(store).__name__,
    }


class Mine(dist.Store):
    """A store of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else bytes(value, "utf8")

    def get(self, key: str) -> bytes:
        return self.values[key]


@own_init
def subclass(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    store = Mine()
    store.set("a", "1")
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("b", "2")
    return {"a": store.get("a"), "keys": sorted(store.values)}


class Listening(dist.Store):
    """A store of the program's own that keeps what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def append(self, key: str, value: Any) -> None:
        self.heard.append(("append", key, value))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.heard.append(("multi_set", keys, values))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.heard.append(("compare_set", key, expected, desired))
        return b"held"

    def has_extended_api(self) -> bool:
        return True


@own_init
def values_are_bytes(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """What reaches a program's own store through a prefix is bytes, as from C++."""
    store = Listening()
    prefixed = dist.PrefixStore("p", store)
    prefixed.append("a", "1")
    prefixed.multi_set(["b"], ["2"])
    prefixed.compare_set("c", "", "3")
    return {"heard": store.heard, "of nothing": says(dist.PrefixStore, "p", None)}


@own_init
def files(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """A FileStore's file is there while it is used, and goes with the last of as many stores as were said."""
    path = f"{place.directory}/file-{rank}"
    there = []
    for sizes in ((1, 1), (3, 3), (-1,)):
        stores = [dist.FileStore(path, size) for size in sizes]
        there.append(os.path.exists(path))
        while stores:
            del stores[0]
            there.append(os.path.exists(path))
        if os.path.exists(path):
            os.remove(path)
    return {"there": there}


@own_init
def clients(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """Only the server waits for all its clients; an agent's store may be opened twice."""
    if rank:
        return {"rank": rank}
    server = dist.TCPStore("127.0.0.1", place.ports[5], 5, True, wait_for_workers=False)
    port, unused = server.port, place.ports[6]
    others = [dist.TCPStore("127.0.0.1", port, 5, False, timedelta(seconds=10)) for _ in range(3)]
    counted = [len(others), server.num_keys()]
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "1"
    os.environ["MASTER_PORT"] = str(port)
    again = dist.TCPStore("localhost", port, 1, True, wait_for_workers=False)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return {
        "counted": counted,
        "again": again.port == port,
        "size 0": says(dist.TCPStore, "localhost", 0, world_size=0, is_master=False),
        "name": says(dist.TCPStore, "dnsnotexist", unused, 2, True, timedelta(milliseconds=300)).replace(
            f" {unused})", " PORT)"
        ),
        "shown": re.sub(r"\d+", "N", repr(others[0])).split("(")[0:3],
    }


TCP = ["TCPStore", "TCPStore without libuv", "PrefixStore over TCPStore", "PrefixStore twice"]
KINDS = [*TCP, "HashStore", "FileStore of one", "PrefixStore over FileStore of one"]
SHARED = [*TCP, "FileStore", "PrefixStore over FileStore"]
BODIES: list[Any] = [queues, attributes, refusals, default_store, subclass, values_are_bytes, files, clients]


@pytest.mark.parametrize("kind", KINDS)
def test_store_alone(conform: Conform, kind: str) -> None:
    """Every method of a store, and the errors of its timeouts, answer as torch's."""
    conform(alone, kind)


@pytest.mark.parametrize("kind", SHARED)
def test_store_together(conform: Conform, kind: str) -> None:
    """Ranks meet over a store."""
    conform(together, kind)


@pytest.mark.parametrize("body", BODIES)
def test_stores(conform: Conform, body: Any) -> None:
    """Queues, attributes and refusals of stores are torch's."""
    conform(body)
