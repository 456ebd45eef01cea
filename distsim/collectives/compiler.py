"""Compiles transfers to plans with the library's own choice of algorithm, and caches the plans.

The library `ideal` is a plain alpha-beta model for tests against closed formulas: links have their own latency and
bandwidth, and there is no launch or protocol cost. Choose it with `--nccl-version ideal`, or with `version =
"ideal"` in the [nccl] table of a cluster file.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distsim.cluster import Cluster, Reroute
from distsim.collectives.algorithms.direct import (
    all_to_all_loads,
    direct_messages,
    direct_phase,
    even_pairs,
    rooted_loads,
    rooted_pairs,
    split_loads,
    split_pairs,
)
from distsim.collectives.algorithms.ring import Shape, hierarchical_phases, ring_messages, ring_phase
from distsim.collectives.algorithms.tree import one_way_phase, tree_messages, tree_phase
from distsim.collectives.constants import Constants, nccl_constants
from distsim.collectives.libraries.gloo import compile_gloo, compile_mpi
from distsim.collectives.members import LinkArrays, Members
from distsim.collectives.plan import SYMMETRIC, Plan, Transfer, TransferCost, canonical_op
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

if TYPE_CHECKING:
    from distsim.collectives.libraries.nccl import NcclSelector

_RING = ("all_reduce", "all_gather", "reduce_scatter")


def compile_ideal(
    group: Members,
    op: str,
    nbytes: float,
    root: int,
    splits: tuple[tuple[int, ...], ...] | None,
    algo: str | None,
) -> Plan:
    """Compile *op* (a canonical name) for an ideal library that uses the full speed of the links."""
    size = group.size
    if algo is not None and algo not in ("ring", "tree", "hierarchical", "direct"):
        raise UsageError(f"expected an algorithm (ring, tree, hierarchical, direct), got {brief(algo)!r}")
    if op == "all_reduce" and algo == "hierarchical":
        return Plan("hierarchical", "ideal", 1, 0.0, hierarchical_phases(group, nbytes))
    if op in _RING and algo != "tree":
        shape = Shape.of(op, size, nbytes)
        return Plan(
            "ring",
            "ideal",
            1,
            0.0,
            (ring_phase(group, shape, TransferCost()),),
            lambda: ring_messages(group, shape, TransferCost()),
        )
    if op in ("all_reduce", "broadcast", "reduce", "barrier"):
        cost = TransferCost()
        phase = tree_phase(group, nbytes, cost) if op == "all_reduce" else one_way_phase(group, nbytes, cost)
        messages = (lambda: tree_messages(group, nbytes, cost)) if op == "all_reduce" else None
        return Plan("tree", "ideal", 1, 0.0, (phase,), messages)
    pairs = {}
    if op in ("gather", "scatter"):
        to_root = op == "gather"
        share = nbytes / size
        pairs = rooted_pairs(size, root, to_root, share)
        phase = direct_phase(group, rooted_loads(group, root, to_root), share, TransferCost())
    elif splits is not None:
        pairs = split_pairs(splits)
        largest = max(pairs.values(), default=0.0)
        phase = direct_phase(group, split_loads(group, pairs, largest), largest, TransferCost())
    else:
        share = nbytes / size
        phase = direct_phase(group, all_to_all_loads(group), share, TransferCost())
        messages = lambda: direct_messages(group, even_pairs(size, share), TransferCost())  # noqa: E731
        return Plan("direct", "ideal", 1, 0.0, (phase,), messages)
    return Plan("direct", "ideal", 1, 0.0, (phase,), lambda: direct_messages(group, pairs, TransferCost()))


_MAX_PLANS = 1 << 16
_MAX_GROUPS = 1 << 13


def _constants(cluster: Cluster) -> Constants | None:
    """Return the model's constants, replaced where the cluster has fitted ones; None if it has none."""
    if not cluster.constants:
        return None
    own = nccl_constants()
    if unknown := [name for name in cluster.constants if not own.knows(name)]:
        near = difflib.get_close_matches(brief(unknown[0]), own.values, 1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"{brief(cluster.name)}: constants.{brief(unknown[0])}: this distsim's model of NCCL has no such constant;"
            f"{hint} distsim calibrate --from LOGS writes the file anew"
        )
    return own.changed({name: one.value for name, one in cluster.constants.items()})


@dataclass(frozen=True, slots=True)
class Explained:
    """One way of running a collective, with its predicted time and the reason for or against it."""

    algo: str
    proto: str
    channels: int
    predicted_s: float | None
    """Predicted seconds of this choice alone on its links; None if it is not available."""
    why: str
    chosen: bool


class Compiler:
    """Plans for one cluster; *algo*, *proto* and *nccl_version* force NCCL's choices."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        algo: str | None = None,
        proto: str | None = None,
        nccl_version: str | None = None,
        launcher: str = "process",
    ) -> None:
        self.cluster = cluster
        self.links = LinkArrays(cluster)
        self.algo, self._proto, self._launcher = algo, proto, launcher
        self.version = nccl_version or cluster.nccl.version
        self.ideal = self.version == "ideal"
        self._groups: dict[tuple[tuple[str, ...], int], Members] = {}
        self._plans: dict[object, Plan] = {}
        nccl = cluster.nccl
        if nccl.compute_capability or nccl.settings or cluster.constants or algo or proto or nccl_version:
            _ = self.nccl  # which refuses what it does not know before a rank runs

    @cached_property
    def nccl(self) -> NcclSelector:
        from distsim.collectives.libraries.nccl import NcclSelector  # gloo and MPI do without its tables

        return NcclSelector(
            self.cluster,
            self.links.capacity,
            algo=self.algo,
            proto=self._proto,
            version=self.version,
            launcher=self._launcher,
            constants=_constants(self.cluster),
        )

    def lead_around(self, down: Collection[int]) -> None:
        """Avoid the links *down* in all later plans if another path exists.

        Never call this on a compiler that others share (`compiler_of`).
        """
        self.links.around = Reroute(self.cluster, down) if down else None
        self._groups.clear()
        self._plans.clear()

    def group(self, devices: tuple[str, ...], key: int) -> Members:
        """Return the group of these devices, made once."""
        result = self._groups.get((devices, key))
        if result is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            result = self._groups[(devices, key)] = Members(self.cluster, devices, key, self.links)
        return result

    def compile(self, transfer: Transfer) -> Plan:
        """Return the plan of one collective."""
        plan = self._plans.get(transfer)
        if plan is None:
            plan = self._make(transfer)
            self._keep(transfer, plan)
        return plan

    def compile_send(self, src: str, dst: str, nbytes: int, flavour: str, key: int) -> Plan:
        """Return the plan of one point-to-point transfer."""
        request = (src, dst, nbytes, flavour, key)
        plan = self._plans.get(request)
        if plan is None:
            group = self.group((src, dst), key)
            if self.ideal:
                splits = ((0, nbytes), (0, 0))
                plan = compile_ideal(group, "all_to_all", nbytes, 0, splits, None)
            elif flavour == "nccl":
                plan = self.nccl.send(group, nbytes)
            elif flavour in SYMMETRIC:
                plan = self._symmetric(group, flavour, "send", nbytes)
            else:
                plan = (compile_mpi if flavour == "mpi" else compile_gloo)(group, "send", nbytes, 0, None)
            self._keep(request, plan)
        return plan

    def _keep(self, key: object, plan: Plan) -> None:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan

    def _make(self, transfer: Transfer) -> Plan:
        op = canonical_op(transfer.op)
        size = len(transfer.devices)
        if not 0 <= transfer.root < size:
            raise UsageError(f"expected a root from 0 to {size - 1}, got {transfer.root}")
        group = self.group(transfer.devices, transfer.key)
        nbytes = transfer.nbytes
        if self.ideal:
            total = nbytes * size if op in ("gather", "scatter") else nbytes
            if size == 1:
                return Plan("none", "ideal", 0, 0.0)
            return compile_ideal(group, op, total, transfer.root, transfer.splits, self.algo and self.algo.lower())
        if transfer.flavour == "nccl":
            return self.nccl.compile(group, op, nbytes, transfer.root, transfer.splits)
        if transfer.flavour in SYMMETRIC:
            return self._symmetric(group, transfer.flavour, op, nbytes)
        if transfer.flavour in ("gloo", "mpi"):
            make = compile_gloo if transfer.flavour == "gloo" else compile_mpi
            return make(group, op, nbytes, transfer.root, transfer.splits)
        raise UsageError(f"expected the flavour nccl, gloo or mpi, got {transfer.flavour!r}")

    def _symmetric(self, group: Members, algo: str, op: str, nbytes: float) -> Plan:
        from distsim.collectives.libraries.symmetric import compile_symmetric  # needs NCCL's tables

        return compile_symmetric(self.nccl.timing, self.nccl.machine(group), group, algo, op, nbytes)

    def explain(self, transfer: Transfer) -> list[Explained]:
        """Return every algorithm and protocol for *transfer*; a single entry if the library has no choice."""
        op = canonical_op(transfer.op)
        if transfer.flavour == "nccl" and not self.ideal:
            group = self.group(transfer.devices, transfer.key)
            rows = self.nccl.explain(group, op, transfer.nbytes, transfer.root, transfer.splits)
            return [Explained(*row) for row in rows]
        plan = self.compile(transfer)
        return [
            Explained(plan.algo, plan.proto, plan.channels, plan.alone_s(self.links.capacity), "the only way", True)
        ]


def compiler_of(cluster: Cluster, **forced: Any) -> Compiler:
    """Return a `Compiler` for *cluster*, the same for all who force the same: the plans of one simulation serve the
    next.
    """
    key = Compiler, *sorted(forced.items())
    result: Compiler | None = cluster.worked_out.get(key)
    if result is None:
        result = cluster.worked_out[key] = Compiler(cluster, **forced)
    return result
