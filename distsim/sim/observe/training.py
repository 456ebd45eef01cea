"""The training steps of a simulated run: noticed while it runs, summed up when it has ended.

A step ends where an optimizer's `step` ends on the device; the optimizer with most steps counts, from its third on.

Model flops are those of the products of forward and backward (three times the forward's where all is trained), hardware
flops all that were run: what backward computes again counts for the second only. Both are shares of the GPU's dense
peak of the data type that most of them had (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distsim.collectives.uncertainty import regime_of
from distsim.debug.messages import ranks_text
from distsim.debug.records.frames import shown
from distsim.network.critical_path import Ran, critical_path, operator_name
from distsim.sim.device.allocator import ExpandableAllocator
from distsim.sim.device.allocator.allocator import OPTIMIZER, Ledger
from distsim.sim.device.allocator.claims import AllocationSite, Modules, family
from distsim.sim.device.memory import current_stream
from distsim.sim.device.operators.reading import COPIED, Reading
from distsim.sim.device.timeline.account import Account
from distsim.sim.device.timeline.steps import StepEnd, ended_step, main_table, works_on
from distsim.sim.isolation.process import current_task
from distsim.sim.observe.metrics import (
    Fused,
    MemorySite,
    OperatorTime,
    OutOfMemory,
    RankTraining,
    RateRange,
    Training,
    UnknownRead,
    Wait,
)
from distsim.text.units import plural

if TYPE_CHECKING:
    from distsim.sim.device.operators.values import Values
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

UNLIKE = 1.1  # no step takes the mean of two of which one takes so many times as long as the other
FIRST_STEADY = 3
"""The first step makes the optimizer's state, the second is the first that finds the allocator's segments."""
MOST_OPERATORS = 20
NO_MODULE = "outside of modules"
"""Label of the loss, backward, the optimizer's temporaries and inputs."""
LONGEST_REST_S = 3_600.0
"""Maximum time in seconds for which a GPU continues to work after its program's end; work that takes longer waits for
something that will not happen."""


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Return a context in which steps of optimizers are observed and reported to the world. It begins before torch's
    state is watched, because the hook is shared."""

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        task = current_task()
        if task is None:
            return
        accelerators = task.process.accelerators
        if accelerators is not None and accelerators.works:
            device = accelerators[works_on(optimizer, task.cuda_device)]
            steps = accelerators.steps
            steps.end(optimizer, device.timeline, current_stream(task, device), task.now_s())
            steps.memory.append(device.memory.allocated)
            if steps.modules is None:  # the second step shows which modules take memory
                steps.modules = Modules(steps.ledgers)
                steps.modules.begin()
            elif steps.num_ended > 1:
                steps.modules.end()
        elif task.port.facts.keeps_slices:
            task.process.times.step_ends.setdefault(id(optimizer), []).append(task.now_s())
        ended_step(task)

    def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
        task = current_task()
        if task is not None and task.process.accelerators is not None:
            steps = task.process.accelerators.steps
            steps.has_optimizer, steps.awaits_update = True, False
            steps.allocates(OPTIMIZER)

    handles = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def finish(world: World) -> None:
    """Let the GPUs finish their work after the programs have ended normally."""
    if world.diagnoses or any(process.ending.exception is not None for process in world.processes):
        return
    timelines = [d.timeline for p in world.processes if p.accelerators is not None for d in p.accelerators.devices]
    last_s = world.now_s + LONGEST_REST_S
    while any(timeline.communicates for timeline in timelines) and world.next_event_s < last_s:
        world.step()
    ends_s = [process.ending.end_s or 0.0 for process in world.processes]
    world.stopped_at_s = max([world.now_s, *ends_s, *(timeline.close() for timeline in timelines)])


def _gpus_of(process: SimProcess) -> int:
    """Return the number of GPUs in use, without GPU 0 if it was used only before torch.cuda.set_device."""
    compute_s: list[float] = [device.timeline.account.compute_s for device in process.accelerators.devices]
    return max(1, sum(seconds > 0.1 * max(compute_s) for seconds in compute_s))


def training_of(
    world: World, ranks: Sequence[SimProcess], tokens_per_step: float | None, until_s: float
) -> Training | None:
    """Return the training figures of the GPUs of *ranks*, without steps that they would have ended after *until_s*;
    None if no rank used a GPU.
    """
    used = [p for p in ranks if p.accelerators is not None and p.accelerators.works and p.accelerators.devices]
    if not used:
        return None
    for process in used:
        for device in process.accelerators.devices:
            device.timeline.close()
            device.memory.ledger.settle()
    gpu = world.facts.gpu
    like = _like(world, used)
    alike = {process: len(ranks) for process, ranks in like.items()}
    num_gpus = sum(alike[p] * _gpus_of(p) for p in used)
    models = [process.accelerators.model for process in used]
    smallest = min(models, key=lambda model: model.memory_bytes)
    result = Training(gpu.name, num_gpus, smallest.memory_bytes, smallest.context_bytes)
    _note_kinds(world, gpu.name)
    result.reads = _reads(used)
    result.fused = _fused(used)
    # In a sample of ranks, one that stands for no other knows of no copy of its part of a checkpoint: it writes all.
    writers = [p for p in used if len(like[p]) > 1] or used
    result.saved_rank, result.saved = max(
        ((p.rank, p.accelerators.saved) for p in writers), key=lambda each: (each[1].write_s + each[1].read_s, -each[0])
    )
    result.placeholder = used[0].accelerators.values.placeholder
    result.routing = _routing(world, used[0].accelerators.values, result.reads)
    result.out_of_memory = _out_of_memory(used, like)
    ends = {p: [end for end in p.accelerators.steps.chosen() if (end.mark.reached_s or 0.0) <= until_s] for p in used}
    stepping = [process for process in used if ends[process]]
    result.steps = min((len(ends[process]) for process in stepping), default=0)
    first = min(FIRST_STEADY, max(result.steps, 1))
    result.first_counted = first if result.steps else 0
    begins = {process: _begin(ends[process], first) for process in stepping}
    counted = result.steps - first + 1
    for process in used:
        account = Account()
        if process in begins:
            account = _account(ends[process][result.steps - 1]).since(begins[process][1])
        rank = _rank(process, account, max(1, counted), like[process])
        by_step = process.accelerators.saved.by_step
        written_s = sum(by_step.get(ended, 0.0) for ended in range(first - 1, result.steps))
        rank.saving_s = min(written_s / max(1, counted), rank.host_s)
        rank.host_s -= rank.saving_s
        result.ranks.append(rank)
    fullest = max(used, key=lambda p: (max(d.memory.highest[0] for d in p.accelerators.devices), -p.rank))
    result.memory_curve = _fullest_ledger(fullest).peak_curve
    result.micro_batch = max(process.accelerators.steps.micro_batch for process in used)
    result.sequence_length = max(process.accelerators.steps.sequence_length for process in used)
    if not result.steps:
        return result
    result.step_times_s = _durations(ends, stepping, result.steps)
    middle = _middle(result.step_times_s[-counted:], first)
    result.step_time_s = sum(result.step_times_s[-counted:][step - first] for step in middle) / len(middle)
    result.recomputes = any(process.accelerators.steps.recomputes for process in stepping)
    every = _per_step(ends, alike, middle, lambda end: end.flops)
    model = _per_step(ends, alike, middle, lambda end: end.model_flops)
    result.model_flops, result.hardware_flops = sum(model.values()), sum(every.values())
    if every:
        result.peak_dtype = max(every, key=lambda dtype: every[dtype])
        result.peak_flops_per_s = gpu.peak_flops.get(result.peak_dtype)
    result.operators = _operators(ends, begins, alike, result.steps, counted)
    computed_s = _computed(ends, begins, alike, result.steps, counted)
    for kind, known in gpu.spec.times(result.peak_dtype or "bf16").items():
        share = computed_s.get(kind, 0.0) / result.step_time_s if result.step_time_s else 0.0
        result.rates.append(RateRange(kind, min(1.0, share), *known))
    host_s = _per_step(ends, alike, middle, lambda end: {"": end.host_s})
    result.host_work_s = host_s.get("", 0.0) / max(1, sum(alike[process] for process in stepping))
    operator_s = stepping[0].accelerators.host.operator_s
    result.launching_s = sum(operator.count for operator in result.operators) * operator_s
    nodes = {world.slot_of(rank).host for process in stepping for rank in like[process]}
    result.step_regime = regime_of(result.host_work_s, result.step_time_s, len(nodes))
    _find_path(result, ends)
    result.routing_s = _cost_of_routing(world, result)
    if tokens_per_step is not None:
        result.tokens_per_step, result.tokens_how = tokens_per_step, "--tokens-per-step"
    else:
        _count_tokens(result, ends, alike, middle)
    return result


def _note_kinds(world: World, first: str) -> None:
    """Say which figures of a cluster with several kinds of node are those of one kind."""
    kinds = [(node, hosts) for node, hosts in world.facts.cluster.kinds if node.gpu is not None]
    if len(kinds) > 1:
        texts = [
            f"{plural(len(hosts), 'node')} with {node.gpu_model} and {plural(node.num_nics, 'NIC')}"
            for node, hosts in kinds
        ]
        world.note(
            f"nodes of {len(kinds)} kinds ({', '.join(texts)}): collectives use the algorithms, channels and NICs that "
            f"all kinds have, MFU is a share of the {first}'s peak, and memory is that of the smallest GPU"
        )


def _routing(world: World, values: Values, reads: Sequence[UnknownRead]) -> str:
    """Return the distribution of `--routing` if the program read what follows from it. Note what had no effect."""
    routing = values.routing
    is_read = any(read.what == values.routed for read in reads)
    others = sorted({bins for bins in values.choices if bins != len(routing.measured)})
    if routing.measured and is_read and len(routing.measured) not in values.choices:
        experts = " and ".join(map(str, others))
        world.note(
            f"--routing {routing.text} has {len(routing.measured)} numbers, and the router has {experts} experts: they "
            "are chosen evenly"
        )
    if not routing.is_even and not is_read:
        world.note(f"--routing {routing.text} has no effect: the program reads no count of choices without values")
    if values.lengths is not None and not values.batches:
        world.note(f"--lengths {values.lengths.text} has no effect: no mask of token ids without values was computed")
    return routing.text if is_read else ""


def _cost_of_routing(world: World, training: Training) -> float:
    """Return the estimated seconds of a step that the pacing rank spends on more rows than the mean rank of its group.

    These are its computation beyond the group's mean, and the share of the all-to-all in which only the rows beyond the
    mean move.
    """
    pacing = training.pacing
    if not training.routing or pacing is None:
        return 0.0
    for communicator in [c for c in world.shared.communicators.values() if c.skew > 1.0]:
        counts = [(rank, len(set(rank.like) & set(communicator.group.ranks))) for rank in training.ranks]
        if pacing.rank in communicator.group.ranks:
            mean_s = sum(rank.compute_s * count for rank, count in counts) / sum(count for _, count in counts)
            waits = [w for w in pacing.waits if w.op.startswith("all_to_all") and w.group == communicator.group.label]
            moving_s: float = sum(wait.moving_s for wait in waits) * (1.0 - 1.0 / communicator.skew)
            return max(0.0, pacing.compute_s - mean_s) + moving_s
    return 0.0


def _fused(used: Sequence[SimProcess]) -> Fused | None:
    fusions = [(p.rank, p.accelerators.fusion) for p in used]
    of_ranks = [(rank, fusion) for rank, fusion in fusions if fusion is not None and fusion.kernels_before]
    if not of_ranks:
        return None
    rank, most = max(of_ranks, key=lambda each: (each[1].kernels_before, -each[0]))
    saved = most.gpu_saved_s, most.host_saved_s
    return Fused(rank, {**most.calls}, most.kernels_before, most.kernels_after, *saved)


class _LazyRan(dict[int, Ran]):
    """GPU work by rank, built when the critical path reaches it."""

    def __init__(self, processes: Mapping[int, SimProcess]) -> None:
        super().__init__()
        self._processes = processes

    def __contains__(self, rank: object) -> bool:
        return rank in self._processes

    def __missing__(self, rank: int) -> Ran:
        timelines = [device.timeline for device in self._processes[rank].accelerators.devices]
        since_s = max(timeline.remembers_from_s for timeline in timelines)
        result = self[rank] = Ran([item for timeline in timelines for _, item in timeline.done], since_s)
        return result


def _find_path(training: Training, ends: Mapping[SimProcess, list[StepEnd]]) -> None:
    """Find the critical path of the last step, from the end of the slowest rank back as far as kernels are kept."""
    if training.steps < 2:
        return
    stepping = {process.rank: process for process, own in ends.items() if own}
    last = max(stepping, key=lambda rank: (ends[stepping[rank]][training.steps - 1].mark.reached_s or 0.0, -rank))
    before, after = ends[stepping[last]][training.steps - 2 : training.steps]
    begin_s, end_s = before.mark.reached_s, after.mark.reached_s
    if begin_s is None or end_s is None or end_s <= begin_s:
        return
    training.critical_path, from_s = critical_path(_LazyRan(stepping), last, begin_s, end_s)
    training.critical_path_share = (end_s - from_s) / (end_s - begin_s)


def _like(world: World, used: Sequence[SimProcess]) -> dict[SimProcess, tuple[int, ...]]:
    """Return, for each process, the ranks that it represents, including itself (equal_ranks.py)."""
    sample = world.traced.sample
    if sample is None:
        return {process: (process.rank,) for process in used}
    return {process: tuple(sample.stands_for(process.rank)) for process in used}


def _account(end: StepEnd) -> Account:
    assert end.account is not None
    return end.account


_NOTHING: dict[Any, float] = {}


def _begin(ends: Sequence[StepEnd], first: int) -> tuple[StepEnd | None, Account]:
    """Return when step *first* begins: at the end of the step before, or at the device's start."""
    return (None, Account()) if first == 1 else (ends[first - 2], _account(ends[first - 2]))


def _durations(ends: dict[Any, list[StepEnd]], stepping: Sequence[SimProcess], steps: int) -> list[float]:
    """Return the seconds of each step from the second on. If there is only one step, its time since the start of the
    run.
    """
    at = [[end.mark.reached_s or 0.0 for end in ends[process][:steps]] for process in stepping]
    if steps == 1:
        return [max(_account(ends[p][0]).total_s for p in stepping)]
    return [max(moments[k] - moments[k - 1] for moments in at) for k in range(1, steps)]


def _middle(times_s: Sequence[float], first: int) -> list[int]:
    """Return the step, or the two steps, whose time is the median of those from *first* on."""
    by_time = sorted(range(len(times_s)), key=lambda i: (times_s[i], i))
    low, high = by_time[(len(by_time) - 1) // 2], by_time[len(by_time) // 2]
    return [first + low] if low == high or times_s[high] > UNLIKE * times_s[low] else [first + low, first + high]


def _per_step(
    ends: dict[Any, list[StepEnd]],
    alike: dict[SimProcess, int],
    steps: Sequence[int],
    quantity: Callable[[StepEnd], Mapping[Any, float]],
) -> dict[Any, float]:
    """Return the mean sum over ranks in *steps*, by name."""
    total: dict[Any, float] = {}
    for process, num_ranks in alike.items():
        for name, number in _in_steps(ends[process], steps, quantity).items():
            total[name] = total.get(name, 0.0) + number * num_ranks
    return total


def _in_steps(
    ends: Sequence[StepEnd], steps: Sequence[int], quantity: Callable[[StepEnd], Mapping[Any, float]]
) -> dict[Any, float]:
    """Return one rank's mean of *steps*."""
    result: dict[Any, float] = {}
    for step in steps if ends else ():
        before = _NOTHING if step == 1 else quantity(ends[step - 2])
        for name, number in quantity(ends[step - 1]).items():
            result[name] = result.get(name, 0.0) + (number - before.get(name, 0)) / len(steps)
    return result


def _rank(process: SimProcess, account: Account, counted: int, like: tuple[int, ...]) -> RankTraining:
    highest = [device.memory.highest for device in process.accelerators.devices]
    waits = [
        Wait(op, group, moving_s / counted, late_s / counted, busy_s / counted, spared_s / counted)
        for (op, group), (moving_s, late_s, busy_s, spared_s) in sorted(
            account.waits.items(), key=lambda item: (-sum(item[1][:2]), item[0])
        )
    ]
    ledger = _fullest_ledger(process)
    return RankTraining(
        process.rank,
        like,
        account.total_s / counted,
        account.compute_s / counted,
        account.overlapped_s / counted,
        account.slowed_s / counted,
        account.exposed_s / counted,
        account.late_s / counted,
        account.bubble_s / counted,
        account.host_s / counted,
        max(allocated for allocated, _ in highest),
        max(reserved for _, reserved in highest),
        {**ledger.peak},
        _families(ledger.peak_modules),
        waits,
        _sites(ledger),
    )


def _fullest_ledger(process: SimProcess) -> Ledger:
    ledgers: list[Ledger] = [device.memory.ledger for device in process.accelerators.devices]
    return max(ledgers, key=lambda ledger: ledger.peak_bytes)


def _sites(ledger: Ledger) -> list[MemorySite]:
    """Return the memory in use at the peak by kind, line and operator, the largest first."""
    sums: dict[tuple[str, str, int, str], tuple[int, int, AllocationSite, int]] = {}
    for (kind, site), (nbytes, count) in ledger.peak_sites.items():
        key = (kind, site.file, site.line, site.operator)
        total, many, largest, most = sums.get(key, (0, 0, site, 0))
        if nbytes > most:
            largest, most = site, nbytes
        sums[key] = (total + nbytes, many + count, largest, most)
    sites = [_memory_site(key[0], site, nbytes, count) for key, (nbytes, count, site, _) in sums.items()]
    return sorted(sites, key=lambda site: (-site.nbytes, site.where, site.operator))


def _memory_site(kind: str, site: AllocationSite, nbytes: int, count: int = 1) -> MemorySite:
    where = f"{shown(site.file)}:{site.line}" if site.file else ""
    code = linecache.getline(site.file, site.line).strip() if site.file else ""
    return MemorySite(kind, where, code, site.operator, site.tensor, nbytes, count)


def _families(modules: dict[str, int]) -> dict[str, int]:
    """Return bytes by module name with numbers replaced by stars; empty if the peak was in a step without names."""
    bytes_by_kind: dict[str, int] = {}
    for name, nbytes in modules.items():
        kind = family(name) if name else NO_MODULE
        bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + nbytes
    return bytes_by_kind if set(bytes_by_kind) - {NO_MODULE} else {}


def _operators(
    ends: dict[Any, list[StepEnd]],
    begins: dict[Any, tuple[StepEnd | None, Account]],
    alike: dict[SimProcess, int],
    steps: int,
    counted: int,
) -> list[OperatorTime]:
    total: dict[str, list[float]] = {}
    for process, (_, before) in begins.items():
        for operator, (count, seconds) in _account(ends[process][steps - 1]).since(before).operators.items():
            sums = total.setdefault(operator_name(operator), [0.0, 0.0])
            sums[0] += count * alike[process]
            sums[1] += seconds * alike[process]
    share = 1.0 / (counted * sum(alike[process] for process in begins))
    operators = [OperatorTime(name, count * share, seconds * share) for name, (count, seconds) in total.items()]
    return sorted(operators, key=lambda operator: (-operator.time_s, operator.name))[:MOST_OPERATORS]


def _computed(
    ends: dict[Any, list[StepEnd]],
    begins: dict[Any, tuple[StepEnd | None, Account]],
    alike: dict[SimProcess, int],
    steps: int,
    counted: int,
) -> dict[str, float]:
    """Return the seconds of products, attention and memory-bound kernels of a step, on the mean rank."""
    total: dict[str, float] = {}
    for process, (_, before) in begins.items():
        for kind, seconds in _account(ends[process][steps - 1]).since(before).kinds.items():
            group = {"gemm": "products", "conv": "products", "attention": "attention"}.get(kind, "memory")
            total[group] = total.get(group, 0.0) + seconds * alike[process]
    ranks = counted * sum(alike[process] for process in begins)
    return {group: seconds / ranks for group, seconds in total.items()}


def _count_tokens(
    training: Training, ends: dict[Any, list[StepEnd]], alike: dict[SimProcess, int], steps: Sequence[int]
) -> None:
    """Look-ups in the embedding that most tokens went through, once for ranks that see the same ones."""
    groups = {ranks: label for p in alike for ranks, label in p.accelerators.steps.same_tokens.items()}
    together = [set(ranks) for ranks in groups]
    for ranks in together:  # groups that have a rank in common are one
        while grown := [other for other in together if other & ranks and not other <= ranks]:
            ranks.update(*grown)
    total = 0.0
    for process, num_ranks in alike.items():
        tokens = _in_steps(ends[process], steps, lambda end: end.tokens)
        most = tokens[main_table(tokens)] if tokens else 0.0
        total += most * num_ranks / max((len(ranks) for ranks in together if process.rank in ranks), default=1)
    if not total:
        training.tokens_how = "unknown, because no embedding was used: set --tokens-per-step N"
        return
    training.tokens_per_step = total
    training.tokens_how = "looked up in the largest embedding, over all ranks"
    if groups:
        ranks = min(groups, key=lambda each: (-len(each), each))
        several = "" if len(groups) == 1 else f" and {len(groups) - 1} more like it"
        training.tokens_how += (
            f"; ranks that reduce activations in forward see the same ones, which count once "
            f"({groups[ranks]}: {ranks_text(ranks)}{several})"
        )


def _reads(used: Sequence[SimProcess]) -> list[UnknownRead]:
    most: dict[tuple[str, Reading], int] = {}
    for process in used:
        for key, count in process.accelerators.values.reads.items():
            most[key] = max(most.get(key, 0), count)
    unknown_reads = []
    for (reader, at), count in most.items():
        file, _, line = at.where.rpartition(":")
        code = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
        unknown_reads.append(UnknownRead(reader, at.where, code, count, at.expression, at.condition))
    return sorted(
        unknown_reads,
        key=lambda read: (not read.condition, read.what == COPIED, -read.count, read.what, read.where, read.expression),
    )


def _out_of_memory(used: Sequence[SimProcess], like: dict[SimProcess, tuple[int, ...]]) -> list[OutOfMemory]:
    shortages: dict[tuple[Any, ...], OutOfMemory] = {}
    for process in used:
        if not isinstance(process.ending.exception, torch.OutOfMemoryError) and not process.port.facts.measures_memory:
            continue
        for device in process.accelerators.devices:
            short = device.shortage
            if short is None:
                continue
            facts = (short.asked, short.capacity, short.reserved, short.allocated, short.missing)
            key = (*facts, tuple(short.held.items()))
            known = shortages.get(key)
            if known is None:
                claims = short.claims
                shortages[key] = OutOfMemory(
                    (process.rank,),
                    *facts,
                    {**short.held},
                    claims.sharded,
                    short.in_backward,
                    short.asked_as,
                    claims.gradients,
                    claims.optimizer,
                    process.accelerators.steps.micro_batch == 1,
                    process.accelerators.steps.micro_batch,
                    None if short.site is None else _memory_site(short.asked_as, short.site, short.asked),
                    isinstance(device.memory, ExpandableAllocator),
                )
            else:
                known.ranks += (process.rank,)
    return list(shortages.values())
