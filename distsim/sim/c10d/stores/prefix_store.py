"""A PrefixStore: another store, under a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from distsim.sim.c10d.stores.store import as_bytes, as_key

__all__ = ["PrefixStore"]


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

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._name(key) for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._name(key), as_bytes(value))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._name(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._name(key), amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._name(key), as_bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(self._names(keys)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._store.compare_set(self._name(key), as_bytes(expected), as_bytes(desired)))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._name(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._store.multi_get(self._names(keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(self._names(keys), [as_bytes(value) for value in values])

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def list_keys(self) -> list[str]:
        start = self._prefix + "/"
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(self._names(keys))
        else:
            self._store.wait(self._names(keys), timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> Any:
        return self._store.timeout

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._store.queue_push(self._name(key), as_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return bytes(self._store.queue_pop(self._name(key), block))

    def queue_len(self, key: str) -> int:
        return int(self._store.queue_len(self._name(key)))

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())
