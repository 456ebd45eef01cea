"""Text of a `CollectiveMismatch`: the verdict of the monitor and the simulator, from the readable rings."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.diagnosis.contradiction import explanation, suggestion
from distsim.debug.divergence.divergence import Divergence
from distsim.debug.divergence.find import find_divergences
from distsim.debug.evidence.rank_state import call_records, sources
from distsim.debug.matching.agreement import Mismatch
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.messages import call_text, site_text
from distsim.debug.records import CallRecord, Evidence, State
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader
from distsim.text.ranks import of_ranks


def refusal_text(mismatch: Mismatch, met: Sequence[CallRecord], rank: int, readers: Sequence[RingReader]) -> str:
    """Return the text that *rank* raises about calls that met and disagree.

    Args:
        mismatch: Difference between the calls.
        met: The calls of every member that could be read.
        rank: The rank that raises.
        readers: Rings of the members on this host. Of other members only the call is known.
    """
    divergence = _divergence(mismatch, met, readers)
    on = f"on group {mismatch.group.label} ({of_ranks(mismatch.group.ranks)})"
    if divergence is not None and (raised := _raised(divergence, met, readers)):
        return f"rank_raised: the ranks made different calls as #{mismatch.seq} {on}, and none was sent. {raised}"
    if divergence is not None and len({(record.op, record.site) for record in met}) > 1:
        return (
            f"{divergence.kind.value}: the ranks made different calls as #{mismatch.seq} {on}, and none was sent. "
            f"{explanation(divergence)} {suggestion(divergence)}"
        )
    calls: dict[str, list[int]] = {}
    for record in sorted(met, key=lambda record: record.rank):
        where = f" at {record.site}" if record.site is not None else ""
        calls.setdefault(f"{mismatch.actual.get(record.rank, mismatch.expected)}{where}", []).append(record.rank)
    sides = "; ".join(f"{of_ranks(ranks)}: {call}" for call, ranks in calls.items())
    mine = next((record for record in met if record.rank == rank), None)
    here = f"{mine.op if mine is not None else 'call'} #{mismatch.seq}"
    if divergence is not None:
        return f"{divergence.kind.value}: {here} {on} did not go out: {sides}. {suggestion(divergence)}"
    cure = "Make them agree." if mismatch.tie else f"Make {of_ranks(mismatch.culprits)} agree with the others."
    return f"{mismatch.kind.value}: {here} {on} did not go out: {sides}. {cure}"


def _raised(divergence: Divergence, met: Sequence[CallRecord], readers: Sequence[RingReader]) -> str:
    """Return the text of the exception that made the culprits diverge, if there is one."""
    texts = []
    for record in met:
        reader = next((reader for reader in readers if reader.number == record.rank), None)
        if record.fleeing and record.rank in divergence.culprits and reader is not None:
            error = reader.raised(rings.W_PENDING).error or "an exception"
            texts.append(
                f"Rank {record.rank} raised {error}, and on the way out it called {call_text(record)} at "
                f"{site_text(record.site)} (a finally or except block)."
            )
    return " ".join(texts)


def _divergence(mismatch: Mismatch, met: Sequence[CallRecord], readers: Sequence[RingReader]) -> Divergence | None:
    """Return the divergence that the calls show so far, or None."""
    here = {reader.number for reader in readers}
    calls = call_records(readers, dict.fromkeys(here, 0))
    elsewhere = {record.rank: [record] for record in met if record.rank not in here}
    evidence = Evidence(
        world_size=max([*mismatch.group.ranks, *here]) + 1,
        ranks={},
        records={**calls, **elsewhere},
        sources=sources(calls.values()),
        cut=frozenset(elsewhere),
    )
    index = EvidenceIndex(evidence)
    log = next((log for log in map(index.group_log, met) if log is not None), None)
    divergence = next(reversed(find_divergences(index, log)), None) if log is not None else None
    if log is None or divergence is None or divergence.seq == mismatch.seq:
        return divergence
    if any(record.state is State.FAILED for record in log.meetings[divergence.seq].values()):
        return None  # an earlier call that was refused: the program has caught that and gone on
    return divergence
