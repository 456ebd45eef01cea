"""torch's state for the whole process, kept once per simulated rank."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import call, is_not, ne
from types import ModuleType
from typing import Any

from distsim.sim.isolation.modules.aliases import ALIASES
from distsim.sim.isolation.modules.modules import is_own_file
from distsim.sim.isolation.torch_state import distributed
from distsim.sim.isolation.torch_state.class_guard import (
    MISSING,
    VALID_VERSION_TAG,
    WATCHER,
    ClassGuard,
    flags_of,
    guards_of,
    has_guarded_classes,
    is_guardable,
)
from distsim.sim.isolation.torch_state.distributed import TorchFinder, follow, forget_meshes, keep_debug_handlers
from distsim.sim.kernel.task import Task, current_process, current_task
from distsim.torch_compat.state import CONTENTS, GROWING, REBOUND

# -- A place where torch keeps state, what a rank has changed of them, and where was looked for them already.


@dataclass(slots=True, eq=False)
class Name:
    """A name in a namespace: a module's dictionary or a class."""

    space: Any
    name: str
    shared: Any
    """Value for ranks that have not changed it."""

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
    """Content of a dict, list, set or plain object. The object itself is not replaced, because others may hold it."""

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


@dataclass(slots=True, eq=False)
class Columns:
    """State of all places, in the order of `TorchState`'s columns."""

    values: list[Any]
    contents: list[Any]
    sizes: list[int]


@dataclass(slots=True)
class Own:
    """State that one process has changed."""

    values: dict[Name | Content, Any] = field(default_factory=dict)
    has_classes: bool = False
    """Whether the changed places include attributes of classes."""
    expected: Columns | None = None
    """State of all places while the process runs and writes nothing; None: not known."""
    base: Columns | None = None
    """Shared state for which *expected* was worked out."""


class Known:
    """Modules and classes that were seen, without keeping them. The number of one that is gone (`id`) may be given to
    another."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, thing: Any) -> bool:
        seen = self._seen.get(id(thing))
        return seen is not None and seen() is thing

    def others(self, things: Sequence[Any]) -> list[Any]:
        """Return the elements of *things* that were not added."""
        seen = self._seen
        return [thing for thing in things if (known := seen.get(id(thing))) is None or known() is not thing]

    def add(self, thing: Any) -> None:
        self._seen[id(thing)] = weakref.ref(thing)


# -- torch's state for the whole process, kept once per simulated rank.
#
# A rank that changes none of it costs one comparison of all places; what a rank has changed goes with the baton (copy
# on write). Three ways of noticing: the names that torch binds anew and the containers it changes in place are compared
# (torch_compat/state.py); a torch module tells when an attribute of it is assigned; and CPython takes a mark from a
# class when an attribute of it is (class_guard.py).


def _make_all(modules: Sequence[ModuleType], kind: type[ModuleType]) -> None:
    """Set the class of all *modules* to *kind*, bypassing watched modules and without a Python step for each."""
    deque(map(_set_class, modules, repeat(kind)), maxlen=0)


_set_class = object.__dict__["__class__"].__set__


class TorchState:
    """All places of torch's state with their shared values. Finding them is slow, so there is one for all
    simulations (`STATE`).
    """

    def __init__(self) -> None:
        self._names: list[Name] = []
        self._contents: list[Content] = []
        self._growing: list[Content] = []
        self._guards: list[ClassGuard] = []
        self._attributes: dict[tuple[int, str], Name] = {}
        self._watched: list[ModuleType] = []
        self._begun_with: list[ModuleType] = []
        self._adopted = -1
        """Number of module changes when the last simulation began."""
        self._kind = _watched(self)
        self._known = Known()
        self.shared: dict[str, distributed.SharedRules | distributed.LazyShards] = {
            distributed.SHARDING_MODULE: distributed.SharedRules(),
            distributed.FSDP_MODULE: distributed.LazyShards(),
        }
        """Results that are computed once for all ranks, by module."""
        self.importer: Task | None = None  # of a module of torch
        self._finder = TorchFinder(self)
        self.swapped_anyway: frozenset[tuple[int, str]] = frozenset()
        """(id of a module, name) of places that are swapped at every switch of ranks (global_flags.PLACES)."""
        self._is_stale = True
        """Whether places were added since the columns were built."""

    # -- the baton

    def enter(self, own: Own) -> None:
        """Apply the changes *own* of a process that begins to run."""
        if self._is_stale:
            self._line_up()
        for slot, value in own.values.items():
            if value is not slot.shared:
                slot.put(value)
        if own.has_classes:
            self._rest()
        self._expect(own)

    def follow(self, leaving: Own, coming: Own) -> None:
        """Switch processes, like `leave` and `enter`; most often no place was written, which is checked quickly."""
        if self._is_stale or not self._is_unwritten(leaving):
            self.leave(leaving)
            self.enter(coming)
            return
        before, after = leaving.values, coming.values
        if before or after:
            changes = [(slot, slot.shared) for slot, value in before.items() if slot not in after]
            changes += after.items()
            changes = [(slot, value) for slot, value in changes if value is not before.get(slot, slot.shared)]
            for slot, value in changes:
                slot.put(value)
            if changes and (leaving.has_classes or coming.has_classes):
                self._rest()
        if coming.expected is None or coming.base is not self._shared:
            self._expect(coming)

    def _is_unwritten(self, running: Own) -> bool:
        """Return whether nothing has changed since the running process was entered.

        Class attributes may have been assigned if they have their old values again: DDP stores the module that is in
        its forward in one.
        """
        expected = running.expected
        if (
            expected is None
            or any(map(is_not, map(call, self._readers, self._keys, repeat(MISSING)), expected.values))
            or self._containers != expected.contents
            or [*map(len, self._sized)] != expected.sizes
        ):
            return False
        assigned = self._assigned_classes()
        if any(True for guard in assigned for _ in guard.changes()):
            return False
        for guard in assigned:
            guard.rest()
        return True

    def leave(self, own: Own) -> None:
        """Save the changes of the process into *own*, and restore the shared state."""
        if self._is_stale:
            self._line_up()
        own.expected = None
        for guard in self._assigned_classes():
            own.has_classes = True
            for cls, name, shared in guard.changes():
                own.values.setdefault(self._attribute(cls, name, shared), None)
        for slot in own.values:
            value = own.values[slot] = slot.get()
            if value is not slot.shared:
                slot.put(slot.shared)
        for slot in self._changed():
            own.values[slot] = slot.get()
            slot.put(slot.shared)
        if own.has_classes:
            self._rest()

    def _changed(self) -> list[Name | Content]:
        """Return the places that differ from the shared state; all steps are in C."""
        now, shared = map(call, self._readers, self._keys, repeat(MISSING)), self._shared
        changed: list[Name | Content] = [*compress(self._slots, map(is_not, now, shared.values))]
        changed += compress(self._contents, map(ne, self._containers, shared.contents))
        changed += compress(self._growing, map(ne, map(len, self._sized), shared.sizes))
        return changed

    def _expect(self, own: Own) -> None:
        """Work out the state of all places with the changes of *own*."""
        held, own.base = own.values, self._shared
        own.expected = self._shared
        if held:
            own.expected = Columns(
                [held.get(slot, slot.shared) for slot in self._slots],
                [held.get(content, content.shared) for content in self._contents],
                [len(held.get(content, content.shared)) for content in self._growing],
            )

    def _line_up(self) -> None:
        """Build the columns that are compared at a hand-over."""
        self._is_stale = False
        self._slots = [*self._names, *self._attributes.values()]
        self._readers: list[Callable[[str, Any], Any]] = [
            (slot.space if type(slot.space) is dict else vars(slot.space)).get for slot in self._slots
        ]
        self._keys = [slot.name for slot in self._slots]
        self._containers = [content.container for content in self._contents]
        self._sized = [content.container for content in self._growing]
        self._sentinels = [guard.sentinel for guard in self._guards]
        self._at_rest = [flags_of(cls) | VALID_VERSION_TAG for cls in self._sentinels]
        self._shared = Columns(
            [slot.shared for slot in self._slots],
            [content.shared for content in self._contents],
            [len(content.shared) for content in self._growing],
        )

    def _assigned_classes(self) -> list[ClassGuard]:
        """Return the guards whose sentinel has lost its mark, or was assigned to."""
        if WATCHER is not None:
            return [guard for guard in self._guards if guard.sentinel in WATCHER.assigned] if WATCHER.assigned else []
        flags = [*map(flags_of, self._sentinels)]
        if flags == self._at_rest:
            return []
        return [guard for guard, flag in zip(self._guards, flags, strict=True) if not flag & VALID_VERSION_TAG]

    def _rest(self) -> None:
        for guard in self._assigned_classes():
            guard.rest()

    def _attribute(self, space: Any, name: str, shared: Any) -> Name:
        key = (id(space), name)
        slot = self._attributes.get(key)
        if slot is None:
            slot = self._attributes[key] = Name(space, name, shared)
            self._is_stale = True
        return slot

    def assigned(self, module: ModuleType, name: str, value: Any) -> None:
        """Handle an attribute of *module* before it is assigned or deleted."""
        process = current_process()
        if process is None or self.importer is not None or module not in self._known:
            return
        if (id(module), name) in self.swapped_anyway:
            return
        if isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}":
            return  # an import: everyone's
        space = vars(module)
        slot = self._attribute(space, name, space.get(name, MISSING))
        process.interpreter.torch_own.values.setdefault(slot, None)

    def take_over(self, holder: Any, name: Any) -> None:
        """Save the shared value of *name* in *holder* (module, class, object or dict) before the running process
        rebinds it.
        """
        process, is_class = current_process(), isinstance(holder, type)
        space = holder if is_class or type(holder) is dict else getattr(holder, "__dict__", None)
        if process is not None and space is not None and self.importer is None:
            before = (vars(space) if is_class else space).get(name, MISSING)
            process.interpreter.torch_own.values.setdefault(self._attribute(space, name, before), None)
            process.interpreter.torch_own.has_classes |= is_class

    # -- modules

    @contextlib.contextmanager
    def watching(self) -> Iterator[TorchState]:
        """Return a context for a simulation in which torch's modules and other shared objects report writes."""
        try:
            for name, shared in self.shared.items():
                shared.begin(sys.modules.get(name))
            self._take_as_everyones()
            if self._adopted != ALIASES.changes:
                self.adopt([m for n, m in sys.modules.copy().items() if _is_shared(n, getattr(m, "__file__", None))])
                self._adopted, self._begun_with, self._watched = ALIASES.changes, self._watched, []
            else:
                _make_all(self._begun_with, self._kind)
            sys.meta_path.insert(0, self._finder)
            yield self
        finally:
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            _make_all(self._begun_with, ModuleType)
            _make_all(self._watched, ModuleType)
            self._watched.clear()
            if self._attributes:
                self._attributes.clear()
                self._is_stale = True
            for shared in self.shared.values():
                shared.end()
            forget_meshes()
            keep_debug_handlers()

    @contextlib.contextmanager
    def everyones(self) -> Iterator[None]:
        """Return a context for importing a torch module once for all ranks: changes to other torch modules are
        shared.
        """
        process = current_process()
        if process is None or self.importer is not None:
            yield
            return
        self.leave(process.interpreter.torch_own)
        self.importer = current_task()
        try:
            yield
        finally:
            self.importer = None
            self._take_as_everyones()
            self.enter(process.interpreter.torch_own)

    def _take_as_everyones(self) -> None:
        if self._is_stale:
            self._line_up()
        for slot in self._changed():
            slot.shared = slot.get()
            self._is_stale = True
        for guard in self._assigned_classes():
            if any(True for _ in guard.changes()):
                guard.accept()
            else:
                guard.rest()

    def adopt(self, modules: Sequence[ModuleType]) -> None:
        """Watch *modules*; their current content is shared by all ranks.

        If this is interrupted, none of it is adopted.
        """
        classes: list[type] = []
        names: list[Name] = []
        contents: list[Content] = []
        growing: list[Content] = []
        known: dict[int, Any] = {}
        plain = [module for module in modules if type(module) is ModuleType]
        self._watched += plain
        _make_all(plain, self._kind)
        for module in self._known.others(modules):
            if not isinstance(module, ModuleType) or id(module) in known:
                continue
            known[id(module)] = module
            inner = getattr(module, "m", None)  # of `torch.backends`, whose modules stand for others
            space = vars(inner if isinstance(inner, ModuleType) else module)
            for name in REBOUND.get(module.__name__, ()):
                if name in space:
                    names.append(Name(space, name, space[name]))
            for path in CONTENTS.get(module.__name__, ()):
                container = follow(module, path)
                if container is not None:
                    contents.append(Content(container))
            for path in GROWING.get(module.__name__, ()):
                growing.append(Content(follow(module, path)))
            if has_guarded_classes(module.__name__):
                for value in space.values():
                    if issubclass(type(value), type) and id(value) not in known and self._is_new_class(value):
                        known[id(value)] = value
                        classes.append(value)
        guards = guards_of(classes)
        self._names += names
        self._contents += contents
        self._growing += growing
        self._guards += guards
        self._is_stale = True
        for known_class in known.values():
            self._known.add(known_class)

    def _is_new_class(self, cls: type) -> bool:
        return cls not in self._known and is_guardable(cls) and has_guarded_classes(str(cls.__module__))


@functools.lru_cache(1 << 14)
def _is_shared(name: str, file: str | None) -> bool:
    """Return whether a module belongs to torch, Python or an installed package.

    The user's own modules are kept per rank.
    """
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


STATE = TorchState()
