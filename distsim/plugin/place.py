"""What a test body is told about where it runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

__all__ = ["Options", "PerRank", "World"]


@dataclass(frozen=True, slots=True)
class World:
    """The fixture `world`."""

    rank: int
    size: int
    local_rank: int
    on: str
    """`sim` or `gloo`: where this body runs."""


class PerRank:
    """Stands for a fixture whose value differs from rank to rank, until the body runs."""

    def __init__(self, what: str) -> None:
        self.__dict__["what"] = what

    def _refuse(self, *_: object) -> Any:
        raise pytest.UsageError(
            f"fixture {self.__dict__['what']!r} was used while another fixture is set up: fixtures are set up once, "
            "for all ranks together; use it in the test's body"
        )

    __index__ = __int__ = __getitem__ = __call__ = __eq__ = __lt__ = __add__ = __mod__ = __bool__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of the marker."""

    n: int
    on: str = "sim"
    cluster: str | None = None
    init: bool = True
    backend: str = "gloo"
    mesh: tuple[int, ...] | None = None
    mesh_dim_names: tuple[str, ...] | None = None
    seed: int = 0
    timeout_s: float = 60.0
    faults: tuple[dict[str, Any], ...] = field(default=())
    guards: tuple[str, ...] = field(default=())

    @classmethod
    def read(cls, marker: pytest.Mark, n: Any, on: Any) -> Options:
        """Check what the marker says; a mistake is one line."""
        known = set(cls.__slots__)
        given = dict(marker.kwargs)
        if len(marker.args) > 1 or (marker.args and "n" in given):
            raise pytest.UsageError(f"world_size: expected one number of ranks, got {marker.args} {given}")
        unknown = sorted(set(given) - known)
        if unknown:
            raise pytest.UsageError(f"world_size: expected arguments {', '.join(cls.__slots__)}, got {unknown[0]}")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise pytest.UsageError(f"world_size: expected a number of ranks, 1 or more, got {n!r}")
        if on not in ("sim", "gloo"):
            raise pytest.UsageError(f"world_size: expected on='sim' or on='gloo', got {on!r}")
        given.update(n=n, on=on)
        for name in ("mesh", "mesh_dim_names", "faults", "guards"):
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        return cls(**given)

    def values(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The test's arguments as this rank sees them."""
        seen = dict(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, PerRank):
                seen[name] = self._value(value.__dict__["what"])
        return seen

    def _value(self, what: str) -> Any:
        if what == "rank":
            return int(os.environ["RANK"])
        if what == "world":
            return World(int(os.environ["RANK"]), self.n, int(os.environ["LOCAL_RANK"]), self.on)
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", self.mesh or (self.n,), mesh_dim_names=self.mesh_dim_names)
