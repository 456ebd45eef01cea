"""The worlds of one process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import RecordedWorld, WorldKind
from distsim.debug.rings.reader import RingReader
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.process import hooks
from distsim.realexec.process.worlds import Worlds, place_of_url
from distsim.text.codec import decode, encode


@pytest.mark.parametrize(("uses_agent_store", "reuses"), [("True", [False, True]), ("False", [False, False])])
def test_a_second_world_in_the_agents_store_reuses_it(
    monkeypatch: pytest.MonkeyPatch, uses_agent_store: str, reuses: list[bool]
) -> None:
    """torchrun's store outlives the group; one that rank 0 serves ends with it."""
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "2900")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", uses_agent_store)
    joined: list[RecordedWorld] = []
    recorder: Any = SimpleNamespace(join=joined.append)
    worlds = Worlds(recorder)
    place, where = place_of_url("env://")
    for _ in reuses:
        worlds.begin(place, where, 0, 2, WorldKind.DEFAULT)
        worlds.begun(place, 2)
    assert [world.reuses_store for world in joined] == reuses
    assert decode(encode(joined), list[RecordedWorld]) == joined


def test_a_rendezvous_by_hand_is_joined_before_it_ends_and_known_to_the_world_made_in_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that waits there is a member by then; ranks that came to the store in another way have the same world."""
    joined: list[RecordedWorld] = []
    recorder: Any = SimpleNamespace(join=joined.append)
    session = SimpleNamespace(worlds=Worlds(recorder))
    guard = hooks.Hooks(lambda world, where: None, lambda: session, lambda port: None)  # type: ignore[arg-type, return-value]
    url, store = "tcp://here:2900", "tcp:2900|/big|big"

    def meeting() -> Any:
        assert [world.size for world in joined] == [5]
        yield "store", 1, 5

    assert list(guard._rendezvous(lambda *_: meeting(), url, 1, 5)) == [("store", 1, 5)]
    with_store = guard._join(1, 5, store, "here:2900 big", kind=WorldKind.FURTHER)
    other = Worlds(recorder).begin(store, "here:2900 big", 1, 5, WorldKind.FURTHER)
    assert with_store is not None
    assert other is not None
    assert (with_store.id, with_store.met) == (other.id, joined[0].id)
    assert decode(encode(with_store), RecordedWorld) == with_store


@pytest.mark.parametrize("fails", [False, True])
def test_the_ring_says_where_the_main_thread_meets_others_by_hand(tmp_path: Path, fails: bool) -> None:
    """After init_process_group, and until the meeting has ended in one way or the other."""
    ring = RingWriter(tmp_path / "0.ring", rank=0, world_size=1, local_rank=0, job="job", attempt=0)
    ring.header(rings.W_JOINED, 1)
    reader = RingReader(tmp_path / "0.ring")
    session = SimpleNamespace(ring=ring)
    guard = hooks.Hooks(lambda world, where: None, lambda: session, lambda port: None)  # type: ignore[arg-type, return-value]
    seen: list[Any] = []

    def connect(*_: Any, **__: Any) -> None:
        seen.append(reader.meets())
        if fails:
            raise RuntimeError

    with contextlib.suppress(RuntimeError):
        guard._noting_address(connect)(SimpleNamespace(host="here", port=2900), "here", 2900)
    assert [(one.at, one.by_hand) for one in seen] == [("here:2900", True)]
    assert reader.meets().at is None
    ring.close()


def test_a_gloo_group_made_by_hand_is_said_to_be_unwatched(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, with its place; groups that torch makes itself are watched, and not spoken of."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    made: list[tuple[object, ...]] = []
    session = SimpleNamespace(heartbeat=SimpleNamespace(makes_unwatched_calls=False))
    own = SimpleNamespace(_session=lambda: session)
    initialize = hooks.Hooks._noting_made_by_hand(own, lambda *args: made.append(args))  # type: ignore[arg-type]
    exec("initialize('a')", {"initialize": initialize, "__name__": "torch.distributed.distributed_c10d"})
    assert not session.heartbeat.makes_unwatched_calls
    for name in ("b", "c"):
        initialize(name)
    assert made == [("a",), ("b",), ("c",)]
    assert session.heartbeat.makes_unwatched_calls
    said = capfd.readouterr().err
    assert said.count("is not watched") == 1
    assert __file__ in said
