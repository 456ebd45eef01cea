"""A store in virtual time, and what it holds: what the kinds of stores have in common.

They subclass `torch.distributed.Store`, so torch's own code and C++ accept them. Errors are those of torch 2.13's
stores, type and words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import simpy
import torch.distributed as dist
from torch.distributed import Store

from distsim.debug.records import StoreWait, Wait
from distsim.sim.isolation.process import RankTask, require_task

__all__ = ["DEFAULT_TIMEOUT", "HashStore", "KeyValues", "SimStore", "as_bytes", "as_key", "changed"]

DEFAULT_TIMEOUT = timedelta(seconds=300)


class KeyValues:
    """The contents of one store, shared by every rank that opens it."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.data: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.clients = 0
        self.closed = 0
        """FileStores that were closed."""
        self._changed: list[simpy.Event] = []

    def change(self) -> None:
        """Wake whoever waits for a key."""
        waiting, self._changed = self._changed, []
        for event in waiting:
            event.succeed()

    def next_change(self) -> simpy.Event:
        event = self.env.event()
        self._changed.append(event)
        return event


def as_bytes(value: str | bytes) -> bytes:
    """As a store keeps it; torch's error for what it refuses."""
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"incompatible function arguments: a value must be str, not {type(value).__name__}")
    return bytes(value)


def changed(task: RankTask, values: KeyValues, why: Wait, give_up_s: float, explicit: bool) -> bool:
    """Wait until somebody changes the store, until *give_up_s* at most."""
    left_s = give_up_s - task.now_s()
    return left_s > 0 and task.wait_until(values.next_change(), why, left_s, explicit)


def as_key(value: object, method: str) -> str:
    """*value*, which *method* was given; torch's error where it is no text."""
    if not isinstance(value, str):
        raise TypeError(f"{method}(): incompatible function arguments: a key must be str, not {type(value).__name__}")
    return value


class SimStore(Store):
    """What the four stores have in common."""

    _absent = "wait timeout after {ms}ms, keys: {keys}"
    _shown_prefix = "/"
    _error: type[Exception] = dist.DistStoreError

    def __init__(self, values: KeyValues, timeout: timedelta) -> None:
        super().__init__()
        self._values = values
        self._timeout = timeout
        self._explicit = timeout != DEFAULT_TIMEOUT

    # -- waiting

    def _turn(self, why: StoreWait | None = None) -> RankTask:
        """One round trip to the server."""
        task = require_task()
        task.compute(task.world.store_latency_s)
        task.flush(why)
        return task

    def _wait_for(self, keys: Sequence[str], timeout: timedelta | None, message: str | None = None) -> None:
        task = self._turn()
        explicit = self._explicit if timeout is None else True
        limit = self._timeout if timeout is None else timeout
        give_up_s = task.now_s() + limit.total_seconds()
        shown = ", ".join(self._shown_prefix + key for key in keys)
        text = (message or self._absent).format(
            ms=int(limit.total_seconds() * 1000), keys=shown, key=keys[0] if keys else ""
        )
        error = self._error(text)
        data = self._values.data
        while not all(key in data or self._values.queues.get(key) for key in keys):
            missing = tuple(key for key in keys if key not in data and not self._values.queues.get(key))
            if not changed(task, self._values, StoreWait(missing), give_up_s, explicit):
                raise error

    # -- the interface of torch.distributed.Store

    def set(self, key: str, value: str | bytes) -> None:
        as_key(key, "set")
        if not isinstance(value, str | bytes):
            raise TypeError(f"set(): incompatible function arguments: a value must be str, not {type(value).__name__}")
        self._turn()
        self._values.data[key] = as_bytes(value)
        self._values.change()

    def get(self, key: str) -> bytes:
        self._wait_for([as_key(key, "get")], None)
        return self._values.data[key]

    def add(self, key: str, amount: int) -> int:
        if not isinstance(amount, int):
            raise TypeError("add(): incompatible function arguments: an amount must be int")
        self._turn()
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
        self._turn()
        self._values.data[key] = self._values.data.get(key, b"") + as_bytes(value)
        self._values.change()

    def check(self, keys: Sequence[str]) -> bool:
        task, why = require_task(), StoreWait(tuple(keys), "check")
        if not task.quiet_polls:  # a loop that only checks goes on when something has happened
            self._turn(why)
        held = self._values
        there = all(key in held.data or held.queues.get(key) for key in keys)
        if not there:
            task.poll(why)
            there = all(key in held.data or held.queues.get(key) for key in keys)
        return there

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._turn()
        held = self._values.data.get(key)
        if held is None and as_bytes(expected):
            return as_bytes(expected)
        if held is None or held == as_bytes(expected):
            self._values.data[key] = as_bytes(desired)
            self._values.change()
        return self._values.data[key]

    def delete_key(self, key: str) -> bool:
        self._turn()
        gone = self._values.data.pop(key, None) is not None
        self._values.change()
        return gone

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._wait_for(list(keys), None)
        return [self._values.data[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._turn()
        self._values.data.update((key, as_bytes(value)) for key, value in zip(keys, values, strict=False))
        self._values.change()

    def num_keys(self) -> int:
        self._turn()
        return len(self._values.data)

    def list_keys(self) -> list[str]:
        self._turn()
        return list(self._values.data)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for(list(keys), timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._explicit = timeout not in (DEFAULT_TIMEOUT, dist.distributed_c10d.default_pg_timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._turn()
        self._values.queues.setdefault(key, deque()).append(as_bytes(value))
        self._values.change()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        task = self._turn()
        give_up_s = task.now_s() + self._timeout.total_seconds()
        while not self._values.queues.get(key):
            if not block:
                raise dist.QueueEmptyError("queue is empty")
            milliseconds = int(self._timeout.total_seconds() * 1000)
            error = self._error(self._absent.format(ms=milliseconds, keys=self._shown_prefix + key, key=key))
            if not changed(task, self._values, StoreWait((key,), "queue"), give_up_s, True):
                raise error
        return self._values.queues[key].popleft()

    def queue_len(self, key: str) -> int:
        self._turn()
        return len(self._values.queues.get(key, ()))

    def clone(self) -> SimStore:
        other = type(self).__new__(type(self))
        Store.__init__(other)
        other.__dict__.update(self.__dict__)
        return other


class HashStore(SimStore):
    """`torch.distributed.HashStore`: within one process."""

    _absent = "Wait timeout"
    _shown_prefix = ""

    def __init__(self, values: KeyValues | None = None) -> None:
        super().__init__(values or KeyValues(require_task().world.env), DEFAULT_TIMEOUT)
