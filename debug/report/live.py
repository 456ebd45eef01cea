"""A live job as a table, a row a group with its ranks by the number of the call they are in, and as metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table
from rich.text import Text

from distsim.debug.diagnosis.pace.job import outlook_text, slow_text
from distsim.debug.evidence.processes import look
from distsim.debug.monitor.straggler_watch import pace_of
from distsim.debug.records import Group
from distsim.debug.records.diagnosis import Diagnosis, exit_code
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader
from distsim.text.ranks import format_ranks

STUCK_S = 1.0
"""A call that waits longer is shown as stuck."""


@dataclass
class GroupRow:
    """One group at this moment."""

    group: Group
    by_number: dict[int, list[int]]
    """Ranks by the number of their last call."""
    op: str
    """The operation at the highest number."""
    waiting: dict[int, float]
    """Rank -> seconds it has been waiting in its last call."""
    ended: list[int]
    stopped: list[int]

    @property
    def slowest(self) -> list[int]:
        """Return the ranks that have made the fewest calls."""
        return self.by_number[min(self.by_number)] if len(self.by_number) > 1 else []


def group_rows(readers: Sequence[RingReader]) -> list[GroupRow]:
    """Return the groups of a job, the largest first."""
    now = time.monotonic_ns()
    last: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[int, str, float]]] = defaultdict(dict)
    groups: dict[tuple[str, tuple[int, ...], int], Group] = {}
    ended, stopped = set(), set()
    for reader in readers:
        rank = reader.number
        process = look(reader.header.pid, reader.header.start_ticks)
        if process is None or process.state in "ZX":
            ended.add(rank)
        elif process.state in "Tt":
            stopped.add(rank)
        records, _ = reader.since(0)
        records = records[(records["flags"] & rings.OF_TWO) == 0]
        for offset in np.unique(records["group"]):
            entry = reader.group(int(offset))
            mine = records[records["group"] == offset]
            newest = mine[np.argmax(mine["seq"])]
            open_ = int(newest["flags"]) & rings.STATE_MASK < rings.COMPLETED
            waited = (now - int(newest["issued"])) / 1e9 if open_ and rank not in ended else 0.0
            op = reader.signature(int(newest["signature"]), int(newest["fingerprint"])).op
            groups[entry.key] = reader.job_group(int(offset))
            last[entry.key][rank] = (int(newest["seq"]), op, waited)
    rows = []
    for key, group in groups.items():
        if group.name in ("init",) and len(groups) > 1:
            continue
        ranks = last[key]
        by_number: dict[int, list[int]] = defaultdict(list)
        for rank in group.ranks:
            by_number[ranks[rank][0] if rank in ranks else 0].append(rank)
        front = max(ranks.values(), key=lambda item: item[0])
        rows.append(
            GroupRow(
                group,
                dict(sorted(by_number.items(), reverse=True)),
                front[1],
                {rank: item[2] for rank, item in ranks.items() if item[2] > 0},
                sorted(ended & set(group.ranks)),
                sorted(stopped & set(group.ranks)),
            )
        )
    rows.sort(key=lambda row: (-len(row.group.ranks), row.group.ranks, row.group.name))
    return rows


def live_table(readers: Sequence[RingReader]) -> Table:
    """Return the rows as a rich table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("group", "ranks", "call", "where the ranks are"):
        table.add_column(name, overflow="fold")  # on more lines, never cut
    table.add_column("longest wait", no_wrap=True)
    table.add_column("state", overflow="fold")
    for row in group_rows(readers):
        places = "  ".join(f"#{number}: {_breakable(ranks)}" for number, ranks in row.by_number.items())
        longest = max(row.waiting.values(), default=0.0)
        table.add_row(
            row.group.label,
            _breakable(row.group.ranks),
            row.op,
            places,
            f"{longest:.1f} s" if longest else "",
            _state(row, longest),
        )
    return table


def metrics_text(readers: Sequence[RingReader], job: str, diagnoses: Sequence[Diagnosis]) -> str:
    """Return the job in Prometheus's text format, as node_exporter's textfile collector reads it.

    Args:
        readers: The rings of the ranks of this host; empty if the job has ended.
        job: Name of the job.
        diagnoses: What the monitor has reported so far.
    """
    waits, states = {reader.number: 0.0 for reader in readers}, {"running": 0, "waiting": 0, "stopped": 0, "ended": 0}
    groups = group_rows(readers)
    for group in groups:
        for rank, wait_s in group.waiting.items():
            waits[rank] = max(waits.get(rank, 0.0), wait_s)
    ended, stopped = ({rank for group in groups for rank in getattr(group, name)} for name in ("ended", "stopped"))
    for rank, wait_s in waits.items():
        state = "ended" if rank in ended else "stopped" if rank in stopped else "waiting" if wait_s else "running"
        states[state] += 1
    slow_ranks, outlook = pace_of(readers) if readers else ([], None)
    excess = {slow.rank: slow.share for slow in slow_ranks}
    ranks = [(reader.number, {"rank": str(reader.number)}) for reader in readers]
    calls = [({"rank": str(reader.number)}, float(reader.count)) for reader in readers]
    families: list[tuple[str, str, str, Iterable[tuple[Mapping[str, str], float]]]] = [
        ("ranks", "gauge", "Ranks of this host by state.", [({"state": name}, n) for name, n in states.items()]),
        ("calls_total", "counter", "Calls of a rank so far.", calls),
        ("wait_seconds", "gauge", "How long a rank has waited in its last call.", [(of, waits[n]) for n, of in ranks]),
        ("straggler", "gauge", "1: the rank keeps others waiting.", [(of, float(n in excess)) for n, of in ranks]),
        ("excess_ratio", "gauge", "Work beyond that of the others, as a share of a step; 0 unless the rank is slow.",
         [(of, excess.get(n, 0.0)) for n, of in ranks]),
        *([] if outlook is None else [
            ("step_seconds", "gauge", "Length of a step.", [({}, outlook.step_s)]),
            ("step_noise_ratio", "gauge", "Spread of a rank's work, as a share of a step.", [({}, outlook.noise)])]),
        ("exit_code", "gauge", "The verdict so far: 0, 1, 3 or 4.", [({}, float(exit_code(diagnoses)))]),
        ("diagnosis", "gauge", "A diagnosis and its culprits.", [
            ({"kind": kind.value, "culprits": format_ranks(culprits)}, 1) for kind, culprits in dict.fromkeys(
                (one.kind, one.culprits) for one in diagnoses)]),
        ("updated_seconds", "gauge", "When this was written (Unix time).", [({}, time.time())]),
    ]  # fmt: skip
    lines = []
    for name, kind, about, values in families:
        lines += [f"# HELP distsim_{name} {about}", f"# TYPE distsim_{name} {kind}"]
        lines += [f"distsim_{name}{{{_labels({'job': job, **labels})}}} {value:.15g}" for labels, value in values]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())


def _breakable(ranks: Sequence[int]) -> str:
    """Return ranks as text that can be wrapped between two ranks, and not within a number."""
    return format_ranks(ranks).replace(",", ", ")


def straggler_lines(readers: Sequence[RingReader]) -> list[str]:
    """Return one line for each rank that is slower than the others, or what could be seen where none is."""
    slow_ranks, outlook = pace_of(readers)
    lines = [f"straggler: {slow_text(slow)}" for slow in slow_ranks]
    return lines or ([] if outlook is None else [f"pace: {outlook_text(outlook)}"])


def _state(row: GroupRow, longest: float) -> Text:
    if row.stopped:
        return Text(f"stopped: {format_ranks(row.stopped)}", style="bold red")
    if row.ended and len(row.ended) < len(row.group.ranks):
        return Text(f"ended: {format_ranks(row.ended)}", style="bold red")
    if row.ended:
        return Text("ended")
    if longest > STUCK_S:
        slow = row.slowest
        return Text(f"waiting for {format_ranks(slow)}" if slow else "stuck together", style="bold yellow")
    return Text("running", style="green")
