"""The guard's part in torch.distributed.rpc and in a process's end, without either."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.distributed.rpc import api

from distsim.realexec import install
from distsim.realexec.process.end_hooks import EndHooks
from distsim.remote_calls.guarded.hooks import RpcHooks


def test_calls_are_noted_as_soon_as_others_may_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has left init_rpc may call one that is still in it."""
    agent = SimpleNamespace(get_worker_infos=lambda: [SimpleNamespace(name="w0", id=0)])
    monkeypatch.setattr(api, "_init_rpc_states", lambda agent: None)
    monkeypatch.setattr(api, "_get_current_rpc_agent", lambda: agent)
    ring = SimpleNamespace(rank=0, job="j")
    recorder = SimpleNamespace(ring=ring, look=None, launcher=None, group_log=lambda *_: None)
    session: Any = SimpleNamespace(rank=0, world_size=1, recorder=recorder, ring=ring)
    hooks = RpcHooks(lambda *_: None, lambda: session)
    inside: list[object] = []

    def init_backend(*_: object) -> None:
        api._init_rpc_states(agent)
        inside.extend((hooks.log, hooks._peer("w0")))  # what torch says here itself is not the program's
        api._init_rpc_states(agent)

    hooks.install()
    try:
        options = SimpleNamespace(rpc_timeout=60.0, num_worker_threads=1)
        hooks._init_backend(init_backend, None, dist.HashStore(), "w0", 0, 1, options)
        assert inside[0] is not None
        assert hooks.log is inside[0]  # where threads stand that serve since then
        assert inside[1] is None
        assert hooks._peer("w0") is not None
    finally:
        hooks.remove()


def test_a_forked_child_notes_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent's ring is mapped in it, too."""
    hooks = RpcHooks(lambda *_: None, lambda: None)
    hooks.log = cast(Any, object())
    for name, value in {"_session": SimpleNamespace(guards=[]), "_hooks": [hooks], "_settings": object()}.items():
        monkeypatch.setattr(install, name, value)
    install._forget()
    assert hooks.log is None


def test_the_end_is_noted_whichever_thread_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """os._exit in a thread that serves a remote call ends the whole process."""
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(os, "_exit", lambda status: told.append(("left", status)))
    session: Any = SimpleNamespace(
        stands_at=lambda frames: told.append(("at", frames[-1].function)),
        exits=lambda code: told.append(("exits", code)),
    )
    hooks = EndHooks(lambda: session)
    hooks.install()
    try:
        thread = threading.Thread(target=lambda: os._exit(0))
        thread.start()
        thread.join()
    finally:
        hooks.remove()
    assert told[-2:] == [("exits", 0), ("left", 0)]
