"""Asynchronous calls whose handle nobody waited for."""

from __future__ import annotations

from distsim.debug.explain import are, ranks_text
from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, Evidence, Finding, Phase, Site

__all__ = ["unwaited"]


def unwaited(evidence: Evidence) -> list[Finding]:
    """One finding for each line that left handles behind on ranks that have ended.

    Only for evidence whose `CallRecord.waited` is kept (a Flight Recorder dump does not tell).
    The results of such a call may be read before they are there, and its errors are never seen.
    """
    lines: dict[tuple[str, Site | None], list[CallRecord]] = {}
    for rank, records in sorted(evidence.records.items()):
        state = evidence.ranks.get(rank)
        if state is None or state.phase not in (Phase.FINISHED, Phase.EXITED):
            continue
        for record in records:
            if record.is_async and not record.waited:
                lines.setdefault((record.op, record.site), []).append(record)
    found = []
    for (op, site), left in lines.items():
        ranks = tuple(sorted({record.rank for record in left}))
        each = sum(record.rank == ranks[0] for record in left)
        calls = f"{each} {op} call{'s' if each != 1 else ''}"
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
