"""The stores of a simulated world: hash, prefix, file and TCP store, and the rendezvous through them."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import Store

from distsim.debug.messages import wait_text
from distsim.debug.records import CallWait, StoreWait, Wait
from distsim.sim.isolation.environ import MASTER_PORT
from distsim.sim.isolation.process import RankTask, require_task
from distsim.sim.kernel.shared import KeyValues
from distsim.sim.kernel.steps import Access
from distsim.sim.kernel.turns import asking_line, name_of
from distsim.sim.orders.stores import Limit, meet_own, take_turn
from distsim.sim.processes.hosts import machine_of, meant

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

# -- A store in virtual time, and what it holds: what the kinds of stores have in common.
#
# They subclass `torch.distributed.Store`, so torch's own code and C++ accept them. Errors are those of torch 2.13's
# stores, type and words.

DEFAULT_TIMEOUT = timedelta(seconds=300)


_LONG = timedelta(minutes=1)
"""Limit of a wait in a store from which nobody is likely to catch its error and go on."""


def as_bytes(value: str | bytes) -> bytes:
    """Convert a value as a store does, or raise torch's error."""
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"incompatible function arguments: a value must be str, not {type(value).__name__}")
    return bytes(value)


def changed(task: RankTask, values: KeyValues, why: Wait, give_up_s: float, explicit: bool) -> bool:
    """Wait until a rank changes the store, at most until *give_up_s*, and return whether one did. Raise torch's error
    if the store's server has ended.
    """
    if values.lost.triggered:
        raise lost_error()
    left_s = give_up_s - task.now_s()
    return left_s > 0 and task.wait_until(values.next_change(), why, left_s, explicit)


def lost_error() -> Exception:
    """Return torch's error of a store whose server closes the connection."""
    error: Exception = dist.DistNetworkError(
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
    )
    return error


def as_key(value: object, method: str) -> str:
    """Return *value*, an argument of *method*, as a key; raise torch's error if it is not a string."""
    if not isinstance(value, str):
        raise TypeError(f"{method}(): incompatible function arguments: a key must be str, not {type(value).__name__}")
    return value


class SimStore(Store):
    """Base class of the four stores."""

    _error: type[Exception] = dist.DistStoreError
    _is_reset = False
    """Whether the store was written to after its server had ended, which resets the connection."""

    def __init__(self, values: KeyValues, timeout: timedelta) -> None:
        super().__init__()
        self._values = values
        self._timeout = timeout
        self._explicit = timeout != DEFAULT_TIMEOUT

    # -- waiting

    def _turn(
        self,
        method: str,
        keys: Sequence[str],
        access: Access,
        limit: Limit | None = None,
        is_answered: bool = True,
    ) -> RankTask:
        """Make one round trip to the server. A call that is not answered cannot notice that the server has ended.

        In an exploration the operation *method* on *keys* waits for its turn, and with a *limit* also until the keys
        are there.

        Raises:
            TimeoutError: That wait has reached its limit.
        """
        task = require_task()
        task.compute(task.port.facts.cluster.cpu.store_latency_s)
        turns = task.port.facts.turns
        if turns is None:
            task.flush(StoreWait(tuple(keys), method) if method == "check" else None)
        elif (caller := asking_line(sys._getframe(1))) is not None:
            if not take_turn(turns, task, caller, self._values, (method, tuple(keys), access), limit):
                raise TimeoutError
        else:
            task.flush()
            meet_own(task, self._values, keys, access)
        if self._values.lost.triggered:
            was_reset, self._is_reset = self._is_reset, True
            if was_reset:
                raise dist.DistNetworkError("Broken pipe")
            if is_answered:
                raise lost_error()
        return task

    def _late(self, keys: Sequence[str], limit: timedelta) -> Exception:
        shown = ", ".join(f"/{key}" for key in keys)
        return self._error(f"wait timeout after {int(limit.total_seconds() * 1000)}ms, keys: {shown}")

    def _wait_for(self, method: str, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout if timeout is None else timeout
        explicit = (self._explicit or timeout is not None) and limit < dist.distributed_c10d.default_pg_timeout
        error = self._late(keys, limit)
        try:
            task = self._turn(method, keys, Access.READ, (limit.total_seconds(), explicit))
        except TimeoutError:
            raise error from None
        give_up_s = task.now_s() + limit.total_seconds()
        data = self._values.data
        while missing := tuple(key for key in keys if key not in data and not self._values.queues.get(key)):
            if not changed(task, self._values, StoreWait(missing), give_up_s, explicit):
                if limit >= _LONG:  # who asks for less may go on after it
                    task.port.traced.misses(task.process.rank, wait_text(StoreWait(missing)))
                raise error
        if task.port.facts.turns is not None:
            meet_own(task, self._values, keys, Access.READ)

    # -- the interface of torch.distributed.Store

    def set(self, key: str, value: str | bytes) -> None:
        as_key(key, "set")
        if not isinstance(value, str | bytes):
            raise TypeError(f"set(): incompatible function arguments: a value must be str, not {type(value).__name__}")
        self._turn("set", (key,), Access.WRITE, is_answered=False)
        self._values.data[key] = as_bytes(value)
        self._values.change()

    def get(self, key: str) -> bytes:
        self._wait_for("get", [as_key(key, "get")])
        return self._values.data[key]

    def add(self, key: str, amount: int) -> int:
        if not isinstance(amount, int):
            raise TypeError("add(): incompatible function arguments: an amount must be int")
        self._turn("add", (key,), Access.WRITE if amount else Access.READ)
        total = self._integer(key) + int(amount)
        self._values.data[key] = str(total).encode()
        self._values.change()
        return total

    def _integer(self, key: str) -> int:
        held = self._values.data.get(as_key(key, "add"), b"0")
        try:
            return int(held)
        except ValueError:
            raise ValueError("stoll") from None

    def append(self, key: str, value: str | bytes) -> None:
        self._turn("append", (key,), Access.WRITE, is_answered=False)
        self._values.data[key] = self._values.data.get(key, b"") + as_bytes(value)
        self._values.change()

    def check(self, keys: Sequence[str]) -> bool:
        task, why = require_task(), StoreWait(tuple(keys), "check")
        explores = task.port.facts.turns is not None and asking_line(sys._getframe(1)) is not None
        if explores or not task.quiet_polls:  # a loop that only checks goes on when something has happened
            self._turn("check", keys, Access.READ)
        held = self._values
        there = all(key in held.data or held.queues.get(key) for key in keys)
        if not there and not explores:
            task.poll(why)
            if held.lost.triggered:
                raise lost_error()
            there = all(key in held.data or held.queues.get(key) for key in keys)
        return there

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._turn("compare_set", (key,), Access.WRITE)
        held = self._values.data.get(key)
        if held is None and as_bytes(expected):
            return as_bytes(expected)
        if held is None or held == as_bytes(expected):
            self._values.data[key] = as_bytes(desired)
            self._values.change()
        return self._values.data[key]

    def delete_key(self, key: str) -> bool:
        self._turn("delete_key", (key,), Access.WRITE)
        gone = self._values.data.pop(key, None) is not None
        self._values.change()
        return gone

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._wait_for("multi_get", list(keys))
        return [self._values.data[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._turn("multi_set", keys, Access.WRITE, is_answered=False)
        self._values.data.update((key, as_bytes(value)) for key, value in zip(keys, values, strict=False))
        self._values.change()

    def num_keys(self) -> int:
        self._turn("num_keys", (), Access.READ)
        return len(self._values.data)

    def list_keys(self) -> list[str]:
        self._turn("list_keys", (), Access.READ)
        return list(self._values.data)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for("wait", list(keys), timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._explicit = timeout not in (DEFAULT_TIMEOUT, dist.distributed_c10d.default_pg_timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._turn("queue_push", (key,), Access.WRITE, is_answered=False)
        self._values.queues.setdefault(key, deque()).append(as_bytes(value))
        self._values.change()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        error = self._late((key,), self._timeout)
        try:
            limit = (self._timeout.total_seconds(), True) if block else None
            task = self._turn("queue_pop", (key,), Access.WRITE, limit)
        except TimeoutError:
            raise error from None
        give_up_s = task.now_s() + self._timeout.total_seconds()
        while not self._values.queues.get(key):
            if not block:
                raise dist.QueueEmptyError("queue is empty")
            if not changed(task, self._values, StoreWait((key,), "queue"), give_up_s, True):
                raise error
        return self._values.queues[key].popleft()

    def queue_len(self, key: str) -> int:
        self._turn("queue_len", (key,), Access.READ)
        return len(self._values.queues.get(key, ()))

    def clone(self) -> SimStore:
        other = type(self).__new__(type(self))
        Store.__init__(other)
        other.__dict__.update(self.__dict__)
        return other


def _new_values() -> KeyValues:
    """Return the contents of a store of the calling process."""
    task = require_task()
    turns = task.port.facts.turns
    number = 0 if turns is None else turns.number("hash store", name_of(task))
    return KeyValues(task.port.event, ("hash", "" if turns is None else name_of(task), number))


class HashStore(SimStore):
    """`torch.distributed.HashStore`: within one process."""

    def __init__(self, values: KeyValues | None = None) -> None:
        super().__init__(values or _new_values(), DEFAULT_TIMEOUT)


class PrefixStore(Store):
    """`torch.distributed.PrefixStore` over a simulated store."""

    def __init__(self, prefix: str, store: Store) -> None:
        if store is None:
            raise ValueError("store argument cannot be None")
        super().__init__()
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Store:
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        inner = self._store
        while isinstance(inner, PrefixStore):
            inner = inner._store
        return inner

    def _name(self, key: str) -> str:
        as_key(key, "PrefixStore")
        return f"{self._prefix}/{key}"

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def list_keys(self) -> list[str]:
        start = self._prefix + "/"
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> Any:
        return self._store.timeout

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())


def _as_sent(argument: Any) -> Any:
    """Return an argument as the store below gets it: text as bytes."""
    if isinstance(argument, list | tuple):
        return [_as_sent(value) for value in argument]
    return argument.encode() if isinstance(argument, str) else argument


def _of_key(name: str) -> Any:
    def method(self: PrefixStore, key: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, name)(self._name(key), *map(_as_sent, args), **kwargs)

    return method


def _of_keys(name: str) -> Any:
    def method(self: PrefixStore, keys: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, name)([self._name(key) for key in keys], *map(_as_sent, args), **kwargs)

    return method


for _called in ("set", "get", "add", "append", "compare_set", "delete_key", "queue_push", "queue_pop", "queue_len"):
    setattr(PrefixStore, _called, _of_key(_called))
for _called in ("check", "multi_get", "multi_set", "wait"):
    setattr(PrefixStore, _called, _of_keys(_called))


# -- A FileStore in virtual time, and the life of its file.


class _File:
    """A FileStore's hold on its file, which is removed with the last of the announced number of stores."""

    def __init__(self, stores: dict[tuple[str, Any], Any], address: tuple[str, str], world_size: int) -> None:
        self._stores, self._address, self._world_size = stores, address, world_size
        self._values: KeyValues = stores[address]
        self._is_open = True

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        values = self._values
        values.clients -= 1
        values.closed += 1
        if values.clients == 0 and 0 <= self._world_size <= values.closed:
            with contextlib.suppress(OSError):
                os.remove(self._address[1])
            if self._stores.get(self._address) is values:
                del self._stores[self._address]

    def leave(self) -> None:
        """Keep the file even if its holder ends without closing it."""
        self._is_open = False


def close_files(process: SimProcess) -> None:
    """Close the FileStores of a process that ends. A forked child leaves by os._exit, which closes none."""
    files, process.groups.file_stores = process.groups.file_stores, {}
    for file in files.values():
        if process.family.is_forked:
            file.leave()
        else:
            file.close()


def _has_content(path: str) -> bool:
    """Return whether a real run has left keys in the file; a simulated run leaves it empty."""
    with contextlib.suppress(OSError):
        return os.path.getsize(path) > 0
    return False


class FileStore(SimStore):
    """Simulated `torch.distributed.FileStore`, shared by ranks that name the same path.

    The file is created and deleted as torch's is, and stays empty.
    """

    _error = RuntimeError

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        task = require_task()
        address = ("file", os.path.abspath(file_name))
        is_new = address not in task.port.shared.stores
        values = task.port.shared.open_store(address)
        if is_new:
            values.data["efcount/"] = b"0"
            if _has_content(file_name):
                task.port.note(
                    f"{file_name} held keys before this run, which the simulation ignores: real ranks would read the "
                    "addresses of an earlier run there, and may fail to connect; delete it before each run"
                )
        os.close(os.open(file_name, os.O_RDWR | os.O_CREAT, 0o644))
        super().__init__(values, DEFAULT_TIMEOUT)
        self.path = file_name
        values.clients += 1
        files: dict[int, _File] = task.process.groups.file_stores
        own = _File(task.port.shared.stores, address, world_size)
        number = len(files)
        files[number] = own
        weakref.finalize(self, _File.close, own).atexit = False

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        super().delete_key(key)
        return True

    def has_extended_api(self) -> bool:
        return False

    def _has_no_queue(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("queue support is not implemented.")

    queue_push = queue_pop = queue_len = _has_no_queue


_EPHEMERAL_PORT = 32_768


class TCPStore(SimStore):
    """`torch.distributed.TCPStore`: one server for each (host, port) of the simulated job."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        if not isinstance(port, int) or not isinstance(host_name, str):
            raise TypeError("__init__(): incompatible constructor arguments: host_name must be str and port int")
        task = require_task()
        shared = task.port.shared
        if world_size == 0:
            raise ValueError("TCPStore world size cannot be 0")
        if port == 0 and is_master:
            port = shared.free_port()
        if master_listen_fd is not None:  # the store would own the socket
            os.close(master_listen_fd)
        here = machine_of(task.process)
        address: tuple[str, tuple[int | None, int]] = ("tcp", (here, port))
        if is_master:
            agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") and os.environ.get("MASTER_PORT") == str(port)
            if address in shared.stores and not (multi_tenant or agents):
                raise dist.DistNetworkError(
                    "The server socket has failed to listen on any local network address. "
                    f"port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
                )
            ends_with_rank = self._serve(task, address)
        milliseconds = int(timeout.total_seconds() * 1000)
        refused = dist.DistNetworkError(
            f"The client socket has timed out after {milliseconds}ms while trying to connect to ({host_name}, {port})."
        )
        task.port.faults.on_connect(task, host_name, port, timeout, timeout != DEFAULT_TIMEOUT)
        give_up_s = task.now_s() + timeout.total_seconds()
        machine = meant(host_name, task.process)
        address = ("tcp", (machine, port))
        task.process.groups.connecting = (host_name, port)
        task.process.groups.meets_at = f"{host_name}:{port}"
        while address not in shared.stores:
            left_s = give_up_s - task.now_s()
            where = _waiting(task, StoreWait((f"{host_name}:{port}",), "the store's server"))
            if left_s <= 0 or not task.wait_until(shared.next_store(), where, left_s, timeout != DEFAULT_TIMEOUT):
                raise refused
        task.process.groups.connecting = None
        task.process.groups.stores[f"{host_name}:{port}"] = is_master and ends_with_rank
        super().__init__(shared.stores[address], timeout)
        self.host, self.port, self.libuvBackend = host_name, port, use_libuv
        self._is_server = is_master
        if wait_for_workers and world_size:
            self._values.clients += 1
            self._values.data["init/"] = str(self._values.clients).encode()
            self._values.change()
            if is_master:  # keeps the server alive until all have come
                self._wait_for_workers(task, world_size, give_up_s)

    def _serve(self, task: RankTask, address: tuple[str, tuple[int | None, int]]) -> bool:
        """Open the store at *address*, and return whether it ends with this process.

        With torchrun the agent serves the store at MASTER_PORT.
        """
        process, shared = task.process, task.port.shared
        values = shared.open_store(address)
        has_agent = process.family.parent is None and task.port.launcher is None
        if has_agent and address[1][1] == MASTER_PORT:
            return False
        process.groups.served.append(values.name)
        assert process.ended.callbacks is not None
        process.ended.callbacks.append(lambda _: shared.close_store(address, values))
        return True

    def clone(self) -> TCPStore:
        return TCPStore(self.host, self.port, None, False, self._timeout, wait_for_workers=False)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise dist.DistStoreError("multi_set keys and values vectors must be of same size")
        super().multi_set(keys, values)

    def _wait_for_workers(self, task: RankTask, world_size: int, give_up_s: float) -> None:
        values, traced = self._values, task.port.traced
        while values.clients < traced.number_of(world_size):
            seconds, joined = int(self._timeout.total_seconds()) + 1, f"{values.clients}/{world_size}"
            text = f"Timed out after {seconds} seconds waiting for clients. {joined} clients joined."
            why = _waiting(task, StoreWait((f"{world_size - values.clients} more clients",), "workers of the store"))
            if not changed(task, values, why, give_up_s, self._explicit):
                raise dist.DistStoreError(text)

    def __repr__(self) -> str:
        server = f"TCPServer(port={self.port})" if self._is_server else "<nullptr>"
        ends = f"addr=[{self.host}]:{_EPHEMERAL_PORT}, remote=[{self.host}]:{self.port}"
        return f"TCPStore(client=TCPClient(SocketImpl(fd=3, {ends})), server={server})"


def _waiting(task: RankTask, why: Wait) -> Wait:
    """Return the wait for a store; if init_process_group opened it, the wait for that call."""
    joining = task.process.groups.joining
    return why if joining is None else CallWait(joining)
