"""What follows from the steps of simulated GPUs: cost, gains, and what would have fitted.

A gain is an estimate from the same records, not another simulation: the mean step of the rank that paces the others,
less what would go (means less means: a median step has nothing of the checkpoints and evaluations that are in the
means). What is left is taken to stay as it is: bubbles and late ranks, which would shrink as well, and what is hidden
so far, which might come to light. No step is said to get shorter than the longest rank's kernels take alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distsim.report.tables import bar, plain_table
from distsim.text.units import format_bytes, format_count

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import OutOfMemory, Training

DEFAULT_TOKENS = 1e9
"""Number of tokens for which a cost is shown if a price is known and `--tokens` is not given."""
HOUR_S, DAY_S = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Cost of training on a number of tokens, with checkpoints as often as the program writes them."""

    tokens: float
    seconds: float
    gpu_hours: float
    price: float | None
    """Price of a GPU hour, if known."""
    amount: float | None
    """Total cost in the currency of the price."""
    energy_kwh: float | None
    """Energy of the GPUs if they draw `power_w` all the time."""
    energy_is_limit: bool
    """Whether that power is the specified limit of the GPU."""
    price_basis: str = ""
    """Source and date of a public list price; empty if the user gave the price."""


def saving_share(training: Training) -> float | None:
    """Return the fraction of the time that checkpoints take at the observed interval; None if unknown."""
    saved, step_s = training.saved, training.step_time_s
    if saved.every is None or not step_s:
        return None
    return saved.mean_s / (saved.mean_s + saved.every * step_s)


def cost_of(training: Training) -> TrainingCost | None:
    """Return the cost of the requested tokens; None if neither tokens nor an own price are given, or the rate is
    unknown. A list price alone asks for nothing.
    """
    tokens = training.planned_tokens
    if training.tokens_per_s is None or (tokens is None and (training.price is None or training.price_basis)):
        return None
    tokens = DEFAULT_TOKENS if tokens is None else tokens
    seconds = tokens / training.tokens_per_s / (1.0 - (saving_share(training) or 0.0))
    cost = cost_of_time(tokens, seconds, training.num_gpus, training.price, training.power_w)
    return replace(cost, energy_is_limit=training.power_is_limit, price_basis=training.price_basis)


def cost_of_time(
    tokens: float, seconds: float, num_gpus: int, price: float | None, power_w: float | None
) -> TrainingCost:
    """Return the cost of *tokens* tokens on *num_gpus* GPUs in *seconds* seconds.

    Args:
        tokens: Tokens of the whole training.
        seconds: Its time.
        num_gpus: GPUs that are paid for all the time.
        price: Price of one GPU hour; None: unknown.
        power_w: Watts of one GPU; None: unknown.
    """
    hours = seconds / HOUR_S * num_gpus
    amount = None if price is None else hours * price
    energy_kwh = None if power_w is None else hours * power_w / 1e3
    return TrainingCost(tokens, seconds, hours, price, amount, energy_kwh, False)


def cost_text(cost: TrainingCost, training: Training) -> str:
    """Return `1T tokens: 29.2 days, 5.6M GPU hours, 14M at 2.5 a GPU hour, at most 3.92 GWh at
    700 W a GPU`."""
    parts = [format_duration(cost.seconds), f"{format_count(cost.gpu_hours)} GPU hours"]
    if cost.amount is not None:
        listed = " (list price)" if cost.price_basis else ""
        parts.append(f"{format_count(cost.amount)} at {cost.price:g} a GPU hour{listed}")
    if cost.energy_kwh is not None:
        most = "at most " if cost.energy_is_limit else ""
        parts.append(f"{most}{format_energy(cost.energy_kwh)} at {training.power_w:g} W a GPU")
    return f"{format_count(cost.tokens)} tokens: {', '.join(parts)}"


def format_energy(kwh: float) -> str:
    """Return an energy for people: `26.7 MWh`."""
    for unit, scale in (("GWh", 1e6), ("MWh", 1e3)):
        if kwh >= scale:
            return f"{kwh / scale:.3g} {unit}"
    return f"{kwh:.3g} kWh"


def format_duration(seconds: float) -> str:
    """Return a long time for people: `24.9 days`."""
    if seconds < HOUR_S:
        return f"{seconds / 60.0:.3g} minutes"
    return f"{seconds / HOUR_S:.3g} hours" if seconds < 2 * DAY_S else f"{seconds / DAY_S:,.1f} days"


FEWEST = 0.005
"""Smallest fraction of a step that gets a line."""
MOST_MODULES = 8
RESERVE = 0.95
"""Usable fraction of the capacity; the rest is lost to fragmentation."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A possible improvement and the step time that would remain."""

    name: str
    how: str
    step_s: float


def gains(training: Training) -> list[Gain]:
    """Return the possible improvements, the largest first, without those that would change nothing."""
    rank = training.pacing
    if rank is None or not training.step_time_s:
        return []
    moving_s = rank.exposed_s - rank.late_s
    faster_s = sum(wait.spared_s for wait in rank.waits)
    gain_rows = [
        ("ideal network", "communication takes no time, SMs or memory bandwidth", moving_s + rank.slowed_s),
        ("ideal overlap", "computation hides all communication", moving_s),
        ("twice the bandwidth", "every collective takes half the time", faster_s),
        ("no pipeline bubble", "no stage waits for another's message", rank.bubble_s),
        ("no stragglers", "all ranks reach each collective at the same time", rank.late_s),
        ("no host overhead", "all kernels are launched in time", rank.host_s),
        ("asynchronous checkpoints", "no step waits until a checkpoint is written", rank.saving_s),
    ]
    step_s = rank.step_s
    least_s = max(one.compute_s - one.slowed_s for one in training.ranks)
    kept = [
        Gain(name, how, max(least_s, step_s - less_s)) for name, how, less_s in gain_rows if less_s > FEWEST * step_s
    ]
    return sorted(kept, key=lambda gain: gain.step_s)


def memory_table(training: Training) -> RenderableType:
    """Return the memory of the rank with the most, by purpose."""
    most = max(training.ranks, key=lambda rank: (rank.peak_allocated_bytes, -rank.rank))
    tables: list[RenderableType] = [memory_kinds(most.memory, most.peak_allocated_bytes)]
    if most.modules:
        total = sum(most.modules.values())
        when = "" if total == most.peak_allocated_bytes else f", when {format_bytes(total)} were in use in step 2"
        tables += [Text(f"by module{when}:"), memory_kinds(most.modules, total, MOST_MODULES)]
    waste = training.peak_reserved_bytes - training.peak_allocated_bytes
    if waste > 0.02 * training.peak_reserved_bytes:
        note = f"and {format_bytes(waste)} reserved by the allocator beyond that (fragments, earlier peaks)"
        tables.append(Text(note, style="dim"))
    return Group(*tables)


def shortage(short: OutOfMemory, training: Training) -> RenderableType:
    """Return lines that say how much memory was missing, what used it, and what would have fitted."""
    lost = short.reserved - short.allocated
    sentence = (
        f"asked for {format_bytes(short.asked)} where {format_bytes(short.allocated)} "
        f"of {format_bytes(short.capacity)} were in use"
    )
    if short.missing:
        sentence += f": {format_bytes(short.missing)} too much"
    else:
        where = "between blocks in use" if short.expandable else "in pieces that are too small"
        sentence += f": {format_bytes(lost)} are free, but {where}, or of other streams"
    lines = [Text("- " + remedy) for remedy in remedies(short, training)]
    return Group(Text(sentence, style="bold"), memory_kinds(short.held, short.allocated), *lines)


def remedies(short: OutOfMemory, training: Training) -> list[str]:
    """Return changes that would have fitted, one sentence each."""
    held = short.held
    states = held["parameters"] + held["gradients"] + held["optimizer"]
    result = _of_the_batch(short, training.recomputes)
    ranks = training.num_gpus
    if states and ranks > 1 and not short.sharded:
        result.append(_sharding(short, states, ranks))
    elif states and short.sharded and ranks > 1:
        alone = "" if states - states // 2 > short.missing else ": not enough alone"
        result.append(f"more ranks: the shards take {format_bytes(states)} here, half on twice the ranks{alone}")
    if held["parameters"] and short.coming_optimizer is None and not held["optimizer"]:
        result.append("the optimizer's state does not exist yet: Adam adds two numbers per parameter")
    elif short.coming_optimizer:
        result.append(
            f"{format_bytes(short.coming_optimizer)} of the optimizer's state and temporary memory had not been "
            "allocated yet"
        )
    if not short.missing and not short.expandable:
        result.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: fragmentation wastes it")
    return result


def _of_the_batch(short: OutOfMemory, recomputes: bool) -> list[str]:
    """Return which smaller batch would have fitted, if one would, and checkpointing unless the program *recomputes*."""
    need = short.asked + max(short.allocated - RESERVE * short.capacity, short.reserved - short.capacity)
    activations = short.held["activations"] + (short.asked if short.asked_as == "activations" else 0)
    if activations and 0 < need < activations and short.asked_as == "activations":
        share = 1 - need / activations
        bound = "" if short.in_backward else " (and less once the rest of forward has run)"
        remedy = "a micro-batch of at most {} of this one{}"
        if short.one_sequence:
            remedy = "the micro-batch is one sequence: shorten it to at most {} of its length{}"
        remedy = remedy.format(f"{share:.0%}", bound)
        batch = f"{remedy}: activations grow with it, and take {format_bytes(activations)}"
        checkpointing = (
            "checkpointing (torch.utils.checkpoint): only the input of a checkpointed block is kept, the rest is "
            "recomputed in backward"
        )
        return [batch] if recomputes else [batch, checkpointing]
    states = short.held["parameters"] + short.held["gradients"] + short.held["optimizer"]
    if activations:
        sentence = f"a smaller micro-batch does not help: only {format_bytes(activations)} are activations"
    elif states and (short.asked_as == "optimizer" or short.held["gradients"]):
        sentence = "a smaller micro-batch does not help: no memory is used by activations"
    else:
        return []  # what is asked for is none of a batch's
    return [sentence]


def _sharding(short: OutOfMemory, states: int, ranks: int) -> str:
    """Return advice to shard the training state if it would then have fitted, including state that is not allocated
    yet."""
    coming = short.coming_gradients + (short.coming_optimizer or 0)
    text = f"sharding (FSDP): parameters, gradients and optimizer state take {format_bytes(states)} on each rank"
    if coming:
        text += f" and {format_bytes(coming)} more later"
    each = (states + coming) // ranks
    text += f", {format_bytes(each)} sharded over all {ranks}: "
    wanted = 0 if short.asked_as == "optimizer" and short.coming_optimizer else short.asked
    if each + short.allocated - states + wanted > RESERVE * short.capacity:
        return text + "not enough alone"
    if short.coming_optimizer is None:
        return text + "the optimizer's state is added to this"
    if not short.in_backward and short.asked_as == "activations":
        return text + "later activations are added to this"
    return text + "enough"


def memory_kinds(held: dict[str, int], total: int, most: int = 6) -> Table:
    """Return bytes by name, most first, with their share of *total*; the *most* largest."""
    table = plain_table("", ">", "")
    for kind, nbytes in sorted(held.items(), key=lambda item: (-item[1], item[0]))[:most]:
        if nbytes > 0.001 * total:
            table.add_row(kind, format_bytes(nbytes), bar(nbytes / total))
    return table
