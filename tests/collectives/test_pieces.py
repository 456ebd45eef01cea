"""Trees move in NCCL's own pieces, and NCCL's environment in a cluster's file is heeded."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise

import pytest

from distsim.cluster import Cluster, load_cluster
from distsim.collectives import Compiler, Plan, Transfer
from distsim.collectives.libraries.nccl_channels import tree_piece_bytes
from distsim.errors import UsageError

KIB, MIB = 1 << 10, 1 << 20


def plan(on: str | Cluster, op: str, nbytes: int, **forced: str) -> tuple[Plan, float]:
    """What is done for a collective over all GPUs and how many us it takes alone."""
    cluster = load_cluster(on) if isinstance(on, str) else on
    compiler = Compiler(cluster, **forced)  # type: ignore[arg-type]
    made = compiler.compile(Transfer(op, "nccl", tuple(cluster.devices), nbytes))
    return made, made.alone_s(compiler.links.capacity) * 1e6


def with_settings(preset: str, **settings: str) -> Cluster:
    """A preset with other entries in nccl.settings."""
    lines = [
        f'base = "{preset.partition(":")[0]}"',
        f"nodes = {preset.partition(':')[2] or 1}",
        "[nccl.settings]",
        *(f"{key} = {json.dumps(value)}" for key, value in settings.items()),
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("\n".join(lines))
        file.flush()
        return load_cluster(file.name)


@pytest.mark.parametrize(
    ("proto", "nbytes", "version", "piece_bytes"),
    [
        ("Simple", 64 * MIB, "2.23.4", 16 * 512 * KIB),
        ("Simple", 4 * MIB, "2.23.4", 16 * 512 * KIB),
        ("Simple", 4 * MIB, "2.19.4", 16 * 32 * KIB),
        ("Simple", 128 * KIB, "2.23.4", 4 * 512 * KIB),
        ("LL", 1 * MIB, "2.23.4", 16 * 32 * KIB),
        ("LL", 8 * KIB, "2.23.4", 2 * 32 * KIB),
        ("LL128", 8 * MIB, "2.23.4", 16 * 36000),
        ("LL128", 1 * MIB, "2.23.4", 16 * 18000),
    ],
)
def test_pieces_of_a_tree(proto: str, nbytes: int, version: str, piece_bytes: int) -> None:
    """Of 8 nodes of 8 H100 with 16 channels: a slot a channel that is used; less in LL128 and, before 2.20, in Simple
    (NCCL enqueue.cc)."""
    cluster = load_cluster("dgx-h100:8")
    compiler = Compiler(cluster, nccl_version=version)
    machine = compiler._nccl.machine(compiler.group(tuple(cluster.devices), 0))
    assert tree_piece_bytes(machine, nbytes, proto) == piece_bytes


def test_a_tree_of_one_piece_pays_for_every_hop() -> None:
    """32 nodes of Alps: up to 4 MiB each channel has one piece, which waits to be whole at each of ten hops between
    nodes, so that each MiB more costs far more than it does later (measured: 98 and 35 us; simulated: 157 and 29)."""
    us = {
        size: plan("alps-gh200:32", "all_reduce", size * MIB, algo="tree", proto="simple")[1]
        for size in (1, 4, 64, 128)
    }
    assert (us[4] - us[1]) / 3 > 2.5 * (us[128] - us[64]) / 64


def test_releases_before_2_20_cut_pieces_of_simple() -> None:
    """The same tree with 2.19 has its pieces cut, and is quicker in the middle."""
    new, old = (
        plan("alps-gh200:32", "all_reduce", 4 * MIB, algo="tree", proto="simple", nccl_version=version)[1]
        for version in ("2.23.4", "2.19.4")
    )
    assert old < 0.8 * new


@pytest.mark.parametrize(
    ("mebibytes", "measured_us"), [(1, 203.2), (4, 356.6), (16, 951.6), (64, 1261.6), (512, 3817.5)]
)
def test_a_tree_in_pieces_of_16_mebibytes(mebibytes: int, measured_us: float) -> None:
    """2 nodes of a3-megagpu: NCCL_BUFFSIZE=8388608 makes a slot of 1 MiB of each of 16 channels, so that time grows by
    50 us a MiB to 16 MiB and then by 6."""
    made, us = plan("gcp-a3mega:2", "all_reduce", mebibytes * MIB)
    assert (made.algo, made.proto) == ("Tree", "Simple")
    assert us == pytest.approx(measured_us, rel=0.25)


@pytest.mark.parametrize("on", ["gcp-a3mega:2", "gcp-a3mega:16", "gcp-a3high:16"])
def test_googles_fabrics_take_no_jump(on: str) -> None:
    """Their environment has Simple only: twice the bytes take at most about twice the time."""
    us = [plan(on, "all_reduce", 1 << power)[1] for power in range(10, 31)]
    for less, more in pairwise(us):
        assert less <= 1.001 * more
        assert more < 2.05 * less


@pytest.mark.parametrize(
    ("settings", "op", "nbytes", "chosen"),
    [
        ({}, "all_reduce", KIB, "Tree LL"),
        ({"NCCL_PROTO": "Simple"}, "all_reduce", KIB, "NVLSTree Simple"),
        ({"NCCL_PROTO": "^LL"}, "all_reduce", KIB, "Tree LL128"),
        ({"NCCL_ALGO": "ring", "NCCL_PROTO": "ll,simple"}, "all_reduce", KIB, "Ring LL"),
        ({"NCCL_ALGO": "Tree"}, "all_gather", KIB, "Ring LL"),
        ({}, "all_reduce", 512 * MIB, "NVLSTree Simple"),
        ({"NCCL_ALGO": "Ring,Tree"}, "all_reduce", 512 * MIB, "Ring Simple"),
        ({"NCCL_NVLS_ENABLE": "0"}, "all_reduce", 512 * MIB, "Ring Simple"),
    ],
)
def test_settings_rule_choices_out(settings: dict[str, str], op: str, nbytes: int, chosen: str) -> None:
    """NCCL_ALGO, NCCL_PROTO and NCCL_NVLS_ENABLE as NCCL reads them; what an operation lacks is passed over."""
    made, _ = plan(with_settings("dgx-h100:2", **settings), op, nbytes)
    assert f"{made.algo} {made.proto}" == chosen


def test_what_is_asked_for_goes_before_settings() -> None:
    """--algo and --proto are for comparing what the cluster's own environment would not take."""
    made, _ = plan("gcp-a3mega:2", "all_reduce", KIB, algo="tree", proto="ll")
    assert (made.algo, made.proto) == ("Tree", "LL")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"NCCL_ALGO": "Rings"}, "nccl.settings.NCCL_ALGO: expected names of Tree, Ring"),
        ({"NCCL_PROTO": "allreduce:LL"}, "nccl.settings.NCCL_PROTO: expected names of LL, LL128, Simple"),
        ({"NCCL_BUFFSIZE": "4MiB"}, "nccl.settings.NCCL_BUFFSIZE: expected bytes of a buffer, got '4MiB'"),
    ],
)
def test_settings_that_nccl_would_not_read_are_named(settings: dict[str, str], words: str) -> None:
    """One line: the key, what may stand there, what does."""
    with pytest.raises(UsageError, match=words):
        Compiler(with_settings("dgx-h100:2", **settings))
