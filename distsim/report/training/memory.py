"""Memory: what it was for at its peak; and, where it was too small, what would have fitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distsim.report.tables import bar
from distsim.text.units import format_bytes

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import OutOfMemory, Training

__all__ = ["memory_kinds", "memory_table", "remedies", "shortage"]

MOST_MODULES = 8
RESERVE = 0.95
"""Of the capacity can be used: the rest is lost between blocks."""


def memory_table(training: Training) -> RenderableType:
    """The rank with most, by what it was for."""
    most = max(training.ranks, key=lambda rank: (rank.peak_allocated_bytes, -rank.rank))
    tables: list[RenderableType] = [memory_kinds(most.memory, most.peak_allocated_bytes)]
    if most.modules:
        total = sum(most.modules.values())
        when = "" if total == most.peak_allocated_bytes else f", when {format_bytes(total)} were in use in step 2"
        tables += [Text(f"by module{when}:"), memory_kinds(most.modules, total, MOST_MODULES)]
    waste = training.peak_reserved_bytes - training.peak_allocated_bytes
    if waste > 0.02 * training.peak_reserved_bytes:
        said = f"and {format_bytes(waste)} that the allocator reserved beyond that (fragments, other moments)"
        tables.append(Text(said, style="dim"))
    return Group(*tables)


def shortage(short: OutOfMemory, training: Training) -> RenderableType:
    """By how much, what held it, what would have fitted."""
    lost = short.reserved - short.allocated
    said = (
        f"asked for {format_bytes(short.asked)} where {format_bytes(short.allocated)} "
        f"of {format_bytes(short.capacity)} were in use"
    )
    if short.missing:
        said += f": {format_bytes(short.missing)} too much"
    else:
        said += f": {format_bytes(lost)} are free, but in pieces that are too small, or of other streams"
    lines = [Text("- " + remedy) for remedy in remedies(short, training)]
    return Group(Text(said, style="bold"), memory_kinds(short.held, short.allocated), *lines)


def remedies(short: OutOfMemory, training: Training) -> list[str]:
    """What would have fitted, from what was held; a sentence each."""
    held = short.held
    states = held["parameters"] + held["gradients"] + held["optimizer"]
    found = _of_the_batch(short)
    ranks = training.num_gpus
    if states and ranks > 1 and not short.sharded:
        found.append(_sharding(short, states, ranks))
    elif states and short.sharded and ranks > 1:
        alone = "" if states - states // 2 > short.missing else ": not enough alone"
        found.append(f"more ranks: the shards here take {format_bytes(states)}, over twice the ranks half{alone}")
    if held["parameters"] and short.coming_optimizer is None and not held["optimizer"]:
        found.append("an optimizer's state is not made yet: Adam's comes on top, two numbers a parameter")
    elif short.coming_optimizer:
        found.append(
            f"{format_bytes(short.coming_optimizer)} of the optimizer's state, and of what it takes for a moment, were "
            "still to come"
        )
    if not short.missing:
        found.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: it is lost to fragments")
    return found


def _of_the_batch(short: OutOfMemory) -> list[str]:
    """What less of a batch would have spared."""
    need = short.asked + max(short.allocated - RESERVE * short.capacity, short.reserved - short.capacity)
    activations = short.held["activations"] + (short.asked if short.asked_as == "activations" else 0)
    if activations and 0 < need < activations and short.asked_as == "activations":
        share = 1 - need / activations
        bound = "" if short.in_backward else " (and less once the rest of forward has run)"
        what = "a micro-batch of at most {} of this one{}: activations grow with it"
        if short.one_sequence:
            what = "the micro-batch is one sequence: one of at most {} of its length{}: activations grow with it"
        return [
            f"{what.format(f'{share:.0%}', bound)}, {format_bytes(activations)} were held or asked for",
            "checkpointing (torch.utils.checkpoint): of a checkpointed block only its input is held, the rest is "
            "computed again in backward",
        ]
    states = short.held["parameters"] + short.held["gradients"] + short.held["optimizer"]
    if activations:
        said = f"no smaller micro-batch: of what was held or asked for only {format_bytes(activations)} are activations"
    elif states and (short.asked_as == "optimizer" or short.held["gradients"]):
        said = "no smaller micro-batch: no activations are held"
    else:
        return []  # what is asked for is none of a batch's
    return [said]


def _sharding(short: OutOfMemory, states: int, ranks: int) -> str:
    """Whether all that training keeps, also what is not there yet, would have fitted in shards."""
    coming = short.coming_gradients + (short.coming_optimizer or 0)
    text = f"sharding (FSDP): parameters, gradients and optimizer state take {format_bytes(states)} on each rank"
    if coming:
        text += f" and {format_bytes(coming)} more that are still to come"
    each = (states + coming) // ranks
    text += f", {format_bytes(each)} sharded over all {ranks}: "
    asked = 0 if short.asked_as == "optimizer" and short.coming_optimizer else short.asked
    if each + short.allocated - states + asked > RESERVE * short.capacity:
        return text + "not enough alone"
    if short.coming_optimizer is None:
        return text + "whether that is enough depends on the optimizer's state, which is not counted"
    if not short.in_backward and short.asked_as == "activations":
        return text + "whether that is enough depends on the activations still to come, which are not counted"
    return text + "enough"


def memory_kinds(held: dict[str, int], total: int, most: int = 6) -> Table:
    """Return bytes by name, most first, with their share of *total*; the *most* largest."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for kind, nbytes in sorted(held.items(), key=lambda item: (-item[1], item[0]))[:most]:
        if nbytes > 0.001 * total:
            table.add_row(kind, format_bytes(nbytes), bar(nbytes / total))
    return table
