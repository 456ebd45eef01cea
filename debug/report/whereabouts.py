"""Ctrl-C on a job: nobody is to blame, but where the ranks were is what its user wants to know."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.records import CallRecord, Evidence, State
from distsim.debug.report.stack_tree import merge_equal
from distsim.debug.words.phrases import capital, group_text, numbered, place, ranks_text, several

__all__ = ["MARKER", "MOST_LINES", "where_ranks_were"]

MARKER = "interrupted.json"
"""The launcher leaves it in the folder of the rings before it ends the ranks."""
MOST_LINES = 8


def where_ranks_were(evidence: Evidence) -> list[str]:
    """A line for all ranks that were in, or had last ended, the same call."""
    texts = {rank: _where(evidence.records.get(rank) or ()) for rank in sorted(evidence.ranks)}
    lines = [f"{capital(ranks_text(ranks))} {several(text, ranks)}." for ranks, text in merge_equal(texts)]
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES
        lines[MOST_LINES:] = [f"... and {left} more place{'s' * (left > 1)}"]
    return lines


def _where(calls: Sequence[CallRecord]) -> str:
    if not calls:
        return "had made no call yet"
    last = max(calls, key=lambda call: call.issued_s)
    on = "" if last.is_p2p else f" on {group_text(last.group)}"
    verb = "was past" if last.state is State.COMPLETED else "was in"  # the interrupt itself made it fail
    return f"{verb} {numbered(last)}{on}, at {place(last.site, function=True)}"
