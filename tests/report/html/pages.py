"""Pages for tests: hangs made by hand, and what a reader of the file finds in it."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser
from typing import Any

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.report.html.page import html, run_page
from distsim.report.html.reports import records_document
from tests.debug.builders import all_reduce, group, play, send

__all__ = ["Seen", "circle", "document", "many_ranks", "seen_of", "unpacked"]

SOURCE = "\n".join(f"statement_{number}()" for number in range(1, 40))


class Seen(HTMLParser):
    """Texts, tags and attributes of a page; the data in it, unpacked."""

    VOID = ("meta", "link", "img", "br", "input", "path", "rect")

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.data: dict[str, str] = {}
        self.links: list[str] = []
        self._inside: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self._inside.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, name = self._inside[-1] if self._inside else ("", "")
        if tag == "script":
            self.data[name] = data
        elif tag != "style":
            self.texts.append(data)


def seen_of(document: dict[str, Any]) -> Seen:
    """The page of one report, read."""
    return Seen(html(run_page(document)))


def unpacked(seen: Seen) -> dict[str, Any]:
    """What the page's script gets."""
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(seen.data["data"])))
    return found


def document(evidence: Evidence, replay: str = "distsim diagnose DIR") -> dict[str, Any]:
    """The report of what is left of a run."""
    return records_document(diagnose(evidence), evidence, replay)


def circle(tp: str = "tp", file_text: str = SOURCE) -> Evidence:
    """Ranks 0 and 1 wait for each other in two groups; rank 2's send meets no receive; rank 3 ends."""
    one, other = group(0, 1, name="1", desc=tp), group(0, 1, name="2", desc="dp")

    def steps(rank: int) -> list[Any]:
        if rank == 2:
            return [all_reduce(3), send(3, 8, tag=7)]
        if rank == 3:
            return [all_reduce(3)]
        first, second = (one, other) if rank == 0 else (other, one)
        return [all_reduce(3), all_reduce(5, first), all_reduce(6, second)]

    evidence = play(4, steps)
    evidence.sources = {"train.py": file_text}
    for records in evidence.records.values():
        for record in records:
            if record.done:
                record.started_s, record.completed_s = record.issued_s + 0.001, record.issued_s + 0.002
    return evidence


def many_ranks(size: int, calls: int) -> Evidence:
    """One rank of *size* stays in its loader after *calls* calls; the others wait for it."""
    world = Group("0", "default_pg", tuple(range(size)))
    site, load = Site("train.py", 5, "step"), Site("data.py", 9, "load")
    records: dict[int, list[CallRecord]] = {}
    states = {}
    for rank in range(size):
        made = []
        for seq in range(1, calls + 1):
            record = CallRecord(
                rank, world, seq, "all_reduce", ((4,),), dtypes=("float32",), reduce_op="SUM", nbytes=16, site=site,
                stack=(site, Site("train.py", 20, "main")), issued_s=seq * 0.01, index=seq - 1,
            )  # fmt: skip
            if seq < calls:
                record.started_s, record.completed_s = seq * 0.01 + 0.001, seq * 0.01 + 0.002
                record.state = State.COMPLETED
            made.append(record)
        stuck = rank == 3
        records[rank] = made[:-1] if stuck else made
        phase = Phase.HOST_STUCK if stuck else Phase.BLOCKED
        waits = () if stuck else (CallWait(made[-1]),)
        at = load if stuck else site
        states[rank] = RankState(rank, phase, waits, site=at, stack=(at, Site("train.py", 20, "main")))
    return Evidence(size, states, records, now_s=1.0, sources={"train.py": SOURCE, "data.py": SOURCE})
