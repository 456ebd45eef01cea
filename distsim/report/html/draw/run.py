"""Prepares one run for the template: its verdict, then its parts in the order of the page.

The verdict names the fault, with the source lines around it. A part without a figure is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.diagnosis.silent.facts import SilentFinding
from distsim.debug.messages import are, group_name, group_text, ranks_text, site_text
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis, diagnoses_from_json
from distsim.debug.report.render import verdict
from distsim.debug.report.stack_tree import merge_equal
from distsim.report.html.draw.drawing import cluster, heat_map, wait_graph
from distsim.report.html.draw.plots import ACCUSED, COMPUTE, GREY, Figure, figure, label
from distsim.report.html.draw.tables import PageTable, of_run
from distsim.report.html.draw.timeline import timeline
from distsim.report.html.draw.training import Figures, memory_plot, training_figures
from distsim.text.units import format_time

BARE = "This report has no records to draw: create it with --html, or use the JSON inside such a page."
REAL_LINKS = "A real run has no samples of links; only a simulation has."

MOST_FAILURES = 20
STACKS = "The width of a frame is its number of ranks. Very narrow frames are drawn wider. Click a frame to zoom in."
FABRIC = "The colour of a line is its mean utilization. Hover over a line to see its figures."
MOST_SHOWN = 12
"""Maximum number of diagnoses that are shown completely; the others take one line for each kind and location."""
MOST_FOLDED = 100
MOST_NAMES = 8
"""Largest number of tensor names in a silent finding."""
MOST_WAITERS = 8
MOST_EXCERPTS = 4
"""Maximum number of source excerpts of one diagnosis."""


@dataclass(slots=True)
class Part:
    """A section of the page. If it has no content, *missing* says why."""

    name: str
    title: str
    hint: str = ""
    figure: Figure | None = None
    missing: str = ""


@dataclass(slots=True)
class RunParts:
    """Content of the page for one run."""

    key: str
    """Key of the run's section and figures on the page."""
    title: str
    facts: list[str]
    word: str
    mood: str
    diagnoses: list[ShownDiagnosis]
    folded: list[str]
    silent: list[ShownDiagnosis]
    """Silent findings."""
    plain: str
    replay: str
    notes: list[str]
    failures: list[dict[str, str]]
    """Dictionaries with `type`, `message`, `traceback` and `who` (the ranks)."""
    parts: list[Part]
    tables: list[PageTable]
    document: Mapping[str, Any]
    calls: Sequence[Any] = ()
    wrong: list[str] = field(default_factory=list)
    """Failed expectations of a scenario."""
    training: Figures | None = None


def run_parts(document: Mapping[str, Any], key: str = "run") -> RunParts:
    """Return all parts of a run from its report.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The document is not a report.
    """
    diagnoses = diagnoses_from_json(document)
    given = document.get("picture")
    picture: dict[str, Any] | None = given if isinstance(given, dict) and given else None
    word, mood = headline(document, diagnoses)
    return RunParts(
        key,
        str(document.get("program") or "a job"),
        _facts(document),
        word,
        mood,
        [_shown(diagnosis, picture["sources"] if picture else ()) for diagnosis in diagnoses[:MOST_SHOWN]],
        folded(diagnoses),
        [_silent(SilentFinding.from_json(one)) for one in document.get("silent") or ()],
        str(picture.get("text", "")) if picture else "",
        str(picture["replay"]) if picture else "",
        [str(note) for note in document.get("notes") or ()]
        + [str(document[n]) for n in ("inconclusive",) if n in document],
        [_failure(one) for one in list(document.get("failures") or ())[:MOST_FAILURES]],
        _parts(document, picture, diagnoses),
        of_run(document),
        document,
        picture["calls"] if picture else (),
        training=training_figures(document),
    )


def _failure(failure: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: str(failure[name]) for name in ("type", "message", "traceback")}
    return texts | {"who": ranks_text([int(rank) for rank in failure["ranks"]])}


def _facts(document: Mapping[str, Any]) -> list[str]:
    result = []
    if document.get("cluster"):
        result.append(f"on {document['cluster']}")
    if document.get("world_size"):
        result.append(f"{document['world_size']:,} ranks")
    if document.get("unseen"):
        result.append(str(document["unseen"]))
    elif others := document.get("not_traced"):
        result.append(f"{ranks_text(others)} not run: nothing is known about {'it' if len(others) == 1 else 'them'}")
    if document.get("backend"):
        result.append(f"backend {document['backend']}")
    if "seed" in document:
        result.append(f"seed {document['seed']}")
    if isinstance(document.get("virtual_time_s"), int | float):
        result.append(f"{format_time(document['virtual_time_s'])} of virtual time")
    if document.get("exit_code") is not None:
        result.append(f"exit code {document['exit_code']}")
    if document.get("software"):
        result.append(f"software assumed: {document['software']}")
    return result


def _parts(document: Mapping[str, Any], picture: dict[str, Any] | None, diagnoses: Sequence[Diagnosis]) -> list[Part]:
    left_out = picture["left_out"] if picture else {}
    real = "links" not in document
    bare = "" if picture else BARE
    memory = Part("memory", "Memory of the fullest rank during one step")
    memory.figure = memory_plot(document.get("training") or {})
    lanes = Part("lanes", "Activity of the ranks over time", str(left_out.get("lanes", "")))
    accused = {rank for d in diagnoses if d.exit_code for rank in d.culprits}
    lanes.figure = timeline(picture, accused) if picture else None
    lanes.missing = bare or "No call and no computation was recorded."
    waits = Part("waits", "Who waits for whom", str(left_out.get("waits", "")))
    waits.figure = wait_graph(picture, diagnoses)
    waits.missing = "No rank waits for another rank."
    stacks = Part("stacks", "Stacks of the ranks", STACKS)
    stacks.figure = icicle(picture) if picture else None
    stacks.missing = bare or "No stacks were taken, because no rank is stuck."
    links = Part("links", "Link utilization over time")
    links.figure = heat_map(picture) if picture else None
    links.missing = bare or (REAL_LINKS if real else "No link carried traffic.")
    fabric = Part("cluster", "Links of the cluster that carried traffic", FABRIC)
    fabric.figure = cluster(document.get("links") or ())
    fabric.missing = REAL_LINKS if real else "No link carried traffic."
    parts = [memory, lanes, waits, stacks, links, fabric]
    return [part for part in parts if part.figure or (bare and part is lanes)] or [lanes]


ROW_PX = 44
LEAST = 0.04
"""Smallest width of a frame, as a share of the whole, so that one rank among a thousand stays visible."""


def icicle(picture: dict[str, Any]) -> Figure | None:
    """Draw stacks as an icicle; None without stacks."""
    rows = picture["stacks"]
    if not rows:
        return None
    deep: list[int] = []
    for row in rows:
        deep.append(1 if row[2] is None else deep[row[2]] + 1)
    tops = sum(row[4] for row in rows if row[2] is None)
    wide = _widths(rows, LEAST * tops)
    everyone = [label(f"{tops:,} {'rank' if tops == 1 else 'ranks'}")]
    trace = {
        "type": "icicle",
        "ids": ["all", *(str(number) for number in range(len(rows)))],
        "parents": ["", *("all" if row[2] is None else str(row[2]) for row in rows)],
        "labels": everyone + [label(f"{function}  {site}") for function, site, *_ in rows],
        "values": [sum(w for w, row in zip(wide, rows, strict=True) if row[2] is None), *wide],
        "text": ["", *(label(f"{'rank' if row[4] == 1 else 'ranks'} {row[3]}") for row in rows)],
        "branchvalues": "total",
        "sort": False,
        "tiling": {"orientation": "v", "pad": 1},
        "textinfo": "label+text",
        "hovertemplate": "%{label}<br>%{text}<extra></extra>",
        "marker": {"colors": [GREY, *(ACCUSED if row[5] else COMPUTE for row in rows)]},
        "pathbar": {"visible": False},
        "leaf": {"opacity": 1},
    }
    return figure([trace], 40 + ROW_PX * (1 + max(deep)), "", margin={"l": 8, "r": 8, "t": 8, "b": 8})


def _widths(rows: list[Any], least: float) -> list[float]:
    """Return the widths of stack frames by number of ranks; a minimum width keeps single ranks visible, with their
    parents."""
    inside = [0.0] * len(rows)
    result = [0.0] * len(rows)
    for number in range(len(rows) - 1, -1, -1):  # a frame comes after the one that called it
        result[number] = round(max(float(rows[number][4]), least, inside[number]), 6)
        parent = rows[number][2]
        if parent is not None:
            inside[parent] += result[number]
    return result


@dataclass(slots=True)
class Excerpt:
    """Some lines of a file, one of them marked."""

    site: str
    ranks: str
    rows: list[tuple[int, str, bool]]
    """Line number, text, and whether the line is the marked one."""


@dataclass(slots=True)
class ShownDiagnosis:
    """One diagnosis or silent finding as the page shows it."""

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
    """Return the headline of the verdict, and the name of its colour: good, warning or bad."""
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
        return ("NOT PROVEN", "warning") if code else ("SAMPLE FINISHED", "good")
    if code:
        return "FAILED", "bad"
    return ("HEALTHY", "good") if "events" not in document else ("FINISHED", "good")


def _shown(d: Diagnosis, sources: Sequence[Mapping[str, Any]]) -> ShownDiagnosis:
    subject = ""
    if d.call is not None:
        on = f" on {group_text(d.group)}" if d.group is not None and d.call.op not in ("send", "recv") else ""
        subject = f"{d.call if on else d.call.op}{on}"
    after = ""
    if d.detected_after_s is not None:
        after = f"after {format_time(d.detected_after_s)}" if d.detected_after_s else "at once"
    one = ShownDiagnosis(
        verdict(d), d.kind.label, ranks_text(d.culprits), subject, after, d.explanation, d.suggestion, _waiters(d)
    )
    culprits = {rank: f"{ranks_text([rank])}" for rank in d.culprits}
    at = {rank: site_text(site, function=True) for rank, site in d.sites.items()}
    merged = sorted(merge_equal(at), key=lambda m: (culprits.keys().isdisjoint(m[0]), m[0]))
    one.sites = [f"{ranks_text(ranks)}: {where}" for ranks, where in merged[:MOST_WAITERS]]
    one.excerpts = excerpts(d, sources)
    return one


def _silent(finding: SilentFinding) -> ShownDiagnosis:
    """Return a silent finding as the page shows it."""
    names = ", ".join(finding.tensors[:MOST_NAMES])
    names += f" and {len(finding.tensors) - MOST_NAMES} more" if len(finding.tensors) > MOST_NAMES else ""
    return ShownDiagnosis(
        finding.level.value.upper(),
        finding.kind.label,
        ranks_text(finding.ranks),
        names,
        f"at step {finding.step}" if finding.step else "before the first step",
        f"{finding.explanation} {finding.evidence}".strip(),
        f"{finding.suggestion} See {finding.see}",
        [] if finding.distance is None else [f"distance: {finding.distance:.2g}"],
        [] if finding.site is None else [f"the optimizer's step: {site_text(finding.site, function=True)}"],
    )


def excerpts(d: Diagnosis, sources: Sequence[Mapping[str, Any]]) -> list[Excerpt]:
    """Return source excerpts, those of the culprits first."""
    wanted: dict[tuple[str, int], list[int]] = {}
    accused = set(d.culprits)
    for rank in (*d.culprits, *(rank for rank in d.sites if rank not in accused)):
        if (site := d.sites.get(rank)) is not None:
            wanted.setdefault((site.file, site.line), []).append(rank)
    known = {(str(s["file"]), int(s["line"])): s for s in sources}
    result = []
    for (file, line), ranks in wanted.items():
        source = known.get((file, line))
        if source is None:
            continue
        first = int(source["first"])
        rows = [(first + n, str(text), first + n == line) for n, text in enumerate(source["lines"])]
        where = site_text(Site(file, line, str(source["function"])), function=True)
        result.append(Excerpt(where, ranks_text(ranks), rows))
        if len(result) == MOST_EXCERPTS:
            break
    return result


def _waiters(d: Diagnosis) -> list[str]:
    """Return where ranks wait, the largest group first."""
    texts = {}
    for rank, at in d.stuck.items():
        number = f" #{at.seq}" if at.seq is not None and at.op not in ("send", "recv") else ""
        on = f" on {group_name(at.group)}" if number and at.group else ""
        where = site_text(Site(at.file, at.line or 0, "")) if at.file else "an unknown line"
        texts[rank] = f"{at.op}{number}{on}, {where}"
    merged = sorted(merge_equal(texts), key=lambda m: (-len(m[0]), m[0]))
    lines = [f"{ranks_text(ranks)} {are(ranks, 'waits', 'wait')} in {text}" for ranks, text in merged[:MOST_WAITERS]]
    if len(merged) > MOST_WAITERS:
        lines.append(f"... and {len(merged) - MOST_WAITERS:,} more places")
    return lines


def folded(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return one line for each kind and place that is not shown in full."""
    alike: dict[tuple[str, str, str], list[Diagnosis]] = {}
    for d in diagnoses[MOST_SHOWN:]:
        site = next((d.sites[r] for r in d.culprits if r in d.sites), None)
        alike.setdefault((verdict(d), d.kind.label, "" if site is None else site_text(site)), []).append(d)
    lines = []
    for (word, kind, where), alike_ones in list(alike.items())[:MOST_FOLDED]:
        ranks = ranks_text({rank for d in alike_ones for rank in d.culprits})
        times = f" ({len(alike_ones):,} different)" if len(alike_ones) > 1 else ""
        lines.append("  ".join(part for part in (word, kind, ranks, where) if part) + times)
    if len(alike) > MOST_FOLDED:
        lines.append(f"... of {len(alike) - MOST_FOLDED:,} more kinds or lines; the JSON has all")
    return lines
