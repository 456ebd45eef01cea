"""A fabric leads its traffic around what is down, where it has a way; where not, the job stalls and says why."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from distsim.cluster import Cluster, Reroute, load_cluster
from distsim.network import Transfer, make_network
from distsim.scenario import Result
from tests.scenario.made import STEPS, made, ran

CLUSTER = """\
base = "ethernet-cpu"
nodes = 4

[fabric]
kind = "leaf-spine"
nodes_per_leaf = 1
spines = 2
oversubscription = 1.0
routing = "ecmp"
switch_latency = "1us"
"""
UPLINKS = [f"leaf{leaf}->spine{spine}" for leaf in range(4) for spine in range(2)]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "fabric.toml").write_text(CLUSTER)
    return load_cluster(str(tmp_path / "fabric.toml"))


def with_faults(folder: Path, *faults: str, more: str = "[expect]") -> Result:
    (folder / "fabric.toml").write_text(CLUSTER)
    tables = ", ".join(f"{{ {fault} }}" for fault in faults)
    return ran(folder, f'on = "fabric.toml"\nnproc_per_node = 2\nfaults = [{tables}]\n{more}', STEPS)


def busy(result: Result) -> set[str]:
    return {link["name"] for link in result.document["links"]}


# --- routes


@pytest.mark.parametrize("dead", UPLINKS)
def test_a_route_avoids_what_is_down_and_nothing_else(cluster: Cluster, dead: str) -> None:
    """Same ends, as many links, over the other spine; routes that did not use the link are as they were."""
    number = {link.name: link.index for link in cluster.links}[dead]
    around = Reroute(cluster, [number])
    changed = 0
    for src in cluster.devices:
        for dst in cluster.devices:
            before = cluster.route(src, dst, 1)
            after = around.route(before, 1)
            assert number not in after
            if number not in before:
                assert after == before
                continue
            changed += 1
            assert len(after) == len(before)
            ends = [(cluster.links[a].dst, cluster.links[b].src) for a, b in pairwise(after)]
            assert all(here == there for here, there in ends)
            assert (after[0], after[-1]) == (before[0], before[-1])
        assert number not in {link for dst in cluster.devices for link in around.route(cluster.route(src, dst, 7), 7)}
    used = {link for src in cluster.devices for dst in cluster.devices for link in cluster.route(src, dst, 1)}
    assert bool(changed) == (number in used)


@pytest.mark.parametrize("dead", [["leaf0->spine*"], ["n0/nic0->leaf0"], ["n0/cpu0->*"]])
def test_where_there_is_no_way_the_route_stays(cluster: Cluster, dead: list[str]) -> None:
    """All ways up from a leaf are down, or something of the host's own."""
    from distsim.sim.faults.links import links_of

    route = cluster.route("n0/cpu0", "n3/cpu0")
    assert Reroute(cluster, links_of(cluster, dead)).route(route) == route


@pytest.mark.parametrize("on", ["polaris:40", "dgx-a100:80", "ethernet-cpu:90", "alps-gh200:64"])
def test_every_kind_of_fabric_has_its_way_around(on: str) -> None:
    """One cable of a route between far hosts is down: the new route holds together and avoids it."""
    cluster = load_cluster(on)
    route = cluster.route(cluster.devices[0], cluster.devices[-1])
    cables = [n for n in route if cluster.links[n].kind == "fabric"]
    assert cables
    led = Reroute(cluster, cables[:1]).route(route)
    alone = led == route  # adaptive routing is one fat cable in our model: nothing is beside it
    assert alone or cables[0] not in led
    assert all(cluster.links[a].dst == cluster.links[b].src for a, b in pairwise(led))


# --- traffic under way


@pytest.mark.parametrize("fidelity", ["fluid", "message"])
@pytest.mark.parametrize("flavour", ["gloo", "nccl"])
def test_what_is_under_way_goes_on_over_the_other_spine(cluster: Cluster, fidelity: str, flavour: str) -> None:
    """Cut in the middle, led around ten seconds later: ten seconds late, every byte moved, nothing over the cut."""
    import simpy

    def run(dead: list[int], lead: bool) -> tuple[float, float]:
        env = simpy.Environment()
        network = make_network(env, cluster, fidelity=fidelity)
        done = network.collective(Transfer("all_reduce", flavour, tuple(cluster.devices), 64 << 20))

        def at(delay_s: float, call: object) -> None:
            env.timeout(delay_s).callbacks.append(lambda _: call())  # type: ignore[operator]

        at(0.02, lambda: [network.set_link(n, up=False) for n in dead])
        if lead:
            at(10.02, lambda: network.lead_around(dead))
        env.run(until=100.0)
        moved = sum(use.bytes for use in network.links_busy() if cluster.links[use.index].kind == "nic")
        return (done.value.end_s if done.triggered else float("inf")), moved

    usual_s, usual_bytes = run([], lead=False)
    assert 0.03 < usual_s < 1.0
    for spine in range(2):
        dead = [link.index for link in cluster.links if f"spine{spine}" in (link.src, link.dst)]
        stalled_s, _ = run(dead, lead=False)
        if stalled_s == usual_s:
            continue  # the hash sent nothing over this spine
        assert stalled_s == float("inf")
        led_s, led_bytes = run(dead, lead=True)
        assert 10.0 < led_s < 10.1 + 2 * usual_s
        assert led_bytes == pytest.approx(usual_bytes)
        return
    pytest.fail("no spine was used")


# --- scenarios


@pytest.mark.parametrize("spine", [0, 1])
@pytest.mark.parametrize("part", ["switch", "links", "call"])
def test_a_spine_less_is_no_fault(tmp_path: Path, spine: int, part: str) -> None:
    """The job ends well over the other spine, whichever goes down, as a switch or link by link, also during a call."""
    fault = {
        "switch": f"what = 'switch_down', switch = 'spine{spine}', at_s = '2ms'",
        "links": f"what = 'link_cut', link = ['*->spine{spine}', 'spine{spine}->*'], at_s = '2ms'",
        "call": f"what = 'switch_down', switch = 'spine{spine}', call = 'all_reduce #2', after_s = '50us'",
    }[part]
    result = with_faults(tmp_path, fault)
    assert result.wrong == []
    assert any(f"->spine{1 - spine}" in name for name in busy(result))


def test_from_the_start_nothing_crosses_the_dead_spine(tmp_path: Path) -> None:
    """All traffic is on the other one."""
    result = with_faults(tmp_path, "what = 'switch_down', switch = 'spine0'")
    assert result.wrong == []
    assert not any("spine0" in name for name in busy(result))


def test_the_fabric_takes_its_time(tmp_path: Path) -> None:
    """Until it has found the way, what would go over the dead links waits."""
    cuts = [f"what = 'link_cut', link = ['*->spine{n}', 'spine{n}->*'], for_s = 0.5" for n in (0, 1)]
    quick = with_faults(tmp_path, "what = 'switch_down', switch = 'spine0', at_s = '1ms'")
    usual = busy(with_faults(tmp_path))
    used = [n for n in (0, 1) if any(f"spine{n}" in name for name in usual)]
    late = with_faults(tmp_path, f"what = 'switch_down', switch = 'spine{used[0]}', at_s = '1ms', reroute_s = 3")
    assert late.wrong == []
    assert late.virtual_time_s > 3.0 > 1.0 > quick.virtual_time_s
    both = with_faults(tmp_path, *cuts)
    assert both.wrong == []
    assert 0.5 < both.virtual_time_s < 1.0


@pytest.mark.parametrize(
    ("faults", "culprits"),
    [
        (["what = 'switch_down', switch = 'spine0'", "what = 'switch_down', switch = 'spine1', at_s = '2ms'"], None),
        (["what = 'link_cut', link = 'leaf2->spine*', at_s = '2ms'"], (4, 5)),
        (["what = 'switch_down', switch = 'leaf3', at_s = '2ms'"], (6, 7)),
        (["what = 'nic_down', nic = 'n1/nic0', at_s = '2ms'"], (2, 3)),
    ],
)
def test_without_another_way_the_network_is_at_fault(
    tmp_path: Path, faults: list[str], culprits: tuple[int, ...] | None
) -> None:
    """Both spines, every way up from a leaf, a leaf, a NIC."""
    result = with_faults(tmp_path, *faults)
    assert (result.kind, result.exit_code) == ("network_fault", 3)
    if culprits is not None:
        assert result.culprits == culprits


def test_once_the_spine_is_back_it_is_used_again(tmp_path: Path) -> None:
    """And the run is the same each time."""
    fault = "what = 'switch_down', switch = 'spine{}', at_s = 0, for_s = '2ms'"
    results = [with_faults(tmp_path, fault.format(n)) for n in (0, 1, 0)]
    assert all(result.wrong == [] for result in results)
    again = {name for name in busy(results[0]) if "spine0" in name}
    assert again == {name for name in busy(with_faults(tmp_path)) if "spine0" in name}
    assert results[0].document == results[2].document


def test_the_schema_knows_how_long_a_fabric_takes(tmp_path: Path) -> None:
    """`reroute_s` of a cut is a time."""
    from distsim.errors import UsageError

    with pytest.raises(UsageError, match=r"faults\[0\].reroute_s: expected a time"):
        made(tmp_path, "faults = [{ what = 'link_cut', link = '*', reroute_s = 'soon' }]\n[expect]")
