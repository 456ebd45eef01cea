"""No operation is quicker for more bytes, but where NCCL or the fabric changes its protocol."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distsim.cluster import load_cluster, preset_names
from distsim.collectives.constants import nccl_constants
from distsim.network.bench import OPS, bench
from tests.kin import one_in

SIZES = [1 << power for power in range(3, 31)]
SHARED = ("alltoall", "gather", "scatter")
"""Of these a message is the size over the ranks."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "nodes"), one_in(12, [pytest.param(preset, nodes) for preset in preset_names() for nodes in (2, 1, 16)])
)
def test_no_time_falls_with_size_but_at_a_switch(preset: str, nodes: int) -> None:
    """Switches are NCCL's algorithm or protocol, and on Slingshot messages that fit into a command queue
    (`tiny_bytes` of nccl.toml), which cost more than those that do not."""
    tiny_bytes = max(value for name, value in nccl_constants().values.items() if name.endswith(".tiny_bytes"))
    falls = []
    cluster = load_cluster(f"{preset}:{nodes}")
    for op in OPS:
        rows = bench(op, cluster, SIZES)
        for less, more in pairwise(rows):
            ranks = len(cluster.devices) if op in SHARED else 1
            switches = (less.algo, less.proto) != (more.algo, more.proto)
            switches |= less.size_bytes / ranks <= tiny_bytes < more.size_bytes / ranks
            if more.time_us < 0.999 * less.time_us and not switches:
                falls.append((op, less.size_bytes, less.time_us, more.time_us))
    assert not falls
