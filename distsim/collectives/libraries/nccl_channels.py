"""Settings of NCCL's environment that change its choices, and the number of channels that it opens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from distsim.collectives.libraries.nccl_tuning import Machine
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, digits

# -- What of NCCL's environment a cluster's file sets that changes its choices or its pieces (`nccl.settings`).

_BUFFER = 1 << 22
_STEPS = 8


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """NCCL_ALGO, NCCL_PROTO, NCCL_NVLS_ENABLE, NCCL_BUFFSIZE and the numbers of channels; NCCL's defaults if unset."""

    algos: frozenset[str] | None
    protos: frozenset[str] | None
    """Allowed protocols; None for all."""
    nvls: bool
    slot_bytes: int
    """Bytes of one of the eight slots of a channel's buffer in protocol Simple."""
    least: int
    most: int
    """Channels: NCCL_MIN_CTAS and NCCL_MAX_CTAS, and their older names NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS."""

    @staticmethod
    def of(environment: Mapping[str, str], algos: tuple[str, ...], protos: tuple[str, ...]) -> ChannelSettings:
        """Read *environment*; *algos* and *protos* are those that NCCL has."""
        buffer = environment.get("NCCL_BUFFSIZE", str(_BUFFER))
        if (buffer_bytes := digits(buffer) or 0) < _STEPS:
            raise UsageError(f"nccl.settings.NCCL_BUFFSIZE: expected bytes of a buffer, got {brief(buffer)!r}")
        return ChannelSettings(
            _listed("NCCL_ALGO", environment, algos),
            _listed("NCCL_PROTO", environment, protos),
            environment.get("NCCL_NVLS_ENABLE", "1") != "0",
            buffer_bytes // _STEPS,
            max(_channels(f"NCCL_MIN_{name}", environment, 1) for name in _NAMES_OF_CHANNELS),
            min(_channels(f"NCCL_MAX_{name}", environment, _MOST) for name in _NAMES_OF_CHANNELS),
        )

    def opened(self, channels: int) -> int:
        """Return how many channels NCCL opens if it would open *channels*: first the maximum counts, then the minimum.

        Source: NCCL v2.21.5-1, src/graph/connect.cc (ncclTopoPostset).
        """
        return max(min(channels, self.most), self.least)

    def against(self, algo: str, proto: str) -> str:
        """Return the setting that excludes a choice; empty if none does."""
        if self.algos is not None and algo not in self.algos:
            return f"NCCL_ALGO leaves {algo} out"
        return f"NCCL_PROTO leaves {proto} out" if self.protos is not None and proto not in self.protos else ""


def host_copy_bytes(environment: Mapping[str, str]) -> int | None:
    """Return up to how many bytes the CXI provider itself copies a matched message into GPU memory.

    Longer messages are copied by CUDA (libfabric, prov/cxi: FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD). None if the variable
    is not set; its default is 4,096.
    """
    name = "FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD"
    given = environment.get(name)
    if given is None:
        return None
    if (threshold := digits(given)) is None:
        raise UsageError(f"nccl.settings.{name}: expected bytes, got {brief(given)!r}")
    return threshold


_MOST = 32
_NAMES_OF_CHANNELS = ("CTAS", "NCHANNELS")


def _channels(name: str, environment: Mapping[str, str], default: int) -> int:
    given = environment.get(name, str(default))
    count = digits(given)
    if count is None or not 1 <= count <= _MOST:
        raise UsageError(f"nccl.settings.{name}: expected a number of channels from 1 to {_MOST}, got {brief(given)!r}")
    return count


def _listed(name: str, environment: Mapping[str, str], known: tuple[str, ...]) -> frozenset[str] | None:
    """Parse a list as NCCL does: names separated by commas; after a ^, all names but those."""
    given = environment.get(name, "")
    if not given:
        return None
    by_name = {one.lower(): one for one in known}
    words = given.removeprefix("^").lower().split(",")
    if unknown := [word for word in words if word not in by_name]:
        raise UsageError(
            f"nccl.settings.{name}: expected names of {', '.join(known)}, after commas (^ before them: all others), "
            f"got {brief(unknown[0])!r}"
        )
    named = {by_name[word] for word in words}
    return frozenset(set(known) - named if given.startswith("^") else named)


# -- How many channels NCCL opens, and what its search believes each of them carries.
#
# Source: NVIDIA/nccl v2.21.5-1, src/graph/search.cc (speedArrayIntra and the like, ncclTopoCompute,
# ncclTopoDupChannels), src/graph/topo.cc (what a NIC and a PCIe slot are taken for); channels of sends:
# src/graph/paths.cc, at v2.18.6-1, v2.20.5-1 (NCHANNELS_PER_NET_PEER = -1) and v2.29.7-1 (ncclTopoComputeP2pChannels,
# P2P_PER_CHANNEL_NET_BW); pieces of a tree: src/enqueue.cc, at v2.19.4-1 (initCollWorkElem), v2.20.5-1 and v2.23.4-1
# (calcCollChunking).

_OLD_INSIDE = (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0)
_OLD_BETWEEN = (48.0, 30.0, 28.0, 24.0, *_OLD_INSIDE[2:], 2.4, 1.2, 0.24, 0.12)
_HOPPER_INSIDE = (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0)
_HOPPER_BETWEEN = (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12)
_BLACKWELL_INSIDE = (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0)
_BLACKWELL_BETWEEN = (
    ((2, 30), (96.0, 86.0, 80.0, 48.0, 45.1, *_HOPPER_BETWEEN[2:])),
    ((2, 28), (96.0, 48.0, 45.1, *_HOPPER_BETWEEN[2:])),
    ((2, 27), (47.9, *_HOPPER_BETWEEN[1:])),
    ((0, 0), _HOPPER_BETWEEN),
)
"""Since which release (sm100SpeedArrayInter at v2.25.1-1, v2.27.3-1, v2.28.3-1, v2.30.3-1)."""


def _speeds(generation: int, version: tuple[int, int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the channel speeds in GB/s that NCCL's search tries on one node, and between nodes."""
    if generation < 2:
        return _OLD_INSIDE, _OLD_BETWEEN
    if generation == 2:
        return _HOPPER_INSIDE, _HOPPER_BETWEEN
    return _BLACKWELL_INSIDE, next(speeds for since, speeds in _BLACKWELL_BETWEEN if version >= since)


_MOST_SEARCHED = 16


@dataclass(frozen=True, slots=True)
class Channels:
    """Channels that NCCL's search finds, with the GB/s of each in a ring and in a tree."""

    count: int
    ring_gbps: float
    tree_gbps: float
    opened: int
    """Each that is found is opened twice."""


def searched(
    generation: int, inside_gbps: float, nic_gbps: float, num_nics: int, num_nodes: int, version: tuple[int, int]
) -> Channels:
    """Return the channels of a group: between nodes one for each NIC, on one node as many as the NVLinks can carry."""
    alone, among = _speeds(generation, version)
    if num_nodes == 1:
        ring = max(alone, key=lambda speed: (min(int(inside_gbps / speed + 1e-6), _MOST_SEARCHED) * speed, speed))
        channels = max(1, min(int(inside_gbps / ring + 1e-6), _MOST_SEARCHED))
        ring = tree = min(ring, inside_gbps)
    else:
        channels = max(1, min(num_nics, _MOST_SEARCHED))
        share = min(nic_gbps, inside_gbps / channels)
        ring = tree = next((speed for speed in among if speed <= share * 1.01), among[-1])
        if num_nodes == 2:  # bwIntra counts there, which the search raises up to twice as far
            tree = next(speed for speed in among if speed <= max(ring, min(2 * ring, inside_gbps / channels * 1.01)))
    if ring >= 25.0 and (generation < 2 or ring >= 50.0 or channels <= 4):
        return Channels(2 * channels, ring / 2, tree / 2, min(_MOST, 4 * channels))
    return Channels(channels, ring, tree, min(_MOST, 2 * channels))


def sent_channels(version: tuple[int, int], opened: int, num_ranks: int, nic_gbps: float, nics_a_rank: float) -> int:
    """Return the number of channels of a send to a rank of another node. It falls with the number of peers, so that
    all sends fit into one round.
    """
    limit = _power_of_two(opened)
    if version < (2, 20):
        return min(2, limit)
    nics = max(1, round(nics_a_rank))
    if version < (2, 29):
        most = 2
        while most * num_ranks > limit * 4 and most > 1:
            most //= 2
        return min(_power_of_two(max(nics, most)), limit)
    channels = min(_power_of_two(max(2, nics, -(-int(nic_gbps * nics) // 14))), limit)
    while channels * -(-num_ranks // 8) > limit and channels > 1:
        channels //= 2
    return channels


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


_THREADS = {"LL": 8 * 512, "LL128": 8 * 640, "Simple": 64 * 512}
"""Bytes of a tree per channel that is opened (NCCL_*_THREAD_THRESHOLD times the number of threads)."""


def tree_piece_bytes(machine: Machine, nbytes: float, proto: str) -> float:
    """Return the bytes that pass a tree in one piece, over all channels.

    A piece is one slot of each channel's buffer; in LL128, and in Simple before 2.20, less if there would be too few
    pieces.
    """
    used = min(machine.channels, max(1, int(nbytes / _THREADS[proto])))
    nodes, per_node = machine.num_nodes, machine.num_ranks / machine.num_nodes
    if proto == "LL":
        return 32768.0 * used

    def cut(piece: int, steps: float, most: float, least: int) -> int:
        while int(nbytes / (used * piece)) < steps * most and piece > least:
            piece //= 2
        return piece

    if proto == "LL128":
        steps = (1 + int(math.log2(nodes)) + 0.1 * per_node) / per_node
        return float(used * cut(cut(576000, steps, 64, 131072), steps, 16, 32768))
    if machine.version >= (2, 20):
        return float(machine.slot_bytes * used)
    depth = per_node - 1 + int(math.log2(nodes))
    return float(used * cut(cut(cut(machine.slot_bytes, depth, 8, 131072), depth, 4, 65536), depth, 1, 32768))


_PASSED_ON = {"LL": 32 * 8, "LL128": 32 * 8 * 8 * 15 // 16, "Simple": math.inf}
"""Bytes that a warp forwards as soon as it has received them, before the piece is complete.

Source: v2.21.5-1, src/device/prims_ll.h and prims_ll128.h (8 bytes a thread; NCCL_LL128_SHMEM_ELEMS_PER_THREAD of 8
bytes, less their flags).
"""


def tree_parts(machine: Machine, nbytes: float, proto: str) -> int:
    """Return the number of parts into which a piece of a tree separates on its way."""
    used = min(machine.channels, max(1, int(nbytes / _THREADS[proto])))
    piece = min(tree_piece_bytes(machine, nbytes, proto), nbytes) / used
    return max(1, math.ceil(piece / _PASSED_ON[proto]))


def nvls_tree_loop_bytes(machine: Machine, nbytes: float) -> float:
    """Return the bytes that an NVLSTree moves at once: one chunk for each head and channel.

    Source: calcCollChunking in src/enqueue.cc of v2.21.5-1 and v2.26.2-1: 128 KiB, 64 KiB on many nodes, less for
    small sizes. NCCL halves it from 4 nodes on; here from 3 nodes on, because 4 nodes are assumed to be no faster than
    3.
    """
    at_once = machine.nvls_channels * min(machine.num_ranks / machine.num_nodes, 32)
    chunk = 131072 if machine.num_nodes <= 2 else 65536
    if nbytes < 4 * at_once * chunk:
        chunk = 65536
    if nbytes < at_once * chunk:
        chunk = 32768
    return float(at_once * chunk)
