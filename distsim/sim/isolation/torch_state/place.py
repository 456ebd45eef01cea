"""A place where torch keeps state, what a rank has changed of them, and where was looked for them already."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.sim.isolation.torch_state.class_guards import MISSING

__all__ = ["Content", "Known", "Name", "Own"]


@dataclass(slots=True, eq=False)
class Name:
    """A name in a namespace: a module's dictionary or a class."""

    space: Any
    name: str
    shared: Any
    """What those ranks find that have not changed it."""

    def get(self) -> Any:
        space = self.space
        return (space if type(space) is dict else vars(space)).get(self.name, MISSING)

    def put(self, value: Any) -> None:
        space, name = self.space, self.name
        if type(space) is dict:
            if value is MISSING:
                space.pop(name, None)
            else:
                space[name] = value
        elif value is not MISSING:
            type.__setattr__(space, name, value)
        elif name in vars(space):
            type.__delattr__(space, name)


class Content:
    """What a dict, list, set or plain object holds; the container itself stays the one that others know."""

    __slots__ = ("container", "shared")

    def __init__(self, container: Any) -> None:
        self.container = container if isinstance(container, dict | list | set) else vars(container)
        self.shared = self.get()

    def get(self) -> Any:
        return self.container.copy()

    def put(self, value: Any) -> None:
        container = self.container
        container.clear()
        if isinstance(container, list):
            container.extend(value)
        else:
            container.update(value)


@dataclass(slots=True)
class Own:
    """What one process has changed."""

    values: dict[Name | Content, Any] = field(default_factory=dict)
    has_classes: bool = False
    """Whether attributes of classes are among it."""


class Known:
    """Modules and classes that were seen, without keeping them. The number of one that is gone (`id`) may be given to
    another."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, thing: Any) -> bool:
        seen = self._seen.get(id(thing))
        return seen is not None and seen() is thing

    def others(self, things: Sequence[Any]) -> list[Any]:
        """Those of *things* that were not added."""
        seen = self._seen
        return [thing for thing in things if (known := seen.get(id(thing))) is None or known() is not thing]

    def add(self, thing: Any) -> None:
        self._seen[id(thing)] = weakref.ref(thing)
