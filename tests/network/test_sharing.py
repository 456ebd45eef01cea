"""Max-min fair sharing of links."""

from __future__ import annotations

import numpy as np
import pytest

from distsim.network.engine import max_min_rates

INF = float("inf")


def rates(flows: list[list[tuple[int, float]]], capacity: list[float], caps: list[float] | None = None) -> list[float]:
    """The rates of flows given as (link, weight) pairs."""
    links = np.array([link for flow in flows for link, _ in flow], dtype=np.int64)
    weights = np.array([weight for flow in flows for _, weight in flow], dtype=np.float64)
    found = max_min_rates(
        [len(flow) for flow in flows], links, weights, np.array(caps or [INF] * len(flows)), np.array(capacity)
    )
    return found.tolist()


def test_flows_on_one_link_share_it_evenly() -> None:
    """Three flows on a link of 9 get 3 each."""
    assert rates([[(0, 1.0)]] * 3, [9.0]) == pytest.approx([3.0, 3.0, 3.0])


def test_what_a_bounded_flow_leaves_goes_to_the_others() -> None:
    """The textbook line: a flow held back elsewhere leaves its share to those who can use it."""
    flows = [[(0, 1.0), (1, 1.0)], [(0, 1.0)], [(1, 1.0)]]
    assert rates(flows, [10.0, 4.0]) == pytest.approx([2.0, 8.0, 2.0])


def test_a_cap_frees_its_share() -> None:
    """A flow capped at 1 leaves 9 of a link of 10."""
    assert rates([[(0, 1.0)], [(0, 1.0)]], [10.0], [1.0, INF]) == pytest.approx([1.0, 9.0])


def test_weights_count_bytes_on_the_link() -> None:
    """A coupled flow that crosses a link twice per byte of progress takes two shares at the same rate."""
    assert rates([[(0, 2.0)], [(0, 1.0)]], [9.0]) == pytest.approx([3.0, 3.0])


def test_a_cut_link_stops_its_flows_only() -> None:
    """Over a link of no capacity the rate is 0; others keep theirs."""
    assert rates([[(0, 1.0)], [(1, 1.0)]], [0.0, 5.0]) == pytest.approx([0.0, 5.0])


def test_no_link_is_overloaded_and_every_flow_has_a_reason() -> None:
    """On random networks no link carries more than it can, and every flow meets a full link or its cap."""
    generator = np.random.default_rng(7)
    for _ in range(30):
        num_links, num_flows = 12, 20
        capacity = generator.uniform(1.0, 10.0, num_links)
        caps = np.where(generator.random(num_flows) < 0.3, generator.uniform(0.1, 3.0, num_flows), INF)
        flows = [
            [(int(link), float(generator.uniform(0.5, 2.0))) for link in generator.permutation(num_links)[:3]]
            for _ in range(num_flows)
        ]
        found = rates(flows, capacity.tolist(), caps.tolist())
        load = np.zeros(num_links)
        for flow, rate in zip(flows, found, strict=True):
            for link, weight in flow:
                load[link] += weight * rate
        assert (load <= capacity * (1 + 1e-6)).all()
        full = load >= capacity * (1 - 1e-6)
        for flow, rate, cap in zip(flows, found, caps, strict=True):
            assert rate == pytest.approx(cap) or any(full[link] for link, _ in flow)
