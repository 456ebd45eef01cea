"""The fluid engine: rates that change while flows are under way."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import simpy

from distsim.network import engine
from distsim.network.engine import Flow, FluidEngine, max_min_rates

pytestmark = pytest.mark.smoke

INF = float("inf")


class Track:
    """An engine on a few links, and when each flow ended."""

    def __init__(self, *capacity: float) -> None:
        self.env = simpy.Environment()
        self.engine = FluidEngine(self.env, np.array(capacity))
        self.ends: dict[str, float] = {}

    def flow(self, name: str, links: dict[int, float], nbytes: float, at: float = 0.0, cap: float = INF) -> None:
        """Start a flow at a time."""

        def begin(_: simpy.Event | None = None) -> None:
            self.engine.start(
                Flow(
                    np.array(list(links), dtype=np.int64),
                    np.array(list(links.values())),
                    nbytes,
                    cap,
                    lambda: self.ends.__setitem__(name, self.env.now),
                )
            )

        self.env.timeout(at).callbacks.append(begin)  # type: ignore[union-attr]

    def at(self, when: float, link: int, capacity: float) -> None:
        """Change a link's capacity at a time."""
        self.env.timeout(when).callbacks.append(  # type: ignore[union-attr]
            lambda _: self.engine.set_capacity(link, capacity)
        )


def test_a_flow_that_joins_halves_the_rate_and_gives_it_back() -> None:
    """Alone for 5 s, together until the second is done, alone again."""
    track = Track(10.0)
    track.flow("a", {0: 1.0}, 100.0)
    track.flow("b", {0: 1.0}, 20.0, at=5.0)
    track.env.run()
    assert track.ends["b"] == pytest.approx(9.0)
    assert track.ends["a"] == pytest.approx(12.0)


def test_a_link_that_fails_stalls_its_flow_until_it_is_back() -> None:
    """Cut after 2 s, back after 7 s: the rest arrives 5 s late."""
    track = Track(10.0)
    track.flow("a", {0: 1.0}, 100.0)
    track.at(2.0, 0, 0.0)
    track.at(7.0, 0, 10.0)
    track.env.run()
    assert track.ends["a"] == pytest.approx(15.0)


def test_a_slowed_link_strikes_in_flight() -> None:
    """Half the bandwidth from 5 s on: 50 bytes at 10, 50 at 5."""
    track = Track(10.0)
    track.flow("a", {0: 1.0}, 100.0)
    track.at(5.0, 0, 5.0)
    track.env.run()
    assert track.ends["a"] == pytest.approx(15.0)


def test_changes_at_one_time_are_settled_once() -> None:
    """A hundred flows that start together are one settlement, and one when they end."""
    track = Track(10.0)
    for number in range(100):
        track.flow(str(number), {0: 1.0}, 10.0)
    track.env.run()
    assert list(track.ends.values()) == pytest.approx([100.0] * 100)
    assert track.engine.num_settlements <= 2


def test_flows_on_other_links_cost_no_settlement() -> None:
    """Flows whose links have room for all keep their rate without being settled."""
    track = Track(10.0, 10.0, 100.0)
    track.flow("a", {0: 1.0, 2: 1.0}, 100.0)
    track.flow("b", {1: 1.0, 2: 1.0}, 50.0, at=1.0)
    track.env.run()
    assert track.ends == {"a": pytest.approx(10.0), "b": pytest.approx(6.0)}
    assert track.engine.num_settlements == 0


def test_bytes_and_busy_time_are_counted() -> None:
    """Every byte that crosses a link is counted with its weight, and the time the link was in use."""
    track = Track(10.0, 100.0)
    track.flow("a", {0: 1.0, 1: 2.0}, 100.0)
    track.flow("b", {0: 1.0}, 100.0, at=30.0)
    track.env.run()
    usage = track.engine.usage
    assert usage.bytes.tolist() == pytest.approx([200.0, 200.0])
    assert usage.busy_until(track.env.now).tolist() == pytest.approx([20.0, 10.0])
    width_s, fractions = usage.fractions()
    assert fractions.shape[0] <= 128
    assert float(fractions[:, 0].sum() * width_s * 10.0) == pytest.approx(200.0, rel=1e-4)


def test_bins_are_the_same_whenever_they_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moved is put into bins when somebody asks, to the same bytes as move by move."""

    def cells(most: int) -> tuple[float, bytes]:
        monkeypatch.setattr(engine, "MAX_UNBINNED", most)
        track = Track(10.0, 100.0)
        for number in range(9):
            track.flow(str(number), {0: 1.0, number % 2: 2.0}, 7.0 * (number + 1), at=3.1 * number)
        track.env.run()
        width_s, fractions = track.engine.usage.fractions()
        return width_s, fractions.tobytes()

    assert cells(0) == cells(4) == cells(1_000)
    assert any(cells(0)[1])


def test_equal_ends_come_in_the_order_of_starts() -> None:
    """Ties are broken by the order in which flows began, never by chance."""
    track = Track(*[10.0] * 20)
    for number in range(20):
        track.flow(f"{number:02d}", {number: 1.0}, 100.0)
    track.env.run()
    assert list(track.ends) == sorted(track.ends)


def test_a_flow_without_links_or_bytes_ends_at_once() -> None:
    """From a device to itself nothing takes time."""
    track = Track(10.0)
    track.flow("nowhere", {}, 100.0, at=1.0)
    track.flow("nothing", {0: 1.0}, 0.0, at=2.0)
    track.env.run()
    assert track.ends == {"nowhere": 1.0, "nothing": 2.0}


def test_what_is_settled_island_by_island_is_what_all_together_would_get() -> None:
    """After every beginning, end, detour and change of a capacity, each flow has the rate that filling all links for
    all flows at once gives it."""
    draw = random.Random(7)
    num_links = 24
    env = simpy.Environment()
    engine = FluidEngine(env, np.array([draw.choice([4.0, 10.0, 25.0]) for _ in range(num_links)]))
    under_way: list[Flow] = []
    ends: list[list[int]] = []
    compared = 0

    def crossing() -> tuple[Any, Any]:
        size = draw.randint(1, 4)
        home = draw.choice([0, 8, 16]) if draw.random() < 0.9 else 4  # mostly three islands, at times joined
        links = np.array(sorted(draw.sample(range(home, home + 8), size)), dtype=np.int64)
        return links, np.array([draw.choice([1.0, 2.0]) for _ in range(size)])

    for _ in range(400):
        step = draw.random()
        if step < 0.6 or not under_way:
            ended: list[int] = []
            flow = Flow(
                *crossing(), draw.uniform(1.0, 60.0), draw.choice([1.0, 3.0, float("inf")]), partial(ended.append, 1)
            )
            under_way.append(flow)
            ends.append(ended)
            engine.start(flow)
        elif step < 0.7:
            engine.move(draw.choice(under_way), *crossing())
        elif step < 0.8:
            engine.set_capacity(draw.randrange(num_links), draw.choice([0.0, 2.0, 10.0, 25.0]))
        env.run(until=env.now + draw.choice([0.25, 1.0]))
        pairs = [(flow, ended) for flow, ended in zip(under_way, ends, strict=True) if not ended]
        under_way, ends = [flow for flow, _ in pairs], [ended for _, ended in pairs]
        if not under_way:
            continue
        expected = max_min_rates(
            [len(flow.links) for flow in under_way],
            np.concatenate([flow.links for flow in under_way]),
            np.concatenate([flow.weights for flow in under_way]),
            np.array([flow.cap_bytes_per_s for flow in under_way]),
            engine.capacity,
        )
        assert [flow.rate for flow in under_way] == pytest.approx(expected.tolist(), rel=1e-6)
        compared += len(under_way)
    assert compared > 1_000


def test_links_that_are_left_and_taken_in_one_instant_are_shared() -> None:
    """Two messages end on a full link and the next two of their queues begin at once: the first of them has room for
    itself, as long as the second is not there, and shares it with the second."""
    track = Track(10.0)
    ends = track.ends

    def start(name: str, then: str) -> None:
        def done() -> None:
            ends[name] = track.env.now
            if then:
                start(then, "")

        track.engine.start(Flow(np.array([0]), np.array([1.0]), 100.0, INF, done))

    start("a", "c")
    start("b", "d")
    track.env.run()
    assert ends == pytest.approx({"a": 20.0, "b": 20.0, "c": 40.0, "d": 40.0})
