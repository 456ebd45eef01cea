"""A FileStore in virtual time, and the life of its file."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distsim.sim.c10d.stores.store import DEFAULT_TIMEOUT, KeyValues, SimStore, as_key
from distsim.sim.isolation.process import require_task

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

__all__ = ["FileStore", "close_files"]


class _File:
    """One FileStore's hold on its file: it goes with the last, once as many stores as were said are closed."""

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
        """The file stays: its holder is gone without a word."""
        self._is_open = False


def close_files(process: SimProcess) -> None:
    """A process that ends closes its FileStores; a forked child leaves by os._exit, which closes none."""
    files, process.notes.file_stores = process.notes.file_stores, {}
    for file in files.values():
        if process.is_forked:
            file.leave()
        else:
            file.close()


def _has_content(path: str) -> bool:
    """Whether a real run has left keys there: the file of a simulated one stays empty."""
    with contextlib.suppress(OSError):
        return os.path.getsize(path) > 0
    return False


class FileStore(SimStore):
    """`torch.distributed.FileStore`: ranks that name the same path share it. The file is there and goes as
    torch's does, and stays empty."""

    _absent = "Wait timeout"
    _shown_prefix = ""
    _error = RuntimeError

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        task = require_task()
        address = ("file", os.path.abspath(file_name))
        values = task.world.stores.get(address)
        if values is None:
            values = task.world.stores[address] = KeyValues(task.world.env)
            values.data["efcount/"] = b"0"
            if _has_content(file_name):
                task.world.note(
                    f"{file_name} held keys before this run, which the simulation ignores: real ranks would read the "
                    "addresses of an earlier run there, and may fail to connect; delete it before each run"
                )
        os.close(os.open(file_name, os.O_RDWR | os.O_CREAT, 0o644))
        super().__init__(values, DEFAULT_TIMEOUT)
        self.path = file_name
        values.clients += 1
        files: dict[int, _File] = task.process.notes.file_stores
        own = _File(task.world.stores, address, world_size)
        number = len(files)
        files[number] = own
        weakref.finalize(self, _File.close, own).atexit = False

    def get(self, key: str) -> bytes:
        self._wait_for([as_key(key, "get")], None, "Timeout waiting for key: {key} after {ms} ms")
        return self._values.data[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        super().delete_key(key)
        return True

    def has_extended_api(self) -> bool:
        return False

    def queue_push(self, key: str, value: str | bytes) -> None:
        raise NotImplementedError("queue support is not implemented.")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        raise NotImplementedError("queue support is not implemented.")

    def queue_len(self, key: str) -> int:
        raise NotImplementedError("queue support is not implemented.")
