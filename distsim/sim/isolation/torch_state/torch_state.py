"""torch's state for the whole process, kept once per simulated rank.

A rank that changes none of it costs a look at each place; what a rank has changed goes with the
baton (copy on write). Three ways of noticing: the names that torch binds anew and the containers it
changes in place are looked at (torch_places.py); a torch module tells when an attribute of it is
assigned; and CPython marks a class, with all that inherit from it, when an attribute of it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import getitem, is_not, ne
from types import ModuleType
from typing import Any

from distsim.sim.isolation.modules.modules import is_own_file
from distsim.sim.isolation.torch_state import empty_shards, sharding_rules
from distsim.sim.isolation.torch_state.class_guards import (
    MISSING,
    VALID_VERSION_TAG,
    ClassGuard,
    guards_of,
    has_guarded_classes,
    marks_of,
    may_be_guarded,
)
from distsim.sim.isolation.torch_state.known import Known
from distsim.sim.isolation.torch_state.meshes import follow, forget_meshes
from distsim.sim.isolation.torch_state.torch_places import CONTENTS, GROWING, REBOUND
from distsim.sim.kernel.task import Task, current_process, current_task

__all__ = ["STATE", "Own", "TorchState"]

_set = ModuleType.__setattr__  # past what watched modules do: there are a thousand of them


@dataclass(slots=True, eq=False)
class _Name:
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


class _Content:
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

    values: dict[_Name | _Content, Any] = field(default_factory=dict)
    has_classes: bool = False
    """Whether attributes of classes are among it."""


class TorchState:
    """All places, with what is everyone's in them; to find them takes long: one for all simulations (`STATE`)."""

    def __init__(self) -> None:
        self._names: list[_Name] = []
        self._contents: list[_Content] = []
        self._growing: list[tuple[Any, int, _Content]] = []
        self._guards: list[tuple[type, ClassGuard]] = []
        self._attributes: dict[tuple[int, str], _Name] = {}
        self._watched: list[ModuleType] = []
        self._kind = _watched(self)
        self._known = Known()
        self.shared: dict[str, sharding_rules.SharedRules | empty_shards.EmptyShards] = {
            sharding_rules.MODULE: sharding_rules.SharedRules(),
            empty_shards.MODULE: empty_shards.EmptyShards(),
        }
        """By module: what it makes once for all ranks."""
        self.importer: Task | None = None  # of a module of torch
        self._finder = _TorchFinder(self)
        self.swapped_anyway: frozenset[tuple[int, str]] = frozenset()
        """(id of a module, name) of what is swapped with every hand-over (switches.PLACES)."""
        self._line_up()

    # -- the baton

    def enter(self, own: Own) -> None:
        """A process begins to run: what it has changed is put in place."""
        for place, value in own.values.items():
            if value is not place.shared:
                place.put(value)
        if own.has_classes:
            self._rest()

    def leave(self, own: Own) -> None:
        """It stops: what it has changed is kept in *own*, and everyone's put back."""
        assigned = self._assigned_classes()
        for guard in assigned:
            own.has_classes = True
            for cls, name, shared in guard.changes():
                own.values.setdefault(self._attribute(cls, name, shared), None)
        for place in own.values:
            value = own.values[place] = place.get()
            if value is not place.shared:
                place.put(place.shared)
        for place in self._changed():
            own.values[place] = place.get()
            place.put(place.shared)
        if own.has_classes:
            self._rest()
        if assigned:
            self._halve(assigned)

    def _changed(self) -> list[_Name | _Content]:
        """Of the places that are looked at. This runs at every hand-over: no step of it is Python's."""
        spaces, names, shared = self._looked_at
        try:
            changed: list[_Name | _Content] = [*compress(self._names, map(is_not, map(getitem, spaces, names), shared))]
        except KeyError:  # a name was taken away
            changed = [n for n in self._names if n.space.get(n.name) is not n.shared]
        empty, contents = self._empty
        if any(empty):
            changed += compress(contents, empty)
        containers, held, contents = self._compared
        changed += compress(contents, map(ne, containers, held))
        growing, sizes, contents = self._measured
        changed += compress(contents, map(ne, map(len, growing), sizes))
        return changed

    def _line_up(self) -> None:
        """What `_changed` and `_assigned_classes` go through, column by column."""
        self._looked_at = [n.space for n in self._names], [n.name for n in self._names], [n.shared for n in self._names]
        empty = [c for c in self._contents if not c.shared]
        self._empty = [c.container for c in empty], empty
        held = [c for c in self._contents if c.shared]
        self._compared = [c.container for c in held], [c.shared for c in held], held
        self._measured = (
            [container for container, _, _ in self._growing],
            [size for _, size, _ in self._growing],
            [content for _, _, content in self._growing],
        )
        self._marks, self._at_rest = marks_of([sentinel for sentinel, _ in self._guards])

    def _assigned_classes(self) -> list[ClassGuard]:
        """Guards of classes that somebody has assigned an attribute of."""
        marks = self._marks()
        if marks == self._at_rest:
            return []
        words = memoryview(marks).cast("L") if isinstance(marks, bytes) else marks
        return [guard for (_, guard), word in zip(self._guards, words, strict=True) if not word & VALID_VERSION_TAG]

    def _halve(self, assigned: Sequence[ClassGuard]) -> None:
        """A class that was assigned once will be again: DDP keeps in one the module that is in its forward. Its guard
        watches half as many classes from now on, in the end it alone, and is looked through in no time. All hold what
        is everyone's now."""
        for guard in assigned:
            middle = len(guard.classes) // 2
            halves = guards_of(list(guard.classes[:middle])) + guards_of(list(guard.classes[middle:]))
            if middle and sum(len(half.classes) for half in halves) == len(guard.classes):
                self._guards = [pair for pair in self._guards if pair[1] is not guard]
                self._guards += [(half.sentinel, half) for half in halves]
                self._line_up()

    def _rest(self) -> None:
        for guard in self._assigned_classes():
            guard.rest()

    def _attribute(self, space: Any, name: str, shared: Any) -> _Name:
        key = (id(space), name)
        place = self._attributes.get(key)
        if place is None:
            place = self._attributes[key] = _Name(space, name, shared)
        return place

    def assigned(self, module: ModuleType, name: str, value: Any) -> None:
        """An attribute of *module* is about to be assigned (or deleted)."""
        process = current_process()
        if process is None or self.importer is not None or module not in self._known:
            return
        if (id(module), name) in self.swapped_anyway:
            return
        if isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}":
            return  # an import: everyone's
        space = vars(module)
        place = self._attribute(space, name, space.get(name, MISSING))
        process.torch_own.values.setdefault(place, None)

    # -- modules

    @contextlib.contextmanager
    def watching(self) -> Iterator[TorchState]:
        """For the time of a simulation: torch's modules, and whatever else all ranks share, tell when they
        are written to."""
        try:
            for name, shared in self.shared.items():
                shared.begin(sys.modules.get(name))
            self._take_as_everyones()
            self.adopt([m for n, m in sys.modules.copy().items() if _is_shared(n, getattr(m, "__file__", None))])
            sys.meta_path.insert(0, self._finder)
            yield self
        finally:
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            for module in self._watched:
                _set(module, "__class__", ModuleType)
            self._watched.clear()
            self._attributes.clear()
            for shared in self.shared.values():
                shared.end()
            forget_meshes()

    @contextlib.contextmanager
    def everyones(self) -> Iterator[None]:
        """A torch module is imported by the running process, once for all: what that changes in other
        torch modules (registrations) is everyone's."""
        process = current_process()
        if process is None or self.importer is not None:
            yield
            return
        self.leave(process.torch_own)
        self.importer = current_task()
        try:
            yield
        finally:
            self.importer = None
            self._take_as_everyones()
            self.enter(process.torch_own)

    def _take_as_everyones(self) -> None:
        for place in self._changed():
            place.shared = place.get()
        self._growing = [(container, len(container), c) for container, _, c in self._growing]
        for guard in self._assigned_classes():
            guard.accept()
        self._line_up()

    def adopt(self, modules: Sequence[ModuleType]) -> None:
        """Watch *modules*; what they hold now is everyone's. Cut short, none of it counts as known."""
        classes: list[type] = []
        names: list[_Name] = []
        contents: list[_Content] = []
        growing: list[tuple[Any, int, _Content]] = []
        known: dict[int, Any] = {}
        plain = [module for module in modules if type(module) is ModuleType]
        self._watched += plain
        for module in plain:
            _set(module, "__class__", self._kind)
        for module in self._known.others(modules):
            if not isinstance(module, ModuleType) or id(module) in known:
                continue
            known[id(module)] = module
            space = vars(getattr(module, "m", module))
            for name in REBOUND.get(module.__name__, ()):
                if name in space:
                    names.append(_Name(space, name, space[name]))
            for path in CONTENTS.get(module.__name__, ()):
                container = follow(module, path)
                if container is not None:
                    contents.append(_Content(container))
            for path in GROWING.get(module.__name__, ()):
                content = _Content(follow(module, path))
                growing.append((content.container, len(content.shared), content))
            if has_guarded_classes(module.__name__):
                for value in space.values():
                    if issubclass(type(value), type) and id(value) not in known and self._is_new_class(value):
                        known[id(value)] = value
                        classes.append(value)
        guards = [(guard.sentinel, guard) for guard in guards_of(classes)]
        self._names += names
        self._contents += contents
        self._growing += growing
        self._guards += guards
        self._line_up()
        for found in known.values():
            self._known.add(found)

    def _is_new_class(self, cls: type) -> bool:
        return cls not in self._known and may_be_guarded(cls) and has_guarded_classes(str(cls.__module__))


@functools.lru_cache(1 << 14)
def _is_shared(name: str, file: str | None) -> bool:
    """Whether a module is torch's, Python's or an installed package's: the user's own are as the host made them."""
    if name.partition(".")[0] in ("sys", "distsim", "__main__", "__mp_main__"):
        return False  # import makes new modules of the type that `sys` has
    return not is_own_file(file)


def _watched(state: TorchState) -> type[ModuleType]:
    class TorchModule(ModuleType):
        """A module that all ranks share, while a simulation runs."""

        def __setattr__(self, name: str, value: Any) -> None:
            state.assigned(self, name, value)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            state.assigned(self, name, None)
            super().__delattr__(name)

        def __reduce__(self) -> Any:
            return importlib.import_module, (self.__name__,)

    return TorchModule


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Sees the torch modules that a rank is the first to import."""

    def __init__(self, state: TorchState) -> None:
        self._state = state

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        process = current_process()
        if process is None or not fullname.startswith("torch."):
            return None
        process.world.ticks += 1  # a sign of life
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader, self._state)
        return spec


class _TorchLoader(importlib.abc.Loader):
    """Loads as *real* does; then the module is watched."""

    def __init__(self, real: Any, state: TorchState) -> None:
        self._real = real
        self._state = state

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        with self._state.everyones():
            self._real.exec_module(module)
            if module.__name__ in self._state.shared:
                self._state.shared[module.__name__].begin(module)
            self._state.adopt([sys.modules.get(module.__name__, module)])


STATE = TorchState()
