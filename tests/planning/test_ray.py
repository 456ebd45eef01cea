"""A sweep over a Ray cluster gives what a sweep over local processes gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distsim.errors import UsageError
from distsim.planning.variations import parse_variation, sweep
from tests.scenario.made import made

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
FAULTS = "faults = [{ what = 'link_slow', link = 'n0/nic0->leaf0', factor = 1.0 }]\n[expect]"
VARIATIONS = [parse_variation("cluster.nodes=2,4"), parse_variation("faults[0].factor=1,0.1")]


@pytest.mark.slow
def test_a_sweep_over_ray_is_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point with the figures it has here, in the same order; the scenario's path is relative to a folder
    that Ray's workers are not in, and the cluster that was started is gone afterwards."""
    made(tmp_path, FAULTS)
    monkeypatch.chdir(tmp_path)
    from distsim.scenario import load_scenario

    scenario = load_scenario("made.toml")
    here = list(sweep(scenario, VARIATIONS))
    there = list(sweep(scenario, VARIATIONS, ray="local"))
    assert [point.settings for point in there] == [point.settings for point in here]
    assert [point.result.kind for point in there] == ["healthy"] * 4
    assert [point.result.figures for point in there] == [point.result.figures for point in here]
    for far, near in zip(there, here, strict=True):
        near.result.document["program"] = far.result.document["program"]  # absolute over there
        assert json.dumps(far.result.document) == json.dumps(near.result.document)
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_where_there_is_no_cluster_one_line_says_so(tmp_path: Path, address: str) -> None:
    """At once, where a port is named and nobody listens there."""
    with pytest.raises(UsageError, match=f"--ray {address}: no Ray cluster there") as caught:
        list(sweep(made(tmp_path, FAULTS), VARIATIONS, ray=address))
    assert "\n" not in str(caught.value)
