"""What is said of a value that a key of a cluster file does not take."""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest

from distsim.cluster.files.load import preset_text
from distsim.cluster.files.spec import ClusterSpec, NicSpec, check_spec
from distsim.errors import UsageError

SAID = [
    ("nodes", "4", "expected an integer, got '4' (str)"),
    ("nodes", True, "expected an integer, got True (bool)"),
    ("nodes", 0, "expected greater than or equal to 1, got 0 (int)"),
    ("node.nic.count", 10**30, "expected less than or equal to 1024, got 1000000000000000000000000000000 (int)"),
    ("node.nic.efficiency", 0.0, "expected greater than 0, got 0.0 (float)"),
    ("node.nic.efficiency", "all", "expected a number, unable to parse string as a number, got 'all' (str)"),
    ("node.nic.efficiency", [1], "expected a number, got [1] (list)"),
    ("node.nic.efficiency", float("nan"), "expected a finite number, got nan (float)"),
    ("node.nic.gpu_direct", "perhaps", "expected a boolean, unable to interpret input, got 'perhaps' (str)"),
    ("node.nic.gpu_direct", 0.5, "expected a boolean, got 0.5 (float)"),
    ("node.nic.model", 7, "expected a string, got 7 (int)"),
    ("node.nic.latency", "5", "expected a time such as '5us', '130ns' or '2ms', got '5'"),
    ("node.gpu.nvlink.topology", "star", "expected 'nvswitch' or 'mesh', got 'star' (str)"),
    ("node.nic", "fast", "expected a table, got 'fast'"),
    ("fabric.kind", "mesh", "expected one of star, leaf-spine, fat-tree, rail-optimised, rail-only, torus, ring, "
     "full-mesh, dragonfly, got 'mesh'; did you mean 'full-mesh'?"),
]  # fmt: skip


def _changed(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(tomllib.loads(preset_text("dgx-h100")))
    *above, last = path.split(".")
    table = data
    for name in above:
        table = table[name]
    table[last] = value
    return data


@pytest.mark.parametrize(("path", "value", "said"), SAID, ids=lambda one: repr(one)[:24])
def test_a_value_that_does_not_fit_is_named_with_its_path(path: str, value: Any, said: str) -> None:
    """Where, what was expected, what came."""
    with pytest.raises(UsageError) as caught:
        check_spec(_changed(path, value), "my.toml")
    assert str(caught.value) == f"my.toml: {path}: {said}"


def test_a_key_that_is_none_and_a_bad_key_of_a_dict_are_named() -> None:
    """Both in one message, with what may have been meant."""
    data = _changed("node.gpu.flops", {"fp99": "1TFLOPS"})
    data["node"]["nic"]["bandwith"] = "1GBps"
    with pytest.raises(UsageError, match="2 faults") as caught:
        check_spec(data, "my.toml")
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("  node.gpu.flops.fp99: expected 'fp64', 'fp32', ")
    assert lines[1].endswith(" or 'fp4', got 'fp99' (str)")
    assert lines[2].startswith("  node.nic.bandwith: unknown key (expected one of model, net, ")
    assert lines[2].endswith("; did you mean 'bandwidth'?")


@pytest.mark.parametrize(
    ("given", "meant"), [(True, True), ("no", False), ("On", True), (1, True), (0.0, False)], ids=repr
)
def test_a_flag_takes_the_words_that_people_have_for_it(given: Any, meant: bool) -> None:
    """As YAML and environment variables write them."""
    assert check_spec(_changed("node.nic.gpu_direct", given), "my.toml").node.nic.gpu_direct is meant  # type: ignore


def test_a_table_that_was_read_does_not_change() -> None:
    """Specs of one preset may be shared: nobody writes into them; equal content is equal."""
    spec: ClusterSpec = check_spec(_changed("nodes", 2), "my.toml")
    with pytest.raises(ValueError, match="frozen"):
        spec.nodes = 3
    assert spec == check_spec(_changed("nodes", 2), "my.toml")
    assert spec != check_spec(_changed("nodes", 3), "my.toml")
    assert isinstance(copy.deepcopy(spec).node.nic, NicSpec)
