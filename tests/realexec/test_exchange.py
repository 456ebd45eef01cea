"""Monitors of several hosts: they meet only with the secret, and what is sent arrives unchanged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distsim.debug.exchange import Follower, Leader
from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, CallWait, Evidence, Finding, Group, Phase, RankState, Site, State
from distsim.debug.wire import evidence_from_json, evidence_to_json

STATUS: dict[str, Any] = {"ranks": [2, 3], "counts": [5, 5], "ended": 0}


@contextmanager
def pair(tmp_path: Path, secret: str | None = None) -> Iterator[tuple[Leader, Follower]]:
    """A leader and a follower on this machine."""
    leader = Leader(tmp_path)
    said = json.loads((tmp_path / "monitor.json").read_text())
    follower = Follower("127.0.0.1", said["port"], secret or said["secret"], "other")
    yield leader, follower
    leader.close()
    follower.close()


def until(condition: Callable[[], bool], step: Callable[[], Any]) -> bool:
    """Step both ends until something is so; bounded, so that a fault fails the test."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        step()
    return condition()


def test_rows_and_looks_cross_over(tmp_path: Path) -> None:
    """A follower that knows the secret is welcomed; its rows arrive, and it hears the verdict."""
    got: list[Any] = []
    told: list[Any] = []
    rows = np.arange(6, dtype=np.uint64).reshape(2, 3)
    outbox = [(2, ("0", (0, 2), 0), rows)]
    with pair(tmp_path) as (leader, follower):

        def step() -> None:
            leader.step(lambda rank, key, data: got.append((rank, key, data)))
            told.extend(follower.step(STATUS, outbox, lambda request: {"echo": request["focus"]}))

        assert until(lambda: bool(got) and bool(leader.links[0].status), step)
        rank, key, data = got[0]
        assert (rank, key) == (2, ("0", (0, 2), 0))
        assert (data == rows).all()
        assert leader.links[0].ranks == (2, 3)
        assert leader.lost == []
        leader.tell({"verdict": {"x": 1}})
        assert until(lambda: bool(told), step)
    assert told[0] == {"verdict": {"x": 1}}


def test_a_wrong_secret_is_shown_the_door(tmp_path: Path) -> None:
    """Who does not know the job's secret is cut off and heard of no more."""
    got: list[Any] = []
    rows = np.zeros((1, 3), dtype=np.uint64)
    with pair(tmp_path, secret="guess") as (leader, follower):

        def step() -> None:
            leader.step(lambda *data: got.append(data))
            follower.step(STATUS, [(2, ("0", (0, 2), 0), rows)], lambda request: None)

        assert until(lambda: follower.link is not None and not follower.link.open, step)
        assert got == []
        assert not any(link.known for link in leader.links)


def test_evidence_survives_the_wire() -> None:
    """States, waits, calls and findings are the same on the other side."""
    group = Group("0", "default_pg", (0, 1))
    site = Site("train.py", 7, "step")
    call = CallRecord(
        rank=1,
        group=group,
        seq=4,
        op="all_to_all_single",
        input_shapes=((4, 2),),
        dtypes=("float32",),
        input_splits=(1, 3),
        site=site,
        stack=(site,),
        issued_s=1.5,
        state=State.ISSUED,
        index=9,
    )
    state = RankState(1, Phase.BLOCKED, (CallWait(call),), site, (site,), 1.5, host="h", pid=3, over=True)
    finding = Finding(Kind.NAN, (1,), "text", group, call, site, "do this", 1.5)
    evidence = Evidence(2, {1: state}, {1: [call]}, findings=[finding], sources={"train.py": "x"})
    states, records, findings, sources = evidence_from_json(json.loads(json.dumps(evidence_to_json(evidence))))
    assert states == {1: state}
    assert records == {1: [call]}
    assert findings == [finding]
    assert sources == {"train.py": "x"}
