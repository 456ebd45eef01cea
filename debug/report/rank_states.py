"""Where each rank is, for reports of interrupted runs, in which no rank is at fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from distsim.debug.messages.phrases import capital, group_text, numbered, place, ranks_text, several, state_text
from distsim.debug.records import CallRecord, Evidence, Phase, RankState, State
from distsim.debug.report.stack_tree import merge_equal

__all__ = ["MARKER", "MOST_LINES", "first_places", "sentences", "where_ranks_were", "whereabouts"]

MARKER = "interrupted.json"
"""The launcher leaves it in the folder of the rings, with the signal's name, before it ends the ranks."""
MOST_LINES = 8
UNKNOWN = "left no record here"


def whereabouts(evidence: Evidence) -> list[str]:
    """Of ranks whose state is known: one sentence for all at the same place, in the order of their first rank."""
    together: dict[str, list[int]] = {}
    for rank, state in sorted(evidence.ranks.items()):
        calls = evidence.records.get(rank, ())
        text = state_text(state, state.waits, calls[-1] if calls else None)
        together.setdefault(text, []).append(rank)
    return sentences(together)


def sentences(together: Mapping[str, Iterable[int]]) -> list[str]:
    """What the ranks that do the same do."""
    return [f"{capital(ranks_text(ranks))} {several(text, ranks)}" for text, ranks in together.items()]


def where_ranks_were(evidence: Evidence) -> list[str]:
    """A line for all ranks that were at the same line of the program, in or past the same call."""
    texts = {
        rank: UNKNOWN if rank in evidence.unseen else _where(state, evidence.records.get(rank) or ())
        for rank, state in sorted(evidence.ranks.items())
    }
    return first_places([f"{capital(ranks_text(ranks))} {several(text, ranks)}." for ranks, text in merge_equal(texts)])


def first_places(lines: Sequence[str], rest: str = "") -> list[str]:
    """The first of *lines*, a place each, and how many more there are; *rest* is what has them."""
    left = len(lines) - MOST_LINES
    if left <= 0:
        return list(lines)
    has = f" (all of them: {rest})" if rest else ""
    return [*lines[:MOST_LINES], f"... and {left} more place{'s' * (left > 1)}{has}"]


def _where(state: RankState, calls: Sequence[CallRecord]) -> str:
    on_host = state.phase in (Phase.RUNNING, Phase.HOST_STUCK, Phase.FROZEN) and state.site is not None
    if not calls:
        return (
            f"was at {place(state.site, function=True)}, before its first call" if on_host else "had made no call yet"
        )
    last = max(calls, key=lambda call: call.issued_s)
    on = "" if last.is_p2p else f" on {group_text(last.group)}"
    if last.state is State.COMPLETED and on_host:
        return f"was at {place(state.site, function=True)}, past {numbered(last)}{on} at {place(last.site)}"
    verb = "was past" if last.state is State.COMPLETED else "was in"  # the interrupt itself made it fail
    return f"{verb} {numbered(last)}{on}, at {place(last.site, function=True)}"
