"""Collects the data of a run that its HTML report draws, as plain JSON data of bounded size.

The input is a `Material`: a simulated run, or the flight records of a real one. The result is `picture` of a report:

- `end_s`; `replay`, the command that shows the run again; `text`, the report as a terminal shows it
- `lanes[]` (`ranks`, `name`), `slices[]`, `calls[]`: a timeline with one lane for each rank, or, of many ranks, for all
  ranks that do the same. A slice is `[lane, kind, from_s, to_s, text, call]`; *kind* is compute, communication, waiting
  (for the other members), failed, or open: a call that never ended. *call* is an index of `calls`, or null. Adjacent
  short slices are merged, and the text has their number.
- `waits[]`: `ranks, needs, any_of, what, where`: the wait-for graph with equal waits merged
- `stacks[]`, `sources[]`, `links` over time
- `faults[]`: from, to or null, text
- `steps[]`: `[from_s, to_s, text]` of the training steps and checkpoints of one rank
- `left_out`: for each part with too much data, a sentence that says what is left out

Times are seconds since the run began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from distsim.debug.diagnosis.waits.assess_proof import lateness, patience
from distsim.debug.diagnosis.waits.wait_graph import RemoteNeed, WaitGraph
from distsim.debug.matching.index import EvidenceIndex, rank_of
from distsim.debug.messages import call_text, group_name, shape_of_call, site_text
from distsim.debug.records import CallRecord, CallWait, Evidence, Phase, Site, State, StoreWait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.render import render_diagnoses, stack_of
from distsim.debug.report.stack_tree import StackNode, blank_addresses, merge_stacks
from distsim.text.ranks import format_ranks
from distsim.text.units import plural

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import GpuTrack
    from distsim.sim.outcome import Outcome

WIDTH = 110
MOST_NEEDS = 64
"""Largest number of waits that are drawn in the wait-for graph."""
Fault = tuple[float, float | None, str]
"""Start, end (None: until the end of the run) and description of an injected fault, in seconds."""
MOST_LANES = 64
MOST_SLICES = 9_000
"""Maximum number of slices of all lanes, which a browser still moves smoothly."""
FINEST = 2_000
"""Slices shorter than this fraction of the run are merged with neighbours of the same kind."""
MOST_FRAMES_OF_CALL = 12

Slice = tuple[str, float, float, str, CallRecord | None]


def picture(material: Material, replay: str = "") -> dict[str, Any]:
    """Return the content of all drawings as JSON data. *replay* is the command that repeats the run."""
    result: dict[str, Any] = {"end_s": material.end_s, "replay": replay, "left_out": {}}
    result.update(lanes(material, result["left_out"]))
    result["waits"] = _waits(material, result["left_out"])
    result["stacks"] = stacks(material)
    result["links"] = usage(material)
    result["faults"] = [list(fault) for fault in material.faults]
    result["steps"] = [list(step) for step in material.steps]
    result["sources"] = sources(material)
    if material.diagnoses:
        text = render_diagnoses(material.diagnoses, material.evidence).plain(WIDTH)
        result["text"] = blank_addresses(text)
    return result


def _waits(material: Material, left_out: dict[str, str]) -> list[dict[str, Any]]:
    if material.evidence is None or not (material.diagnoses or material.snapshot):
        return []
    edges = wait_edges(material.evidence)
    if len(edges) > MOST_NEEDS:
        left_out["waits"] = f"{MOST_NEEDS} of {len(edges):,} different waits are drawn."
    return [asdict(edge) for edge in edges[:MOST_NEEDS]]


MOST_LINKS = 48


def usage(material: Material) -> dict[str, Any] | None:
    """Return the usage of links over time; None if there are no samples (a real run) or no traffic."""
    samples: dict[int, list[tuple[float, float]]] = {}
    for time_s, index, fraction in material.link_samples:
        samples.setdefault(index, []).append((time_s, fraction))
    if not samples:
        return None
    times = sorted({time_s for changes in samples.values() for time_s, _ in changes})
    rows: list[tuple[float, int, list[float]]] = []
    for index, changes in samples.items():
        values = dict(changes)
        row: list[float] = []
        now = 0.0
        for time_s in times:
            now = values.get(time_s, now)
            row.append(now)
        rows.append((-sum(row), index, row))
    rows.sort(key=lambda one: one[:2])
    alike: dict[tuple[float, ...], list[str]] = {}
    for _, index, row in rows:
        alike.setdefault(tuple(round(value, 3) for value in row), []).append(material.link_names[index])
    chosen = list(alike.items())[:MOST_LINKS]
    return {
        "names": [names[0] + (f" (and {len(names) - 1} alike)" if names[1:] else "") for _, names in chosen],
        "times_s": [round(time_s, 9) for time_s in times],
        "rows": [list(row) for row, _ in chosen],
    }


MOST_FRAMES = 600


def stacks(material: Material) -> list[list[Any]]:
    """Return the merged stacks of ranks; empty if no rank is stuck."""
    evidence = material.evidence
    if evidence is None or not (material.diagnoses or material.snapshot):
        return []
    stack_by_rank = {rank: stack for rank in evidence.ranks if (stack := stack_of(rank, evidence))}
    accused = {rank for d in material.diagnoses if d.exit_code for rank in d.culprits}
    rows: list[list[Any]] = []
    todo: list[tuple[StackNode, int | None]] = [(node, None) for node in merge_stacks(stack_by_rank).ordered()]
    while todo and len(rows) < MOST_FRAMES:  # breadth first: what is cut off lies innermost
        node, parent = todo.pop(0)
        assert node.site is not None
        rows.append(
            [
                node.site.function,
                site_text(node.site, through=False),
                parent,
                format_ranks(node.ranks),
                len(node.ranks),
                accused.issuperset(node.ranks),
            ]
        )
        todo += [(child, len(rows) - 1) for child in node.ordered()]
    return rows


BEFORE, AFTER = 3, 3
MOST_SITES = 40
LONGEST = 300
"""Largest number of characters in a line."""


def sources(material: Material) -> list[dict[str, Any]]:
    """Return the source excerpts, each once, those of the culprits first."""
    texts: Mapping[str, str] = {} if material.evidence is None else material.evidence.sources
    ranks: dict[Site, set[int]] = {}
    for d in material.diagnoses:
        accused = set(d.culprits)
        for rank in (*d.culprits, *(r for r in d.sites if r not in accused)):
            if (site := d.sites.get(rank)) is not None and (site in ranks or len(ranks) < MOST_SITES):
                ranks.setdefault(site, set()).add(rank)
    result = []
    for site, at in ranks.items():
        lines = texts.get(site.file, "").splitlines()
        if not 0 < site.line <= len(lines):
            continue
        first = max(1, min(site.line - BEFORE + 1, len(lines) - BEFORE - AFTER + 1))
        shown = [line[:LONGEST] for line in lines[first - 1 : first - 1 + BEFORE + AFTER]]
        result.append(
            {
                "file": site.file,
                "line": site.line,
                "function": site.function,
                "ranks": sorted(at),
                "first": first,
                "lines": shown,
            }
        )
    return result


@dataclass(slots=True)
class Material:
    """Data of a run from which its picture is made. Times are seconds since the run began."""

    records: Mapping[int, Sequence[CallRecord]]
    """Calls by rank, in program order."""
    end_s: float
    diagnoses: Sequence[Diagnosis] = ()
    evidence: Evidence | None = None
    compute: Mapping[int, Sequence[tuple[float, float, str]]] = field(default_factory=dict)
    gpus: Mapping[int, Sequence[GpuTrack]] = field(default_factory=dict)
    alike: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """For each traced rank that stands for equal ranks: all of these ranks."""
    link_names: Sequence[str] = ()
    link_samples: Sequence[tuple[float, int, float]] = ()
    faults: Sequence[Fault] = ()
    steps: Sequence[tuple[float, float, str]] = ()
    """Start, end and name of the training steps and checkpoints of one rank."""
    snapshot: bool = False
    """Whether the job is still running: the ranks that wait are shown although no rank may be at fault."""


def of_outcome(outcome: Outcome, faults: Sequence[Fault] = ()) -> Material:
    """Collect the picture of a simulated run."""
    alike = {} if outcome.training is None else {rank.rank: rank.like for rank in outcome.training.ranks}
    return Material(
        records=outcome.records,
        end_s=outcome.virtual_time_s,
        diagnoses=outcome.diagnoses,
        evidence=outcome.evidence,
        compute=outcome.compute,
        gpus=outcome.gpu_tracks,
        alike={rank: like for rank, like in alike.items() if len(like) > 1},
        link_names=[link.name for link in outcome.links],
        link_samples=outcome.link_samples,
        faults=faults,
        steps=_steps(outcome),
    )


def _steps(outcome: Outcome) -> list[tuple[float, float, str]]:
    """Return the training steps of the first rank that made any, and the checkpoints that held steps up."""
    tracks = [track for rank in sorted(outcome.gpu_tracks) for track in outcome.gpu_tracks[rank] if track.steps]
    on_cpu = outcome.step_ends[min(outcome.step_ends)] if outcome.step_ends else []
    ends_s = [end_s for _, end_s in tracks[0].steps] if tracks else on_cpu
    steps = [
        (begin_s, end_s, f"step {number}") for number, (begin_s, end_s) in enumerate(pairwise([0.0, *ends_s]), start=1)
    ]
    spans = [] if outcome.training is None else outcome.training.saved.spans
    return steps + [(begin_s, end_s, "checkpoint") for begin_s, end_s in spans]


def of_records(diagnoses: Sequence[Diagnosis], evidence: Evidence, snapshot: bool = False) -> Material:
    """Collect the picture of a real run, alive or dead."""
    calls = (record for records in evidence.records.values() for record in records)
    last_s = max((max(c.issued_s, c.completed_s or 0.0) for c in calls), default=0.0)
    return Material(evidence.records, max(evidence.now_s, last_s), diagnoses, evidence, snapshot=snapshot)


def lanes(material: Material, left_out: dict[str, str]) -> dict[str, Any]:
    """Return the keys `lanes`, `slices` and `calls` of the picture."""
    ranks = sorted({*material.records, *material.compute, *(r for r in material.gpus if material.gpus.get(r))})
    groups = [[rank] for rank in ranks]
    if len(ranks) > MOST_LANES:
        groups = _alike(material, ranks)
        left_out["lanes"] = (
            f"One lane for ranks that make the same calls: {plural(len(groups), 'kind')} of {len(ranks):,} ranks; "
        )
        left_out["lanes"] += "the times are those of the lowest rank."
    if len(groups) > MOST_LANES:
        accused = {rank for d in material.diagnoses for rank in d.culprits}
        order = sorted(groups, key=lambda g: (accused.isdisjoint(g), -len(g), g[0]))
        rest = sum(len(group) for group in order[MOST_LANES:])
        groups = sorted(order[:MOST_LANES])
        left_out["lanes"] += f" Left out: {plural(rest, 'rank')} of {plural(len(order) - MOST_LANES, 'more kind')}."
    slices: list[list[Any]] = []
    calls: list[dict[str, Any]] = []
    numbers: dict[int, int] = {}
    met = _meetings(material)
    each = max(20, MOST_SLICES // max(1, len(groups)))
    for lane, group in enumerate(groups):
        for kind, begin, end, text, call in thinned(list(_slices(material, group[0], met)), material.end_s, each):
            number = None
            if call is not None:
                if id(call) not in numbers:
                    numbers[id(call)] = len(calls)
                    calls.append(_call(call))
                number = numbers[id(call)]
            slices.append([lane, kind, _s(begin), _s(end), text, number])
    stands = [sum(len(material.alike.get(rank, (rank,))) - 1 for rank in group) for group in groups]
    return {
        "lanes": [
            {"ranks": group, "name": _name(group) + (f", for {others:,} that did not run" if others else "")}
            for group, others in zip(groups, stands, strict=True)
        ],
        "slices": slices,
        "calls": calls,
    }


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = format_ranks(ranks)
    return f"ranks {runs}" if len(runs) <= 24 else f"{len(ranks):,} ranks from {ranks[0]}"


def _alike(material: Material, ranks: Sequence[int]) -> list[list[int]]:
    """Group ranks by their calls, lines and progress."""
    ranks_by_key: dict[tuple[object, ...], list[int]] = {}
    states = {} if material.evidence is None else material.evidence.ranks
    for rank in ranks:
        state = states.get(rank)
        calls = (
            (r.op, r.nbytes, r.state, None if r.site is None else (r.site.file, r.site.line))
            for r in material.records.get(rank, ())
        )
        key = (hash(tuple(calls)), None if state is None else (state.phase, state.site))
        ranks_by_key.setdefault(key, []).append(rank)
    return sorted(ranks_by_key.values())


Met = dict[tuple[str, int, str], float]


def _meetings(material: Material) -> Met:
    """Return when the last member reached each complete collective, which a guard does not record."""
    came: dict[tuple[str, int, str], list[float]] = {}
    sizes: dict[tuple[str, int, str], int] = {}
    for records in material.records.values():
        for record in records:
            if record.started_s is None and not record.is_p2p and not record.rejected:
                key = (record.group.name, record.seq, record.op)
                came.setdefault(key, []).append(record.issued_s)
                sizes[key] = len(record.members)
    return {key: max(times) for key, times in came.items() if len(times) >= sizes[key]}


def _slices(material: Material, rank: int, met: Met) -> Iterable[Slice]:
    for begin, end, label in material.compute.get(rank, ()):
        yield "compute", begin, end, label, None
    on_gpu: set[int] = set()
    for track in material.gpus.get(rank) or ():
        for piece in track.slices:
            if not piece.records:
                yield "compute", piece.begun_s, piece.ended_s, piece.name, None
                continue
            on_gpu.update(id(record) for record in piece.records)
            first = piece.records[0]
            begun = min((r.started_s for r in piece.records if r.started_s is not None), default=piece.begun_s)
            yield from _call_slices(first, piece.begun_s, min(max(begun, piece.begun_s), piece.ended_s), piece.ended_s)
    for record in material.records.get(rank, ()):
        if record.rejected or id(record) in on_gpu:
            continue
        if not record.done:
            started = record.issued_s if record.started_s is None else record.started_s
            if started > record.issued_s:
                yield "waiting", record.issued_s, started, _text(record), record
            yield "open", started, max(started, material.end_s), _text(record), record
        else:
            # Some dumps know that a call has ended, and not when.
            ended = record.issued_s if record.completed_s is None else record.completed_s
            came = met.get((record.group.name, record.seq, record.op), record.issued_s)
            all_there = came if record.started_s is None else record.started_s
            yield from _call_slices(record, record.issued_s, min(all_there, ended), ended)


def _call_slices(record: CallRecord, issued_s: float, started_s: float, completed_s: float) -> Iterable[Slice]:
    text = _text(record)
    if started_s > issued_s:
        yield "waiting", issued_s, started_s, text, record
    if completed_s > started_s or started_s <= issued_s:
        kind = "failed" if record.state is State.FAILED else "communication"
        yield kind, max(started_s, issued_s), completed_s, text, record


def _text(record: CallRecord) -> str:
    return call_text(record) if record.is_p2p else f"{call_text(record)} on {group_name(record.group.label)}"


def thinned(slices: list[Slice], end_s: float, most: int) -> list[Slice]:
    """Merge short neighbours of one kind, and ever longer ones, until at most *most* slices are left."""
    slices.sort(key=lambda piece: piece[1:3])
    width = end_s / FINEST
    while len(slices) > most:
        last: dict[str, int] = {}
        counts: dict[int, int] = {}
        merged: list[Slice] = []
        for piece in slices:
            kind, begin, end, _, _ = piece
            at = last.get(kind)
            if at is not None and kind != "open" and end - begin < width and begin - merged[at][2] < width:
                counts[at] = counts.get(at, 1) + 1
                merged[at] = (kind, merged[at][1], max(end, merged[at][2]), merged[at][3], merged[at][4])
                continue
            last[kind] = len(merged)
            merged.append(piece)
        slices = [
            (kind, begin, end, f"{text.partition(' … ')[0]} … and {counts[i] - 1:,} more", call)
            if i in counts
            else piece
            for i, piece in enumerate(merged)
            for kind, begin, end, text, call in (piece,)
        ]
        width *= 2
        if width > 4 * end_s:
            break
    return slices[:most]


def _call(record: CallRecord) -> dict[str, Any]:
    """Return the details of a call that a click shows."""
    facts: dict[str, Any] = {
        "rank": record.rank,
        "call": _text(record),
        "what": shape_of_call(record),
        "bytes": record.nbytes,
        "state": record.state.value,
        "issued_s": _s(record.issued_s),
        "started_s": None if record.started_s is None else _s(record.started_s),
        "completed_s": None if record.completed_s is None else _s(record.completed_s),
        "line": None if record.site is None else site_text(record.site, function=True),
        "stack": [site_text(site, function=True) for site in record.stack[:MOST_FRAMES_OF_CALL]],
    }
    if record.thread != "MainThread":
        facts["thread"] = record.thread
    if record.is_async:
        facts["async"] = "waited for" if record.waited else "not waited for"
    if record.error:
        facts["error"] = record.error[:500]
    return facts


def _s(seconds: float) -> float:
    """Round *seconds* to nanoseconds."""
    return round(seconds, 9)


@dataclass(slots=True)
class WaitEdge:
    """Ranks that wait in a call at a line for all of *needs*, or for any one of them."""

    ranks: list[int]
    needs: tuple[int, ...]
    """Ranks that are waited for; a rank stands also for its threads that serve remote calls."""
    any_of: bool
    what: str
    where: str


def wait_edges(evidence: Evidence) -> list[WaitEdge]:
    """Return the waits of all ranks that cannot continue by themselves."""
    index = EvidenceIndex(evidence)
    moving, _ = patience(index, lateness(index))
    graph = WaitGraph(index, moving)
    merged: dict[tuple[object, ...], WaitEdge] = {}
    ranks_of: dict[int, tuple[int, ...]] = {}
    for actor in graph.stuck:
        rank = rank_of(actor)
        state = index.states[rank]
        serves = index.remote.record(actor) is not None
        if not serves and (actor != rank or state.phase is not Phase.BLOCKED):
            continue
        for need in graph.needs.get(actor, ()):
            need_text, where = _said(need, state.site)
            key = (need_text, where, id(need.ranks) if isinstance(need.wait, CallWait) else need.ranks, need.any_of)
            if id(need.ranks) not in ranks_of:
                ranks_of[id(need.ranks)] = tuple(dict.fromkeys(map(rank_of, need.ranks)))
            needs = ranks_of[id(need.ranks)]
            edge = merged.setdefault(key, WaitEdge([], needs, need.any_of, need_text, where))
            if rank not in edge.ranks[-1:]:  # a thread that serves calls is its rank's
                edge.ranks.append(rank)
    return list(merged.values())


def _said(need: RemoteNeed, site: Site | None) -> tuple[str, str]:
    wait = need.wait
    if isinstance(wait, CallWait):
        call = wait.record
        on = "" if call.is_of_two else f" on {group_name(call.group.label)}"
        return call_text(call) + on, "" if call.site is None else site_text(call.site, through=False)
    where = "" if site is None else site_text(site, through=False)
    if isinstance(wait, StoreWait):
        return wait.purpose or "a key of the store", where
    return wait.what, where
