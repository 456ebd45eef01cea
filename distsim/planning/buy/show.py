"""Shows the offers of `distsim buy`: as text for a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from distsim.collectives.uncertainty import memory_error, ratio_error
from distsim.planning.buy.offers import MachineComparison, Offer, equals_text, late_text
from distsim.planning.tables import points_console, print_columns, print_tracebacks, tight_text
from distsim.report.training.section import DAY_S, format_duration, format_energy
from distsim.text.units import format_count, format_time

if TYPE_CHECKING:
    from distsim.report.html.page import Page


def print_offers(comparison: MachineComparison) -> None:
    """Print the recommendation with its reason, then all offers, then what the prices are."""
    console = points_console()
    grid = Table.grid(padding=(0, 2))
    for title, headline, reasons in _verdict(comparison):
        for word, text in zip([title] + [""] * len(reasons), [headline, *reasons], strict=True):
            if text:
                grid.add_row(Text(word, style="bold"), Text(text))
    console.print(grid)
    offers = comparison.offers
    names = {"": marks_of(comparison), "machine": [offer.machine for offer in offers]}
    if any(offer.layout for offer in offers):
        names["layout"] = [offer.layout for offer in offers]
    speed = speed_columns(offers)
    print_columns(console, names, money_columns(offers) | speed, tuple(speed))
    for line in [*comparison.notes, *price_lines(offers)]:
        console.print(line)
    without_offer = [machine for machine in comparison.machines if not machine.rows]
    print_tracebacks(console, [point for machine in without_offer for point in machine.failed.values()])


def _verdict(comparison: MachineComparison) -> list[tuple[str, str, list[str]]]:
    """Return the choices: title, offer and reasons of each. One that is chosen twice is there once."""
    verdict = [("", "", [comparison.nearest])] if comparison.nearest else []
    shown: list[Offer] = []
    for choice in comparison.choices:
        if choice.offer in shown:
            continue
        shown.append(choice.offer)
        also = [one.title for one in comparison.choices if one.offer is choice.offer and one is not choice]
        late = late_text(choice, comparison.limits) if choice.title == "recommended" else ""
        reasons = [choice.reason, equals_text(choice), tight_text(choice.offer.figures), late]
        verdict.append((choice.title, _headline(choice.offer, also), [reason for reason in reasons if reason]))
    return verdict


def _headline(offer: Offer, also: Sequence[str]) -> str:
    gpus = f"{offer.figures['gpus']:.0f} GPUs"
    text = f"{offer.name}, {gpus}: {format_duration(offer.seconds)}, {format_count(offer.amount)}"
    return text + (f" (also the {' and the '.join(also)})" if also else "")


def marks_of(comparison: MachineComparison) -> list[str]:
    """Return a mark for each offer: those of the choices that it is."""
    titles = [[one.title for one in comparison.choices if one.offer is offer] for offer in comparison.offers]
    return [one[0].replace("recommended", "best") if one else "" for one in titles]


def money_columns(offers: Sequence[Offer]) -> dict[str, list[str]]:
    """Return the columns about the purchase, by their titles."""
    shares = [offer.goodput for offer in offers if offer.goodput is not None]
    return {
        "GPUs": [f"{offer.figures['gpus']:,.0f}" for offer in offers],
        "time": [format_duration(offer.seconds) for offer in offers],
        "GPU hours": [format_count(offer.cost.gpu_hours) for offer in offers],
        "cost": [format_count(offer.amount) for offer in offers],
        "energy": [_energy(offer) for offer in offers],
        **({"goodput": [f"{share.good:.0%}" for share in shares]} if shares else {}),
    }


def _energy(offer: Offer) -> str:
    kwh = offer.cost.energy_kwh
    return "-" if kwh is None else f"{'<' if offer.cost.energy_is_limit else ''}{format_energy(kwh)}"


def speed_columns(offers: Sequence[Offer]) -> dict[str, list[str]]:
    """Return the columns about a step, by their titles."""
    return {
        "step": [_step(offer) for offer in offers],
        "tokens/s": [format_count(offer.figures["tokens_per_s"]) for offer in offers],
        "per GPU": [format_count(offer.figures["tokens_per_s"] / offer.figures["gpus"]) for offer in offers],
        "MFU": [f"{offer.figures['mfu']:.0%}" if "mfu" in offer.figures else "-" for offer in offers],
        "memory": [f"{offer.figures['gpu_memory_share']:.0%}" for offer in offers],
        "bound by": [f"{offer.bound[0].split()[0]} {offer.bound[1]:.0%}" for offer in offers],
    }


def _step(offer: Offer) -> str:
    figures = offer.figures
    text = format_time(figures["step_s"])
    if "step_low_s" not in figures:
        return text
    return f"{text} ±{(figures['step_high_s'] - figures['step_low_s']) / 2 / figures['step_s']:.0%}"


def price_lines(offers: Sequence[Offer]) -> list[str]:
    """Return a line for each price: its amount, and its source and date if it is a list price."""
    lines = {}
    for offer in offers:
        kind = offer.machine.rpartition(":")[0]
        lines[kind] = f"{kind}: {offer.cost.price:g} a GPU hour ({offer.cost.price_basis or 'as given'})"
    return list(lines.values())


def page_of(comparison: MachineComparison) -> Page:
    """Return the page: the recommendation, cost over time, the offers; below, how sure it is and what was assumed."""
    from distsim.report.html.draw.tables import PageTable, TableCell
    from distsim.report.html.page import buy_page

    offers = comparison.offers
    columns = {"": marks_of(comparison), "machine": [offer.machine for offer in offers]}
    if any(offer.layout for offer in offers):
        columns["layout"] = [offer.layout for offer in offers]
    columns |= money_columns(offers) | speed_columns(offers)
    values: dict[str, Sequence[float | None]] = {
        "GPUs": [offer.figures["gpus"] for offer in offers],
        "time": [offer.seconds for offer in offers],
        "GPU hours": [offer.cost.gpu_hours for offer in offers],
        "cost": [offer.amount for offer in offers],
        "energy": [offer.cost.energy_kwh for offer in offers],
        "step": [offer.figures["step_s"] for offer in offers],
        "tokens/s": [offer.figures["tokens_per_s"] for offer in offers],
        "per GPU": [offer.figures["tokens_per_s"] / offer.figures["gpus"] for offer in offers],
        "MFU": [offer.figures.get("mfu") for offer in offers],
        "memory": [offer.figures["gpu_memory_share"] for offer in offers],
    }
    table = PageTable("Offers", list(columns))
    for number in range(len(offers)):
        cells = [(texts[number], values[name][number] if name in values else None) for name, texts in columns.items()]
        table.rows.append([TableCell(text, value) for text, value in cells])
    cards = [(title, headline, "; ".join(reasons)) for title, headline, reasons in _verdict(comparison)]
    points = [
        {
            "kind": offer.machine.rpartition(":")[0],
            "name": offer.name,
            "days": offer.seconds / DAY_S,
            "cost": offer.amount,
            "mark": mark,
        }
        for offer, mark in zip(offers, columns[""], strict=True)
    ]
    title = f"{format_count(comparison.tokens)} tokens of {comparison.script}"
    sections = {"How sure": _sure_lines(comparison), "What was assumed": _assumed_lines(comparison)}
    return buy_page(title, cards, points, comparison.limits, table, sections, comparison.document())


def _sure_lines(comparison: MachineComparison) -> list[str]:
    lines = []
    for offer in comparison.offers:
        if (ends := offer.range_s) is not None:
            low, high = (end / offer.seconds for end in ends)
            lines.append(
                f"{offer.name}: {format_duration(ends[0])} to {format_duration(ends[1])}, "
                f"{format_count(low * offer.amount)} to {format_count(high * offer.amount)}, in 8 cases of 10"
            )
        else:
            lines.append(f"{offer.name}: no measurement of a step of this size")
    lines.append(
        f"The ratio of two offers of one kind of machine errs by a factor of {ratio_error():.3g} at most in 8 cases "
        "of 10: program and card are common to both."
    )
    lines.append(f"Predicted peaks of memory err by {memory_error().worst:.1%} at most.")
    return lines


def _failures_text(offer: Offer) -> str:
    if offer.goodput is None:
        return "The training runs without interruption"
    return "Days and money include checkpoints, steps that are computed again after a failure, and downtime"


def _assumed_lines(comparison: MachineComparison) -> list[str]:
    lines = [
        *price_lines(comparison.offers),
        f"{_failures_text(comparison.offers[0])}; all GPUs are paid for all the time. Storage, network and staff are "
        "not counted.",
        "Energy is that of the GPUs alone; < marks their maker's limit, where the cluster file gives no power.",
        f"Sizes: the fewest nodes that fit, from {comparison.nodes[0]} to {comparison.nodes[1]}, then 2, 4 and 8 times "
        "those. A step's batch grows with the GPUs as the script says.",
        *comparison.notes,
    ]
    return lines
