"""Objects that the ranks of a job share, most under the key at which they meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from distsim.sim.kernel.clocks import Clock
from distsim.sim.kernel.scheduler import Event

FIRST_PORT = 40_001
"""First port of those that a server gets which asks for any."""


class KeyValues:
    """The contents of one store, shared by every rank that opens it."""

    def __init__(self, new_event: Callable[[], Event], name: Hashable = "") -> None:
        self._new_event = new_event
        self.name = name
        """Name of the store, which is the same in all runs: its kind and address."""
        self.data: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.clients = 0
        self.closed = 0
        """FileStores that were closed."""
        self.lost = new_event()
        """Happens when the process that serves the store ends."""
        self._changed: list[Event] = []
        self.born: dict[str, int] = {}
        """In an exploration, the step that made each key."""
        self.pushed: dict[str, deque[int]] = {}
        """In an exploration, the steps that pushed what each queue holds."""
        self.clocks: dict[str, Clock] = {}
        """In an exploration, what happens before torch's own last operation on a key."""

    def change(self) -> None:
        """Wake the tasks that wait for a key."""
        waiting, self._changed = self._changed, []
        for event in waiting:
            event.succeed()

    def next_change(self) -> Event:
        """Return an event that happens with the next change."""
        event = self._new_event()
        self._changed.append(event)
        return event


class SharedObjects:
    """Stores, groups, workers and more of one job."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self.stores: dict[tuple[str, Any], KeyValues] = {}
        """By kind and address: ("tcp", (machine, port)), ("file", path), ..."""
        self.communicators: dict[tuple[Any, ...], Any] = {}
        """Communicators (c10d/communicator.py) by job, rendezvous, members and how often the group was made."""
        self.rendezvous: dict[tuple[Any, ...], Any] = {}
        """Worlds that ranks join (c10d/rendezvous.py), by their address, size and number."""
        self.handles: dict[tuple[Any, ...], Any] = {}
        """Processes by their handles for reconfiguration, and the handles that claim its numbers (reconfigure.py)."""
        self.members: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Ranks of groups that are not on record, one object for all ranks that make them."""
        self.environ_of: Callable[[Any], dict[bytes, bytes]] = lambda slot: {}
        """Returns the environment that the launcher gives the rank on a slot."""
        self.rpc_workers: dict[str, Any] = {}
        """RPC workers (rpc/transport.Workers), by store."""
        self.random_fills: Any = None
        """Random numbers that several ranks draw alike (special.RandomFills)."""
        self.libraries: dict[str, Any] = {}
        """What the replacements of a library share, by a name of theirs."""
        self.libraries_left_out: set[str] = set()
        """GPU libraries with a replacement that programs did not get, because they catch the ImportError."""
        self.opened: dict[int, tuple[int, int]] = {}
        """File descriptors that ranks opened for writing, and the files that they referred to."""
        self._store_waiters: list[Event] = []
        self._next_port = FIRST_PORT

    def open_store(self, address: tuple[str, Any]) -> KeyValues:
        """Return the store at *address*. If it is new, wake the tasks that wait for one."""
        values = self.stores.get(address)
        if values is None:
            values = self.stores[address] = KeyValues(self._new_event, address)
            waiting, self._store_waiters = self._store_waiters, []
            for event in waiting:
                event.succeed()
        return values

    def close_store(self, address: tuple[str, Any], values: KeyValues) -> None:
        """Remove the store *values* at *address*, because its server has ended; its clients wake up."""
        if self.stores.get(address) is values:
            del self.stores[address]
        if not values.lost.triggered:
            values.lost.succeed()
            values.change()

    def next_store(self) -> Event:
        """Return an event that happens when the next store is opened."""
        event = self._new_event()
        self._store_waiters.append(event)
        return event

    def free_port(self) -> int:
        """Return a port that no server has."""
        port, self._next_port = self._next_port, self._next_port + 1
        return port
