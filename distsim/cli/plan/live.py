"""Progress of running points: a table on a terminal, otherwise a line for each point that ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from distsim.scenario.explore.sweep import Point

__all__ = ["live_points"]

Show = Callable[[Sequence["Point"]], None]


@contextmanager
def live_points(total: int, table: Callable[[Sequence[Point]], RenderableType] | None) -> Iterator[Show]:
    """Return a function that shows progress; it is called with all finished points after each one.

    Args:
        total: How many there will be at most.
        table: Makes a table of the best points; None: nothing is shown.
    """
    from distsim.report.progress import is_shown

    if table is None:
        yield lambda points: None
        return
    if not is_shown(sys.stderr):
        yield lambda points: print(f"distsim: {_line(points, total)}", file=sys.stderr, flush=True)
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from distsim.debug.report.console import Console

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def show(points: Sequence[Point]) -> None:
            live.update(Group(table(points), Text(_line(points, total), style="dim")), refresh=True)

        yield show


def _line(points: Sequence[Point], total: int) -> str:
    from distsim.text.units import format_time

    last = points[-1]
    figures = last.result.figures
    settings = " ".join(f"{name}={value}" for name, value in last.settings.items())
    if figures.get("fits") == 0.0:
        state = "out of memory"
    elif not last.result.ran or last.result.exit_code or not figures.get("step_s"):
        state = last.result.verdict
    else:
        state = f"{format_time(figures['step_s'])} a step"
    return f"{len(points)} of {total} points, {settings}: {state}"
