"""Links as a sequence: arrays of what each has, and a `Link` where one is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from distsim.cluster import load_cluster
from distsim.cluster.graph import link as link_module
from distsim.cluster.graph.link import Link, Links
from distsim.network import FluidNetwork, Transfer


def test_no_link_is_made_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large cluster is loaded, and collectives run on it, without a `Link`; reports make those they name."""
    made: list[int] = []

    def make(index: int, *what: object) -> Link:
        made.append(index)
        return Link(index, *what)  # type: ignore[arg-type]

    monkeypatch.setattr(link_module, "Link", make)
    cluster = load_cluster("dgx-h100:2048")
    network = FluidNetwork(simpy.Environment(), cluster)
    network.env.run(network.collective(Transfer("all_gather", "nccl", tuple(cluster.devices[:16]), 1 << 20)))
    busy = [one.index for one in network.links_busy()]
    assert (made, busy != []) == ([], True)
    assert [cluster.links[index].index for index in busy] == made


def test_a_link_is_the_same_by_index_by_slice_and_in_turn() -> None:
    """On a cluster with shared NVSwitches, NICs and a fabric; negative places and a list's errors, too."""
    links = load_cluster("gb200-nvl72:3").links
    every = list(links)
    assert [links[place] for place in range(len(links))] == every
    assert (links[-1], links[3:9:2], links[len(links) :]) == (every[-1], every[3:9:2], [])
    with pytest.raises(IndexError):
        links[len(links)]


def test_links_are_equal_as_lists_are() -> None:
    """To any sequence of the same links in the same order, and to nothing else."""
    links = load_cluster("dgx-h100:2").links
    assert links == list(links) == Links.of(list(links))
    assert links != list(links)[:-1]
    assert links != list(links)[::-1]
    assert links != load_cluster("dgx-a100:2").links
    assert links != 3


def test_kinds_are_told_apart_by_arrays() -> None:
    """As each link's own kind says."""
    links = load_cluster("polaris:3").links
    for kinds in (("nic",), ("nvlink", "fabric"), ()):
        assert np.flatnonzero(links.are(kinds)).tolist() == [link.index for link in links if link.kind in kinds]
