"""Asynchronous calls whose handle nobody waited for."""

from __future__ import annotations

from distsim.debug.messages.phrases import are, ranks_text
from distsim.debug.records import CallRecord, Evidence, Finding, Phase, Site
from distsim.debug.records.call_log import LEAST_KEPT
from distsim.debug.records.kinds import Kind

__all__ = ["unwaited"]


def unwaited(evidence: Evidence, *, written_out: bool = False) -> list[Finding]:
    """One finding for each line that left handles behind on ranks that have ended; with *written_out* only
    lines that name the call: torch's own (DDP's, FSDP's) keep handles that a guard does not see waited for.

    Only for evidence whose `CallRecord.waited` is kept (a Flight Recorder dump does not tell).
    The results of such a call may be read before they are there, and its errors are never seen.
    """
    lines: dict[tuple[str, Site | None], list[CallRecord]] = {}
    for rank, records in sorted(evidence.records.items()):
        state = evidence.ranks.get(rank)
        if state is None or state.phase not in (Phase.FINISHED, Phase.EXITED):
            continue
        for record in records:
            if record.remote is not None or record.rejected:
                continue  # who sends an order need not wait for its end; a refused call has no handle
            if record.is_async and not record.waited and not (written_out and not _named(record, evidence)):
                lines.setdefault((record.op, record.site), []).append(record)
    found = []
    for (op, site), left in lines.items():
        ranks = tuple(sorted({record.rank for record in left}))
        each = sum(record.rank == ranks[0] for record in left)
        least = "at least " if each >= LEAST_KEPT and ranks[0] in evidence.cut else ""  # only the newest are on record
        calls = f"{least}{each} {op} call{'s' if each != 1 else ''}"
        found.append(
            Finding(
                Kind.ASYNC_NEVER_WAITED,
                ranks,
                f"{ranks_text(ranks)} {are(ranks, 'has', 'each have')} {calls} that nobody waited for",
                group=left[0].group,
                call=left[-1],
                site=site,
            )
        )
    return found


def _named(record: CallRecord, evidence: Evidence) -> bool:
    lines = evidence.sources.get(record.site.file, "").splitlines() if record.site is not None else []
    text = lines[record.site.line - 1] if record.site is not None and record.site.line <= len(lines) else ""
    return any(word in text for word in (record.op, f"i{record.op}", "async_op"))
