"""Shows the offers of `distsim buy`: as text for a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from distsim.collectives.uncertainty import memory_error, ratio_error
from distsim.planning.buy.offers import MachineComparison, Offer, equals_text, late_text
from distsim.planning.tables import points_console, print_columns, print_tracebacks, step_text, tight_text
from distsim.report.training.section import DAY_S, format_duration, format_energy
from distsim.text.units import format_count

if TYPE_CHECKING:
    from distsim.report.html.page import Page

Columns = dict[str, list[tuple[str, float | None]]]
"""Cells by the title of their column: the text, and the number by which a page sorts."""


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
    names, money, speed = (
        {title: [text for text, _ in cells] for title, cells in columns.items()} for columns in columns_of(comparison)
    )
    print_columns(console, names, money | speed, tuple(speed))
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


def columns_of(comparison: MachineComparison) -> tuple[Columns, Columns, Columns]:
    """Return the columns of the offers: what names them, the purchase, and a step."""
    offers = comparison.offers
    titles = [[one.title for one in comparison.choices if one.offer is offer] for offer in offers]
    names: Columns = {
        "": [(one[0].replace("recommended", "best") if one else "", None) for one in titles],
        "machine": [(offer.machine, None) for offer in offers],
    }
    if any(offer.layout for offer in offers):
        names["layout"] = [(offer.layout, None) for offer in offers]
    gpus = [offer.figures["gpus"] for offer in offers]
    money: Columns = {
        "GPUs": [(f"{count:,.0f}", count) for count in gpus],
        "time": [(format_duration(offer.seconds), offer.seconds) for offer in offers],
        "GPU hours": [(format_count(offer.cost.gpu_hours), offer.cost.gpu_hours) for offer in offers],
        "cost": [(format_count(offer.amount), offer.amount) for offer in offers],
        "energy": [(_energy(offer), offer.cost.energy_kwh) for offer in offers],
    }
    if shares := [offer.goodput for offer in offers if offer.goodput is not None]:
        money["goodput"] = [(f"{share.good:.0%}", None) for share in shares]
    figures = [offer.figures for offer in offers]
    rates = [one["tokens_per_s"] for one in figures]
    speed: Columns = {
        "step": [(step_text(one), one["step_s"]) for one in figures],
        "tokens/s": [(format_count(rate), rate) for rate in rates],
        "per GPU": [(format_count(rate / count), rate / count) for rate, count in zip(rates, gpus, strict=True)],
        "MFU": [(f"{one['mfu']:.0%}", one["mfu"]) if "mfu" in one else ("-", None) for one in figures],
        "memory": [(f"{one['gpu_memory_share']:.0%}", one["gpu_memory_share"]) for one in figures],
        "bound by": [(f"{offer.bound[0].split()[0]} {offer.bound[1]:.0%}", None) for offer in offers],
    }
    return names, money, speed


def _energy(offer: Offer) -> str:
    kwh = offer.cost.energy_kwh
    return "-" if kwh is None else f"{'<' if offer.cost.energy_is_limit else ''}{format_energy(kwh)}"


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

    names, money, speed = columns_of(comparison)
    columns = names | money | speed
    table = PageTable("Offers", list(columns))
    table.rows = [[TableCell(*cell) for cell in row] for row in zip(*columns.values(), strict=True)]
    cards = [(title, headline, "; ".join(reasons)) for title, headline, reasons in _verdict(comparison)]
    points = [
        {
            "kind": offer.machine.rpartition(":")[0],
            "name": offer.name,
            "days": offer.seconds / DAY_S,
            "cost": offer.amount,
            "mark": mark,
        }
        for offer, (mark, _) in zip(comparison.offers, names[""], strict=True)
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
