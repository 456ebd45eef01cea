"""Chooses algorithm and protocol as NCCL does, and computes their cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from distsim.cluster import Cluster
from distsim.collectives.algorithms.direct import (
    all_to_all_loads,
    direct_messages,
    direct_phase,
    even_pairs,
    next_loads,
    pair_loads,
    rooted_loads,
    rooted_pairs,
    split_loads,
    split_pairs,
)
from distsim.collectives.algorithms.ring import Shape, ring_messages
from distsim.collectives.algorithms.tree import tree_messages
from distsim.collectives.constants import Constants, nccl_constants
from distsim.collectives.libraries.nccl_channels import Channels, ChannelSettings, searched, sent_channels
from distsim.collectives.libraries.nccl_timing import NcclTiming, Timed
from distsim.collectives.libraries.nccl_tuning import ALGORITHMS, PROTOCOLS, Candidate, Machine, candidates
from distsim.collectives.libraries.rccl_tuning import LINK_GBPS, model_of, ranged_protocol, rccl_candidates
from distsim.collectives.members import Members
from distsim.collectives.plan import Plan, PlannedMessage
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, digits

Splits = tuple[tuple[int, ...], ...] | None
Messages = Callable[[], list[PlannedMessage]] | None

TUNED_NETS = ("efa",)
"""Fabrics whose makers ship a tuner plugin with NCCL (AWS: aws-ofi-nccl).

The tuner takes the choice that is fastest on its fabric, instead of the one that NCCL's own model predicts. It has no
figures for p4d, for which NCCL's model is used. Google configures NCCL by its environment instead (see the presets).
"""
_TUNER_TRUSTS = 2.0
"""Factor up to which the tuner takes LL and LL128 although NCCL's model predicts them slower than the best Simple
choice.

They end at NCCL's own thresholds, rather than at those of our model.
"""

DIRECT = ("all_to_all", "gather", "scatter", "sendrecv", "send")


_PLUGIN_US = {("efa", 1): 75.0, ("efa", 2): 75.0, ("efa", 3): 35.0}
"""Latency in microseconds that a plugin reports to NCCL, by fabric and generation.

Source: aws-ofi-nccl, src/platform-aws.cpp (p4d, p5, p6).
"""
_PCIE_GBPS = {1: 3.0, 2: 6.0, 3: 12.0, 4: 24.0, 5: 48.0, 6: 96.0}
_SOCKET_GBPS = {"amd": 16.0, "arm": 6.0, "bdw": 6.0, "skl": 10.0, "srp": 22.0, "erp": 40.0}


class NcclSelector:
    """NCCL of one version on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        capacity: NDArray[np.float64],
        *,
        algo: str | None,
        proto: str | None,
        version: str,
        launcher: str = "process",
        constants: Constants | None = None,
    ) -> None:
        if launcher not in ("process", "shared"):
            raise UsageError(f"expected the launcher process or shared, got {brief(launcher)!r}")
        self.cluster = cluster
        self.capacity = capacity
        self.version = version
        self.numbers = _numbers(version)
        self.timing = NcclTiming(cluster, constants or nccl_constants(), launcher, self.numbers)
        self.settings = ChannelSettings.of(cluster.nccl.settings, ALGORITHMS, PROTOCOLS)
        self.algo = _named("an algorithm", algo, ALGORITHMS) if version != "ideal" else None
        self.proto = _named("a protocol", proto, PROTOCOLS) if version != "ideal" else None

    def machine(self, group: Members) -> Machine:
        """Return the properties of *group* that NCCL's tuning depends on."""
        result: Machine = group.cached("nccl machine", lambda: self._machine(group))
        return result

    def _machine(self, group: Members) -> Machine:
        node, nccl = self.cluster.node, self.cluster.nccl
        capability = nccl.compute_capability
        generation = 3 if capability >= 100 else {9: 2, 8: 1}.get(capability // 10, 0)
        nvlink = node.nvlink != "none"
        many = len(group.domains) > 1
        slot = _PCIE_GBPS.get(node.pcie_generation, node.pcie_bytes_per_s / 1e9)
        intra = node.nvlink_bytes_per_s / 1e9 if nvlink else self._believed_pcie_gbps()
        nic = min(node.nic_spec_bytes_per_s / 1e9, slot)
        count = len(group.domains)
        rccl = model_of(capability) if nccl.library == "rccl" and node.ranks_per_node == 8 else 0
        if rccl:
            intra = LINK_GBPS[rccl] * node.nvlinks_per_gpu
        channels = searched(generation, intra, nic, group.num_nics, count, self.numbers)
        if not nvlink and not many:
            channels = Channels(1, intra, intra, 2)
        return Machine(
            num_ranks=group.size,
            num_nodes=count,
            generation=generation,
            intra="nvlink" if nvlink else "pci",
            intra_gbps=intra,
            graph_channels=channels.count,
            ring_gbps=channels.ring_gbps,
            tree_gbps=channels.tree_gbps,
            channels=(opened := self.settings.opened(channels.opened)),
            has_fewer_channels=opened < channels.opened,
            nvls=node.nvls and self.settings.nvls and group.size > count,
            nvls_channels=self.settings.opened(nvls_channels := 16 if generation == 2 else 24),
            has_fewer_nvls_channels=self.settings.opened(nvls_channels) < nvls_channels,
            net_us=_PLUGIN_US.get((nccl.net, generation), 0.0),
            ll128=nvlink and generation >= 1 and (not many or self._ll128_reaches_nics()),
            amd=nccl.cpu_vendor == "amd",
            collnet=nccl.collnet,
            simple_tree=generation >= 2 and group.num_nics * count >= group.size,
            x86=nccl.cpu_vendor != "arm",
            version=self.numbers,
            rccl=rccl,
            nics=group.num_nics,
            slot_bytes=self.settings.slot_bytes,
        )

    def _ll128_reaches_nics(self) -> bool:
        """Return whether NICs are near enough to their GPUs for LL128.

        They are behind the same PCIe switch, not behind the processor's root ports (tuning.cc v2.21.5-1: typeInter up
        to PATH_PXB, from Hopper on PATH_PXN). On a Grace host a NIC is behind the processor, which NCCL accepts since
        2.27 (tuning.cc v2.27.3-1: NCCL_LL128_C2C, up to PATH_P2C).
        """
        nccl = self.cluster.nccl
        if nccl.cpu_vendor == "arm" and nccl.net in ("slingshot", "ib", "roce"):
            return self.numbers >= (2, 27)
        return nccl.net in ("ib", "roce", "efa") and not self.cluster.node.nics_beyond_root

    def _believed_pcie_gbps(self) -> float:
        """Return the bandwidth in GB/s that NCCL assumes for a ring over PCIe (v2.30.7, src/graph/topo.h and
        topo.cc).

        NCCL assumes a figure for a x16 slot by its generation, and one for the path between sockets by the
        processor, whatever the measured rates are.
        """
        node, nccl, sockets = self.cluster.node, self.cluster.nccl, self.cluster.cpu.num_sockets
        slot = _PCIE_GBPS.get(node.pcie_generation, node.pcie_bytes_per_s / 1e9)
        between = _SOCKET_GBPS.get(nccl.cpu_class or nccl.cpu_vendor, slot)
        return min(slot, between) if sockets > 1 else slot

    def compile(self, group: Members, op: str, nbytes: float, root: int, splits: Splits) -> Plan:
        """Return the plan of NCCL's choice. *nbytes* as in `Transfer`."""
        if group.size == 1:
            return Plan("none", "none", 0, self.timing.floor_s(group))
        if op in DIRECT:
            return self._direct(group, op, nbytes, root, splits)
        if op == "barrier":
            op, nbytes = "all_reduce", 4
        best = self._choose(group, op, nbytes)
        return self.plan(group, op, nbytes, best.algo, best.proto)

    def _choose(self, group: Members, op: str, nbytes: float) -> Candidate:
        if self.tuned(group):
            return self._pick(group, op, nbytes)
        result: Candidate = group.cached(("nccl choice", op, nbytes), lambda: self._pick(group, op, nbytes))
        return result

    def tuned(self, group: Members) -> bool:
        """Return whether a tuner plugin of the fabric's maker chooses for this group."""
        nccl = self.cluster.nccl
        old = nccl.net == "efa" and nccl.compute_capability < 90
        return nccl.net in TUNED_NETS and not old and len(group.domains) > 1

    def _pick(self, group: Members, op: str, nbytes: float) -> Candidate:
        machine = self.machine(group)
        every = self.candidates(op, nbytes, machine)
        allowed = [one for one in every if one.believed_us is not None]
        forced = [one for one in allowed if self.algo in (None, one.algo) and self.proto in (None, one.proto)]
        if not forced:
            self._refuse_impossible(machine)
        among = forced or allowed
        best = min(among, key=lambda one: one.believed_us or 0.0)
        if machine.rccl and self.proto is None:
            proto = ranged_protocol(op, nbytes, machine)
            return next((one for one in among if (one.algo, one.proto) == (best.algo, proto)), best)
        if not self.tuned(group):
            return best
        simple = [one.believed_us or 0.0 for one in among if one.proto == "Simple"]
        most_us = _TUNER_TRUSTS * min(simple, default=math.inf)
        near = [one for one in among if one.proto == "Simple" or (one.believed_us or 0.0) <= most_us]
        return min(near, key=lambda one: self._alone_s(group, op, nbytes, one))

    def candidates(self, op: str, nbytes: float, machine: Machine) -> list[Candidate]:
        """Return the choices of the library that the settings allow; all of them if the settings allow none."""
        every = (rccl_candidates if machine.rccl else candidates)(op, nbytes, machine)
        forced = self.algo is not None or self.proto is not None
        left = [
            replace(one, believed_us=None, why=why) if (why := self.settings.against(one.algo, one.proto)) else one
            for one in every
        ]
        return every if forced or all(one.believed_us is None for one in left) else left

    def _refuse_impossible(self, machine: Machine) -> None:
        """Raise an error if the user forces a choice that no operation supports on this machine.

        A choice that only one operation lacks is ignored for it, as NCCL ignores NCCL_ALGO=Tree in a broadcast.
        """
        why = ""
        for op in ("all_reduce", "all_gather"):
            for one in self.candidates(op, 1 << 20, machine):
                if self.algo in (None, one.algo) and self.proto in (None, one.proto):
                    if one.believed_us is not None:
                        return
                    why = why or one.why
        forced = " ".join(name for name in (self.algo, self.proto) if name)
        raise UsageError(f"{forced} is not available on {self.cluster.name}: {why}; see --explain")

    def _alone_s(self, group: Members, op: str, nbytes: float, one: Candidate) -> float:
        return self.plan(group, op, nbytes, one.algo, one.proto).alone_s(self.capacity)

    def believed_us(self, group: Members, op: str, nbytes: float) -> float | None:
        """Return NCCL's own estimate of the time of its best choice (ncclGroupSimulateEnd); None if it has no
        estimate.
        """
        if op in DIRECT or group.size == 1:
            return None
        every = [one.believed_us for one in self.candidates(op, nbytes, self.machine(group))]
        return min((each for each in every if each is not None), default=None)

    def explain(
        self, group: Members, op: str, nbytes: float, root: int, splits: Splits
    ) -> list[tuple[str, str, int, float | None, str, bool]]:
        """Return (algo, proto, channels, predicted_s, why, chosen) of every combination of algorithm and protocol."""
        if op in DIRECT or group.size == 1:
            plan = self.compile(group, op, nbytes, root, splits)
            return [(plan.algo, plan.proto, plan.channels, plan.alone_s(self.capacity), "the only way", True)]
        if op == "barrier":
            op, nbytes = "all_reduce", 4
        best = self._choose(group, op, nbytes)
        rows: list[tuple[str, str, int, float | None, str, bool]] = []
        for one in self.candidates(op, nbytes, self.machine(group)):
            if one.believed_us is None:
                rows.append((one.algo, one.proto, 0, None, one.why, False))
                continue
            plan = self.plan(group, op, nbytes, one.algo, one.proto)
            chosen = one == best
            why = f"{self.cluster.nccl.library.upper()}'s model says {one.believed_us:.1f} us" + (
                ", taken" if chosen else ""
            )
            rows.append((one.algo, one.proto, plan.channels, plan.alone_s(self.capacity), why, chosen))
        return rows

    def plan(self, group: Members, op: str, nbytes: float, algo: str, proto: str) -> Plan:
        """Return the plan of an operation by one algorithm and protocol."""
        machine, timing = self.machine(group), self.timing
        if algo == "Tree":
            timed = timing.tree(group, machine, nbytes, proto)
            return self._made(group, algo, proto, timed, lambda: tree_messages(group, nbytes, timed.cost))
        if algo in ("NVLS", "NVLSTree"):
            return self._made(group, algo, proto, timing.nvls(group, machine, op, nbytes, algo == "NVLSTree"), None)
        if algo == "MSCCL":
            return self._made(group, algo, proto, timing.all_pairs(group, machine, nbytes, proto), None)
        if algo == "PAT":
            return self._made(group, algo, proto, timing.pat(group, machine, op, nbytes), None)
        timed = timing.ring(group, machine, op, nbytes, proto)
        shape = Shape.of(op, group.size, nbytes)
        return self._made(group, algo, proto, timed, lambda: ring_messages(group, shape, timed.cost))

    def _made(self, group: Members, algo: str, proto: str, timed: Timed, messages: Messages) -> Plan:
        plan = Plan(algo, proto, self.machine(group).channels, timed.software_s, (timed.phase,), messages)
        return self._lifted(plan, self.timing.floor_s(group))

    def _lifted(self, plan: Plan, floor_s: float) -> Plan:
        """Return *plan*, lengthened to at least the host's time for launching it."""
        missing = floor_s - plan.alone_s(self.capacity)
        if missing <= 0.0:
            return plan
        return Plan(plan.algo, plan.proto, plan.channels, plan.floor_s + missing, plan.phases, plan.messages)

    def send(self, group: Members, nbytes: float) -> Plan:
        """Return a point-to-point transfer from member 0 to member 1."""
        return self._direct(group, "send", nbytes, 0, None)

    def _direct(self, group: Members, op: str, nbytes: float, root: int, splits: Splits) -> Plan:
        size = group.size
        machine, peers = self.machine(group), 1 if op in ("send", "sendrecv") else size
        pairs: dict[tuple[int, int], float] = {}
        even = False
        if op == "send":
            loads, share = pair_loads(group), nbytes
            pairs = {(0, 1): nbytes}
        elif op == "sendrecv":
            loads, share = next_loads(group), nbytes
            pairs = {(member, (member + 1) % size): nbytes for member in range(size)}
        elif op in ("gather", "scatter"):
            loads, share = rooted_loads(group, root, op == "gather"), nbytes
            pairs = rooted_pairs(size, root, op == "gather", nbytes)
        elif splits is None:
            loads, share = all_to_all_loads(group), nbytes / size
            even = size <= 128
        else:
            pairs = split_pairs(splits)
            share = max(pairs.values(), default=0.0)
            loads = split_loads(group, pairs, share)
        software_s, cost = self.timing.direct(group, machine, peers, share, loads)
        channels, rate = self._sent(group, machine, share, peers)
        cost = replace(cost, edge_bytes_per_s=rate)
        messages = (lambda: direct_messages(group, pairs or even_pairs(size, share), cost)) if pairs or even else None
        phase = direct_phase(group, loads, share, cost)
        plan = Plan("SendRecv", "Simple", channels, software_s, (phase,), messages)
        return self._lifted(plan, self.timing.p2p_floor_s(group))

    def _sent(self, group: Members, machine: Machine, share: float, peers: int) -> tuple[int, float]:
        """Return the number of channels of a send, and the bytes per second that they carry together, for the
        slowest pair of the group.
        """
        node = self.cluster.node
        inside = max(1, 32 // max(min(group.size, node.ranks_per_node), 8))
        while share / inside > 2**24 and inside < 32:
            inside *= 2
        near = self.timing.constants.get("p2p", "channel_GBps") * 1e9 * inside
        if len(group.domains) == 1:
            return inside, near
        nic = node.nic_spec_bytes_per_s / 1e9
        a_rank = node.num_nics / max(1, node.ranks_per_node)
        far = sent_channels(self.numbers, machine.channels, group.size, nic, a_rank)
        if peers > 1:  # many peers use all channels between them
            return far, math.inf
        return far, min(self.timing.constants.get("p2p", "net_channel_GBps") * 1e9 * far, near)


def _numbers(version: str) -> tuple[int, int]:
    if version == "ideal":
        return 2, 30
    parts = version.split(".")
    second = digits(parts[1]) if len(parts) > 1 and parts[0] == "2" else None
    if second is None:
        raise UsageError(f"expected a version of NCCL such as 2.27.3, or ideal, got {brief(version)!r}")
    return 2, second


def _named(option: str, given: str | None, known: tuple[str, ...]) -> str | None:
    if given is None:
        return None
    for name in known:
        if name.lower() == given.lower().replace("_", "").replace("-", ""):
            return name
    raise UsageError(f"expected {option} of NCCL ({', '.join(known)}), got {brief(given)!r}")
