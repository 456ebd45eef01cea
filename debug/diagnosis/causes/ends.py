"""Tells what was open when a launcher, a scheduler or a person ended all ranks.

Who ends a job ends a rank that waits innocently as well as one that is stuck. The ranks that such a signal ended are
looked at as they were before it; only where nothing was open then is the end itself reported. A rank that died before
the others were ended is the fault, and they are its victims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from distsim.debug.matching.secondary_errors import aftermath, given_up, settle_given_up
from distsim.debug.messages import are, capital, ranks_text, site_text
from distsim.debug.records import CallWait, Evidence, Phase, RankState, Site, StoreWait
from distsim.debug.records.circumstances import HANDLER
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind, Proof

OPEN_S = 2.0
"""Seconds that a wait must have lasted at the end to be more than a rank that was a little late."""
STARTS_S = 60.0
"""The same of a wait for ranks that start."""
UNKNOWN_PATIENCE_S = 60.0
"""Seconds that a rank must have stood still, while others waited, in a dead job whose `--hang-after` is not known."""
ONE_MOMENT_S = 1.5
"""Largest difference in seconds between the last heartbeats of ranks that were ended at once."""
SLOW_S = 5.0
"""Seconds in which a process without a heartbeat may only have ended more quickly than the others."""
PAUSE = "That may have been work, or a pause: it is not proven that the job could not continue."
UNSEEN = "a signal that nobody saw"
_BY = {
    "SIGTERM": "as launchers (torchrun, srun), scancel, `timeout`, time limits and preemption do",
    "SIGINT": "as Ctrl-C does",
    "SIGHUP": "as a terminal does that is closed",
    "SIGQUIT": "as Ctrl-\\ does",
    **dict.fromkeys(
        ("SIGUSR1", "SIGUSR2"),
        "as a scheduler's notice does (sbatch --signal, preemption) that the program does not handle",
    ),
    "SIGXCPU": "as a limit of CPU time does",
    "SIGKILL": "as launchers do after a grace period, and the kernel of a host or a container without memory",
    UNSEEN: "as launchers and schedulers do with all processes of a job",
}
"""Who ends all ranks of a job by a signal."""
LIVING = (Phase.RUNNING, Phase.BLOCKED, Phase.FROZEN, Phase.HOST_STUCK, Phase.ABSENT)
HARD = ("SIGKILL", UNSEEN)
"""Signals that may also be a fault of one rank, before the others were ended."""


@dataclass(frozen=True, slots=True)
class End:
    """Ranks that were ended from outside, all at once."""

    ranks: tuple[int, ...]
    signal: str
    at_s: float | None
    """Time of their last heartbeat, if it is known."""

    @property
    def text(self) -> str:
        """Return the sentence on the end."""
        return f"Later {ranks_text(self.ranks)} {are(self.ranks, 'was', 'were')} ended by {self.signal}, {self.by}."

    @property
    def by(self) -> str:
        return _BY.get(self.signal, "by a person or a scheduler")


def ended_by(state: RankState) -> str | None:
    """Return the signal by which the rank was ended from outside; None if it lives, or has an end of its own."""
    if state.over:
        return None
    if state.phase is Phase.KILLED:
        name = state.signal or UNSEEN
        return name if name in _BY else None
    if state.phase is Phase.RAISED and (state.exception or "").startswith("KeyboardInterrupt"):
        return "SIGINT"
    if state.phase is Phase.EXITED:  # in a handler of the program, which may have saved its state
        labels = (label for site in state.stack for label in site.inside if label.startswith(HANDLER))
        return next((label.split()[-1] for label in labels), None)
    return None


def ended_together(evidence: Evidence) -> End | None:
    """Return the end of a job whose living ranks were all ended from outside; None if one lives, or none was.

    A rank that was ended alone, while others live on, is the fault, unless their waits for it ended by torch's timeout
    before: then their launcher ended it. A stopped process does not end until it is killed.
    """
    states = {rank: state for rank, state in evidence.ranks.items() if rank not in evidence.unseen}
    ended = {rank: name for rank, state in states.items() if (name := ended_by(state)) is not None}
    living = {rank: state for rank, state in states.items() if state.phase in LIVING and not state.over}
    polite = [name for name in ended.values() if name not in HARD]
    if living and not (polite and all(state.phase is Phase.FROZEN for state in living.values())):
        cut_off = evidence.all_ended and not evidence.unrecorded
        cut_off = cut_off and all(rank in living or _is_over(state) for rank, state in states.items())
        return End(tuple(sorted(living)), UNSEEN, _last_seen(living.values())) if cut_off else None
    at_s = _last_seen(states[rank] for rank, name in ended.items() if not polite or name not in HARD)
    early = {rank for rank, name in ended.items() if polite and name == "SIGKILL" and _died_before(states[rank], at_s)}
    ranks = tuple(sorted(ended.keys() - early))
    if not ranks or (len(ranks) < min(2, evidence.world_size) and not _ended_after_timeouts(evidence, ranks)):
        return None
    return End(ranks, next(iter(polite or [ended[rank] for rank in ranks])), at_s)


def _ended_after_timeouts(evidence: Evidence, ranks: Sequence[int]) -> bool:
    """Return whether *ranks* still lived when the timeouts of others ended their waits."""
    timeouts_s = [call.completed_s for call in given_up(evidence).values() if call.completed_s is not None]
    seen_s = _last_seen(evidence.ranks[rank] for rank in ranks)
    return bool(timeouts_s) and seen_s is not None and seen_s >= min(timeouts_s)


def _is_over(state: RankState) -> bool:
    return state.over or state.phase in (Phase.FINISHED, Phase.EXITED)


def _last_seen(states: Iterable[RankState]) -> float | None:
    return max((state.seen_s for state in states if state.seen_s is not None), default=None)


def _died_before(state: RankState, at_s: float | None) -> bool:
    """Return whether a killed rank died just before the others were asked to end, at *at_s*.

    One that was asked, too, and did not end, is killed after a grace period. One whose heartbeat had stopped before was
    stopped, or held the interpreter: its death would have been reported.
    """
    return state.seen_s is None or at_s is None or abs(state.seen_s - at_s) <= ONE_MOMENT_S


def verdict_before(
    evidence: Evidence, end: End | None, judge: Callable[[Evidence], list[Diagnosis]]
) -> list[Diagnosis]:
    """Return what was wrong before the ranks were ended; else that they were.

    What is not proven is a warning, beside the end. *end* is None if the ranks still live, and are about to be ended.
    """
    states = {rank: _standing(state) for rank, state in evidence.ranks.items()}
    if end is not None:
        states |= {rank: _as_it_was(states[rank], end) for rank in end.ranks}
    patience_s = min(OPEN_S, evidence.hang_after_s or OPEN_S)
    before = replace(evidence, ranks=states, hang_after_s=patience_s, quiet_after_s=None, all_ended=False)
    settle_given_up(before)
    judged = [d for d in judge(before) if d.exit_code and _lasted(before, d)]
    judged = [d for d in judged if not (d.kind is Kind.RANK_RAISED and _lost(before, d))] or judged
    proven = [d for d in judged if _is_stuck(evidence, before, d)]
    after = "" if end is None else f" {end.text}"
    if proven:
        return [replace(d, explanation=f"{d.explanation}{after}") for d in proven]
    was_open = [
        replace(d, only_warns=True, proof=None, explanation=f"{d.explanation}{after} {PAUSE}")
        for d in judged[:1]
        if d.kind is not Kind.RANK_RAISED
    ]
    return was_open if end is None else [*was_open, _end_alone(evidence, end)]


def _is_stuck(evidence: Evidence, before: Evidence, d: Diagnosis) -> bool:
    """Return whether the fault is more than a rank outside of calls for which others had to wait: it may have been at
    work, or in a short pause. A wait that torch's timeout has ended needs no more proof.
    """
    running = [state for rank in d.culprits if (state := before.ranks[rank]).phase is Phase.RUNNING]
    if d.proof is not Proof.PATIENCE or not running or given_up(before).keys() & set(d.victims):
        return True
    waited_s = d.detected_after_s or 0.0
    if evidence.hang_after_s == 0.0:  # post mortem: how long the job was to be patient is not known
        stood_s = min(max(state.idle_s or 0.0, state.silent_s or 0.0) for state in running)
        return min(waited_s, stood_s) >= UNKNOWN_PATIENCE_S
    return evidence.hang_after_s is not None and waited_s >= evidence.hang_after_s


def _standing(state: RankState) -> RankState:
    """Return the state with what its heartbeat says of the main thread: a process that is being ended works."""
    return state if state.stood_s is None else replace(state, idle_s=max(state.idle_s or 0.0, state.stood_s))


def _as_it_was(state: RankState, end: End) -> RankState:
    if state.phase not in (Phase.EXITED, Phase.RAISED) and None not in (end.at_s, state.seen_s):
        silent_s = (end.at_s or 0.0) - (state.seen_s or 0.0)
        state = replace(state, silent_s=silent_s if silent_s > SLOW_S else None)
    if state.phase in LIVING:
        return state
    waits = tuple(wait for wait in state.waits if not isinstance(wait, CallWait) or not wait.record.done)
    since_s = min((wait.record.issued_s for wait in waits if isinstance(wait, CallWait)), default=state.since_s)
    on_store = any(isinstance(wait, StoreWait) for wait in waits)
    interrupted = [at for at, site in enumerate(state.stack) if any(name.startswith(HANDLER) for name in site.inside)]
    stack = state.stack[interrupted[0] :] if interrupted else state.stack
    return replace(
        state,
        phase=Phase.BLOCKED if waits else Phase.RUNNING,
        waits=waits,
        since_s=since_s if waits and not on_store else None,
        site=stack[0] if interrupted else state.site,
        stack=stack,
        signal=None,
        exit_code=None,
        exception=None,
        traceback=None,
        origins=None,
    )


def _lasted(evidence: Evidence, d: Diagnosis) -> bool:
    """Return whether a wait was long for this job: longer than it takes to start, and than any pause of it before."""
    waited_s = d.detected_after_s or 0.0
    if d.kind is Kind.NEVER_JOINED:
        return waited_s >= STARTS_S
    if d.proof is not Proof.PATIENCE:
        return True
    calls = [call for rank in d.culprits for call in evidence.records.get(rank, ())]
    pauses_s = [
        after.issued_s - before.completed_s
        for before, after in pairwise(calls)
        if before.rank == after.rank and before.completed_s is not None
    ]
    return waited_s >= max([OPEN_S, *pauses_s])


def _lost(evidence: Evidence, d: Diagnosis) -> bool:
    return all(aftermath(evidence.ranks[rank].exception) for rank in d.culprits)


def _end_alone(evidence: Evidence, end: End) -> Diagnosis:
    places: dict[str, list[int]] = {}
    sites: dict[int, Site] = {}
    for rank in end.ranks:
        state = evidence.ranks[rank]
        calls = evidence.records.get(rank, ())
        site = state.site or (calls[-1].site if calls else None)
        if site is not None:
            sites[rank] = site
        places.setdefault(site_text(site, function=True), []).append(rank)
    where = "; ".join(f"{ranks_text(some)} {are(some, 'was', 'were')} at {at}" for at, some in places.items())
    who = "All ranks" if len(end.ranks) == evidence.world_size else capital(ranks_text(end.ranks))
    return Diagnosis(
        Kind.JOB_ENDED,
        (),
        end.ranks,
        sites=sites,
        explanation=f"{who} {are(end.ranks, 'was', 'were')} ended by {end.signal}, {end.by}. {capital(where)}.",
        suggestion="If the job was stuck, look at where its ranks were. If it was not, nothing is wrong with them.",
    )
