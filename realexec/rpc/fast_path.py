"""A call that the same line has made before, and one that the same thread has served before, are noted the short way.

Between two calls a worker waits, its caches grow cold, and every line of Python costs several times what a benchmark
says. torch's own rpc_sync looks among its operators for the user's function, asks the agent who the callee is and the
profiler whether it runs, in half a dozen functions; what came out of that the last time depends only on what is
compared here, so it is not done again, and that pays for the record. The record itself is copied from the one before,
and is in the ring before C++ hears of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe as frame_above
from threading import get_ident
from types import FunctionType
from typing import Any, Protocol

import torch.futures
from torch.distributed.rpc import WorkerInfo, api

from distsim.debug.rings import layout as rings
from distsim.debug.rings.callsite import calling, codes_of, way_to
from distsim.debug.rings.writer import stays
from distsim.realexec.rpc.log import IDLE, NO_LIMIT, Key, Peer, RemoteLog
from distsim.realexec.rpc.udf import Udf, answers_later
from distsim.torch_compat import rpc as names
from distsim.torch_compat import works

__all__ = ["calls", "keep", "serves"]

API = vars(api)
SENDS, PICKLER = names.SEND_FUNCTION.attribute, names.PICKLER.attribute
profiler_enabled = works.PROFILES.get(works.unknown)
find_builtin = names.FIND_BUILTIN.get(None)
THERE = {SENDS, PICKLER, "get_worker_info"} <= API.keys() and find_builtin is not None
"""This torch has what the short way calls."""
MOST = 512
"""Calls that are remembered."""
DONE = rings.REMOTE | rings.COMPLETED
PAYLOAD_END = rings.WORDS_AT // 8 + rings.W_PAYLOAD_END
WAIT = works.FUTURE.get(torch.futures.Future).wait

Long = Callable[[Any, Any, Any, Any, Any, Key | None], Any]


class Hooks(Protocol):
    """What is known of RPC in this process (hooks.RpcHooks)."""

    log: RemoteLog | None
    quiet: int


def calls(hooks: Hooks, long: Long) -> Callable[..., Any]:
    """`rpc_sync` by the short way, or by *long*, which is to `keep` the call under the key that it gets."""

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
            udf = tuple.__new__(Udf, (func, args or (), kwargs or {}, (log.rank, index)))
            pickled, tensors = API[PICKLER].serialize(udf)
            answer = WAIT(API[SENDS](known[2], pickled, tensors, timeout, False))
        except BaseException as error:
            log.fail(index, error)
            raise
        ring.finish_as(index, DONE)
        return answer

    return rpc_sync


def keep(log: RemoteLog, key: Key, index: int, peer: Peer) -> None:
    """Remember a call whose record has just been written."""
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


def serves(hooks: Hooks, original: Callable[[Any], Any], long: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_run_function` by the short way, or by *long*."""

    def run(udf: Any) -> Any:
        log = hooks.log
        if log is None or type(udf) is not Udf or type(udf[0]) is not FunctionType:
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
