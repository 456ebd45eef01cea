"""Progress line of a simulation: continuously on a terminal, otherwise occasionally in long runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from distsim.text import original_print
from distsim.text.units import format_time

if TYPE_CHECKING:
    from distsim.sim.outcome import Progress

Report = Callable[["Progress"], None]
FIRST_S, EVERY_S = 10.0, 60.0
"""Wall time until the first line of progress without a terminal, then until the next."""


def progress_line(progress: Progress) -> str:
    """Return a line such as `12.3 ms of virtual time, 16/16 ranks, 81,000 events/s`."""
    parts = [
        f"{format_time(progress.virtual_time_s)} of virtual time",
        f"{progress.ranks_alive}/{progress.ranks_total} ranks alive",
        f"{progress.events:,} events, {progress.events_per_s:,.0f}/s",
    ]
    if progress.tracing:
        parts.append(progress.tracing)
    if progress.waiting:
        parts.append(progress.waiting)
    return ", ".join(parts)


def log_line(progress: Progress) -> str:
    """Return the line for a log, which is shorter: `60 s: 12.3 ms of virtual time, 16/16 ranks alive, step 2`."""
    text = f"{progress.wall_s:.0f} s: {format_time(progress.virtual_time_s)} of virtual time, "
    text += f"{progress.ranks_alive}/{progress.ranks_total} ranks alive"
    traced = progress.tracing.partition(" (")[0]
    return f"{text}, {traced}" if traced else text


def is_shown(stream: TextIO) -> bool:
    """Return whether a person is watching: a terminal that can move its cursor, outside CI."""
    return stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


@contextmanager
def live_progress(stream: TextIO, quiet: bool = False) -> Iterator[Report | None]:
    """Return the function that shows the simulator's `Progress`, or None for silence.

    On a terminal the line vanishes at the end. It is refreshed only by these calls: a thread of rich's own would
    run beside the ranks and read clocks that are virtual to them.
    """
    if quiet:
        yield None
        return
    if not is_shown(stream):
        yield _written_to(stream)
        return
    import sys

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream)
    live = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )

    def report(progress: Progress) -> None:
        text = Text(progress_line(progress), style="dim", no_wrap=True, overflow="ellipsis")
        live.update(text, refresh=True)

    with live:
        yield report


def _written_to(stream: TextIO) -> Report:
    """Return a function that writes the line to a pipe or file if the simulation takes long."""
    next_s = FIRST_S

    def report(progress: Progress) -> None:
        nonlocal next_s
        if progress.wall_s >= next_s:
            next_s = progress.wall_s + EVERY_S
            original_print(f"distsim: {log_line(progress)}", file=stream, flush=True)

    return report
