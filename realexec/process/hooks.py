"""Where the guard enters torch.distributed: the private helpers that every way of making a group goes through.

The helpers are looked up in `distributed_c10d` at each call, so also a script that said
`from torch.distributed import init_process_group` before is met.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, ProcessGroup

from distsim.debug.matching.refused import FIRST_CALLS, came_out
from distsim.debug.rings import layout as rings
from distsim.debug.words.error_text import error_line
from distsim.realexec.guard import fast_path as shortcut
from distsim.realexec.guard import group as guard
from distsim.realexec.guard import handle
from distsim.realexec.guard.group import GuardedGroup, group_ranks
from distsim.realexec.process.session import Session
from distsim.realexec.strict import deferred as held
from distsim.realexec.strict import strict
from distsim.torch_compat import groups, stores
from distsim.torch_compat.patches import Patches

__all__ = ["Hooks", "guard_world", "swap"]


class Hooks:
    """Patches of distributed_c10d, undone by `remove`. *open_session(rank, world, where)* makes the ring,
    *before_store(port)* hears of every store of a rendezvous."""

    def __init__(
        self,
        open_session: Callable[[int, int, str], Session | None],
        session: Callable[[], Session | None],
        before_store: Callable[[int], None],
    ) -> None:
        self._open = open_session
        self._session = session
        self._before_store = before_store
        self._patches = Patches()
        self._inside = threading.local()

    def install(self) -> None:
        patches = self._patches
        patches.wrap(groups.RENDEZVOUS, self._rendezvous)
        patches.wrap(stores.CREATE_STORE, self._create_store)  # also init_rpc's and the program's own
        patches.wrap(groups.NEW_GROUP_HELPER, self._helper)
        patches.wrap(groups.UPDATE_DEFAULT_GROUP, self._update_default)
        patches.wrap(groups.NEW_GROUP_WITH_TAG, self._new_group)
        patches.wrap(groups.WRAPPER, self._no_wrapper)
        patches.wrap(groups.SPLIT_GROUP, self._split, also=(dist,))
        patches.wrap(groups.LOG_MESSAGE, self._raised)
        for attach in (groups.NAN_CHECK, groups.FLIGHT_RECORDER):
            patches.wrap_static(attach, _attach)
        for name in ("get", "wait"):
            patches.put(dist.Store, name, _waiting(getattr(dist.Store, name)))
        if groups.EXACT_TYPE.works():  # torch 2.14 asks isinstance
            patches.lead_global(groups.EXACT_TYPE, "type", _type_of)

    def remove(self) -> None:
        self._patches.remove()

    # init_process_group -------------------------------------------------------------------------

    def _rendezvous(self, original: Any, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        self.begin_init(rank, world_size, "" if url.startswith("env://") else url.partition("?")[0])
        return original(url, rank, world_size, **kwargs)

    def _create_store(self, original: Any, hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        self._before_store(port)
        return original(hostname, port, *args, **kwargs)

    def begin_init(self, rank: int, world_size: int, where: str = "") -> None:
        """init_process_group begins on *rank*, which meets the others at *where*; without both, as a launcher says."""
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
        world_size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "-1"))
        if rank < 0 or world_size <= 0:
            return
        session = self._session() or self._open(rank, world_size, where)
        if session is None:
            return
        log = session.recorder.group_log("init", "default_pg", range(world_size))
        self._inside.init = session.recorder.note(log, "init_process_group", next(log.seq))

    def _update_default(self, original: Any, pg: Any) -> Any:
        answer = original(pg)
        session = self._session()
        index = getattr(self._inside, "init", None)
        if session is not None and pg is not None:
            session.joined()
            if index is not None:
                session.ring.finish(index, rings.COMPLETED)
        self._inside.init = None
        return answer

    def _helper(self, original: Any, size: int, rank: int, ranks: Any, *args: Any, **kwargs: Any) -> Any:
        default = not ranks
        if default and getattr(self._inside, "init", None) is None:
            self.begin_init(rank, size)  # an explicit store: there was no rendezvous
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if default and attempt != "0" and len(args) > 1:
            # elastic keeps one store over restarts: gloo would connect to the addresses of dead workers
            args = (args[0], PrefixStore(f"attempt_{attempt}", args[1]), *args[2:])
        pg, store = original(size, rank, ranks, *args, **kwargs)
        return self._guard(pg, () if default else tuple(ranks)), store

    def _guard(self, pg: Any, ranks: tuple[int, ...]) -> Any:
        session = self._session()
        if session is None:  # backend mpi: ranks are known only now
            if not isinstance(pg, ProcessGroup):
                return pg
            session = self._open(pg.rank(), pg.size(), "")
        if session is None or not isinstance(pg, ProcessGroup) or isinstance(pg, GuardedGroup):
            return pg
        guarded = session.guard(pg, group_ranks(pg, ranks))
        if pg in _attached:
            guarded.note_hook("attached", 0, registered=True)
        swap(pg, guarded)
        return guarded

    # new_group, split_group ---------------------------------------------------------------------

    def _new_group(self, original: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = self._session()
        if session is None:
            return original(ranks, *args, **kwargs)
        world = range(session.world_size)
        asked = tuple(world) if ranks is None else tuple(ranks)
        if kwargs.get("sort_ranks", True):
            asked = tuple(sorted(asked))
        local = kwargs.get("use_local_synchronization", False)
        if local and session.rank not in asked:
            return original(ranks, *args, **kwargs)
        index = session.recorder.note_new_group(asked, local)
        made = groups.WORLD.get().group_count
        try:
            answer = original(ranks, *args, **kwargs)
        except BaseException as error:
            session.ring.error(index, error_line(error))
            session.ring.finish(index, rings.FAILED)
            if not local and groups.WORLD.get().group_count == made:  # wrong ranks: torch has not counted it
                session.recorder.rejected_new_group(index)
            raise
        session.ring.finish(index, rings.COMPLETED)
        return answer

    def _split(self, original: Any, parent_pg: Any = None, *args: Any, **kwargs: Any) -> Any:
        split = original(parent_pg, *args, **kwargs)
        if isinstance(split, ProcessGroup) and not isinstance(split, GuardedGroup):
            ranks = tuple(groups.WORLD.get().pg_group_ranks.get(split, {}))
            return self._guard(split, ranks)
        return split

    def _no_wrapper(self, original: Any, wrapped_pg: Any = None, *args: Any, **kwargs: Any) -> Any:
        """TORCH_DISTRIBUTED_DEBUG=DETAIL: this guard takes the place of torch's wrapper."""
        if self._session() is None or wrapped_pg is None:
            return original(wrapped_pg, *args, **kwargs) if wrapped_pg is not None else original(*args, **kwargs)
        return wrapped_pg

    # What a public function refuses -------------------------------------------------------------

    def _raised(self, original: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """torch logs the exception that its public function *name* is about to raise."""
        session, error = self._session(), sys.exc_info()[1]
        op = FIRST_CALLS.get(name)
        if session is not None and error is not None and op is not None and not came_out(error, _on_record):
            group = _group_of(name, args, kwargs)
            if isinstance(group, GuardedGroup) and group.recorder is not None:
                group.recorder.refused(group.group_log, op, error_line(error))
        return original(name, *args, **kwargs)


_RECORDING = frozenset(module.__file__ for module in (guard, handle, held, strict))


def _on_record(code: CodeType, innermost: bool) -> bool:
    """A frame of the guard's own; the short way has a record only where it raises itself, else it took the long one."""
    return code.co_filename in _RECORDING or (innermost and code.co_filename == shortcut.__file__)


def _group_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The group that a public function was called for: the world where none is given."""
    with contextlib.suppress(TypeError):  # arguments that do not fit its signature
        kwargs = inspect.signature(getattr(c10d, name)).bind_partial(*args, **kwargs).arguments
    return kwargs.get("group") or groups.WORLD.get().default_pg


def _waiting(original: Any) -> Callable[..., Any]:
    """A store's `get` or `wait`: the heartbeat finds the keys in this frame if the thread stands in it."""

    @functools.wraps(original)
    def distsim_store_wait(self: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, keys, *args, **kwargs)

    return distsim_store_wait


def _type_of(thing: Any) -> Any:
    return ProcessGroup if isinstance(thing, GuardedGroup) else type(thing)


def _attach(original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """A hook of torch's own goes on the C++ group, whose calls it sees; the guard does not learn when it is removed."""
    if isinstance(group, GuardedGroup):
        group.note_hook("attached", 0, registered=True)
        return original(group.inner, *args, **kwargs)
    _attached.add(group)
    return original(group, *args, **kwargs)


_attached: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups that got a hook of torch's own before they came under guard."""


def swap(old: Any, new: Any) -> None:
    """Put *new* in the place of *old* everywhere torch keeps groups, the C++ registry of names included."""
    world = groups.WORLD.get()
    for table in groups.tables(world):
        if old in table:
            value = table.pop(old)  # first: a held group is equal to its guard
            table[new] = value
        for members in table.values():
            if isinstance(members, list):
                members[:] = [new if group is old else group for group in members]
    name = world.pg_names.get(new)
    if name is not None:
        with contextlib.suppress(RuntimeError):
            groups.UNREGISTER.get()(name)
        groups.REGISTER.get()(name, new)
    if world.default_pg is old:
        c10d.GroupMember.WORLD = new


def guard_world(session: Session) -> None:
    """Put every group that exists already under guard."""
    world = groups.WORLD.get()
    for pg in list(world.pg_map):
        guard = session.guard(pg, tuple(world.pg_group_ranks.get(pg, range(pg.size()))), held=True)
        if guard is not pg:
            if groups.NAN_CHECK.exists():  # it may have hooks, and does not say so
                guard.note_hook("earlier", 0, registered=True)
            swap(pg, guard)
