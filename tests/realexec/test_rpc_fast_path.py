"""A remote call that a line has made before, and one that a thread has served before, are noted the short way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed import rpc
from torch.distributed.rpc import api, internal

from distsim.debug.records import CallRecord, State
from distsim.debug.records.call import Remote
from distsim.debug.records.signature import Signature
from distsim.debug.rings.reader import RingReader
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard.recorder import Recorder
from distsim.remote_calls.guarded.hooks import RpcHooks
from distsim.remote_calls.guarded.log import NumberedFunction, Peer, RemoteLog


def double(x: int) -> int:
    return 2 * x


def fails(x: int) -> int:
    raise SystemExit(x)


@rpc.functions.async_execution
def later(x: int) -> Any:
    return torch.futures.Future()


class Worker:
    """One under guard whose calls go nowhere."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ring = RingWriter(path / "rank00000.a0.j.ring", rank=0, world_size=2, local_rank=0, job="j", attempt=0)
        recorder = Recorder(self.ring)
        options = SimpleNamespace(rpc_timeout=60.0, num_worker_threads=16)
        self.log = RemoteLog(recorder, "w0", options, recorder.group_log("rpc", "rpc", (0, 1)))
        self.log.peers.update(dict.fromkeys(("w1", 1, ("rank", 1)), Peer("w1", 1, True)))
        self.sent: list[Any] = []
        self.long = 0
        """Calls that torch's own function has made."""
        invoke = api._invoke_rpc

        def counted(*args: Any) -> Any:
            self.long += 1
            return invoke(*args)

        monkeypatch.setattr(api, "_invoke_rpc", counted)
        monkeypatch.setattr(api, "_invoke_rpc_python_udf", self._send)
        monkeypatch.setattr(api, "_is_current_rpc_agent_set", lambda: True)
        monkeypatch.setattr(api, "get_worker_info", lambda name: WorkerInfo("w1", 1))
        self.hooks = RpcHooks(lambda *_: None, lambda: None)
        self.hooks.install()
        self.hooks.log = self.log

    def _send(self, to: WorkerInfo, pickled: bytes, tensors: Any, timeout: float, is_async: bool) -> Any:
        assert (to.name, timeout, is_async) == ("w1", -1.0, False)
        udf = internal.deserialize(pickled, tensors)
        self.sent.append(udf)
        future: Any = torch.futures.Future()
        if udf.func is fails:
            future.set_exception(ValueError("refused"))
        else:
            future.set_result(udf.func(*udf.args, **udf.kwargs))
        return future

    def records(self) -> list[CallRecord]:
        reader = RingReader(self.ring.path)
        found, _ = reader.since(0)
        return [reader.decode(record, 0) for record in found]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.hooks.remove()


SETTLES = 20
"""Calls after which the way to a line is walked as it will be from then on, however deep pytest's own stack is."""


def call_again(worker: Worker, what: Callable[[], Any]) -> int:
    """Make a call often; answers how many of the last three torch's own function has made."""
    for number in range(SETTLES + 3):
        if number == SETTLES:
            before = worker.long
        what()
    return worker.long - before


def same(record: CallRecord) -> tuple[Any, ...]:
    return record.op, record.remote, record.peer, record.site, record.stack, record.thread, record.state


def test_a_call_made_again_is_noted_as_the_first_was(worker: Worker) -> None:
    """torch's own function is not asked again, and only time and numbers differ."""
    answers = []
    assert call_again(worker, lambda: answers.append(rpc.rpc_sync("w1", double, args=(4,)))) == 0
    assert answers == [8] * (SETTLES + 3)
    first, *others = worker.records()
    assert first.state is State.COMPLETED
    assert first.site is not None
    assert first.site.file.endswith("test_rpc_fast_path.py")
    assert {same(one) for one in others} == {same(first)}
    assert [udf.request for udf in worker.sent] == [(0, number) for number in range(SETTLES + 3)]
    assert [one.seq for one in worker.records()] == [number + 1 for number in range(SETTLES + 3)]


def test_what_tells_calls_of_a_line_apart(worker: Worker) -> None:
    """The function, and the way to the line."""

    def call(function: Any) -> Any:
        return rpc.rpc_sync("w1", function, args=(1,))

    assert call_again(worker, lambda: call(double)) == 0
    assert call_again(worker, lambda: call(str)) == 3  # a type has no code to be told by
    assert call_again(worker, lambda: call(double)) == 0
    first, *_, last = worker.records()
    assert last.site == first.site
    assert last.stack != first.stack
    assert {one.remote.function for one in worker.records() if one.remote} == {"double", "str"}


def test_a_signature_that_is_being_overwritten_is_written_anew(worker: Worker) -> None:
    """Other calls' signatures may have taken the place of a known call's."""
    numbers = iter(range(1_000_000))

    def call() -> None:
        for number in itertools.islice(numbers, 1200):
            worker.ring.signature(number, lambda key: (Signature("x" * 300, root=key), False))
        rpc.rpc_sync("w1", double, args=(1,))

    assert call_again(worker, call) == 3
    assert worker.records()[-1].remote == Remote("double", "w0", "w1", 16)


def test_a_known_call_that_fails_says_so(worker: Worker) -> None:
    """Its record ends as failed, with the error, and the caller gets it."""

    def call() -> None:
        with pytest.raises(ValueError, match="refused"):
            rpc.rpc_sync("w1", fails, args=(1,))

    assert call_again(worker, call) == 0
    assert {(one.state, one.error) for one in worker.records()} == {(State.FAILED, "ValueError: refused")}


def test_a_profiler_sees_every_call(worker: Worker) -> None:
    """While one runs, torch's own function makes the call."""

    def call() -> Any:
        return rpc.rpc_sync("w1", double, args=(1,))

    assert call_again(worker, call) == 0
    with torch.autograd.profiler.profile(use_kineto=True):
        assert call_again(worker, call) == 3


def test_a_call_served_again_is_noted_as_the_first_was(worker: Worker) -> None:
    """Each record says whose call it serves, and ends however the function does."""
    seen: list[CallRecord] = []

    def serve(function: Any, number: int) -> None:
        internal._run_function(NumberedFunction(function, (1,), {}, (1, number)))
        seen.append(worker.records()[-1])

    for number in (7, 8, 9):
        serve(double, number)
    assert [one.remote.request for one in seen if one.remote] == [(1, 7), (1, 8), (1, 9)]
    assert {(one.op, one.site, one.thread, one.state) for one in seen} == {
        ("rpc_serve", seen[0].site, seen[0].thread, State.COMPLETED)
    }
    for number in (10, 11):
        with pytest.raises(SystemExit):
            serve(fails, number)
    assert {one.state for one in worker.records()} == {State.COMPLETED}
    serve(later, 12)
    serve(later, 13)
    assert [one.is_async for one in seen[-2:]] == [True, True]
