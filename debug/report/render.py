"""The report for people: verdict, culprit and location first, then who waits, the evidence, and the next step.

Ranks whose exceptions differ only in numbers are shown once. `python -m distsim.debug.report.render` shows a report.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import ConsoleOptions, RenderResult
from rich.text import Text

from distsim.debug.messages import (
    are,
    call_text,
    group_name,
    group_text,
    numbered,
    ranks_text,
    site_text,
    some_ranks_text,
)
from distsim.debug.records import P2P, CallRecord, CallWait, Evidence, HostWait, Phase, Site, StoreWait
from distsim.debug.records.call import REMOTE_CALLS, SERVE, line_of
from distsim.debug.records.diagnosis import Diagnosis, Stuck
from distsim.debug.records.kinds import Kind, until_when
from distsim.debug.report.console import Console, Line, most_lines, plain_text, shortened
from distsim.debug.report.rank_states import Inconclusive
from distsim.debug.report.stack_tree import blank_addresses, folded_frames, merge_equal, merge_stacks
from distsim.text.ranks import format_ranks
from distsim.text.tracebacks import but_for_numbers, first_difference, others_differ
from distsim.text.units import plural

MAX_LINES = 8
"""Groups of ranks, cycle steps or stack frames shown of each; the JSON report has them all."""

MAX_TRACEBACKS = 2
"""Largest number of different tracebacks that are shown for each diagnosis."""
MAX_REPORT_LINES = 40
"""Further diagnoses are only counted once a report is that long, so that hundreds of ranks with an error each
fit on a screen."""

REST = "--report FILE"
VERDICT_STYLE = {"WARNING": "bold yellow", "HEALTHY": "bold green", "INCONCLUSIVE": "bold yellow"}


@dataclass(frozen=True, slots=True)
class DiagnosisReport:
    """Knows how to print itself with rich; `plain` gives the same as text."""

    diagnoses: Sequence[Diagnosis]
    evidence: Evidence | None = None
    inconclusive: Inconclusive | None = None
    whole: bool = False
    """Whether every diagnosis is shown in full, however many there are."""
    rest: str = REST
    """Command or file that has the diagnoses which are not shown."""

    def __rich_console__(self, console: object, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self.inconclusive is not None:
            yield from _inconclusive(self.inconclusive, width)
        elif not self.diagnoses:
            yield Text("HEALTHY  no hang and no inconsistent collective", style=VERDICT_STYLE["HEALTHY"])
        used = 0
        groups = self._groups()
        for i, (diagnosis, *others) in enumerate(groups):
            shown = list(_head(diagnosis, width))
            for line in self._body(diagnosis, others):
                shown += line.wrapped(width)
            used += len(shown) + 1
            if i and used > MAX_REPORT_LINES and not self.whole:
                yield from _rest([d for group in groups[i:] for d in group], width, self.rest)
                return
            if i or self.inconclusive is not None:
                yield Text("")
            yield from shown

    def _groups(self) -> list[list[Diagnosis]]:
        return [[d] for d in self.diagnoses] if self.whole else told_once(self.diagnoses, self.evidence)

    def _body(self, diagnosis: Diagnosis, others: Sequence[Diagnosis]) -> Iterator[Line]:
        most = sys.maxsize if self.whole else most_lines(len(self.diagnoses))
        notes = self.evidence.notes if self.evidence is not None and diagnosis is self.diagnoses[0] else ()
        yield from _body(diagnosis, self.evidence, most, self.rest, notes)
        if others and self.evidence is not None:
            yield Line(and_others(diagnosis, others, self.evidence, self.rest))

    @property
    def shown(self) -> Sequence[Diagnosis]:
        """Return the diagnoses that are printed in full at the width of a file."""
        used = 0
        groups = self._groups()
        for i, (diagnosis, *others) in enumerate(groups):
            lines = (part for line in self._body(diagnosis, others) for part in line.wrapped(120))
            used += sum(1 for _ in lines) + 2
            if i and used > MAX_REPORT_LINES and not self.whole:
                return [first for first, *_ in groups[:i]]
        return [first for first, *_ in groups]

    def plain(self, width: int = 80) -> str:
        """Return the report as text without colour, *width* columns wide."""
        return plain_text(self, width)


def render_diagnoses(
    diagnoses: Sequence[Diagnosis],
    evidence: Evidence | None = None,
    inconclusive: Inconclusive | None = None,
    whole: bool = False,
    rest: str = REST,
) -> DiagnosisReport:
    """Return *diagnoses* as a rich renderable.

    Args:
        diagnoses: The diagnoses, the root cause first.
        evidence: If given, shapes, last calls, stacks and source lines are shown.
        inconclusive: Replaces `HEALTHY`.
        whole: Whether to show all diagnoses, however many, and complete tracebacks.
        rest: Name of the file that contains everything.
    """
    return DiagnosisReport(diagnoses, evidence, inconclusive, whole, rest)


def _inconclusive(verdict: Inconclusive, width: int) -> Iterator[Text]:
    first, *rest = Line(f"INCONCLUSIVE  {verdict.text}", indent=0).wrapped(width)
    first.stylize(VERDICT_STYLE["INCONCLUSIVE"], 0, len("INCONCLUSIVE"))
    yield from (first, *rest)
    for line in (*(Line(detail) for detail in verdict.details), Line(f"next: {verdict.suggestion}", style="bold")):
        yield from line.wrapped(width)


def verdict(diagnosis: Diagnosis) -> str:
    """Return the first word of the report, which says how severe the diagnosis is."""
    if diagnosis.is_warning:
        return "WARNING"
    match diagnosis.exit_code:
        case 4:
            return "MISMATCH"
        case 1 if diagnosis.kind is Kind.JOB_ENDED:
            return "ENDED"
        case 1:
            return "ERROR"
        case _:
            return "HANG" if diagnosis.stuck or diagnosis.nobody_waits else "FAILED"


def _rest(diagnoses: Sequence[Diagnosis], width: int, where: str) -> Iterator[Text]:
    """Return one line for each kind and place that is not shown in full, and where to find it."""
    alike: dict[tuple[str, str, Site | None], list[Diagnosis]] = {}
    for d in diagnoses:
        site = next((d.sites[r] for r in d.culprits if r in d.sites), None)
        alike.setdefault((verdict(d), d.kind.label, site), []).append(d)
    num = len(diagnoses)
    yield Text("")
    more = f"... and {num} more {'diagnosis' if num == 1 else 'diagnoses'} (all of them: {where})"
    yield from Line(more, indent=0).wrapped(width)
    for (word, label, site), alike_diagnoses in list(alike.items())[:MAX_LINES]:
        ranks = {rank for d in alike_diagnoses for rank in d.culprits}
        at = "" if site is None else f"  {site_text(site)}"
        times = "" if len(alike_diagnoses) == 1 else f"  ({len(alike_diagnoses)} different)"
        yield from Line(f"{word}  {label}  {ranks_text(ranks)}{at}{times}").wrapped(width)
    if len(alike) > MAX_LINES:
        yield from Line(f"... of {len(alike) - MAX_LINES} more kinds or lines").wrapped(width)


def _head(d: Diagnosis, width: int) -> Sequence[Text]:
    """Return the head of a diagnosis on one line if it fits.

    If it does not, the group's ranks are left out first, then the line of the program. Of very many ranks only the
    first are named, because the body has them all. Text that is still too long continues on the next line.
    """
    word = verdict(d)
    after = "" if d.detected_after_s is None else "at once"
    if d.detected_after_s:
        after = f"after {_duration(d.detected_after_s)}"
    site = next((d.sites[r] for r in d.culprits or d.victims if r in d.sites), None)
    text = Text()
    for subject in _subjects(d):
        for where in (f"  {site_text(site)}", f"  {site_text(site, through=False)}", "") if site is not None else ("",):
            text = Text(word, style=VERDICT_STYLE.get(word, "bold red"))
            text.append(f"  {d.kind.label}  ", style="bold")
            text.append(some_ranks_text(d.culprits or d.victims), style="bold yellow")
            text.append(subject, style="default").append(where, style="cyan")
            gap = width - text.cell_len - len(after)
            if gap >= 2 or (not after and gap >= 0):
                return [text.append(" " * gap).append(after, style="dim") if after else text]
    headline = f"{text.plain}  {after}" if after else text.plain
    return list(Line(headline, indent=0, style=VERDICT_STYLE.get(word, "bold red")).wrapped(width))


def _subjects(d: Diagnosis) -> list[str]:
    if d.call is None:
        return [""]
    if d.call.op in P2P | REMOTE_CALLS | {SERVE} or d.group is None:
        return [f"  {d.call.op}", ""]
    return [f"  {d.call} on {group_text(d.group)}", f"  {d.call} on {group_name(d.group.label)}", f"  {d.call}"]


def _body(d: Diagnosis, evidence: Evidence | None, most_lines: int, rest: str, notes: Sequence[str]) -> Iterator[Line]:
    yield from _explained(d)
    if d.provisional and d.kind is not Kind.STRAGGLER and not d.nobody_waits:
        yield Line(until_when(None if evidence is None else evidence.hang_after_s, d.detected_after_s or 0.0))
    yield from _waiters(d, evidence)
    if evidence is not None:
        for ranks, text in merge_equal(last_calls(d, evidence))[:MAX_LINES]:
            yield Line(f"last call of {_named(d, ranks)}: {text}")
        yield from _processes(d, evidence)
        yield from _source(d, evidence)
        yield from _tracebacks(d, evidence, most_lines, rest)
        yield from _stacks(d, evidence)
    for note in notes:
        yield Line(f"note: {note}", style="dim")
    yield Line(f"next: {d.suggestion} See {d.see}", style="bold")


def _explained(d: Diagnosis) -> Iterator[Line]:
    """Return the explanation of the diagnosis, and the list of its culprits unless another line contains it."""
    yield Line(d.explanation)
    whole = format_ranks(d.culprits)
    if whole not in some_ranks_text(d.culprits) and whole not in d.explanation:
        yield Line(f"all of them: ranks {whole}")


def _waiters(d: Diagnosis, evidence: Evidence | None) -> Iterator[Line]:
    """Return lines that say where ranks wait, the largest group first."""
    texts = {rank: _where(rank, at, evidence) for rank, at in d.stuck.items()}
    merged = sorted(merge_equal(texts), key=lambda m: (-len(m[0]), m[0]))
    for ranks, text in merged[:MAX_LINES]:
        if _told(d, ranks):
            continue
        yield Line(f"{ranks_text(ranks)} {are(ranks, 'waits', 'wait')} in {text}")
    if len(merged) > MAX_LINES:
        rest = [rank for ranks, _ in merged[MAX_LINES:] for rank in ranks]
        yield Line(f"... and {ranks_text(rest)} at {plural(len(merged) - MAX_LINES, 'more line')}")


def _told(d: Diagnosis, ranks: Sequence[int]) -> bool:
    """Return whether the explanation has these ranks and their line already."""
    at = d.stuck[ranks[0]]
    line = site_text(Site(at.file, at.line or 0, "")) if at.file else ""
    return f"{ranks_text(ranks)} " in d.explanation.replace("Rank", "rank") and line in d.explanation


def _where(rank: int, at: Stuck, evidence: Evidence | None) -> str:
    call = _call_of(rank, at, evidence)
    call_name = numbered(call) if call is not None else at.op
    if call is not None and not call.is_of_two:
        call_name += f" on {group_name(call.group.label)}"
    return f"{call_name}, {site_text(Site(at.file, at.line or 0, '')) if at.file else 'at an unknown line'}"


def _call_of(rank: int, at: Stuck, evidence: Evidence | None) -> CallRecord | None:
    if evidence is None:
        return None
    for record in reversed(evidence.records.get(rank, ())):
        same = (record.op, record.seq, record.group.ranks) == (at.op, at.seq, at.group_ranks)
        if same and at.group in ("", record.group.label):
            return record
    return None


def last_calls(d: Diagnosis, evidence: Evidence) -> dict[int, str]:
    """Return the last calls of the culprits, unless they are stuck in them."""
    called = (rank for rank in d.culprits if rank not in d.stuck and evidence.records.get(rank))
    return {rank: state_of_call(evidence.records[rank][-1]) for rank in called}


def state_of_call(call: CallRecord) -> str:
    """Return a call as text, such as `barrier #2 on default_pg, train.py:5, completed`."""
    on = "" if call.is_of_two else f" on {group_name(call.group.label)}"
    where = "" if call.site is None else f", {site_text(call.site)}"
    return f"{call_text(call)}{on}{where}, {call.state.value}"


def _processes(d: Diagnosis, evidence: Evidence) -> Iterator[Line]:
    """Yield a line for the processes of the culprits on each host, and the folder of their records there."""
    processes: dict[tuple[str, str | None], list[str]] = {}
    for rank in d.culprits:
        state = evidence.ranks.get(rank)
        if state is not None and state.pid is not None and state.host is not None:
            processes.setdefault((state.host, state.folder), []).append(f"rank {rank} is pid {state.pid}")
    for (host, folder), texts in list(processes.items())[:MAX_LINES]:
        more = f" and {len(texts) - MAX_LINES} more" if len(texts) > MAX_LINES else ""
        records = "" if folder is None else f"; records: {folder}"
        yield Line(f"{', '.join(texts[:MAX_LINES])}{more} on host {host}{records}")


def _source(d: Diagnosis, evidence: Evidence) -> Iterator[Line]:
    """Yield the source lines of the culprits, of the other ranks, and of the cause, if the files' texts are known."""
    shown: set[tuple[str, int]] = set()
    own = _unlike(d.sites[r] for r in d.culprits if r in d.sites)[:2]
    others = [site for site in _unlike(d.sites[r] for r in d.sites if r not in d.culprits) if site not in own]
    for site in [*own, *others[:2], *d.causes]:
        text = line_of(evidence.sources, site)
        if text and (site.file, site.line) not in shown:
            shown.add((site.file, site.line))
            yield Line(f"{site_text(site, through=False)}  |  {text}", style="cyan")


def _unlike(sites: Iterable[Site]) -> list[Site]:
    """Return the distinct lines in their order."""
    return list({(site.file, site.line): site for site in sites}.values())


def shown_tracebacks(d: Diagnosis, evidence: Evidence) -> list[tuple[tuple[int, ...], str]]:
    """Return the tracebacks that the report of *d* shows, equal ones (but for addresses) once, with their ranks."""
    texts = {
        rank: blank_addresses(text).rstrip()
        for rank in d.culprits
        if (state := evidence.ranks.get(rank)) is not None and (text := state.traceback)
    }
    return merge_equal(texts)[:MAX_TRACEBACKS]


def _named(d: Diagnosis, ranks: Sequence[int]) -> str:
    """Return all *ranks*; if there are very many culprits, which are listed above, the first ones."""
    return some_ranks_text(ranks) if set(ranks) == set(d.culprits) else ranks_text(ranks)


def _tracebacks(d: Diagnosis, evidence: Evidence, most: int, rest: str) -> Iterator[Line]:
    shown = shown_tracebacks(d, evidence)
    for ranks, text in shown:
        yield Line(f"traceback of {_named(d, ranks)}:")
        lines = text.splitlines()
        for line in shortened(lines, most // len(shown), f"{rest} has them"):
            yield Line(line, indent=4, whole=True)


def _stacks(d: Diagnosis, evidence: Evidence) -> Iterator[Line]:
    """Yield the merged stacks of all ranks concerned (STAT's prefix tree), if they show more than the lines above."""
    stacks = {rank: stack for rank in (*d.culprits, *d.victims) if (stack := stack_of(rank, evidence))}
    if any(len(stack) > 1 for stack in stacks.values()):
        yield from stack_lines(stacks)


def stack_lines(stacks: Mapping[int, Sequence[Site]]) -> Iterator[Line]:
    """Yield the stacks (innermost frame first) as one tree, one line for each frame."""
    lines = merge_stacks(stacks).lines()
    yield Line("stacks, outermost frame first:")
    columns = min(24, max(len(format_ranks(node.ranks)) for _, node in lines))
    folded = folded_frames(lines)
    for depth, node, times in folded[: 3 * MAX_LINES]:
        ranks = format_ranks(node.ranks)
        if len(ranks) > columns:
            ranks = f"{len(node.ranks)} ranks"
        frame = node.site
        name = f"{frame.function}  {site_text(frame)}" if frame is not None else ""
        if times > 1:
            name += f"  ({times} times)"
        yield Line(f"{ranks:<{columns}}  {'  ' * depth}{name}", indent=4, hang=columns + 4)
    if len(folded) > 3 * MAX_LINES:
        yield Line(f"... {sum(times for *_, times in folded[3 * MAX_LINES :])} more frames", indent=4)


def stack_of(rank: int, evidence: Evidence) -> tuple[Site, ...]:
    """Return the frames that *rank* is in, innermost first; empty if it has finished."""
    state = evidence.ranks.get(rank)
    if state is None or state.phase is Phase.FINISHED:
        return ()
    if state.stack:
        return state.stack
    for wait in state.waits:
        if isinstance(wait, CallWait):
            return wait.record.stack
        if isinstance(wait, HostWait | StoreWait):
            break
    return (state.site,) if state.site is not None else ()


def _duration(seconds: float) -> str:
    """Return a duration as text, such as `0.8 s`, `12 ms` or `350 us`; at least 1 us."""
    if seconds >= 0.1:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.0f} ms"
    return f"{max(1.0, seconds * 1e6):.0f} us"


def _show() -> None:
    """Print an example: eight ranks, one of them in its data loader."""
    from distsim.debug.diagnosis.diagnose import diagnose
    from distsim.debug.records import Group, RankState, State

    group = Group("1", "dp", tuple(range(8)))
    step, load = Site("train.py", 131, "step"), Site("data.py", 52, "__next__")
    main = Site("train.py", 210, "main")
    ranks, records = {}, {}
    for rank in range(8):
        calls = [
            CallRecord(
                rank, group, seq, "all_reduce", ((4096, 1024),), dtypes=("float32",), reduce_op="SUM",
                site=step, stack=(step, main), state=State.COMPLETED, index=seq - 1, issued_s=seq * 1.0,
            )
            for seq in (41, 42)
        ]  # fmt: skip
        calls[1].state = State.ISSUED
        records[rank] = calls[:1] if rank == 3 else calls
        ranks[rank] = RankState(rank, Phase.BLOCKED, (CallWait(calls[1]),))
    ranks[3] = RankState(3, Phase.HOST_STUCK, site=load, stack=(load, Site("train.py", 88, "epoch"), main))
    evidence = Evidence(8, ranks, records, now_s=42.8)
    Console().print(render_diagnoses(diagnose(evidence), evidence))


if __name__ == "__main__":
    _show()


def told_once(diagnoses: Sequence[Diagnosis], evidence: Evidence | None) -> list[list[Diagnosis]]:
    """Return the diagnoses in their order, those together that differ from an earlier one in numbers only."""
    groups: list[list[Diagnosis]] = []
    first: dict[str, list[Diagnosis]] = {}
    for d in diagnoses:
        error = None if evidence is None or d.kind is not Kind.RANK_RAISED else _said(d, evidence)
        known = None if error is None else first.get(but_for_numbers(error))
        if known is not None and (not d.stuck or d.stuck == known[0].stuck):  # who waits for it is told there
            known.append(d)
            continue
        groups.append([d])
        if error is not None:
            first.setdefault(but_for_numbers(error), groups[-1])
    return groups


def and_others(first: Diagnosis, others: Sequence[Diagnosis], evidence: Evidence, rest: str) -> str:
    """Return the line for diagnoses like *first* that are not shown in full. *rest* says where to find them."""
    ranks = sorted({rank for d in others for rank in d.culprits})
    last = max(others, key=lambda d: max(d.culprits))
    who = "" if len(others) == 1 else f", {some_ranks_text(ranks)} (all of them: {rest})"
    difference = first_difference(_said(first, evidence) or "", _said(last, evidence) or "")
    return f"... and {others_differ(len(others))}{who}; {some_ranks_text(last.culprits)}: {difference}"


def _said(d: Diagnosis, evidence: Evidence) -> str | None:
    """Return the one traceback of all culprits; None if some left none, or another one."""
    texts = {None if (state := evidence.ranks.get(rank)) is None else state.traceback for rank in d.culprits}
    text = next(iter(texts)) if len(texts) == 1 else None
    return blank_addresses(text) if text else None
