"""Locations of ranks for reports that accuse none: interrupted runs, and incomplete records.

Records may show nothing wrong and still be incomplete: a rank without any is usually the dead one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from distsim.debug.messages import (
    are,
    capital,
    group_text,
    numbered,
    ranks_text,
    several,
    site_text,
    state_text,
    wait_text,
)
from distsim.debug.records import CallRecord, CallWait, Evidence, Phase, RankState, State
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.stack_tree import merge_equal

MARKER = "interrupted.json"
"""The launcher leaves it in the folder of the rings, with the signal's name, before it ends the ranks."""
MOST_LINES = 8
UNKNOWN = "left no record here"


def whereabouts(evidence: Evidence) -> list[str]:
    """Return one sentence for all ranks at the same place, in the order of their first rank."""
    together: dict[str, list[int]] = {}
    for rank, state in sorted(evidence.ranks.items()):
        calls = evidence.records.get(rank, ())
        text = state_text(state, state.waits, calls[-1] if calls else None)
        together.setdefault(text, []).append(rank)
    return sentences(together)


def sentences(together: Mapping[str, Iterable[int]]) -> list[str]:
    """Return one sentence for each text about the ranks that share it."""
    return [f"{capital(ranks_text(ranks))} {several(text, ranks)}" for text, ranks in together.items()]


def where_ranks_were(evidence: Evidence) -> list[str]:
    """Return a line for all ranks that were at the same line of the program, in or past the same call."""
    texts = {
        rank: UNKNOWN if rank in evidence.unseen else _where(state, evidence.records.get(rank) or ())
        for rank, state in sorted(evidence.ranks.items())
    }
    return first_places([f"{capital(ranks_text(ranks))} {several(text, ranks)}." for ranks, text in merge_equal(texts)])


def first_places(lines: Sequence[str], rest: str = "") -> list[str]:
    """Return the first of *lines*, and a line that counts the others; *rest* names the file that contains all."""
    left = len(lines) - MOST_LINES
    if left <= 0:
        return list(lines)
    has = f" (all of them: {rest})" if rest else ""
    return [*lines[:MOST_LINES], f"... and {left} more line{'s' * (left > 1)}{has}"]


def _where(state: RankState, calls: Sequence[CallRecord]) -> str:
    on_host = state.phase in (Phase.RUNNING, Phase.HOST_STUCK, Phase.FROZEN) and state.site is not None
    if not calls:
        return (
            f"was at {site_text(state.site, function=True)}, before its first call"
            if on_host
            else "had made no call yet"
        )
    last = max(calls, key=lambda call: call.issued_s)
    on = "" if last.is_p2p else f" on {group_text(last.group)}"
    if last.state is State.COMPLETED and on_host:
        return f"was at {site_text(state.site, function=True)}, past {numbered(last)}{on} at {site_text(last.site)}"
    verb = "was past" if last.state is State.COMPLETED else "was in"  # the interrupt itself made it fail
    return f"{verb} {numbered(last)}{on}, at {site_text(last.site, function=True)}"


@dataclass(frozen=True, slots=True)
class Inconclusive:
    """Reason why no diagnosis is possible, and advice."""

    text: str
    details: tuple[str, ...]
    """Sentences about the calls that have not completed."""
    suggestion: str

    def __str__(self) -> str:
        return " ".join([f"{capital(self.text)}.", *self.details])


def interruption(places: Sequence[str]) -> Inconclusive:
    """Return the note on a job that was ended from outside without a proven fault. *places* has its ranks'
    positions.
    """
    return Inconclusive(
        "the job was interrupted, and its ranks were ended; where they were:",
        tuple(places),
        "If the job was stuck, the stacks show where: look at the rank at another line than the others. Otherwise "
        "nothing is wrong.",
    )


def inconclusive(diagnoses: Sequence[Diagnosis], evidence: Evidence, *, dumps: bool) -> Inconclusive | None:
    """Return the note that replaces `healthy` if no rank is at fault in the records, but records of some ranks are
    missing.

    *dumps* says whether they are PyTorch's Flight Recorder dumps, and not rings.
    """
    if any(not diagnosis.is_warning for diagnosis in diagnoses):
        return None
    lost = evidence.unrecorded
    there = [rank for rank in evidence.ranks if rank not in lost]
    open_calls = _open_calls(evidence)
    if lost:
        text = (
            f"nothing is wrong in the records of {ranks_text(there)}, but {ranks_text(lost)} left none that can be read"
        )
    elif evidence.members_guessed and open_calls:
        text = (
            f"nothing is wrong in the records of {ranks_text(there)}, but some calls in them have not ended, and they "
            "do not list the other members of the group"
        )
    else:
        return None
    details = open_calls
    if lost and open_calls and evidence.members_guessed:
        details += (f"The records do not show whether {ranks_text(lost)} should have joined.",)
    if not open_calls and there:
        details = (f"All calls in the records of {ranks_text(there)} are done.",)
    whose = ranks_text(lost) if lost else "every other rank of the job"
    if dumps:
        suggestion = (
            f"Find the {are(lost, 'dump', 'dumps')} of {whose} (TORCH_FR_DUMP_TEMP_FILE says where a rank writes its "
            "own, on its own host) and put all ranks' in one folder; where there is none, read that rank's log: a rank "
            "that died leaves no dump."
        )
    else:
        suggestion = (
            f"Read the log of {whose} and the kernel's log on its host; a rank's ring is missing where it died before "
            "init_process_group, ran without the guard, or wrote to another folder."
        )
    return Inconclusive(text, details, suggestion)


def _open_calls(evidence: Evidence) -> tuple[str, ...]:
    """Return the calls that ranks are in, each once."""
    inside: dict[str, list[int]] = {}
    for rank, state in evidence.ranks.items():
        wait = next((wait for wait in state.waits if isinstance(wait, CallWait)), None)
        if wait is not None:
            at = f", at {site_text(wait.record.site)}" if wait.record.site is not None else ""
            inside.setdefault(f"{wait_text(wait)}{at}", []).append(rank)
    sentences = (f"{capital(ranks_text(r))} {are(r, 'is', 'are')} still in {text}." for text, r in inside.items())
    return tuple(islice(sentences, 8))
