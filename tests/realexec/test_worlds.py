"""The worlds of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distsim.debug.rings.world import World, WorldKind
from distsim.realexec.process import hooks
from distsim.realexec.process.worlds import Worlds, place_of_url


@pytest.mark.parametrize(("uses_agent_store", "reuses"), [("True", [False, True]), ("False", [False, False])])
def test_a_second_world_in_the_agents_store_reuses_it(
    monkeypatch: pytest.MonkeyPatch, uses_agent_store: str, reuses: list[bool]
) -> None:
    """torchrun's store outlives the group; one that rank 0 serves ends with it."""
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "2900")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", uses_agent_store)
    joined: list[World] = []
    recorder: Any = SimpleNamespace(join=joined.append)
    worlds = Worlds(recorder)
    place, where = place_of_url("env://")
    for _ in reuses:
        worlds.begin(place, where, 0, 2, WorldKind.DEFAULT)
        worlds.begun(place, 2)
    assert [world.reuses_store for world in joined] == reuses
    assert [World.from_json(world.to_json()) for world in joined] == joined


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
