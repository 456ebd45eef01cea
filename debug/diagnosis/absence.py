"""Ranks that never made the call that others wait in: they live or ended well, or they are gone or stuck by themselves.

Those that are gone raised, left, were killed or stopped, or never joined.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distsim.debug.diagnosis.causes.program_text import ProgramText
from distsim.debug.diagnosis.context import Case
from distsim.debug.divergence.divergence import refusal_advice, refusal_text, refused_call
from distsim.debug.divergence.source_order import Order, relate
from distsim.debug.matching.agreement import same_call
from distsim.debug.matching.index import GroupCalls
from distsim.debug.matching.secondary_errors import aftermath, last_words, timed_out
from distsim.debug.messages import (
    INJECTED,
    NEVER_COMPLETED,
    ONLY_IN_WAIT,
    SECOND_WAIT,
    advice,
    are,
    call_text,
    capital,
    creation_advice,
    exception_line,
    group_text,
    injected_advice,
    killed_advice,
    no_record_advice,
    raised_advice,
    ranks_text,
    several,
    site_text,
    some_ranks_text,
)
from distsim.debug.records import CallRecord, CallWait, HostWait, Phase, Site, StoreWait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.records.obligations import CREATIONS
from distsim.shelves import shelf


def absent_from_call(case: Case, call: CallRecord, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Diagnose *ranks* that are not in *call*.

    They skipped it, left the loop, or never waited for their handle; or they are right, and the ranks in the call
    make one too many.
    """
    log = case.index.group_log(call)
    unknown = [r for r in ranks if case.unknown(r)]
    if len(unknown) == len(ranks):
        return _no_record(case, call, ranks, victims)
    ranks = [r for r in ranks if r not in unknown]  # of these it is known that they did not come
    finished = all(case.is_over(r) for r in ranks)
    if log is not None and call.op in CREATIONS:
        return _plain(case, Kind.GROUP_CREATION_ORDER, call, ranks, victims)
    if call.op == "init_process_group":
        return _plain(case, Kind.NEVER_JOINED, call, ranks, victims)
    if refused_call(case.index, call, ranks) is not None:
        return _plain(case, Kind.MISSING_RANK, call, ranks, victims)
    if log is not None and (result := _other_group(case, log, call, ranks, victims)) is not None:
        return result
    if log is not None and finished:
        pending = [r for r in ranks if r in log.meetings.get(call.seq, ())]
        if pending:
            return _never_waited(case, log, call, pending, victims)
        if (result := loop_ended(case, log, call, ranks, victims)) is not None:
            return result
        met = sorted(log.meetings.get(call.seq, ()))
        if len(met) * 2 < len(log.group.ranks):
            if (split := _split_over_groups(case, log, call, met, victims)) is not None:
                return split
            return extra_call(case, call, met, (), "The other ranks finished without it and will never come.")
    if log is not None and (_hung_up(case, ranks, victims) or _past_the_loop(case, call, ranks)):
        if (result := loop_ended(case, log, call, ranks, victims)) is not None:
            return result
    late = [r for r in ranks if log is not None and r in log.meetings.get(call.seq, ())]
    if late:
        return _too_late(case, call, late, victims)
    return _plain(case, Kind.MISSING_RANK, call, ranks, victims)


def _hung_up(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> bool:
    """Return whether *ranks* run although all ranks that waited for them have lost the connection.

    A living process keeps its connections until its group is destroyed or its program has ended. A timeout proves
    nothing about a connection.
    """
    errors = [last_words(case.index.died_inside(r), case.index.states[r]) for r in victims]
    running = case.index.states[ranks[0]].phase is Phase.RUNNING and not case.is_over(ranks[0])
    return running and bool(victims) and all(aftermath(words) and not timed_out(words) for words in errors)


def _past_the_loop(case: Case, call: CallRecord, ranks: Sequence[int]) -> bool:
    """Return whether *ranks* run at lines after the loop of *call*, so that they will not return to it."""
    for rank in ranks:
        state = case.index.states[rank]
        if state.phase is not Phase.RUNNING or state.site is None:
            return False
        here = replace(call, rank=rank, site=state.site, stack=state.stack or (state.site,))
        relation = relate(here, call, case.index.evidence.sources)
        if not (relation.certain and relation.order is Order.AFTER and relation.left_loop):
            return False
    return True


def _plain(case: Case, kind: Kind, call: CallRecord, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    who = ranks_text(ranks)
    they, them = ("it", "it") if len(ranks) == 1 else ("they", "them")
    where = several(case.where(ranks[0]), ranks)
    running = case.index.states[ranks[0]].phase is Phase.RUNNING and not case.is_over(ranks[0])
    errors = [last_words(case.index.died_inside(r), case.index.states[r]) for r in victims]
    gave_up = any(timed_out(words) for words in errors)
    refused = refused_call(case.index, call, ranks)
    never = f"{who} never called" if refused is None else f"{refusal_text(refused, ranks)}, so it never reached"
    sentence = f"{never} {call_text(call)} on {group_text(call.group)}: {they} {where}."
    log = case.index.group_log(call)
    there = len(log.meetings.get(call.seq, ())) if log is not None else 0
    if (
        refused is None
        and all(case.is_over(rank) for rank in ranks)
        and there * 2 == len(call.members)
        and kind is Kind.MISSING_RANK
    ):
        sentence += " The group is split evenly: the other ranks may also have made one call too many."
    suggestion = advice(Kind.STRAGGLER if running else kind, who=some_ranks_text(ranks), other=site_text(call.site))
    if kind is Kind.GROUP_CREATION_ORDER and not running and call.site is not None:
        suggestion = creation_advice(call, ProgramText(case.index.evidence.sources).line(call.site))
    if refused is not None:
        suggestion = refusal_advice(refused)
    elif running and gave_up:
        suggestion += f" Or pass a longer timeout={_limit_text(errors)}."
    elif _hung_up(case, ranks, victims):
        sentence += f" Connections to {them} were closed while {they} ran, as destroy_process_group() does."
        suggestion = "Call dist.barrier() before destroy_process_group(), so that no rank leaves too early."
    return case.diagnosis(
        kind,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(sentence)} {case.waiting(call, ranks, victims)}"
        f"{case.store_text(victims) if kind is Kind.NEVER_JOINED else ''}",
        suggestion=suggestion,
    )


def _limit_text(errors: Sequence[str | None]) -> str:
    """Return the timeout that the exceptions of gloo and NCCL name, as ` (it was 2 s)`; empty if they name none."""
    limits = [int(match[1]) for words in errors if words is not None and (match := LIMIT.search(words)) is not None]
    return f" (it was {max(limits) / 1000:g} s)" if limits else ""


def _no_record(case: Case, call: CallRecord, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Diagnose *ranks* without records, for which others wait."""
    who = ranks_text(ranks)
    they, are_ = ("it", "is") if len(ranks) == 1 else ("they", "are")
    return case.diagnosis(
        Kind.MISSING_RANK,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(who)} left no record: whether {they} came to {call_text(call)} on "
        f"{group_text(call.group)}, and where {they} {are_}, is not known. {case.waiting(call, ranks, victims)}",
        suggestion=no_record_advice(ranks),
    )


def _never_waited(
    case: Case, log: GroupCalls, call: CallRecord, pending: Sequence[int], victims: Sequence[int]
) -> Diagnosis:
    own = log.meetings[call.seq][pending[0]]
    return case.diagnosis(
        Kind.ASYNC_NEVER_WAITED,
        pending,
        victims,
        call=call,
        explanation=f"{capital(ranks_text(pending))} started {call_text(own)} at {site_text(own.site)} without "
        f"waiting for it, and finished before it was done. {case.waiting(call, pending, victims)}",
        suggestion=advice(Kind.ASYNC_NEVER_WAITED),
    )


def loop_ended(
    case: Case, log: GroupCalls, call: CallRecord, ranks: Sequence[int], victims: Sequence[int]
) -> Diagnosis | None:
    """Return the diagnosis if the call is one that both have made before: their loops ran differently often. Whose
    wait is looked at first is chance, so the line may be that of any rank that is in the call.
    """
    met_calls = log.meetings.get(call.seq, {})
    met = sorted(met_calls)
    for one in (call, *(met_calls[rank] for rank in met)):
        if one.site is None:
            continue
        since = max(calls[0].seq for rank in (one.rank, ranks[0]) if (calls := log.calls.get(rank)))
        rounds, other_rounds = _rounds(log, one.rank, one, since), _rounds(log, ranks[0], one, since)
        if rounds > other_rounds > 0:
            call = one
            break
    else:
        return None
    if call.op in CREATIONS:
        return _plain(case, Kind.GROUP_CREATION_ORDER, call, ranks, victims)
    legal = _passed_by(case, call.rank, call)  # rounds that also those skip who make the call again
    if all(_passed_by(case, rank, call) - legal >= rounds - other_rounds for rank in ranks):
        skipped = _plain(case, Kind.MISSING_RANK, call, ranks, victims)
        they = "it" if len(ranks) == 1 else "they"
        note = f"In another round of that loop {they} made a later call of the loop without this one."
        return replace(skipped, explanation=f"{skipped.explanation} {note}")
    here = [rank for rank in met if met_calls[rank].way == call.way] or met
    finished = all(case.is_over(rank) for rank in ranks)
    few = finished and len(met) * 2 < len(log.group.ranks)
    ended = finished and case.index.states[ranks[0]].phase is not Phase.KILLED
    then = "finished" if ended else several(case.where(ranks[0]), ranks)
    even = len(met) * 2 == len(log.group.ranks)
    tie = " The group is split evenly, so the records do not show which number of calls is right." if even else ""
    if since > 1:  # older calls are no longer in the records, so nobody can say how often it was made
        often = f"{rounds - other_rounds} more time{'s' if rounds - other_rounds > 1 else ''} than {ranks_text(ranks)}"
        came = f"made it last as #{max(seq for seq in _like(log, ranks[0], call) if seq <= call.seq)}"
    else:
        often, came = (
            f"for the {_ordinal(rounds)} time",
            f"made it {'once' if other_rounds == 1 else f'{other_rounds} times'}",
        )
    return case.diagnosis(
        Kind.UNEVEN_ITERATIONS,
        met if few else ranks,
        () if few else victims,
        call=call,
        explanation=f"{capital(ranks_text(here))} {are(here, 'makes', 'make')} {call.op} at {site_text(call.site)} "
        f"{often} on {group_text(log.group)}. {capital(ranks_text(ranks))} {came} and {then}.{tie}",
        suggestion=advice(Kind.UNEVEN_ITERATIONS),
    )


def _passed_by(case: Case, rank: int, call: CallRecord) -> int:
    """Return the number of iterations in which *rank* made another call of the loop around *call*, but not this one.

    A line directly in the loop runs once per iteration, so if it was called twice in between, *call* was skipped.
    """
    text = ProgramText(case.index.evidence.sources)
    site = call.way[0]
    loop = next((loop for _, loop in text.loops([site])), None)
    if loop is None:
        return 0
    since: Counter[Site] = Counter()
    passed = most = 0
    for record in case.index.records(rank):
        if record.way == call.way and record.op == call.op:
            passed, most, since = passed + most, 0, Counter()
        elif record.site is not None and record.way[1:] == call.way[1:] and _alone(text.line(record.site), record.op):
            if next((inner for _, inner in text.loops([record.site])), None) is loop:
                since[record.site] += 1
                most = max(most, since[record.site] - 1)
    return passed + most


def _alone(line: str, op: str) -> bool:
    """Return whether the line makes one call of *op* each time: no object collective, which makes two, and no
    comprehension.
    """
    return len(re.findall(rf"\b{re.escape(op)}\(", line)) == 1 and " for " not in line


def _rounds(log: GroupCalls, rank: int, call: CallRecord, since: int) -> int:
    """Return how often *rank* has made calls like *call* from number *since* on."""
    return sum(since <= seq <= call.seq for seq in _like(log, rank, call))


def _like(log: GroupCalls, rank: int, call: CallRecord) -> list[int]:
    return [r.seq for r in log.calls.get(rank, ()) if r.way == call.way and r.op == call.op]


def _ordinal(n: int) -> str:
    if n % 100 in (11, 12, 13):
        return f"{n}th"
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th') }"


def _split_over_groups(
    case: Case, log: GroupCalls, call: CallRecord, met: Sequence[int], victims: Sequence[int]
) -> Diagnosis | None:
    """Diagnose a missing member that waits for the present ranks in the same call on another group."""
    for rank in log.group.ranks:
        if rank in met:
            continue
        for need in case.graph.needs.get(rank, ()):
            if not isinstance(need.wait, CallWait) or not need.ranks or not set(need.ranks) <= set(met):
                continue
            other = need.wait.record
            if same_call(call, other) and _one_call_of_the_text(case, call, other):
                return group_mismatch(case, call, other, met, [rank], victims)
    return None


def _one_call_of_the_text(case: Case, mine: CallRecord, other: CallRecord) -> bool:
    """Return whether two calls have the same line, or are in two branches that each contain the call once."""
    if mine.site is not None and mine.site == other.site:
        return True
    relation = relate(mine, other, case.index.evidence.sources)
    return relation.certain and relation.order is Order.EXCLUSIVE and not relation.repeated


def group_mismatch(
    case: Case,
    mine: CallRecord,
    other: CallRecord,
    who: Sequence[int],
    others: Sequence[int],
    victims: Sequence[int],
) -> Diagnosis:
    """Return the diagnosis of one call of the program that is made on two groups: *mine* by *who*, *other* by
    *others*. The two backends of a group are such groups, too.
    """
    kind, at, there = Kind.GROUP_MISMATCH, site_text(mine.site), site_text(other.site)
    suggestion = advice(kind, mine=at)
    explanation = (
        f"{capital(ranks_text(who))} called {call_text(mine)} on {group_text(mine.group)}, at {at}. "
        f"{capital(ranks_text(others))} made the same call on {group_text(other.group)}, at {there}."
    )
    if mine.group.is_beside(other.group):
        kind, on_cpu = Kind.DEVICE_MISMATCH, mine.group == other.group.beside("cpu")
        devices = ("the CPU", "a GPU") if on_cpu else ("a GPU", "the CPU")
        suggestion = advice(kind, who=some_ranks_text(who), mine=at, other="device" if on_cpu else '"cpu"')
        explanation = (
            f"{capital(ranks_text(who))} called {call_text(mine)} at {at} with a tensor on {devices[0]}, and "
            f"{ranks_text(others)} at {there} with a tensor on {devices[1]}. The group has a backend for each device, "
            "so these calls never meet."
        )
    return case.diagnosis(
        kind,
        who,
        [*others, *victims],
        call=other,
        explanation=explanation,
        suggestion=suggestion,
        since_s=max(mine.issued_s, other.issued_s),
        sites={} if mine.site is None else {mine.rank: mine.site},
    )


def extra_call(
    case: Case,
    call: CallRecord,
    ranks: Sequence[int],
    victims: Sequence[int],
    says: str = "No other rank has ever made that call.",
) -> Diagnosis:
    """Return the diagnosis of a *call* that only *ranks* make, under a condition that no other rank meets."""
    return case.diagnosis(
        Kind.EXTRA_COLLECTIVE,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(ranks_text(ranks))} called {call_text(call)} on {group_text(call.group)}, at "
        f"{site_text(call.site)}. {says}",
        suggestion=advice(Kind.EXTRA_COLLECTIVE, mine=site_text(call.site)),
    )


def _too_late(case: Case, call: CallRecord, late: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    log = case.index.group_log(call)
    own = log.meetings[call.seq][late[0]] if log is not None else call
    waited = max(0.0, own.issued_s - call.issued_s)
    return case.diagnosis(
        Kind.MISSING_RANK,
        late,
        victims,
        call=call,
        explanation=f"{capital(ranks_text(late))} came to {call_text(call)} on {group_text(call.group)} "
        f"{waited:.1f} s late, at {site_text(own.site)}. {capital(ranks_text(victims))} had given up by then.",
        suggestion=advice(Kind.STRAGGLER, who=some_ranks_text(late)) + " Or pass a longer timeout=.",
    )


def _other_group(
    case: Case, log: GroupCalls, call: CallRecord, ranks: Sequence[int], victims: Sequence[int]
) -> Diagnosis | None:
    """Return a diagnosis if the missing ranks made the same call equally often, but on another group."""
    own: CallRecord | None = None
    for rank in ranks:
        calls = [r for r in case.index.records(rank) if r.op == call.op and not r.is_p2p]
        if not calls:
            return None
        last = calls[-1]
        a, b = frozenset(last.group.ranks), frozenset(log.group.ranks)
        if last.group == log.group or not (a < b or b < a or last.group.is_beside(log.group)):
            return None
        if last.site is not None and last.site == call.site:
            here = [r for r in case.index.records(call.rank) if r.op == call.op and r.site == call.site]
            if sum(r.site == call.site for r in calls) < len(here):
                return None
        else:
            relation = relate(last, call, case.index.evidence.sources)
            if not relation.certain or relation.order is not Order.EXCLUSIVE or relation.swapped:
                return None
        own = last
    if own is None:
        return None
    if own.group.is_beside(log.group):
        met = sorted(log.meetings.get(call.seq, ()))
        return group_mismatch(case, own, call, ranks, met, [rank for rank in victims if rank not in met])
    return case.diagnosis(
        Kind.GROUP_MISMATCH,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(ranks_text(ranks))} called {call_text(own)} on {group_text(own.group)}, at "
        f"{site_text(own.site)}. {case.waiting(call, ranks, victims)}",
        suggestion=advice(Kind.GROUP_MISMATCH, mine=site_text(own.site)),
        sites={own.rank: own.site} if own.site is not None else {},
    )


LIMIT = re.compile(r"(?:waiting |Timeout\(ms\)=|timeout after )(\d+) ?(?:ms)?", re.IGNORECASE)
_KIND = {
    Phase.RAISED: Kind.RANK_RAISED,
    Phase.FINISHED: Kind.RANK_EXITED,  # with an exit code of its own
    Phase.EXITED: Kind.RANK_EXITED,
    Phase.KILLED: Kind.RANK_KILLED,
    Phase.FROZEN: Kind.PROCESS_FROZEN,
    Phase.HOST_STUCK: Kind.HOST_STUCK,
    Phase.ABSENT: Kind.NEVER_JOINED,
}
MOST_PIDS = 8
_UNSEEN = (
    "Look at its log, and at the kernel log of its host (out of memory). os.execv, and C code that ends the process, "
    "look the same."
)


def death(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Diagnose ranks with the same end: `rank_raised`, `rank_exited`, `rank_killed`, frozen, stuck or absent."""
    first = case.index.states[ranks[0]]
    unseen = first.phase is Phase.KILLED and first.signal is None
    kind = Kind.RANK_EXITED if unseen else _KIND.get(first.phase, Kind.HOST_STUCK)
    call = case.first_wait(ranks)
    who = ranks_text(ranks)
    waiting = case.waiting(call, ranks, victims)
    if kind is Kind.NEVER_JOINED:
        waiting += case.store_text(victims)
    if call is None:
        call = case.index.died_inside(ranks[0])
    subject = f"{who} {several(case.where(ranks[0]), ranks)}"
    pids = [str(pid) for rank in ranks[:MOST_PIDS] if (pid := case.index.states[rank].pid) is not None]
    remote = shelf("diagnosis of rpc").calls_at_its_end(case, ranks[0]) if case.index.remote else ""
    sites = {rank: site for rank in ranks if (site := case.index.states[rank].site) is not None}
    return case.diagnosis(
        kind,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(subject)}.{remote} {waiting}".rstrip(),
        suggestion=injected_advice(victims)
        if (first.reason or "").startswith(INJECTED)
        else _UNSEEN
        if unseen
        else raised_advice(
            some_ranks_text(ranks),
            first.exception or "",
            bool(victims),
            everyone=len(ranks) >= case.index.evidence.world_size,
            traceback=first.traceback or "",
        )
        if kind is Kind.RANK_RAISED
        else killed_advice(first.signal, some_ranks_text(ranks), first.reason)
        if kind is Kind.RANK_KILLED
        else advice(kind, who=some_ranks_text(ranks)).replace("kill -CONT", " ".join(["kill -CONT", *pids])),
        since_s=first.since_s,
        sites=sites,
    )


def in_flight_exception(case: Case, ranks: Sequence[int], victims: Sequence[int], call: CallRecord | None) -> Diagnosis:
    """Diagnose ranks that raised and make further calls in a `finally` or `except` block."""
    state = case.index.states[ranks[0]]
    who = ranks_text(ranks)
    return case.diagnosis(
        Kind.RANK_RAISED,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(who)} raised {exception_line(state)}, and on the way out "
        f"{several(case.where(ranks[0]), ranks)} (a finally or except block). "
        f"{case.waiting(call, ranks, victims)}".rstrip(),
        suggestion=f"Fix the exception of {some_ranks_text(ranks)} first, and make no collective calls in finally "
        "blocks.",
        since_s=state.since_s,
    )


_HOST_WAITS = {
    "sleep": "Look at what the loop around that line waits for: it sleeps and looks again, and no rank that still runs "
    "will change it.",
    SECOND_WAIT: "Call wait() once on each handle of isend or irecv: gloo ends a message in its first wait(), and a "
    "second one never returns.",
    NEVER_COMPLETED: f"Call wait() on the handle of isend or irecv: {ONLY_IN_WAIT}",
}
"""Advice by the beginning of what a rank waits for on the host."""


def host_wait(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Diagnose ranks that wait for something that no call can bring: a lock, a queue, an unset store key."""
    call = case.first_wait(ranks)
    waits = case.index.waits(ranks[0])
    on_store = any(isinstance(w, StoreWait) for w in waits)
    if call is not None and on_store and not call.is_p2p:
        return absent_from_call(case, call, ranks, victims)
    waited_for = next((w.what for w in waits if isinstance(w, HostWait)), "it")
    return case.diagnosis(
        Kind.HOST_STUCK,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(ranks_text(ranks))} {several(case.where(ranks[0]), ranks)}. "
        f"{case.waiting(call, ranks, victims)}".rstrip(),
        suggestion="No running rank will set that key: look at the rank that should."
        if on_store
        else next(
            (cure for wait, cure in _HOST_WAITS.items() if waited_for.startswith(wait)),
            f"No running rank can end the wait for {waited_for}: look at the rank that should.",
        ),
        since_s=case.index.states[ranks[0]].since_s,
    )
