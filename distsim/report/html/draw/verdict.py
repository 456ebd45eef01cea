"""The verdict: what is wrong, with the lines of source where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.messages import are, group_text, place, ranks_text
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.render import verdict
from distsim.debug.report.stack_tree import merge_equal
from distsim.text.units import format_time

__all__ = ["Excerpt", "Told", "excerpts", "folded", "headline", "told"]

MOST_TOLD = 12
"""Diagnoses in full; the others are a line for each kind and place."""
MOST_FOLDED = 100
MOST_WAITERS = 8
MOST_EXCERPTS = 4
"""Of one diagnosis."""


@dataclass(slots=True)
class Excerpt:
    """Some lines of a file, one of them meant."""

    place: str
    ranks: str
    rows: list[tuple[int, str, bool]]
    """Number, text, whether it is the line."""


@dataclass(slots=True)
class Told:
    """One diagnosis for the page."""

    word: str
    kind: str
    ranks: str
    subject: str
    after: str
    explanation: str
    suggestion: str
    waiters: list[str]
    sites: list[str] = field(default_factory=list)
    excerpts: list[Excerpt] = field(default_factory=list)


def headline(document: Mapping[str, Any], diagnoses: Sequence[Diagnosis]) -> tuple[str, str]:
    """The word for the whole, and its colour's name: good, warning, bad."""
    if document.get("interrupted"):
        return "INTERRUPTED", "warning"
    if diagnoses:
        word = verdict(diagnoses[0])
        return word, "warning" if word == "WARNING" else "bad"
    if document.get("inconclusive"):
        return "INCONCLUSIVE", "warning"
    if document.get("snapshot"):
        return "RUNNING", "good"
    code = document.get("exit_code")
    if document.get("not_traced") and code in (0, 5):
        return "NOT PROVEN", "warning"
    if code:
        return "FAILED", "bad"
    return ("HEALTHY", "good") if "events" not in document else ("FINISHED", "good")


def told(diagnoses: Sequence[Diagnosis], sources: Sequence[Mapping[str, Any]]) -> list[Told]:
    """The first diagnoses in full."""
    return [_told(d, sources) for d in diagnoses[:MOST_TOLD]]


def _told(d: Diagnosis, sources: Sequence[Mapping[str, Any]]) -> Told:
    subject = ""
    if d.call is not None:
        on = f" on {group_text(d.group)}" if d.group is not None and d.call.op not in ("send", "recv") else ""
        subject = f"{d.call if on else d.call.op}{on}"
    after = ""
    if d.detected_after_s is not None:
        after = f"after {format_time(d.detected_after_s)}" if d.detected_after_s else "at once"
    one = Told(
        verdict(d), d.kind.label, ranks_text(d.culprits), subject, after, d.explanation, d.suggestion, _waiters(d)
    )
    culprits = {rank: f"{ranks_text([rank])}" for rank in d.culprits}
    at = {rank: place(site, function=True) for rank, site in d.sites.items()}
    merged = sorted(merge_equal(at), key=lambda m: (culprits.keys().isdisjoint(m[0]), m[0]))
    one.sites = [f"{ranks_text(ranks)}: {where}" for ranks, where in merged[:MOST_WAITERS]]
    one.excerpts = excerpts(d, sources)
    return one


def excerpts(d: Diagnosis, sources: Sequence[Mapping[str, Any]]) -> list[Excerpt]:
    """Of the culprits' places first."""
    wanted: dict[tuple[str, int], list[int]] = {}
    accused = set(d.culprits)
    for rank in (*d.culprits, *(rank for rank in d.sites if rank not in accused)):
        if (site := d.sites.get(rank)) is not None:
            wanted.setdefault((site.file, site.line), []).append(rank)
    known = {(str(s["file"]), int(s["line"])): s for s in sources}
    found = []
    for (file, line), ranks in wanted.items():
        source = known.get((file, line))
        if source is None:
            continue
        first = int(source["first"])
        rows = [(first + n, str(text), first + n == line) for n, text in enumerate(source["lines"])]
        where = place(Site(file, line, str(source["function"])), function=True)
        found.append(Excerpt(where, ranks_text(ranks), rows))
        if len(found) == MOST_EXCERPTS:
            break
    return found


def _waiters(d: Diagnosis) -> list[str]:
    """Who waits where, the largest group first."""
    texts = {}
    for rank, at in d.stuck.items():
        number = f" #{at.seq}" if at.seq is not None and at.op not in ("send", "recv") else ""
        on = f" on {at.group}" if number and at.group else ""
        where = place(Site(at.file, at.line or 0, "")) if at.file else "an unknown line"
        texts[rank] = f"{at.op}{number}{on}, {where}"
    merged = sorted(merge_equal(texts), key=lambda m: (-len(m[0]), m[0]))
    lines = [f"{ranks_text(ranks)} {are(ranks, 'waits', 'wait')} in {text}" for ranks, text in merged[:MOST_WAITERS]]
    if len(merged) > MOST_WAITERS:
        lines.append(f"... and {len(merged) - MOST_WAITERS:,} more places")
    return lines


def folded(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """What is not told in full: a line for each kind and place."""
    alike: dict[tuple[str, str, str], list[Diagnosis]] = {}
    for d in diagnoses[MOST_TOLD:]:
        site = next((d.sites[r] for r in d.culprits if r in d.sites), None)
        alike.setdefault((verdict(d), d.kind.label, "" if site is None else place(site)), []).append(d)
    lines = []
    for (word, kind, where), found in list(alike.items())[:MOST_FOLDED]:
        ranks = ranks_text({rank for d in found for rank in d.culprits})
        times = f" ({len(found):,} different)" if len(found) > 1 else ""
        lines.append("  ".join(part for part in (word, kind, ranks, where) if part) + times)
    if len(alike) > MOST_FOLDED:
        lines.append(f"... of {len(alike) - MOST_FOLDED:,} more kinds or places; the JSON has all")
    return lines
