"""A TCPStore in virtual time: its server, and how ranks find it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from distsim.debug.records import CallWait, StoreWait, Wait
from distsim.sim.c10d.stores.store import DEFAULT_TIMEOUT, KeyValues, SimStore, changed
from distsim.sim.isolation.process import RankTask, require_task
from distsim.sim.processes.hosts import machine_of, meant

__all__ = ["TCPStore"]

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
        world = task.world
        if world_size == 0:
            raise ValueError("TCPStore world size cannot be 0")
        if port == 0 and is_master:
            port = world.free_port()
        if master_listen_fd is not None:  # the store would own the socket
            os.close(master_listen_fd)
        here = machine_of(task.process)
        address: tuple[str, tuple[int | None, int]] = ("tcp", (here, port))
        if is_master:
            agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") and os.environ.get("MASTER_PORT") == str(port)
            if address in world.stores and not (multi_tenant or agents):
                raise dist.DistNetworkError(
                    "The server socket has failed to listen on any local network address. "
                    f"port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
                )
            if address not in world.stores:
                world.stores[address] = KeyValues(world.env)
                world.store_opened()
        milliseconds = int(timeout.total_seconds() * 1000)
        refused = dist.DistNetworkError(
            f"The client socket has timed out after {milliseconds}ms while trying to connect to ({host_name}, {port})."
        )
        world.faults.on_connect(task, host_name, port, timeout, timeout != DEFAULT_TIMEOUT)
        give_up_s = task.now_s() + timeout.total_seconds()
        machine = meant(host_name, task.process)
        address = ("tcp", (machine, port))
        task.process.notes.connecting = (host_name, port)
        task.process.notes.meets_at = f"{host_name}:{port}"
        while address not in world.stores:
            left_s = give_up_s - task.now_s()
            where = _waiting(task, StoreWait((f"{host_name}:{port}",), "the store's server"))
            if left_s <= 0 or not task.wait_until(world.next_store(), where, left_s, timeout != DEFAULT_TIMEOUT):
                raise refused
        task.process.notes.connecting = None
        super().__init__(world.stores[address], timeout)
        self.host, self.port, self.libuvBackend = host_name, port, use_libuv
        self._is_server = is_master
        if wait_for_workers and world_size:
            self._values.clients += 1
            self._values.data["init/"] = str(self._values.clients).encode()
            self._values.change()
            if is_master:  # keeps the server alive until all have come
                self._wait_for_workers(task, world_size, give_up_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise dist.DistStoreError("multi_set keys and values vectors must be of same size")
        super().multi_set(keys, values)

    def _wait_for_workers(self, task: RankTask, world_size: int, give_up_s: float) -> None:
        values, traced = self._values, task.world.traced
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
    """A store opened by init_process_group is waited for in that call."""
    joining = task.process.notes.joining
    return why if joining is None else CallWait(joining)
