"""Makes the Outcome of a world that has ended, with the intervals of its times."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.multiprocessing import ProcessRaisedException

from distsim.collectives.uncertainty import Interval, interval, size_class, step_error
from distsim.debug.diagnosis.silent.facts import Severity
from distsim.debug.messages import ranks_text
from distsim.debug.records import P2P, CallRecord, Evidence
from distsim.debug.records.call_log import CallSum
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.errors import Failure
from distsim.sim.observe.gpu_tracks import GpuTracks
from distsim.sim.observe.metrics import Training
from distsim.sim.observe.silent import silent_findings
from distsim.sim.observe.training import training_of
from distsim.sim.outcome import NOT_PROVEN, SILENT_FAULT, CollectiveTotal, LinkUse, Outcome, RankSummary
from distsim.text.units import format_time

if TYPE_CHECKING:
    from distsim.sim.c10d.group_api import Questions
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World
    from distsim.sim.world.conditions import RunRequest

# -- Intervals of a run's times, from those of its collectives (collectives/uncertainty.py).
#
# Errors of calls alike are the model's, not chance: they are added up, not averaged out. A step's interval is that of
# the communication which nothing hides on the rank that paces the others, and of published steps (step_errors.py),
# which has the errors of operators, of the host and of what is taken to be hidden.

UNMEASURED = 0.01
"""Share of a step that communication without measurements may take before the step has no interval."""


class Confidence:
    """Confidence intervals of the calls of one world."""

    def __init__(self, world: World, nccl_version: str | None) -> None:
        self._world = world
        self.is_known = nccl_version != "ideal"
        """Whether the times are of a machine that could be measured."""
        self._nodes: dict[tuple[str, int | None, int | None], int] = {}
        self._factors: dict[tuple[int, str, str, str], tuple[float, float] | None] = {}

    def of(self, sums: Sequence[CallSum], group: Questions | None) -> tuple[float, float] | None:
        """Return (low_s, high_s) of all these calls of *group* together; None if such a call was never measured."""
        if group is None:
            return None
        low_s = high_s = 0.0
        for alike in sums:
            factors = self._of_one(alike.first, group.flavour_on(alike.first.device))
            if factors is None:
                return None
            low_s += factors[0] * alike.time_s
            high_s += factors[1] * alike.time_s
        return low_s, high_s

    def _of_one(self, record: CallRecord, flavour: str) -> tuple[float, float] | None:
        ends = (record.rank, record.peer) if record.is_p2p else (None, None)
        members = (record.group.name, *ends)
        nodes = self._nodes.get(members)
        if nodes is None:
            slots = self._world.facts.slots
            nodes = self._nodes[members] = len({slots[rank].host for rank in record.members})
        key = (nodes, size_class(record.nbytes), flavour, record.op)
        if key not in self._factors:
            interval = self._interval(record, nodes, flavour)
            self._factors[key] = None if interval is None else (interval.low_s, interval.high_s)
        return self._factors[key]

    def _interval(self, record: CallRecord, nodes: int, flavour: str) -> Interval | None:
        return (
            interval(self._world.facts.cluster, record.nbytes, nodes, 1.0, flavour, record.op)
            if self.is_known
            else None
        )


def step_interval(training: Training, totals: Sequence[CollectiveTotal]) -> tuple[float, float] | None:
    """Return (low_s, high_s) of a step; None without a step, or if unmeasured communication is exposed.

    The errors of its exposed communication, of the rates of its GPU and those of published steps of its regime are
    independent, so their squares are added.
    """
    rank = training.pacing
    if rank is None or not training.step_time_s or training.step_regime is None:
        return None
    known = step_error(training.step_regime, training.num_gpus, training.gpu)
    sums: dict[tuple[str, str], list[float]] = {}
    unmeasured = {(total.op, total.group) for total in totals if total.low_s is None}
    if sum(wait.moving_s for wait in rank.waits if (wait.op, wait.group) in unmeasured) > UNMEASURED * rank.step_s:
        return None
    for total in totals:
        summed = sums.setdefault((total.op, total.group), [0.0, 0.0, 0.0])
        low_s, high_s = (total.low_s, total.high_s) if total.low_s is not None else (total.time_s, total.time_s)
        for i, seconds in enumerate((total.time_s, low_s, high_s or 0.0)):
            summed[i] += seconds
    low_s = high_s = training.step_time_s
    for wait in rank.waits:
        # A receive is timed as the send that it waits for.
        time_s, low, high = sums.get((wait.op, wait.group)) or sums.get(("send", wait.group)) or (0.0, 0.0, 0.0)
        if time_s > 0.0:
            low_s -= wait.moving_s * (1.0 - low / time_s)
            high_s += wait.moving_s * (high / time_s - 1.0)
    step_s = training.step_time_s
    quicker = [max(0.0, 1.0 - rate.shortest) * rate.share * step_s for rate in training.rates]
    slower = [max(0.0, rate.longest - 1.0) * rate.share * step_s for rate in training.rates]
    return (
        max(0.0, step_s - math.hypot(step_s - low_s, step_s * (1.0 - known.low), *quicker)),
        step_s + math.hypot(high_s - step_s, step_s * (known.high - 1.0), *slower),
    )


_ADDRESS = re.compile(r"0x[0-9a-f]+")


USAGE = 2
"""The exit code of a program that was called wrongly."""


def bus_factor(op: str, num_ranks: int) -> float:
    """Return busbw / algbw, as nccl-tests' PERFORMANCE.md defines it."""
    n = num_ranks
    if n < 2:
        return 1.0
    if op.startswith("all_reduce"):
        return 2 * (n - 1) / n
    if op.startswith(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")):
        return (n - 1) / n
    return 1.0


def summing_up(
    world: World, evidence: Evidence, request: RunRequest, name: str, interrupt: int, wall_s: float
) -> Outcome:
    ranks = [world.rank_processes[r] for r in sorted(world.rank_processes) if r < world.world_size]
    started = [p for p in ranks if p.rank not in world.restarts.left_behind]
    started += [] if world.launcher is None else [world.launcher]
    own_order = world.launcher is not None or bool(world.restarts.died_s)
    failures = _failures(started)
    virtual_s = world.stopped_at_s or max([world.now_s, *(p.ending.end_s or 0.0 for p in ranks)])
    backend = next((b for p in ranks for b in _backends(p)), "none")
    diagnoses = list(world.diagnoses)
    silent = silent_findings(world, request.silent_allow)
    confidence = Confidence(world, request.nccl_version)
    totals = _totals(ranks, confidence)
    is_cut = interrupt > 0 or (world.limits is not None and world.limits.reached is not None)
    training = training_of(world, ranks, request.tokens_per_step, virtual_s if is_cut else math.inf)
    notes = [*world.notes, *_of_polls(world), *_of_launcher(world)]
    if training is not None and confidence.is_known and (sure := step_interval(training, totals)) is not None:
        training.step_low_s, training.step_high_s = sure
    if training is not None:
        _price(training, world, request)
        diagnoses = [_short_of_memory(diagnosis, training) for diagnosis in diagnoses]
    exit_code = 128 + interrupt if interrupt else _exit_code(diagnoses, failures, started)
    if not exit_code and request.silent == "strict" and any(one.level is Severity.ERROR for one in silent):
        exit_code = SILENT_FAULT
    is_proven = not world.traced.not_traced or request.sample_is_enough or exit_code not in (0, SILENT_FAULT)
    return Outcome(
        world_size=world.world_size,
        cluster=world.facts.cluster.name if not isinstance(request.on, str) else request.on,
        backend=backend,
        seed=world.facts.seed,
        program=name,
        exit_code=exit_code if is_proven else NOT_PROVEN,
        virtual_time_s=virtual_s,
        wall_time_s=wall_s,
        events=world.events,
        results=[p.ending.result for p in (ranks if own_order else world.processes[: len(world.facts.slots)])],
        ranks=[_summary(p, virtual_s) for p in ranks],
        records={p.rank: p.calls.kept() for p in ranks},
        diagnoses=diagnoses,
        evidence=evidence,
        failures=failures,
        collectives=totals,
        links=_links(world, virtual_s, None if request.trace else MOST_LINKS),
        link_samples=_link_samples(world) if request.trace else (),
        compute={p.rank: p.times.slices for p in ranks},
        step_ends={p.rank: max(p.times.step_ends.values(), key=len) for p in ranks if p.times.step_ends},
        for_trace=request.trace,
        training=training,
        gpu_tracks=GpuTracks(ranks),
        silent=silent,
        notes=notes,
        not_traced=tuple(world.traced.not_traced),
        unseen=world.traced.unseen,
        is_proven=is_proven,
        software=_software(world, request.nccl_version) if backend == "nccl" else "",
        software_matters=backend == "nccl" and world.facts.cluster.nccl.named(world.facts.cluster.variant),
        interrupted=interrupt > 0,
    )


def _price(training: Training, world: World, request: RunRequest) -> None:
    """Set the price and the power of a GPU."""
    facts = world.facts.cluster.node.gpu
    assert facts is not None
    training.price, training.price_basis = request.price, ""
    if request.price is None:
        training.price, training.price_basis = facts.price, facts.price_basis
    training.power_w, training.power_is_limit = facts.power_w, False
    if training.power_w is None and world.facts.gpu.power_w:
        training.power_w, training.power_is_limit = world.facts.gpu.power_w, True
    training.planned_tokens = request.planned_tokens


def _software(world: World, version: str | None) -> str:
    """Return the software whose times the model of NCCL's collectives reproduces."""
    facts, variant = world.facts.cluster.nccl, world.facts.cluster.variant
    facts = facts if version is None else replace(facts, version=version)
    return facts.software + (f" (variant {variant})" if variant else "")


def _short_of_memory(diagnosis: Diagnosis, training: Training) -> Diagnosis:
    """Return *diagnosis* with the figures of the report as its suggestion where memory was too small."""
    short = {rank for shortage in training.out_of_memory for rank in shortage.ranks}
    if diagnosis.kind is not Kind.RANK_RAISED or not short.issuperset(diagnosis.culprits):
        return diagnosis
    fits = "The section on out of memory below lists changes that would fit."
    if diagnosis.causes:  # what grows is told already
        return replace(diagnosis, suggestion=f"{diagnosis.suggestion} {fits}")
    who = ranks_text(diagnosis.culprits)
    return replace(diagnosis, suggestion=f"Reduce the memory of {who}: t{fits[1:]}")


def _of_polls(world: World) -> list[str]:
    """Return why a run ended that only polled, without a timeout."""
    polling = sorted({p.rank for p in world.processes if any(task.quiet_polls for task in p.tasks)})
    if not world.diagnoses or not world.only_polls or not polling:
        return []
    looked, quiet = "polled" if len(polling) == 1 else "each polled", format_time(world.quiet_s)
    return [
        f"the run was ended: for {quiet} of virtual time {ranks_text(tuple(polling))} {looked} (is_completed, "
        "query, ...), and nothing but timeouts could follow"
    ]


def _of_launcher(world: World) -> list[str]:
    """Return how the parent process of the ranks ended, unless a report on its children already says so."""
    parent = world.launcher
    if parent is None:
        return []
    if parent.ending.exception is not None and world.diagnoses:
        where = f" at {parent.last_stack[0].file}:{parent.last_stack[0].line}" if parent.last_stack else ""
        kind, text = type(parent.ending.exception).__name__, str(parent.ending.exception).strip().split("\n", 1)[0]
        return [f"the process that started the ranks (main) raised {kind}{where}: {text}"]
    if parent.ending.exit_code and parent.ending.exception is None:
        return [f"the process that started the ranks (main) ended with exit code {parent.ending.exit_code}"]
    return []


def _exit_code(diagnoses: Sequence[object], failures: Sequence[Failure], ranks: Sequence[SimProcess]) -> int:
    for diagnosis in diagnoses:
        code = getattr(diagnosis, "exit_code", 0)
        if code:
            return int(code)
    if failures:
        return 1
    own = {p.ending.exit_code or 0 for p in ranks if not (p.family.ended_by_program or p.told_its_parent)}
    if own == {USAGE}:
        return USAGE  # every rank refused the program's arguments, as argparse does
    return int(any(own))


def _backends(process: SimProcess) -> list[str]:
    """Return the backends of the default group; if the process works on GPUs, those of all devices:
    `cpu:gloo,cuda:nccl`.
    """
    on_gpus = process.accelerators is not None and process.accelerators.works
    return [group.backend_config() if on_gpus else group.flavour_on("cpu") for group in process.groups.objects[:1]]


def _failures(processes: Sequence[SimProcess]) -> list[Failure]:
    merged: dict[tuple[str, str], list[SimProcess]] = {}
    for process in processes:
        children = process.family.children
        if isinstance(process.ending.exception, ProcessRaisedException) and any(p.ending.exception for p in children):
            continue  # the launcher repeats what its child has raised
        if process.ending.exception is not None:
            text = process.ending.traceback_text or ""
            key = (type(process.ending.exception).__name__, _ADDRESS.sub("0x", text))
            merged.setdefault(key, []).append(process)
    return [
        Failure(
            ranks=tuple(p.rank for p in group if p.is_rank),
            type=kind,
            message=group[0].ending.error_text,
            traceback=group[0].ending.traceback_text or "",
        )
        for (kind, _), group in merged.items()
    ]


def _summary(process: SimProcess, virtual_s: float) -> RankSummary:
    memory = process.port.memory
    return RankSummary(
        rank=process.rank,
        host=process.slot.host,
        device=process.slot.device,
        end_s=virtual_s if process.ending.end_s is None else process.ending.end_s,
        compute_s=process.times.compute_s,
        communication_s=process.calls.moving_s(),
        exposed_s=process.times.exposed_s,
        idle_s=process.times.idle_s,
        phase=process.phase,
        exit_code=process.ending.exit_code,
        peak_memory_bytes=None if memory is None else memory.peak_bytes(process),
    )


def _totals(ranks: Sequence[SimProcess], confidence: Confidence) -> list[CollectiveTotal]:
    """Return calls by group and operation; a collective counts once, a send once."""
    groups = {group.group_name: group for process in ranks for group in process.groups.objects}
    sums_by_key: dict[tuple[str, tuple[int, ...], str, str], list[CallSum]] = {}
    traced = {process.rank for process in ranks}
    for process in ranks:
        for alike in process.calls.together():
            record = alike.first
            if not (record.dtypes or record.op == "barrier"):
                continue
            if record.op == "recv" or (record.op not in P2P and record.rank != _first(record, traced)):
                continue
            key = (
                record.group.label,
                record.group.ranks,
                record.op,
                record.dtypes[0] if record.dtypes else "",
            )
            sums_by_key.setdefault(key, []).append(alike)
    totals = []
    for (label, members, op, dtype), sums in sums_by_key.items():
        num_bytes = sum(alike.nbytes for alike in sums)
        time_s = sum(alike.time_s for alike in sums)
        algbw = num_bytes / time_s if time_s > 0 else 0.0
        low_s, high_s = confidence.of(sums, groups.get(sums[0].first.group.name)) or (None, None)
        totals.append(
            CollectiveTotal(
                label,
                op,
                dtype,
                len(members),
                sum(alike.count for alike in sums),
                num_bytes,
                time_s,
                algbw,
                algbw * bus_factor(op, len(members)),
                low_s,
                high_s,
            )
        )
    return sorted(totals, key=lambda t: (-t.time_s, t.group, t.op))


def _first(record: CallRecord, traced: set[int]) -> int:
    """Return the first member of its group that was traced."""
    first = record.group.ranks[0]
    return first if first in traced else next(rank for rank in record.group.ranks if rank in traced)


def _link_samples(world: World) -> list[tuple[float, int, float]]:
    """Return the network's samples, with the place in `Outcome.links` instead of the cluster's index."""
    positions = {use.index: number for number, use in enumerate(world.facts.network.links_busy())}
    return [(time_s, positions[index], used) for time_s, index, used in world.facts.network.utilisation_samples()]


MOST_LINKS = 2_000
"""Number of links up to which the report has each, and beyond it one of those that are used alike."""


def _links(world: World, virtual_s: float, most: int | None) -> list[LinkUse]:
    uses = []
    for use in world.facts.network.links_busy(most):
        link = world.facts.cluster.links[use.index]
        mean = use.bytes / (link.bandwidth_bytes_per_s * virtual_s) if virtual_s > 0 else 0.0
        uses.append(
            LinkUse(
                link.name,
                link.kind,
                link.bandwidth_bytes_per_s,
                use.bytes,
                use.busy_s,
                mean,
                use.peak_utilisation,
                use.alike,
            )
        )
    return uses
