"""Tables of the summary (time by rank, collectives, links), and figures formatted for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isclose
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from distsim.text.ranks import format_ranks
from distsim.text.units import format_bandwidth, format_bytes, format_time, plural

if TYPE_CHECKING:
    from distsim.sim.outcome import CollectiveTotal, LinkUse, RankSummary

MOST_RANKS = 8
"""Number of ranks above which equal ones share a row."""
MOST_ROWS = 16
"""Number of different rows above which only minimum, median and maximum are shown."""
MOST_COLLECTIVES = 12
ALIKE = 0.1
"""Groups of one name whose calls, bytes and time differ by at most this fraction share a row."""
MOST_LINKS = 8
FEWEST_LINKS = 3
IDLE = 0.005
"""Mean utilization below which a link is shown only if it is among the first three."""
BAR_WIDTH = 10

_PARTS = {
    "end_s": ">ran for",
    "compute_s": ">compute",
    "communication_s": ">communication",
    "exposed_s": ">exposed",
    "idle_s": ">idle",
}
_FULL, _EIGHTHS = "█", " ▏▎▍▌▋▊▉"


_HOST_PARTS = _PARTS | {"compute_s": ">CPU work", "idle_s": ">CPU idle"}


def ranks_table(ranks: Sequence[RankSummary], has_gpus: bool = False) -> Table:
    """Return the table of times by rank. With *has_gpus*, the heads say that work and idle time are the CPU's."""
    heads = list((_HOST_PARTS if has_gpus else _PARTS).values())
    joined = _joined(ranks) if len(ranks) > MOST_RANKS else [[rank] for rank in ranks]
    if len(joined) > MOST_ROWS:
        return _spread(ranks, heads)
    table = plain_table(">rank", "device", *heads)
    for group in joined:
        first = group[0]
        where = first.device if len(group) == 1 else f"{len(group)} ranks"
        style = "red" if first.exit_code else ""
        table.add_row(short_ranges(format_ranks(rank.rank for rank in group)), where, *_times(first), style=style)
    return table


def short_ranges(ranges: str, most: int = 18) -> str:
    """Shorten a long list of single ranks: `0,2,4,6,...`; the row has their number."""
    return ranges if len(ranges) <= most else ranges[:most].rpartition(",")[0] + ",..."


def _joined(ranks: Sequence[RankSummary]) -> list[list[RankSummary]]:
    """Group ranks with equal printed times, in the order of their first rank."""
    alike: dict[tuple[str, ...], list[RankSummary]] = {}
    for rank in ranks:
        alike.setdefault((*_times(rank), str(rank.exit_code)), []).append(rank)
    return list(alike.values())


def _spread(ranks: Sequence[RankSummary], heads: Sequence[str]) -> Table:
    table = plain_table("of all ranks", *heads)
    for label, pick in (("minimum", min), ("median", median), ("maximum", max)):
        values = [pick([getattr(rank, part) for rank in ranks]) for part in _PARTS]
        table.add_row(label, *(format_time(value) for value in values))
    slowest = [max(ranks, key=lambda rank: (getattr(rank, part), -rank.rank)).rank for part in _PARTS]
    table.add_row("largest on", *(f"rank {rank}" for rank in slowest), style="dim")
    return table


def _times(rank: RankSummary) -> list[str]:
    return [format_time(getattr(rank, part)) for part in _PARTS]


def collectives_table(totals: Iterable[CollectiveTotal]) -> RenderableType | None:
    """Return the calls by group and operation, the longest first; None if there are none.

    If a row stands for several equal groups, its figures are the mean of these groups.
    """
    rows = _alike_groups(sorted(totals, key=lambda total: (-total.time_s, total.group, total.op, total.dtype)))
    if not rows:
        return None
    table = plain_table("group", "operation", ">calls", ">bytes", ">time", ">algbw", ">busbw")
    for groups in rows[:MOST_COLLECTIVES]:
        total = _mean(groups)
        table.add_row(
            total.group if len(groups) == 1 else f"{total.group}, {len(groups)} groups",
            f"{total.op} {total.dtype}".rstrip(),
            f"{total.count:,}",
            format_bytes(total.bytes),
            _sure(total),
            _gigabytes(total.algbw_bytes_per_s) if total.bytes else "-",
            _gigabytes(total.busbw_bytes_per_s) if total.bytes else "-",
        )
    return _with_rest(table, len(rows) - MOST_COLLECTIVES, "operation")


def _alike_groups(totals: Sequence[CollectiveTotal]) -> list[list[CollectiveTotal]]:
    """Group one operation's *totals* on groups of one name (`mesh_tp` of each stage) that are about equal."""
    rows: list[list[CollectiveTotal]] = []
    by_name: dict[tuple[object, ...], list[list[CollectiveTotal]]] = {}
    for total in totals:
        same_name = by_name.setdefault((total.group, total.num_ranks, total.op, total.dtype), [])
        row = next((row for row in same_name if _about(row[0], total)), None)
        if row is None:
            row = []
            rows.append(row)
            same_name.append(row)
        row.append(total)
    return rows


def _about(one: CollectiveTotal, other: CollectiveTotal) -> bool:
    pairs = (one.time_s, other.time_s), (one.bytes, other.bytes), (one.count, other.count)
    return all(isclose(first, second, rel_tol=ALIKE) for first, second in pairs)


def _mean(totals: Sequence[CollectiveTotal]) -> CollectiveTotal:
    """Return the mean of the groups."""
    first, many = totals[0], len(totals)
    if many == 1:
        return first
    time_s, num_bytes = (sum(values) / many for values in zip(*((t.time_s, t.bytes) for t in totals), strict=True))
    algbw = num_bytes / time_s if time_s > 0 else 0.0
    busbw = algbw * (first.busbw_bytes_per_s / first.algbw_bytes_per_s if first.algbw_bytes_per_s else 0.0)
    low_s, high_s = (
        None if None in ends else sum(end for end in ends if end is not None) / many
        for ends in ([t.low_s for t in totals], [t.high_s for t in totals])
    )
    return replace(
        first,
        count=round(sum(t.count for t in totals) / many),
        bytes=round(num_bytes),
        time_s=time_s,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=busbw,
        low_s=low_s,
        high_s=high_s,
    )


def _sure(total: CollectiveTotal) -> str:
    """Return a time with its interval, such as `812 us (650-1,010)`; the time alone if never measured."""
    shown = format_time(total.time_s)
    number, _, unit = shown.partition(" ")
    if total.low_s is None or total.high_s is None or not unit:
        return shown
    scale = float(number.replace(",", "")) / total.time_s
    low, high = (f"{float(f'{seconds * scale:.3g}'):,g}" for seconds in (total.low_s, total.high_s))
    return f"{shown} ({low}-{high})"


def _gigabytes(bytes_per_s: float) -> str:
    """Return GB/s to three digits without the unit, which is in the table's title."""
    value = bytes_per_s / 1e9
    if value < 0.001:
        return "<0.001"
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def links_table(links: Iterable[LinkUse]) -> RenderableType | None:
    """Return the busiest links with a bar, equally used ones in one row; None if nothing was transferred."""
    alike: dict[tuple[object, ...], list[LinkUse]] = {}
    for link in links:
        if link.bytes > 0:
            key = (
                link.kind,
                link.bandwidth_bytes_per_s,
                f"{link.mean_utilisation:.0%}",
                f"{link.peak_utilisation:.0%}",
            )
            alike.setdefault(key, []).append(link)
    if not alike:
        return None
    for group in alike.values():
        group.sort(key=lambda link: -link.bytes)
    rows = sorted(alike.values(), key=lambda group: (-group[0].mean_utilisation, -group[0].bytes))
    shown = [row for n, row in enumerate(rows) if n < FEWEST_LINKS or row[0].mean_utilisation >= IDLE]
    shown = shown[:MOST_LINKS]
    table = plain_table("link", ">alike", ">speed", ">bytes", "busy on average", ">peak")
    for group in shown:
        first = group[0]
        table.add_row(
            first.name,
            f"x{count}" if (count := _count(group)) > 1 else "",
            format_bandwidth(first.bandwidth_bytes_per_s),
            format_bytes(first.bytes),
            bar(first.mean_utilisation),
            f"{first.peak_utilisation:.0%}",
        )
    return _with_rest(table, sum(map(_count, rows)) - sum(map(_count, shown)), "link")


def _count(group: Sequence[LinkUse]) -> int:
    return sum(link.alike for link in group)


def bar(fraction: float) -> Text:
    """Return a bar such as `"█████     50%"`, drawn to an eighth of a character."""
    eighths = round(min(max(fraction, 0.0), 1.0) * BAR_WIDTH * 8)
    drawn = _FULL * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    style = "red" if fraction >= 0.9 else "yellow" if fraction >= 0.6 else "green"
    share = "<1%" if 0 < fraction < 0.005 else f"{fraction:.0%}"
    return Text.assemble((f"{drawn:<{BAR_WIDTH}}", style), f" {share:>4}")


def plain_table(*columns: str) -> Table:
    """Return a table without lines. A column whose name begins with `>` is aligned to the right; without any name,
    the table has no header.
    """
    heads = [Column(name.removeprefix(">"), justify="right" if name[:1] == ">" else "left") for name in columns]
    shown = any(head.header for head in heads)
    return Table(*heads, box=None, padding=(0, 1), pad_edge=False, header_style="dim", show_header=shown)


def _with_rest(table: Table, count: int, noun: str) -> RenderableType:
    if count <= 0:
        return table
    return Group(table, Text(f"and {plural(count, f'more {noun}')}: --report FILE has all", style="dim"))


SHARES = ("busiest_link", "mfu", "hfu", "gpu_memory_share")


def time_unit(end_s: float) -> tuple[float, str]:
    """Return the factor and unit of seconds on an axis with this end."""
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if end_s < limit:
            return scale, unit
    return 1.0, "s"


def figure_name(name: str) -> str:
    """Return the name of a figure as text: `virtual_time_s` -> `virtual time`. The unit is in the values."""
    kind, _, rest = name.partition(".")
    for ending in ("_bytes_per_s", "_bytes", "_s") if not kind.startswith("tokens") else ():
        kind = kind.removesuffix(ending)
    return " ".join(part for part in (kind.replace("_", " "), rest) if part)


def figure_text(name: str, value: float | None) -> str:
    """Return a figure with its unit."""
    if value is None:
        return "-"
    kind = name.partition(".")[0]
    if kind.endswith("_bytes_per_s"):
        return format_bandwidth(value)
    if kind.endswith("_bytes"):
        return format_bytes(int(value))
    if kind.endswith("_s") and not kind.endswith("per_s"):
        return format_time(value)
    return f"{value:.1%}" if kind in SHARES else f"{value:,.6g}"


def figure_unit(name: str, top: float) -> tuple[float, str]:
    """Return the factor and unit of a figure on an axis that ends at *top*."""
    kind = name.partition(".")[0]
    if kind.endswith("_bytes_per_s"):
        return 1e-9, "GB/s"
    if kind.endswith("_bytes"):
        return 1e-9, "GB"
    if kind.endswith("_s") and not kind.endswith("per_s"):
        return time_unit(top)
    return (100.0, "%") if kind in SHARES else (1.0, "number")
