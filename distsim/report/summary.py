"""Prints the summary at the end of a run: first the verdict, then where the time was spent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distsim.debug.report.console import Console as PlainConsole
from distsim.debug.report.console import piped_width
from distsim.debug.report.rank_states import sentences, whereabouts
from distsim.report.failures import Failures
from distsim.report.tables import collectives_table, links_table, ranks_table
from distsim.report.training import training_parts
from distsim.text.units import format_time, plural

if TYPE_CHECKING:
    from distsim.sim.outcome import Outcome


class Summary:
    """An outcome as a rich renderable.

    The wall time is shown only *with_wall_time*: it is the only figure that differs between two runs with the same
    seed.
    """

    def __init__(self, outcome: Outcome, with_wall_time: bool = True) -> None:
        self.outcome = outcome
        self.with_wall_time = with_wall_time

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        outcome = self.outcome
        told_ranks: list[int] = []
        if not outcome.is_proven:
            yield Text.assemble(("NOT PROVEN", "bold yellow"), f"  {outcome.unseen}")
            yield Text()
        if outcome.diagnoses:
            from distsim.debug.report.render import render_diagnoses, shown_tracebacks

            report = render_diagnoses(outcome.diagnoses, outcome.evidence)
            yield report
            yield Text()
            if outcome.evidence is not None:
                shown = {id(diagnosis) for diagnosis in report.shown}
                for diagnosis in outcome.diagnoses:
                    if id(diagnosis) in shown:
                        told_ranks += [r for ranks, _ in shown_tracebacks(diagnosis, outcome.evidence) for r in ranks]
                    else:
                        told_ranks += diagnosis.culprits  # counted there, and what they raised with it
        yield Failures(outcome.failures, told_ranks)
        yield Whereabouts(outcome)
        yield from self._header()
        yield from _silent(outcome)
        if outcome.exit_code == 3:
            yield from self._notes()
            return  # where the time went until then is nobody's question; a JSON report has it
        if outcome.training is not None:
            for title, body in training_parts(outcome.training):
                yield from self._section(title, body)
        if outcome.exit_code == 0 or _moved(outcome):
            has_gpus = outcome.training is not None
            title = "time by rank, on its host (the GPU's: where a step goes)" if has_gpus else "time by rank"
            yield from self._section(title, ranks_table(outcome.ranks, has_gpus))
        yield from self._section("collectives (algbw and busbw in GB/s)", collectives_table(outcome.collectives))
        yield from self._section("busiest links", links_table(outcome.links))
        yield from self._notes()

    def _notes(self) -> RenderResult:
        outcome = self.outcome
        if outcome.is_proven and outcome.is_sample_finished:
            yield Text()
            yield Text(f"sample: {outcome.unseen}", style="yellow")
        shown = outcome.evidence.notes if outcome.diagnoses and outcome.evidence is not None else ()
        notes = [note for note in outcome.notes if note not in shown]
        if notes:
            yield Text()
        for note in notes:
            yield Text(f"note: {note}", style="dim")

    def _header(self) -> RenderResult:
        outcome = self.outcome
        ranks = plural(outcome.world_size, "rank")
        backend = {"": "", "none": "no process group, "}.get(outcome.backend, f"backend {outcome.backend}, ")
        yield Text.assemble(
            (outcome.program, "bold"),
            f" on {outcome.cluster}: {ranks}, {backend}seed {outcome.seed}",
        )
        verdict, style = _verdict(outcome)
        line = Text.assemble((verdict, style), " after ", (format_time(outcome.virtual_time_s), "bold"))
        line.append(" of virtual time")
        details = [f"{outcome.events:,} events"]
        if self.with_wall_time:
            details.insert(0, f"{format_time(outcome.wall_time_s)} of wall time")
        line.append(f" ({', '.join(details)})")
        yield line
        if outcome.software_matters and (outcome.exit_code == 0 or not outcome.is_proven):
            yield Text(f"software assumed: {outcome.software}", style="dim")
        if outcome.unseen and outcome.is_proven and not outcome.is_sample_finished:  # else first, or below the figures
            yield Text(f"not run: {outcome.unseen}", style="yellow")

    def _section(self, title: str, body: object) -> RenderResult:
        if body is not None:
            yield Text()
            yield Text(title, style="bold")
            yield body  # type: ignore[misc]


def _silent(outcome: Outcome) -> RenderResult:
    """Yield the silent findings, which do not change the verdict above them."""
    if outcome.silent:
        from distsim.debug.report.silent import SilentReport

        yield Text()
        yield SilentReport(outcome.silent)


def _moved(outcome: Outcome) -> bool:
    """Return whether any rank computed, made a call or waited; else there are no times to show."""
    return any(r.compute_s or r.communication_s or r.exposed_s or r.idle_s for r in outcome.ranks)


def _verdict(outcome: Outcome) -> tuple[str, str]:
    if outcome.interrupted:
        return "interrupted", "bold yellow"
    if outcome.cut_short:
        return "ended by a limit", "bold yellow"
    if outcome.is_sample_finished:
        ran = outcome.world_size - len(outcome.not_traced)
        return f"{ran} of {outcome.world_size} ranks finished", "bold yellow"
    if outcome.exit_code == 0:
        return "finished", "bold green"
    words = {1: "failed", 3: "hung", 4: "inconsistent collectives"}
    return words.get(outcome.exit_code, f"ended with exit code {outcome.exit_code}"), "bold red"


def print_summary(outcome: Outcome, file: TextIO | None = None) -> None:
    """Print the summary, as wide as the terminal, or 120 columns where there is none."""
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() else piped_width()
    console = PlainConsole(file=stream, width=width)
    console.print(Summary(outcome), crop=False)  # lines of a traceback stay whole


def leavers(outcome: Outcome) -> list[str]:
    """Return ranks that left with an exit code and without a traceback."""
    failed = {rank for failure in outcome.failures for rank in failure.ranks}
    together: dict[str, list[int]] = {}
    for summary in outcome.ranks:
        if summary.exit_code and summary.rank not in failed:
            together.setdefault(f"left with exit code {summary.exit_code}", []).append(summary.rank)
    return sentences(together)


class Whereabouts:
    """Locations of the ranks of an unfinished run, as a rich renderable; empty if a diagnosis has them."""

    def __init__(self, outcome: Outcome) -> None:
        self.title, self.lines = "", list[str]()
        if outcome.diagnoses:
            return
        if outcome.interrupted and outcome.evidence is not None:
            self.title, self.lines = "INTERRUPTED", whereabouts(outcome.evidence)
        elif outcome.exit_code:
            self.title, self.lines = "EXITED", leavers(outcome)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.lines:
            yield Text(self.title, style="bold red")
            for line in self.lines:
                yield Text(f"  {line}")
            yield Text()
