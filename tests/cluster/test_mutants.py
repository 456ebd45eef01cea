"""Files that went wrong in any way: a cluster or one UsageError, never another exception."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from distsim.cluster import load_cluster
from distsim.cluster.files.graph_files import to_node_link
from distsim.cluster.files.load import assemble, merged, preset_text
from distsim.cluster.files.spec import check_spec
from distsim.errors import UsageError
from tests.cluster.test_import import ASTRA, HOPPER

STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "5us",
    [],
    [1],
    {},
    {"a": 1},
]
FABRICS: list[dict[str, Any]] = [
    {"kind": "torus", "dims": [2, 2]},
    {"kind": "dragonfly", "bandwidth": "1GBps", "global_bandwidth": "1GBps"},
    {"kind": "fat-tree"},
    {"kind": "full-mesh"},
    {},
]


def _tables(data: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [value for value in data.values() if isinstance(value, dict)]
    return [data, *(table for one in inner for table in _tables(one))]


def test_a_cluster_file_with_any_value_anywhere() -> None:
    """One to three keys of a good file hold something strange, or are missing."""
    chance = random.Random(1)
    base = tomllib.loads(preset_text("dgx-h100"))
    refused = 0
    for _ in range(600):
        data: dict[str, Any] = merged(base, {"nodes": 4, "fabric": chance.choice(FABRICS)})
        data = json.loads(json.dumps(data))
        for _ in range(chance.randint(1, 3)):
            table = chance.choice(_tables(data))
            if not table:
                continue
            key = chance.choice(sorted(table))
            if chance.random() < 0.2:
                del table[key]
            else:
                table[key] = copy.deepcopy(chance.choice(STRANGE))  # a later key may change it
        try:
            cluster = assemble(check_spec(data, "mutant"))
            cluster.route(cluster.devices[0], cluster.devices[-1])
        except UsageError:
            refused += 1
    assert 300 < refused < 600


@pytest.mark.parametrize("ending", ["xml", "json", "yml", "toml"])
def test_a_file_cut_off_anywhere(ending: str, tmp_path: Path) -> None:
    """Every fortieth of a good file's length."""
    text = {
        "xml": HOPPER,
        "json": json.dumps(to_node_link(load_cluster("snellius-h100"))),
        "yml": ASTRA,
        "toml": load_cluster("dgx-h100").to_toml(),
    }[ending]
    path = tmp_path / f"cut.{ending}"
    refused: list[str] = []
    for part in range(40):
        path.write_text(text[: len(text) * part // 40], encoding="utf-8")
        try:
            load_cluster(str(path))
        except UsageError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(message.startswith(str(path)) for message in refused)


@pytest.mark.parametrize(
    ("fabric", "nodes"),
    [
        ({"kind": "torus", "dims": [30000, 30000]}, 4),
        ({"kind": "full-mesh"}, 30000),
        (
            {
                "kind": "dragonfly",
                "bandwidth": 1,
                "global_bandwidth": 1,
                "nodes_per_switch": 1,
                "switches_per_group": 1,
            },
            9999,
        ),
        ({"kind": "leaf-spine", "nodes_per_leaf": 1, "spines": 1024}, 30000),
    ],
)
def test_a_fabric_too_large_to_build_is_refused(fabric: dict[str, Any], nodes: int) -> None:
    """Before the memory is full."""
    data = merged(tomllib.loads(preset_text("dgx-h100")), {"nodes": nodes, "fabric": fabric})
    with pytest.raises(UsageError, match="fabric: expected at most 4,000,000 cables, got"):
        check_spec(data, "test")
