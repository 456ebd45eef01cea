"""Record of the remote calls that a worker makes and serves.

Guarded workers announce themselves in the store of `init_rpc`. Between them, a Python function travels as a
`NumberedFunction` with the number of the call's record, so that the callee knows which call it serves. Futures that
a program derives from its calls (`then`, `collect_all`, `wait_all`) are followed: waiting for such a future is
waiting for the calls behind it.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from distsim.debug.records.call import SERVE, Remote
from distsim.debug.records.frames import defined_at, frame_of, program_frames, steps
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.callsite import calling, codes_of, way_to
from distsim.debug.rings.writer import stays
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.text.tracebacks import error_line
from distsim.torch_compat.rpc import ASYNC_EXECUTION, LOCAL_INVOKE

DEFAULT_TIMEOUT_S = 60.0
"""rpc_timeout if a program sets none; it does not count as a limit of the program."""
RREF = re.compile(r"created_on=(\d+), local_id=(\d+)")
OPERATORS = "_VariableFunctionsClass."
METHOD = "RRef."
"""Prefix of the name of a method that is called on an RRef's value."""
MOST_PLACES = 512
"""Maximum number of positions of blocked threads in the ring's table."""
MOST_ERRORS, LONGEST_ERROR = 64, 2000
"""Largest number and length of exception texts in the ring's table of half a MiB, which also holds other texts."""
IDLE = -1
"""Value of an index without a record."""
NO_LIMIT = -1.0
"""torch's UNSET_RPC_TIMEOUT."""
MOST_DERIVED = 1024
"""Number of derived futures above which those whose calls have ended are dropped."""


class Peer(NamedTuple):
    """Another worker of the RPC job."""

    name: str
    rank: int
    """Rank of the worker's ring."""
    guarded: bool


Key = tuple[Any, ...]
Stays = tuple[bytes, bytes]


class Same(NamedTuple):
    """Constant part of a call that the same line may make again."""

    body: Stays
    position: int
    """Position of its signature in the ring, which may have been overwritten."""
    alive: tuple[CodeType, ...] | None
    """Code objects on the stack above the call, kept alive because their ids are part of the key."""


class Standing:
    """State of a thread that serves calls at the last examination."""

    __slots__ = ("at", "index", "last", "looked", "said")

    def __init__(self) -> None:
        self.index = IDLE
        """Index of the record of the call that the thread serves."""
        self.looked = IDLE
        """That index at the last heartbeat."""
        self.last = 0
        """Id of the thread's frame at the last heartbeat. A reference to the frame would keep its tensors alive."""
        self.at = 0
        self.said = False
        """Whether the record has the thread's position."""


class Future:
    """A future of torch that the recorder can poll like other outstanding calls."""

    __slots__ = ("_forget", "_future")

    def __init__(self, future: Any, forget: Callable[[int], Any]) -> None:
        self._future = future
        self._forget = forget

    def is_completed(self) -> bool:
        done: bool = self._future.done()
        if done:
            self._forget(id(self._future))
        return done

    def wait(self) -> bool:
        return True


class RemoteLog:
    """Record of a worker's remote calls, from init_rpc to shutdown."""

    def __init__(self, recorder: Recorder, name: str, options: Any, members: GroupLog) -> None:
        self.recorder = recorder
        self.ring = recorder.ring
        self.name = name
        self.rank = recorder.ring.rank
        self.members = members
        self.peers: dict[Any, Peer] = {}
        """Peers by the worker's name and number."""
        limit_s = float(options.rpc_timeout)
        self.limit_s = 0.0 if limit_s == DEFAULT_TIMEOUT_S else limit_s
        self.threads = int(getattr(options, "num_worker_threads", 0))
        self.futures: dict[int, int] = {}
        """Index of the record of each outstanding future, by the future's id."""
        self.derived = Derived(recorder, self.futures)
        self.numbers = itertools.count(1)
        self.calls: dict[Key, tuple[Stays, int, Any, Any]] = {}
        """Cached calls for the fast path (`hooks`), by key.

        A value is the constant part of the record, the position in the payload ring after which the signature must
        be written again, torch's WorkerInfo of the callee, and the code objects above the call.
        """
        self.served: dict[Key, tuple[Stays, int, Standing]] = {}
        """Served calls for the fast path (`hooks`), by function, rank of the caller, and thread."""
        self._standing: dict[int, Standing] = {}
        self._names: dict[int, str] = {}
        self._places = 0
        self._again: dict[Key, Same] = {}
        self._errors: set[str] = set()

    # -- calls of ours

    def begin(self, op: str, peer: Peer, function: str, timeout_s: float, flags: int) -> int:
        """Record a call that starts, and return the index of its record."""
        recorder = self.recorder
        if recorder.outstanding:
            recorder.poll()
        me = threading.get_ident()
        frame = calling(sys._getframe(2))
        way = None if frame is None else way_to(frame)
        key = op, way, function, peer.name, timeout_s, me
        same = self._again.get(key)
        if same is not None and same.position + rings.PAYLOAD_BYTES // 2 > self.ring.payload_end:
            return self.ring.replay(same.body, next(self.numbers))
        thread = recorder._threads.get(me) or recorder._thread(me)
        site = recorder.sites.here(3)
        fields = op, function, self.name, peer.name, self.threads, timeout_s if timeout_s >= 0.0 else self.limit_s
        position, print_ = self.ring.signature(fields, _describe)
        index = self.ring.issue(
            flags | rings.ISSUED | rings.REMOTE,
            self.members.group,
            thread,
            next(self.numbers),
            position,
            site[0],
            print_,
            site[1],
            peer.rank,
            0,
        )
        if way is not None and recorder.sites.knows(way):
            self._keep(key, index, position, codes_of(frame))
        return index

    def _keep(self, key: tuple[Any, ...], index: int, position: int, alive: Any) -> None:
        """Keep the constant part of the record of a repeated call."""
        if len(self._again) >= MOST_PLACES:
            self._again.clear()
        self._again[key] = Same(stays(self.ring.template(index)), position, alive)

    def watch(self, index: int, future: Any) -> None:
        """Record the end of the call when *future* is done, and who waits for it until then."""
        self.futures[id(future)] = index
        self.recorder.watch(index, Future(future, self._forget), False)

    def _forget(self, ident: int) -> None:
        self.futures.pop(ident, None)

    def wait(self, future: Any, original: Callable[[Any], Any]) -> Any:
        """Replace `future.wait()` for futures of calls and others, and record the wait."""
        index = self.futures.get(id(future))
        if index is None:
            return self.derived.wait(future, original)
        self.ring.mark(index, rings.WAITING | rings.WAITED)
        try:
            value = original(future)
        except BaseException as error:
            self._say(index, error)
            self._close(index, future, rings.FAILED)
            raise
        self._close(index, future, rings.COMPLETED)
        return value

    def fail(self, index: int, error: BaseException) -> None:
        """Record the end of a call that raised."""
        self._say(index, error)
        self.ring.finish(index, rings.FAILED)

    def _say(self, index: int, error: BaseException) -> None:
        """Attach an error's text to a record.

        If a worker raises very often (an empty queue), only the first texts are kept, because the table holds other
        texts, too.
        """
        text = error_line(error)[:LONGEST_ERROR]
        if text not in self._errors and len(self._errors) >= MOST_ERRORS:
            return
        self._errors.add(text)
        self.ring.error(index, text)

    def _close(self, index: int, future: Any, state: int) -> None:
        self.recorder.outstanding.pop(index, None)
        self._forget(id(future))
        self.ring.finish(index, state)

    def note_rref(self, index: int, rref: Any) -> None:
        """Record which value a call creates or fetches."""
        match = RREF.search(str(rref))
        if match is None:
            return
        made_by = self.peers.get(int(match[1]))
        self.ring.number_rref(index, int(match[1]) if made_by is None else made_by.rank, int(match[2]) + 1)

    # -- calls of others

    def serve(self, udf: Any) -> int:
        """Record that this thread starts to serve a call, and return the index of the record."""
        me = threading.get_ident()
        rank, number = getattr(udf, "request", (-1, -1))
        called = _called(udf)
        caller = self.peers.get(("rank", rank))
        fields = SERVE, called, caller.name if caller else "?", self.name, self.threads, 0.0
        position, print_ = self.ring.signature(fields, _describe)
        index = self.ring.issue(
            rings.ISSUED | rings.REMOTE,
            self.members.group,
            self.recorder._threads.get(me) or self._thread(me),
            next(self.numbers),
            position,
            self._definition(udf.func),
            print_,
            0,
            rank,
            0,
            number + 1,
        )
        standing = self._standing.get(me)
        if standing is None:
            standing = self._standing[me] = Standing()
        standing.index = index
        if type(udf.func) is FunctionType and not (called.startswith(METHOD) or answers_later(udf.func)):
            if len(self.served) >= MOST_PLACES:
                self.served.clear()
            same, expires = stays(self.ring.template(index)), position + rings.PAYLOAD_BYTES // 2
            self.served[udf.func, rank, me] = same, expires, standing
        return index

    def _thread(self, me: int) -> int:
        """Return the ring's number of a thread of torch's pool, which has no name in Python."""
        name = self._names.setdefault(me, f"RPC {len(self._names) + 1}")
        offset = self.recorder._threads[me] = self.ring.entry(rings.TABLE_THREAD, (me, name), [me, name])
        self.recorder.num_serving += 1
        return offset

    def end_serving(self, index: int, future: Any = None) -> None:
        """Record that the function has returned. With a *future*, the reply follows when it is done."""
        standing = self._standing.get(threading.get_ident())
        if standing is not None:  # `end` has come before
            standing.index = IDLE
        if future is None:
            self.ring.finish(index, rings.COMPLETED)
        else:
            self.ring.mark(index, rings.ASYNC)
            self.recorder.watch(index, Future(future, self._forget), False)

    def _definition(self, function: Any) -> int:
        """Return the table offset of the first line of a user's function, or 0 if it is unknown."""
        site = defined_at(function)
        return 0 if site is None else self.recorder.sites.intern([site])[0]

    def look(self) -> None:
        """Record, once per heartbeat, the positions of threads that have served one call for a while."""
        for thread, standing in list(self._standing.items()):
            index = standing.index
            if index == IDLE:
                continue
            frame = frame_of(thread)
            if frame is None:
                continue
            stands = standing.looked == index and id(frame) == standing.last and frame.f_lasti == standing.at
            is_noted = stands and standing.said
            if stands and not is_noted and self._places < MOST_PLACES and (stood := program_frames(steps(frame))):
                self._places += 1
                self.ring.set_site(index, self.recorder.sites.intern(stood)[0])
                is_noted = True
            standing.looked, standing.last, standing.at, standing.said = index, id(frame), frame.f_lasti, is_noted

    def end(self) -> None:
        """Stop polling futures of this log at shutdown."""
        for index in self.futures.values():
            self.recorder.outstanding.pop(index, None)
            self.ring.finish(index, rings.COMPLETED)
        self.futures.clear()
        self._standing.clear()


def name_of(function: Any) -> str:
    """Return the qualified name of a function, such as `Trainer.step`, or the name of its type if it has none."""
    name = getattr(function, "__qualname__", None)
    return (name or type(function).__qualname__).removeprefix(OPERATORS)


def _called(udf: Any) -> str:
    """Return the name of the function that a request calls; for a call on an RRef, the method's name."""
    name = name_of(udf.func)
    if name.startswith(LOCAL_INVOKE) and len(udf.args) > 1:
        return f"{METHOD}{udf.args[1]}"
    return name


Said = tuple[str, str, str, str, int, float]


def _describe(key: Said) -> tuple[Signature, bool]:
    op, function, caller, callee, threads, limit_s = key
    remote = Remote(function, caller, callee, threads, limit_s or None)
    return Signature(op, remote=remote), False


class Derived:
    """Futures of one worker that were derived from others. *calls* maps the id of a call's future to its record
    index.
    """

    def __init__(self, recorder: Recorder, calls: dict[int, int]) -> None:
        self._recorder = recorder
        self._calls = calls
        self._known: dict[int, tuple[Any, frozenset[int]]] = {}
        """Each derived future with the records of the calls behind it, by id. The reference keeps the id unique."""

    def add(self, future: Any, of: Iterable[Any]) -> None:
        """Record that *future* completes when all futures in *of* do."""
        behind: set[int] = set()
        for source in of:
            index = self._calls.get(id(source))
            if index is not None:
                behind.add(index)
            elif id(source) in self._known:
                behind |= self._known[id(source)][1]
        if not behind:
            return
        if len(self._known) >= MOST_DERIVED:
            open_ = self._recorder.outstanding
            self._known = {ident: known for ident, known in self._known.items() if any(i in open_ for i in known[1])}
        self._known[id(future)] = future, frozenset(behind)

    def wait(self, future: Any, original: Callable[[Any], Any]) -> Any:
        """Wait for a future that is not the future of a call itself."""
        known = self._known.pop(id(future), None)
        if known is None:
            return original(future)
        recorder = self._recorder
        waits = [index for index in sorted(known[1]) if index in recorder.outstanding]
        for index in waits:
            recorder.ring.mark(index, rings.WAITING | rings.WAITED)
        try:
            return original(future)
        finally:
            for index in waits:
                if not recorder.look_at(index):  # another has failed, which ends the wait for all
                    recorder.ring.unmark(index, rings.WAITING)


class NumberedFunction(NamedTuple):
    """torch's PythonUDF with the rank and index of the caller's record."""

    func: Any
    args: Any
    kwargs: Any
    request: tuple[int, int]


def answers_later(function: Any) -> bool:
    """Return whether the function returns a future whose result is the reply (`@rpc.functions.async_execution`)."""
    return hasattr(function, ASYNC_EXECUTION)
