"""Patches of torch.distributed.rpc: its public functions, and the one that C++ calls to serve a request.

`rpc_sync` and the other functions are torch's decorator around the actual function, which is in a closure cell. The
content of that cell is exchanged, so a name that a script imported earlier is covered, too.

A call that the same line has made before, and one that the same thread has served before, take a fast path. Between
two calls a worker waits, its caches grow cold, and every line of Python costs several times what a benchmark shows.
torch's own rpc_sync searches its operators for the user's function, asks the agent for the callee and the profiler
whether it runs, in half a dozen functions. Their results depend only on what is compared here, so they are reused,
and the time saved pays for the record. The record is copied from the previous one, and is in the ring before C++
gets the call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from sys import _getframe as frame_above
from threading import get_ident
from types import FunctionType
from typing import Any

import torch.distributed.rpc as rpc
import torch.futures
from torch.distributed.rpc import WorkerInfo, api, internal

from distsim.debug.rings import layout as rings
from distsim.debug.rings.callsite import calling, codes_of, way_to
from distsim.debug.rings.files import RecordedWorld, WorldKind
from distsim.debug.rings.writer import stays
from distsim.realexec.guard.recorder import GroupLog
from distsim.realexec.process.session import Session
from distsim.remote_calls.guarded.log import (
    IDLE,
    NO_LIMIT,
    Key,
    NumberedFunction,
    Peer,
    RemoteLog,
    answers_later,
    name_of,
)
from distsim.text.tracebacks import error_line
from distsim.torch_compat import groups
from distsim.torch_compat import rpc as names
from distsim.torch_compat.names import Patches

FUTURE = groups.FUTURE.get(torch.futures.Future)
rref_future = names.RREF_FUTURE.get(None)

GROUP = "rpc"
KEY = "distsim_worker/"
"""Prefix of the key, followed by a worker's number, under which a guarded worker stores its ring's rank and its job
in the store of init_rpc.
"""
NOBODYS = -1
"""Rank of a worker that has no record here; its calls are not reported."""
TORCHS_OWN = frozenset({api.__name__, "torch.distributed.rpc.backend_registry"})
"""Modules whose functions torch itself calls remotely, to join and to shut down."""
API = vars(api)
SENDS, PICKLER = names.SEND_FUNCTION.attribute, names.PICKLER.attribute
profiler_enabled = groups.PROFILES.get(groups.unknown)
find_builtin = names.FIND_BUILTIN.get(None)
THERE = {SENDS, PICKLER, "get_worker_info"} <= API.keys() and find_builtin is not None
"""Whether the installed torch has all functions that the fast path calls."""
MOST = 512
"""Largest number of calls that are cached."""
DONE = rings.REMOTE | rings.COMPLETED
PAYLOAD_END = rings.WORDS_AT // 8 + rings.W_PAYLOAD_END
WAIT = groups.FUTURE.get(torch.futures.Future).wait

Long = Callable[[Any, Any, Any, Any, Any, Key | None], Any]


class _Here(threading.local):
    request: tuple[int, int] | None = None
    """Rank and record index of the call that this thread is making, which travel with the function."""


class RpcHooks:
    """Patches of torch.distributed.rpc, undone by `remove`. `open_session(world, where)` creates the ring."""

    def __init__(
        self, open_session: Callable[[RecordedWorld | None, str], Session | None], session: Callable[[], Session | None]
    ) -> None:
        self._open = open_session
        self._session = session
        self._patches = Patches()
        self._undo: list[Callable[[], object]] = []
        self._here = _Here()
        self.log: RemoteLog | None = None
        self.quiet = 0
        """Id of the thread in which torch makes internal calls (to join or shut down), or 0."""
        self._members: GroupLog | None = None
        """Group of the init_rpc that is running."""
        self._joining: Callable[[], RemoteLog | None] | None = None
        """Creates the log of the init_rpc that is running."""

    def install(self) -> None:
        self._cell(api.rpc_sync, self._rpc_sync)
        self._cell(api.rpc_async, self._later("rpc_async", RemoteLog.watch))
        self._cell(api.remote, self._later("remote", _watch_value))
        self._cell(api.shutdown, self._shutdown)
        patches = self._patches
        patches.wrap(names.INIT, self._init_rpc)
        patches.wrap(names.INIT_BACKEND, self._init_backend)
        patches.wrap(names.INIT_STATES, self._init_states)
        patches.put(api, "PythonUDF", self._udf(internal.PythonUDF))
        patches.exchange(names.RUN_FUNCTION, self._run)
        patches.put(rpc.PyRRef, "to_here", self._to_here(rpc.PyRRef.to_here))
        patches.put(FUTURE, "wait", self._wait(FUTURE.wait))
        patches.put(FUTURE, "then", self._derives(FUTURE.then, lambda future, callback: [future]))
        patches.exchange(groups.COLLECT_ALL, lambda original: self._derives(original, lambda futures: futures))

    def remove(self) -> None:
        self._patches.remove()
        while self._undo:
            self._undo.pop()()
        self.log = None

    def forget(self) -> None:
        """Drop the state in a forked child, because the calls in the ring are its parent's."""
        self.log = None

    def _cell(self, public: Any, way: Callable[[Any], Any]) -> None:
        cells = dict(zip(public.__code__.co_freevars, public.__closure__ or (), strict=True))
        cell = cells.get("func")
        if cell is None:  # this torch decorates otherwise
            return
        original = cell.cell_contents
        self._undo.append(lambda: setattr(cell, "cell_contents", original))
        cell.cell_contents = functools.wraps(original)(way(original))

    # -- calls

    def _peer(self, to: Any) -> Peer | None:
        """Return the callee; None if the call is invalid, which torch reports."""
        log = self.log
        if log is None or self.quiet == threading.get_ident():
            return None
        return log.peers.get(to if isinstance(to, str | int) else getattr(to, "id", None))

    def _rpc_sync(self, original: Any) -> Any:
        here = self._here

        def long(to: Any, func: Any, args: Any, kwargs: Any, timeout: Any, key: Key | None) -> Any:
            peer, log = self._peer(to), self.log
            if peer is None or log is None:
                return original(to, func, args, kwargs, timeout)
            index = log.begin("rpc_sync", peer, name_of(func), timeout, rings.WAITING)
            if key is not None:
                keep(log, key, index, peer)
            if peer.guarded:
                here.request = (log.rank, index)
            try:
                answer = original(to, func, args, kwargs, timeout)
            except BaseException as error:
                log.fail(index, error)
                raise
            finally:
                here.request = None
            log.ring.finish(index, rings.COMPLETED)
            return answer

        return calls(self, long)

    def _later(self, op: str, watch: Callable[[RemoteLog, int, Any], None]) -> Callable[[Any], Any]:
        """Return the way of *op*, which returns before the callee has served it. *watch* takes its result."""

        def way(original: Any) -> Any:
            def call(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = NO_LIMIT) -> Any:
                peer, log = self._peer(to), self.log
                if peer is None or log is None:
                    return original(to, func, args, kwargs, timeout)
                index = log.begin(op, peer, name_of(func), timeout, rings.ASYNC)
                if peer.guarded:
                    self._here.request = (log.rank, index)
                try:
                    result = original(to, func, args, kwargs, timeout)
                except BaseException as error:
                    log.fail(index, error)
                    raise
                finally:
                    self._here.request = None
                watch(log, index, result)
                return result

            return call

        return way

    def _udf(self, original: Any) -> Any:
        here = self._here

        class PythonUDF(original):
            __slots__ = ()

            def __new__(cls, func: Any, args: Any, kwargs: Any) -> Any:
                request = here.request
                return (
                    original(func, args, kwargs) if request is None else NumberedFunction(func, args, kwargs, request)
                )

        return PythonUDF

    def _to_here(self, original: Any) -> Any:
        @functools.wraps(original)
        def to_here(rref: Any, *args: Any, **kwargs: Any) -> Any:
            log = self.log
            peer = None if log is None else self._peer(rref.owner())
            if log is None or peer is None:
                return original(rref, *args, **kwargs)
            timeout = args[0] if args else kwargs.get("timeout", NO_LIMIT)
            index = log.begin("to_here", peer, "", timeout, rings.WAITING)
            log.note_rref(index, rref)
            try:
                value = original(rref, *args, **kwargs)
            except BaseException as error:
                log.fail(index, error)
                raise
            log.ring.finish(index, rings.COMPLETED)
            return value

        return to_here

    def _wait(self, original: Any) -> Any:
        @functools.wraps(original)
        def wait(future: Any) -> Any:
            log = self.log
            return original(future) if log is None else log.wait(future, original)

        return wait

    def _derives(self, original: Any, sources: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def derive(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.log is not None:
                self.log.derived.add(result, sources(*args, **kwargs))
            return result

        return derive

    # -- serving

    def _run(self, original: Any) -> Any:
        def run(udf: Any) -> Any:
            log = self.log
            function = getattr(udf, "func", None)
            if log is None or function is None or getattr(function, "__module__", None) in TORCHS_OWN:
                return original(udf)
            index = log.serve(udf)
            future = None
            try:
                answer = original(udf)
                if isinstance(answer, FUTURE) and answers_later(function):
                    future = answer
                return answer
            finally:
                log.end_serving(index, future)

        return functools.wraps(original)(serves(self, original, run))

    # -- init_rpc, shutdown

    def _init_rpc(
        self,
        original: Any,
        name: Any,
        backend: Any = None,
        rank: int = -1,
        world_size: Any = None,
        *more: Any,
        **kw: Any,
    ) -> Any:
        session = self._session()
        if session is None and world_size and rank >= 0:
            session = self._open(RecordedWorld("", rank, world_size, WorldKind.RPC, ""), "")
        if session is None or not world_size or session.rank != rank or session.world_size < world_size:
            return original(name, backend, rank, world_size, *more, **kw)  # which ranks are to come is not known
        world = session.worlds.begin("rpc", "init_rpc", rank, world_size, WorldKind.RPC)
        members = session.recorder.group_log(GROUP, GROUP, range(world_size), world)
        self._members = members
        index = session.recorder.note(members, "init_rpc", next(members.seq))
        try:
            original(name, backend, rank, world_size, *more, **kw)
        except BaseException as error:
            session.ring.fail(index, error_line(error))
            raise
        finally:
            self._members = None
        session.ring.finish(index, rings.COMPLETED)
        if not session.ring.words[rings.WORDS_AT // 8 + rings.W_JOINED]:
            session.joined()

    def _init_backend(
        self, original: Any, backend: Any, store: Any, name: Any, rank: int, world_size: Any, options: Any
    ) -> Any:
        session = self._session()
        if session is None:
            return original(backend, store, name, rank, world_size, options)
        with contextlib.suppress(Exception):  # no store: torch says so
            store.set(f"{KEY}{rank}", f"{session.rank} {session.ring.job}")
        self._joining = lambda: self._begin(session, store, str(name), options) if world_size else None
        self.quiet = threading.get_ident()
        try:
            return original(backend, store, name, rank, world_size, options)
        except BaseException:
            self.log = session.recorder.look = None
            raise
        finally:
            self._joining = None
            self.quiet = 0

    def _init_states(self, original: Any, agent: Any) -> Any:
        """Start to record once all workers are known. No worker has left init_rpc yet, so none can have called this
        one.
        """
        answer = original(agent)
        joining, self._joining = self._joining, None  # torch comes by twice: what is served in between is on record
        if joining is not None:
            self.log = joining()
        return answer

    def _begin(self, session: Session, store: Any, name: str, options: Any) -> RemoteLog:
        peers = {}
        for info in names.CURRENT_AGENT.get()().get_worker_infos():
            ring = _ring_rank(store, info.id, session.ring.job)
            peer = Peer(info.name, NOBODYS if ring is None else ring, ring is not None)
            keys = (info.name, info.id, ("rank", peer.rank)) if peer.guarded else (info.name, info.id)
            peers.update(dict.fromkeys(keys, peer))
        members = self._members
        ranks = tuple(sorted({p.rank for p in peers.values() if p.guarded and p.rank < session.world_size}))
        if members is None or members.ranks != ranks:
            world = session.recorder.launcher if members is None else members.world
            members = session.recorder.group_log(GROUP, GROUP, ranks, world)
        log = RemoteLog(session.recorder, name, options, members)
        log.peers.update(peers)
        session.recorder.look = log.look
        return log

    def _shutdown(self, original: Any) -> Any:
        def shutdown(graceful: bool = True, *args: Any, **kwargs: Any) -> Any:
            log = self.log
            if log is None:
                return original(graceful, *args, **kwargs)
            index = log.recorder.note(log.members, "rpc_shutdown", next(log.members.seq)) if graceful else None
            self.quiet = threading.get_ident()
            try:
                return self._end(original, log, index, graceful, *args, **kwargs)
            finally:
                self.quiet = 0
                self.log = log.recorder.look = None
                log.end()

        return shutdown

    @staticmethod
    def _end(original: Any, log: RemoteLog, index: int | None, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = original(*args, **kwargs)
        except BaseException as error:
            if index is not None:
                log.fail(index, error)
            raise
        if index is not None:
            log.ring.finish(index, rings.COMPLETED)
        return answer


def _ring_rank(store: Any, worker: int, job: str) -> int | None:
    """Return the rank of a worker's ring, or None if it is not guarded or its ring belongs to another job.

    Trainers that met in another group before have rings of that job, in which this rank may be another process.
    """
    with contextlib.suppress(Exception):
        if store.check([f"{KEY}{worker}"]):
            rank, its_job = store.get(f"{KEY}{worker}").decode().split()
            return int(rank) if its_job == job else None
    return None


def _watch_value(log: RemoteLog, index: int, rref: Any) -> None:
    log.note_rref(index, rref)
    if rref_future is not None:
        log.watch(index, rref_future(rref))


def calls(hooks: RpcHooks, long: Long) -> Callable[..., Any]:
    """Return `rpc_sync` with a fast path. Other calls go to *long*, which caches them by `keep` under the key that
    it gets.
    """

    def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: Any = NO_LIMIT) -> Any:
        log, me, kind = hooks.log, get_ident(), type(to)
        if (
            log is None
            or me == hooks.quiet
            or type(func) is not FunctionType
            or type(timeout) is not float
            or (kind is not str and kind is not WorkerInfo)
        ):
            return long(to, func, args, kwargs, timeout, None)
        caller = calling(frame_above(1).f_back)
        if caller is None:  # no frame of the program's calls it
            return long(to, func, args, kwargs, timeout, None)
        # A function that can be pickled is its module's for good; a code object stays as long as the way is known.
        key = way_to(caller), func, to if kind is str else to.id, timeout, me
        known, ring = log.calls.get(key), log.ring
        if known is None or known[1] <= ring.words[PAYLOAD_END] or profiler_enabled():
            return long(to, func, args, kwargs, timeout, key)
        if log.recorder.outstanding:
            log.recorder.poll()
        index = ring.replay(known[0], next(log.numbers))
        try:
            udf = tuple.__new__(NumberedFunction, (func, args or (), kwargs or {}, (log.rank, index)))
            pickled, tensors = API[PICKLER].serialize(udf)
            answer = WAIT(API[SENDS](known[2], pickled, tensors, timeout, False))
        except BaseException as error:
            log.fail(index, error)
            raise
        ring.finish_as(index, DONE)
        return answer

    return rpc_sync


def keep(log: RemoteLog, key: Key, index: int, peer: Peer) -> None:
    """Cache a call whose record was just written."""
    function = key[1]
    if (
        not THERE
        or not peer.guarded
        or answers_later(function)
        or find_builtin(function) is not None
        or not log.recorder.sites.knows(key[0])
    ):
        return
    if len(log.calls) >= MOST:
        log.calls.clear()
    body = log.ring.template(index)
    expires = int.from_bytes(body[5 * 8 : 6 * 8], "little") + rings.PAYLOAD_BYTES // 2
    codes = codes_of(calling(frame_above(1)))  # kept alive, so that their ids stay theirs
    log.calls[key] = stays(body), expires, API["get_worker_info"](peer.name), codes


def serves(hooks: RpcHooks, original: Callable[[Any], Any], long: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `_run_function` with a fast path; other requests go to *long*."""

    def run(udf: Any) -> Any:
        log = hooks.log
        if log is None or type(udf) is not NumberedFunction or type(udf[0]) is not FunctionType:
            return long(udf)
        rank, number = udf[3]
        known, ring = log.served.get((udf[0], rank, get_ident())), log.ring
        if known is None or known[1] <= ring.words[PAYLOAD_END]:
            return long(udf)
        standing = known[2]
        standing.index = index = ring.replay(known[0], next(log.numbers), number + 1)
        try:
            return original(udf)
        finally:
            standing.index = IDLE
            ring.finish_as(index, DONE)

    return run
