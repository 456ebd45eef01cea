"""The table of causes: the first row that finds its fact on record says what to do.

Rows come in the order of their strength: what leaves no other explanation comes first, then what the program's text
shows, then what hints and does not prove.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from distsim.debug.diagnosis.causes.caught import ended_thread, swallowed, tried_again
from distsim.debug.diagnosis.causes.circumstances import (
    at_the_end,
    backward,
    in_a_join,
    object_lists,
    recomputation,
    signal_handler,
    unlike_mesh,
    unproven,
)
from distsim.debug.diagnosis.causes.exceptions import (
    call_under_way,
    gathered,
    grows_each_step,
    recomputed_otherwise,
)
from distsim.debug.diagnosis.causes.find_cause import (
    LOST,
    functional_call,
    held_lock,
    lost_store,
    members_only,
    message_loop,
    own_values,
    polled_message,
    skipped_init,
    text_cause,
)
from distsim.debug.diagnosis.causes.program_text import ProgramText
from distsim.debug.diagnosis.causes.threads import alive_after_its_end, lock_in_a_call, waits_for_child
from distsim.debug.diagnosis.context import Case, Cause
from distsim.debug.matching.secondary_errors import aftermath
from distsim.debug.messages import capital, ranks_text, several, site_text, wait_text
from distsim.debug.records import CallWait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import INCONSISTENT, Kind


@dataclass(frozen=True, slots=True)
class Row:
    """A cause: the kinds that it explains, and the function that finds its fact."""

    name: str
    kinds: frozenset[Kind]
    find: Callable[[Case, Diagnosis, ProgramText], Cause | None]
    """Return the cause with its words; None if the fact is not on record."""


RAISED = frozenset({Kind.RANK_RAISED})
STUCK = frozenset({Kind.HOST_STUCK, Kind.STRAGGLER})
ROWS = (
    Row("signal handler", LOST, signal_handler),
    Row("exit handler or finalizer", LOST | {Kind.RANK_EXITED}, at_the_end),
    Row("tried again after an exception", LOST, tried_again),
    Row("swallowed exception", LOST, swallowed),
    Row("thread ended by an exception", LOST | STUCK | {Kind.THREAD_RACE}, ended_thread),
    Row("lock held in a call", LOST | STUCK, lock_in_a_call),
    Row("child process", LOST | STUCK, waits_for_child),
    Row("alive after its end", STUCK, alive_after_its_end),
    Row("gathered exceptions", RAISED, gathered),
    Row("recomputed otherwise", RAISED, recomputed_otherwise),
    Row("grows each step", RAISED, grows_each_step),
    Row("object lists of other lengths", frozenset({Kind.SHAPE_MISMATCH}), object_lists),
    Row("mesh made otherwise", frozenset({Kind.GROUP_CREATION_ORDER}), unlike_mesh),
    Row("call in a join block", LOST, in_a_join),
    Row("recomputation", LOST, recomputation),
    Row("backward", LOST, backward),
    # What the program's text shows
    Row("server of a store has ended", RAISED | STUCK, lost_store),
    Row("lock of several processes", STUCK, held_lock),
    Row("polled message", STUCK, polled_message),
    Row("functional result", frozenset({Kind.ASYNC_NEVER_WAITED, Kind.BUFFER_MODIFIED_IN_FLIGHT}), functional_call),
    Row("skipped init_process_group", frozenset({Kind.NEVER_JOINED}), skipped_init),
    Row("group made by its members alone", frozenset({Kind.GROUP_CREATION_ORDER}), members_only),
    Row("value of one process", frozenset({Kind.ROOT_MISMATCH}), own_values),
    Row("loop of messages", frozenset({Kind.P2P_UNMATCHED}), message_loop),
    Row("lines around the calls", LOST, text_cause),
    # What hints and does not prove
    Row("unproven circumstances", LOST, unproven),
    Row("call under way", frozenset({Kind.RANK_KILLED}), call_under_way),
)


def with_reason(case: Case, d: Diagnosis) -> Diagnosis:
    """Return the diagnosis with its cause and the advice that removes it, if a row finds one."""
    text = ProgramText(case.index.evidence.sources)
    rows = (row for row in ROWS if d.culprits and d.kind in row.kinds)
    cause = next((cause for row in rows if (cause := row.find(case, d, text)) is not None), None)
    return d if cause is None else _told(case, d, cause)


def _told(case: Case, d: Diagnosis, cause: Cause) -> Diagnosis:
    culprits = cause.culprits or d.culprits
    victims = tuple(sorted({*d.culprits, *d.victims} - set(culprits)))
    words = f"{d.explanation} {cause.says}"
    if cause.leads:  # sentences on who went round a loop more often, say, would contradict it
        guessed = d.kind in INCONSISTENT or d.kind is Kind.UNEVEN_ITERATIONS or culprits != d.culprits
        words = f"{cause.says} {_places(case, culprits, victims) if guessed else d.explanation}"
    return replace(
        d,
        kind=cause.kind or d.kind,
        culprits=culprits,
        victims=victims,
        sites={**d.sites, **cause.sites},
        explanation=words.strip(),
        suggestion=cause.suggestion,
        causes=cause.lines,
    )


def _places(case: Case, culprits: tuple[int, ...], victims: tuple[int, ...]) -> str:
    """Return where the ranks are, the culprits first, in a sentence for each place."""
    places: dict[str, list[int]] = {}
    for rank in (*culprits, *victims):
        where, call = case.where(rank), case.index.died_inside(rank)
        if call is not None and call.site is not None and aftermath(case.index.states[rank].exception):
            where = f"waited in {wait_text(CallWait(call))}, at {site_text(call.site)}"  # and lost the connection
        places.setdefault(where, []).append(rank)
    return " ".join(f"{capital(ranks_text(some))} {several(where, some)}." for where, some in places.items())
