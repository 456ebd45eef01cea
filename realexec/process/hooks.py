"""Patches of the private helpers of torch.distributed that create every process group.

The helpers are looked up in `distributed_c10d` at each call, so a script that imported `init_process_group` earlier
is covered, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import CodeType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, ProcessGroup

from distsim.debug.records.arguments import FIRST_CALLS, came_out
from distsim.debug.records.frames import user_stack
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import RecordedWorld, WorldKind
from distsim.realexec.guard import fast_path as shortcut
from distsim.realexec.guard import group as guard
from distsim.realexec.guard import handle
from distsim.realexec.guard.group import GuardedGroup, group_ranks, guard_of
from distsim.realexec.process.session import Session
from distsim.realexec.process.worlds import launched, noting_prefix, place_of_store, place_of_url
from distsim.realexec.replicas import ReplicaGroups
from distsim.realexec.strict import deferred as held
from distsim.realexec.strict import strict
from distsim.text import original_print
from distsim.text.tracebacks import error_line
from distsim.text.untrusted_input import MOST_RANKS
from distsim.torch_compat import groups
from distsim.torch_compat.names import Patches

MOST_STORES = 8
"""Number of TCPStores that are recorded."""


class Hooks:
    """Patches of distributed_c10d, undone by `remove`.

    `open_session(world, where)` creates the ring. `before_store(port)` is called before each store of a rendezvous
    is created.
    """

    def __init__(
        self,
        open_session: Callable[[RecordedWorld | None, str], Session | None],
        session: Callable[[], Session | None],
        before_store: Callable[[int], None],
    ) -> None:
        self._open = open_session
        self._session = session
        self._before_store = before_store
        self._patches = Patches(_in_usual_world)
        self._inside = threading.local()
        self._met: dict[tuple[str, int], str] = {}
        """World that last met in a `rendezvous` call of the program, by rendezvous and world size."""
        self._replicas = ReplicaGroups(self._patches, open_session, session)
        self._stores: dict[str, bool] = {}
        """TCPStores that the program has used, by address, and whether this process serves them."""

    def install(self) -> None:
        patches = self._patches
        patches.wrap(groups.RENDEZVOUS, self._rendezvous)
        patches.wrap(groups.CREATE_STORE, self._create_store)  # also init_rpc's and the program's own
        patches.wrap(groups.NEW_GROUP_HELPER, self._helper)
        patches.wrap(groups.UPDATE_DEFAULT_GROUP, self._update_default)
        patches.wrap(groups.NEW_GROUP_WITH_TAG, self._new_group)
        patches.wrap(groups.SPLIT_GROUP, self._split, also=(dist,))
        patches.wrap(groups.LOG_MESSAGE, self._raised)
        patches.put(dist.TCPStore, "__init__", self._noting_address(dist.TCPStore.__init__))
        for name in ("get", "wait"):
            patches.put(dist.Store, name, _waiting(getattr(dist.Store, name)))
        patches.put(ThreadPoolExecutor, "__init__", _noting_line(ThreadPoolExecutor.__init__))
        patches.put(PrefixStore, "__init__", noting_prefix(PrefixStore.__init__))
        if dist.is_gloo_available():
            patches.put(dist.ProcessGroupGloo, "__init__", self._noting_made_by_hand(dist.ProcessGroupGloo.__init__))
        for attach in (groups.NAN_CHECK, groups.FLIGHT_RECORDER):
            patches.wrap_static(attach, _attach)
        patches.wrap(groups.WRAPPER, self._no_wrapper)
        if groups.EXACT_TYPE.works():  # torch 2.14 asks isinstance
            patches.lead_global(groups.EXACT_TYPE, "type", _type_of)

    def remove(self) -> None:
        self._patches.remove()

    def _noting_made_by_hand(self, original: Any) -> Callable[..., None]:
        """Wrap `ProcessGroupGloo.__init__` to note that a group constructed by the program is not watched."""
        is_noted = os.environ.get("LOCAL_RANK", "0") != "0"  # one line for each host

        @functools.wraps(original)
        def initialize(group: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal is_noted
            caller = sys._getframe(1)
            by_hand = not caller.f_globals.get("__name__", "").startswith(("torch.", "torchft."))
            session = self._session()
            if by_hand and session is not None:
                session.heartbeat.makes_unwatched_calls = True
            if by_hand and not is_noted:
                is_noted = True
                original_print(
                    f"distsim: the ProcessGroupGloo made at {caller.f_code.co_filename}:{caller.f_lineno} is not "
                    f"watched, so hangs in its calls are not reported; to watch it, create it with "
                    f"init_process_group or new_group",
                    file=sys.stderr,
                    flush=True,
                )
            original(group, *args, **kwargs)

        return initialize

    # init_process_group -------------------------------------------------------------------------

    def _rendezvous(self, original: Any, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        if _called_by_init():
            self.begin_init(rank, world_size, url)
        meeting = original(url, rank, world_size, **kwargs)
        return meeting if _called_by_torch() else self._rendezvous_by_hand(meeting, url, rank, world_size)

    def _create_store(self, original: Any, hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        self._before_store(port)
        return original(hostname, port, *args, **kwargs)

    def _noting_address(self, original: Any) -> Callable[..., None]:
        """Wrap `TCPStore.__init__` to record the address, until the store is reached as that of a rendezvous."""

        @functools.wraps(original)
        def initialize(store: Any, *args: Any, **kwargs: Any) -> None:
            self._replicas.watch()
            given = dict(zip(("host_name", "port", "world_size", "is_master"), args, strict=False)) | kwargs
            address = f"{given.get('host_name')}:{given.get('port')}"
            session = self._session()
            if session is not None and session.ring.words[rings.WORDS_AT // 8 + rings.W_JOINED]:
                with self._meeting_by_hand(address):
                    original(store, *args, **kwargs)
                return self._uses(store, is_server=bool(given.get("is_master")))
            self._meets_at(address, reached=False)
            original(store, *args, **kwargs)
            self._meets_at(address, reached=True)
            self._uses(store, is_server=bool(given.get("is_master")))

        return initialize

    def _uses(self, store: Any, is_server: bool) -> None:
        session, address = self._session(), f"{store.host}:{store.port}"
        if len(self._stores) < MOST_STORES:
            self._stores[address] = is_server or self._stores.get(address, False)
        if session is not None:
            key = ("stores", *self._stores.items())
            session.ring.header(rings.W_STORES, session.ring.entry(rings.TABLE_TEXT, key, self._stores))

    def _meets_at(self, address: str, reached: bool, by_hand: bool = False) -> None:
        session = self._session()
        if session is not None:
            content = {"at": address, "reached": reached, "by_hand": by_hand}
            key = ("meets", address, reached, by_hand)
            session.ring.header(rings.W_MEETS, session.ring.entry(rings.TABLE_TEXT, key, content))

    @contextlib.contextmanager
    def _meeting_by_hand(self, address: str) -> Iterator[None]:
        """Return a context in which the ring records that the main thread waits in a rendezvous outside
        init_process_group."""
        session = self._session()
        if session is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._meets_at(address, reached=False, by_hand=True)
        try:
            yield
        finally:
            session.ring.header(rings.W_MEETS, 0)

    def _rendezvous_by_hand(self, meeting: Iterable[Any], url: str, rank: int, size: int) -> Iterator[Any]:
        """Wrap a rendezvous that the program calls itself, so that the ranks that still wait in it are known."""
        session, world = self._session(), None
        meeting_key, where = place_of_url(url)
        if session is not None:
            world = session.worlds.begin(f"by hand {meeting_key}", where, rank, size, WorldKind.FURTHER)
        for answer in meeting:
            if session is not None and world is not None:
                session.worlds.begun(f"by hand {meeting_key}", size)
                self._met[meeting_key, size], world = world.id, None
            yield answer

    def begin_init(self, rank: int, world_size: int, url: str = "env://") -> None:
        """Record the start of init_process_group on *rank*, with the rendezvous *url*. By default both come from the
        launcher.
        """
        launcher = launched(os.environ)
        rank = rank if rank >= 0 or launcher is None else launcher.rank
        world_size = world_size if world_size > 0 or launcher is None else launcher.size
        self._begin(rank, world_size, *place_of_url(url), "" if url.startswith("env://") else url.partition("?")[0])

    def _begin(self, rank: int, world_size: int, meeting: str, where: str, job: str = "") -> None:
        world = self._join(rank, world_size, meeting, where, job)
        session = self._session()
        if session is None or world is None:
            return
        session.ring.header(rings.W_JOINED, 0)
        log = session.recorder.group_log("init", "default_pg", range(world_size))
        index = session.recorder.note(log, "init_process_group", next(log.seq))
        self._inside.init = index, session.recorder.ring, partial(session.worlds.begun, meeting, world_size)

    def _join(
        self, rank: int, size: int, meeting: str, where: str, job: str = "", kind: WorldKind = WorldKind.DEFAULT
    ) -> RecordedWorld | None:
        if not 0 <= rank < size <= MOST_RANKS:
            return None  # torch says what it thinks of these
        session = self._session() or self._open(RecordedWorld("", rank, size, kind, where), job)
        met = self._met.get((meeting.partition("|")[0], size), "") if kind is WorldKind.FURTHER else ""
        return None if session is None else session.worlds.begin(meeting, where, rank, size, kind, met)

    def late(self) -> None:
        """Start to record although init_process_group was called before the guard was installed."""
        store = groups.of_default_group() if dist.get_backend() != "mpi" else None
        meeting, where = place_of_url("env://") if store is None else place_of_store(store)
        meeting = meeting.partition("|")[0]  # which prefix it has, nobody saw
        world = self._join(dist.get_rank(), dist.get_world_size(), meeting, where)
        session = self._session()
        if session is not None and world is not None:
            session.worlds.begun(meeting, world.size)
            session.joined()
            guard_world(session)

    def _update_default(self, original: Any, pg: Any) -> Any:
        answer = original(pg)
        session = self._session()
        begun = getattr(self._inside, "init", None)
        if session is not None and pg is not None:
            session.joined()
            session.ring.header(rings.W_MEETS, 0)
            if begun is not None:
                index, ring, end = begun
                ring.finish(index, rings.COMPLETED)
                end()
        self._inside.init = None
        return answer

    def _helper(self, original: Any, size: int, rank: int, ranks: Any, *args: Any, **kwargs: Any) -> Any:
        default, by_hand = not ranks, None
        store = args[1] if len(args) > 1 else kwargs.get("store")
        if default and not _called_by_init():
            name = str(args[2] if len(args) > 2 else kwargs.get("group_name", ""))
            by_hand = place_of_store(store, name)
        elif default and getattr(self._inside, "init", None) is None:
            if size > 0:
                self._begin(rank, size, *place_of_store(store))  # an explicit store: there was no rendezvous
            else:
                self.begin_init(rank, size)
        world = None if by_hand is None else self._join(rank, size, *by_hand, kind=WorldKind.FURTHER)
        session = self._session()
        if default and session is not None and session.strict is not None:
            session.strict.peers.meet(world or session.recorder.world, store)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if default and attempt != "0" and len(args) > 1 and not kwargs.get("enable_reconfigure"):
            # elastic keeps one store over restarts: gloo would connect to the addresses of dead workers
            args = (args[0], PrefixStore(f"attempt_{attempt}", args[1]), *args[2:])
        with contextlib.nullcontext() if by_hand is None else self._meeting_by_hand(by_hand[1]):
            pg, store = original(size, rank, ranks, *args, **kwargs)
        if world is not None and session is not None:
            session.worlds.begun(by_hand[0] if by_hand else "", size)
        return self._guard(pg, () if default else tuple(ranks), world), store

    def _guard(self, pg: Any, ranks: tuple[int, ...], world: RecordedWorld | None = None) -> Any:
        """Guard a group. *ranks* are ranks of *world*, by default the default group's world."""
        session = self._session()
        if session is None and isinstance(pg, ProcessGroup):  # backend mpi: ranks are known only now
            self._join(pg.rank(), pg.size(), *place_of_url("env://"))
            session = self._session()
        if session is None or not isinstance(pg, ProcessGroup) or guard_of(pg) is not None:
            return pg
        guarded = session.guard(pg, session.log_of(pg, group_ranks(pg, ranks), world))
        if pg in _attached:
            guarded.note_hook("attached", 0, registered=True)
        swap(pg, guarded)
        return guarded

    # new_group, split_group ---------------------------------------------------------------------

    def _new_group(self, original: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = self._session()
        if session is None:
            return original(ranks, *args, **kwargs)
        world = session.recorder.world
        members = tuple(range(world.size)) if ranks is None else tuple(ranks)
        if kwargs.get("sort_ranks", True):
            members = tuple(sorted(members))
        local = kwargs.get("use_local_synchronization", False)
        if local and world.rank not in members:
            return original(ranks, *args, **kwargs)
        index = session.recorder.note_new_group(members, local)
        group_count = groups.WORLD.get().group_count
        try:
            answer = original(ranks, *args, **kwargs)
        except BaseException as error:
            session.ring.error(index, error_line(error))
            session.ring.finish(index, rings.FAILED)
            if not local and groups.WORLD.get().group_count == group_count:  # wrong ranks: torch has not counted it
                session.recorder.rejected_new_group(index)
            raise
        session.ring.finish(index, rings.COMPLETED)
        return answer

    def _split(self, original: Any, parent_pg: Any = None, *args: Any, **kwargs: Any) -> Any:
        split = original(parent_pg, *args, **kwargs)
        if isinstance(split, ProcessGroup) and guard_of(split) is None:
            ranks = tuple(groups.WORLD.get().pg_group_ranks.get(split, {}))
            parent = guard_of(parent_pg)
            return self._guard(split, ranks, None if parent is None else parent.group_log.world)
        return split

    def _no_wrapper(self, original: Any, wrapped_pg: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the guarded group instead of torch's debug wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
        if self._session() is None or wrapped_pg is None:
            return original(wrapped_pg, *args, **kwargs) if wrapped_pg is not None else original(*args, **kwargs)
        return wrapped_pg

    # What a public function refuses -------------------------------------------------------------

    def _raised(self, original: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Record the exception that torch's public function *name* is about to raise, as torch logs it."""
        session, error = self._session(), sys.exc_info()[1]
        op = FIRST_CALLS.get(name)
        if session is not None and error is not None and op is not None and not came_out(error, _on_record):
            group = guard_of(_group_of(name, args, kwargs))
            if group is not None and group.recorder is not None:
                group.recorder.refused(group.group_log, op, error_line(error))
        return original(name, *args, **kwargs)


_RECORDING = frozenset(module.__file__ for module in (guard, handle, held, strict))


def _on_record(code: CodeType, innermost: bool) -> bool:
    """Return whether *code* is the guard's own, so that the call has a record.

    The fast path writes a record only if it raises itself; otherwise the call took the slow path.
    """
    return code.co_filename in _RECORDING or (innermost and code.co_filename == shortcut.__file__)


def _group_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the group argument of a public function, or the default group if there is none."""
    with contextlib.suppress(TypeError):  # arguments that do not fit its signature
        kwargs = inspect.signature(getattr(c10d, name)).bind_partial(*args, **kwargs).arguments
    return kwargs.get("group") or groups.WORLD.get().default_pg


def _called_by_init() -> bool:
    """Return whether torch's own init_process_group called a helper. Frameworks that construct groups call it, too."""
    caller = sys._getframe(3)  # below: this function, the hook, and its wrapper
    return caller.f_code.co_name == "init_process_group" and caller.f_globals is vars(c10d)


def _called_by_torch() -> bool:
    """Return whether torch itself called a hook: init_process_group, init_rpc."""
    return str(sys._getframe(3).f_globals.get("__name__", "")).startswith("torch.")


def _in_usual_world() -> bool:
    """Return whether torch's table of groups is the process-wide one. torch's own tests use one per thread."""
    return vars(c10d)[shortcut.WORLD] is shortcut.USUAL


def _waiting(original: Any) -> Callable[..., Any]:
    """Wrap a store's `get` or `wait` so that the heartbeat finds the awaited keys in its frame."""

    @functools.wraps(original)
    def distsim_store_wait(self: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, keys, *args, **kwargs)

    return distsim_store_wait


def _noting_line(original: Any) -> Callable[..., None]:
    """Wrap the constructor of a pool so that a worker, which has no frame of the program, is known by its line."""

    @functools.wraps(original)
    def initialize(pool: Any, *args: Any, **kwargs: Any) -> None:
        original(pool, *args, **kwargs)
        pool.distsim_made_at = next(iter(user_stack(sys._getframe(1))), None)

    return initialize


def _type_of(thing: Any) -> Any:
    return ProcessGroup if isinstance(thing, GuardedGroup) else type(thing)


def _attach(original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """Register one of torch's own hooks on the C++ group, which makes the calls. The guard does not learn when it is
    removed.
    """
    guard = guard_of(group)
    if guard is not None:
        guard.note_hook("attached", 0, registered=True)
        return original(guard.inner or group, *args, **kwargs)
    _attached.add(group)
    return original(group, *args, **kwargs)


_attached: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups that had hooks of torch (from the program) before they were guarded."""


def swap(old: Any, new: Any) -> None:
    """Replace *old* by *new* everywhere torch keeps groups, including the C++ registry of names."""
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
    """Guard every existing group."""
    world = groups.WORLD.get()
    for pg in list(world.pg_map):
        ranks = tuple(world.pg_group_ranks.get(pg, range(pg.size())))
        guard = session.guard(pg, session.log_of(pg, ranks), held=True)
        if guard is pg:
            continue
        if groups.NAN_CHECK.exists():  # it may have hooks, and does not say so
            guard.note_hook("earlier", 0, registered=True)
        if isinstance(guard, GuardedGroup):
            swap(pg, guard)
