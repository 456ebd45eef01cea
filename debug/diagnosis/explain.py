"""Explains evidence in which something may be wrong, by the rules of each family of faults.

The steps: find the ranks that can never continue, and why (waits); diagnose each of these, and the calls that
contradict each other (absence, deadlock, point_to_point, contradiction, deaths); add the findings of guards
(ranking).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.debug.diagnosis.absence import absent_from_call, death, host_wait, in_flight_exception
from distsim.debug.diagnosis.causes.rows import with_reason
from distsim.debug.diagnosis.causes.unlike_models import with_unlike_models
from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.contradiction import contradiction
from distsim.debug.diagnosis.deadlock import key_circle, knot
from distsim.debug.diagnosis.point_to_point import disagreeing, disagreement, unmatched
from distsim.debug.diagnosis.ranking import merge_findings, order
from distsim.debug.diagnosis.waits.assess_proof import Weigher, lateness, patience
from distsim.debug.diagnosis.waits.rendezvous import apart, follows, stale_addresses
from distsim.debug.diagnosis.waits.standstill import idle_job, unending
from distsim.debug.diagnosis.waits.wait_graph import Contradictions, RemoteNeed, WaitGraph
from distsim.debug.divergence.divergence import Divergence
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.matching.secondary_errors import given_up
from distsim.debug.messages import are, capital, exception_text, ranks_text
from distsim.debug.records import CallRecord, CallWait, Evidence, HostWait, Phase, State, StoreWait
from distsim.debug.records.call import was_refused
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import INCONSISTENT, PROOFS, Kind, Proof
from distsim.shelves import shelf

INIT = "init_process_group"
MOST_NAMED = 4
"""Largest number of culprits of one diagnosis whose processes are named."""
MANY = 8
"""Diagnoses of ranks that raised, with all who wait for them."""


def explain(index: EvidenceIndex, divergences: Sequence[Divergence], nothing_moves: bool) -> list[Diagnosis]:
    """Return the diagnoses, the root cause first; empty if nothing is wrong.

    Args:
        index: The evidence.
        divergences: The contradictions among the calls of each group.
        nothing_moves: Whether blocked ranks are reported even without a known reason.
    """
    evidence = index.evidence
    pairs = disagreeing(index) if index.pairs.partner else []
    contradictions = Contradictions(
        {d.group_log.id: (i, d.seq, frozenset(d.culprits)) for i, d in enumerate(divergences) if d.blocks},
        {
            id(end): len(divergences) + i
            for i, pair in enumerate(pairs)
            for end in pair[1:]
            if end.state is not State.COMPLETED  # a rank may have died in it
        },
    )
    moving, stragglers = patience(index, lateness(index))
    case = Case(index, WaitGraph(index, moving, contradictions, nothing_moves), divergences, pairs)
    hit: set[int] = set()
    met: list[Diagnosis] = []
    diagnoses = _explain_roots(case, hit, met)
    for i, divergence in enumerate(divergences):
        if i not in hit:
            met.append(contradiction(case, divergence, ()))
    for i, pair in enumerate(pairs, start=len(divergences)):
        if i not in hit:
            met.append(disagreement(case, pair, ()))
    met = [_not_made(case, _with_refused(case, d)) for d in _one_group_mismatch(met)]
    diagnoses = [_not_made(case, _with_refused(case, d)) for d in diagnoses]
    diagnoses += _unwaited_deaths(case, diagnoses + met)
    meeting = _failed_rendezvous(case)
    if meeting:
        diagnoses = [d for d in diagnoses if not follows(d, meeting)]
    blocked = [rank for rank, state in index.states.items() if state.phase is Phase.BLOCKED]
    diagnoses = merge_findings(case, [*met, *diagnoses, *stragglers(case), *_idle(case, blocked), *meeting])
    diagnoses = with_unlike_models(case, diagnoses)
    if not case.graph.needs.keys() >= set(blocked):  # the call of one of them has all its members
        diagnoses += unending(case, diagnoses)
    if nothing_moves and blocked and not diagnoses:
        diagnoses = [_blocked_alone(case, blocked[0], blocked[1:])]
    weigher = Weigher(index, moving, _of_content(contradictions, divergences))
    weighed = [d if d.proof is not None else replace(d, proof=weigher.proof(d)) for d in diagnoses]
    causes = [with_reason(case, d) for d in weighed]
    return _told_once([_with_processes(evidence, d) for d in order(index, causes)])


CONFUSED = INCONSISTENT | {
    Kind.MISSING_RANK,
    Kind.EXTRA_COLLECTIVE,
    Kind.UNEVEN_ITERATIONS,
    Kind.DEADLOCK_CYCLE,
    Kind.P2P_UNMATCHED,
}
"""Kinds of diagnosis that depend on which rank made which call."""


def _failed_rendezvous(case: Case) -> list[Diagnosis]:
    """Diagnose ranks that cannot meet in init_process_group, if a rank is in it or has called it again."""
    index = case.index
    calls = (index.died_inside(r) if s.phase is Phase.RAISED else index.last(r) for r, s in index.states.items())
    in_init = any(call is not None and call.op == INIT for call in calls)
    if not in_init and all(state.reused_store is None for state in index.states.values()):
        return []
    return [*apart(case), *stale_addresses(case)]


def _idle(case: Case, blocked: Sequence[int]) -> list[Diagnosis]:
    """Diagnose ranks of a live job that make no progress, if none of them waits in a call."""
    live = [rank for rank in blocked if not case.index.states[rank].leaving and rank not in case.index.evidence.unseen]
    return [] if live else idle_job(case)


def _with_processes(evidence: Evidence, diagnosis: Diagnosis) -> Diagnosis:
    """Add to the diagnosis which processes the ranks are, if they have different numbers outside the program."""
    size = len(diagnosis.group.ranks) if diagnosis.group is not None else 0
    if diagnosis.kind is Kind.NEVER_JOINED and evidence.doubles:
        return _as_doubles(evidence, diagnosis)
    if diagnosis.kind in CONFUSED and not evidence.double_ranks.keys().isdisjoint(
        {*diagnosis.culprits, *diagnosis.victims}
    ):
        return _confused(evidence, diagnosis)
    if diagnosis.kind is Kind.NEVER_JOINED and 0 < evidence.launched < size:
        started = f"The program waits for {size} ranks (world_size={size}), but its launcher here has started a job of "
        diagnosis = replace(
            diagnosis,
            explanation=f"{diagnosis.explanation} {started}{evidence.launched}.",
            suggestion="Take world_size from WORLD_SIZE, or start the missing ranks (on the other hosts, if each host "
            f"has its own launcher). {diagnosis.suggestion}",
        )
    named = [rank for rank in diagnosis.culprits if rank in evidence.processes][:MOST_NAMED]
    if not named or (diagnosis.kind is Kind.NEVER_JOINED and evidence.unseen.issuperset(named)):
        return diagnosis
    elsewhere = [
        rank for rank in named if rank not in diagnosis.stuck and " of its launcher" not in evidence.processes[rank]
    ]
    if diagnosis.kind is Kind.NEVER_JOINED and elsewhere:  # they go on in a world of their own
        diagnosis = replace(diagnosis, suggestion=f"Give every rank the same world_size and address in {INIT}.")
    names = "; ".join(f"rank {rank} is {evidence.processes[rank]}" for rank in named)
    return replace(diagnosis, explanation=f"{diagnosis.explanation} By process: {names}.")


def _as_doubles(evidence: Evidence, diagnosis: Diagnosis) -> Diagnosis:
    """Diagnose a rank that no process has, because two processes have the same other rank."""
    reasons, _, cures = zip(*(text.rpartition(": ") for text in evidence.doubles), strict=True)
    members = frozenset(diagnosis.group.ranks if diagnosis.group is not None else diagnosis.victims)
    verb = are(diagnosis.culprits, "has", "have")
    explanation = f"No process is {ranks_text(diagnosis.culprits)}, which {verb} never joined: {'; '.join(reasons)}."
    for number, rank in evidence.double_ranks.items():  # a number behind the last rank is no rank of the program
        if number in diagnosis.stuck and number not in members:
            explanation += f" Rank {rank} waits twice, also as pid {evidence.ranks[number].pid}."
    return replace(
        diagnosis,
        victims=tuple(rank for rank in diagnosis.victims if rank in members),
        stuck={rank: at for rank, at in diagnosis.stuck.items() if rank in members},
        sites={rank: site for rank, site in diagnosis.sites.items() if rank in members},
        explanation=explanation,
        suggestion=f"{capital(cures[0])}.",
    )


def _confused(evidence: Evidence, diagnosis: Diagnosis) -> Diagnosis:
    """Turn *diagnosis* into the diagnosis of two processes that are one rank and take each other's messages."""
    reasons, _, cures = zip(*(text.rpartition(": ") for text in evidence.doubles), strict=True)
    reason = "; ".join(reasons)
    both = {*diagnosis.culprits, *diagnosis.victims} - evidence.double_ranks.keys()
    called = evidence.double_ranks  # the second process has a number behind the last rank of the world
    return replace(
        diagnosis,
        kind=Kind.NEVER_JOINED,
        culprits=tuple(sorted(set(called.values()))),
        victims=tuple(sorted(both)),
        stuck={called.get(rank, rank): at for rank, at in diagnosis.stuck.items()},
        sites={called.get(rank, rank): site for rank, site in diagnosis.sites.items()},
        explanation=f"{reason[:1].upper()}{reason[1:]}. Each may receive data meant for the other, so the ranks that "
        f"wait in {diagnosis.call.op if diagnosis.call is not None else 'their calls'} do not show who left a call "
        "out.",
        suggestion=f"{capital(cures[0])}; if these are two jobs, give each an address of its own.",
    )


def _told_once(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Mention the victims of hundreds of failed ranks with the first few failures only."""
    raised = [i for i, d in enumerate(diagnoses) if d.kind is Kind.RANK_RAISED and d.victims]
    for i in raised[MANY:]:
        diagnosis = diagnoses[i]
        own = {rank: site for rank, site in diagnosis.sites.items() if rank in diagnosis.culprits}
        stuck = {rank: at for rank, at in diagnosis.stuck.items() if rank in diagnosis.culprits}
        diagnoses[i] = replace(diagnosis, victims=(), sites=own, stuck=stuck)
    return diagnoses


def _of_content(contradictions: Contradictions, divergences: Sequence[Divergence]) -> Contradictions:
    """Drop mismatches that only the lines of calls show, because equal calls match from any line."""
    logs = {id_: log for id_, log in contradictions.group_logs.items() if divergences[log[0]].met}
    return Contradictions(logs, contradictions.pairs)


def _explain_roots(case: Case, hit: set[int], met: list[Diagnosis]) -> list[Diagnosis]:
    """Explain every root of the graph; contradicting calls that met go to *met*."""
    result: list[Diagnosis] = []
    gone: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
    absent: dict[tuple[int, int], tuple[CallRecord, list[int], list[int]]] = {}
    starved: dict[int, tuple[CallRecord, list[int]]] = {}
    outside: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
    timed_out = given_up(case.index.evidence)
    for root in case.graph.roots():
        victims = list(case.graph.victims(root))
        if root.mismatch is not None:
            hit.add(root.mismatch)
            met.append(_mismatch(case, root.mismatch, victims))
            continue
        if root.remote:
            if victims or root.ranks:  # else whoever asked has given up
                result.append(shelf("diagnosis of rpc").unanswered(case, root, victims))
            continue
        dead = [r for r in root.ranks if case.index.states[r].phase is not Phase.BLOCKED and r not in timed_out]
        if len(root.ranks) > 1 and not dead:
            result.append(knot(case, root.ranks, victims))
            continue
        rank = dead[0] if dead else root.ranks[0]
        if not victims and len(root.ranks) == 1 and rank not in case.graph.needs:
            continue  # only its own threads need it, that served remote calls, and whoever asked waits for none
        victims += [r for r in root.ranks if r != rank]
        state = case.index.states[rank]
        if state.phase is Phase.BLOCKED and rank not in case.graph.too_late:
            if not _waits_outside(case, rank, victims):
                result.append(_blocked_alone(case, rank, victims))
                continue
            call = case.first_wait([rank])
            ranks, waiting = outside.setdefault((case.where(rank), call and (call.group, call.seq)), ([], []))
            ranks.append(rank)
            waiting += victims
        elif state.over or (
            state.phase in (Phase.BLOCKED, Phase.FINISHED, Phase.RUNNING)
            and not (state.phase is Phase.FINISHED and state.exit_code)
        ):  # one that was killed at its very end never came, either
            _never_came(case, rank, victims, absent, starved, result)
        else:
            call = case.first_wait([rank])
            key = (
                state.phase,
                exception_text(state),
                state.signal,
                state.exit_code,
                state.site,
                call and call.group,
                call and call.seq,
            )
            ranks, all_victims = gone.setdefault(key, ([], []))
            ranks.append(rank)
            all_victims += victims
    behind = {rank: others for ranks, others in outside.values() for rank in ranks}
    circle = key_circle(case, behind) if len(behind) > 1 else None
    if circle is not None:
        result.append(circle)
        outside = {key: both for key, both in outside.items() if not {*both[0]} <= {*circle.culprits}}
    result += [host_wait(case, ranks, victims) for ranks, victims in outside.values()]
    for ranks, victims in gone.values():
        result.append(death(case, ranks, victims))
    for call, ranks, victims in absent.values():
        result.append(absent_from_call(case, call, ranks, victims))
    for call, victims in starved.values():
        result.append(unmatched(case, call, [call.rank, *victims]))
    return result


def _mismatch(case: Case, number: int, victims: Sequence[int]) -> Diagnosis:
    if number >= len(case.divergences):
        return disagreement(case, case.pairs[number - len(case.divergences)], victims)
    divergence = case.divergences[number]
    met = divergence.group_log.meetings[divergence.seq]
    fleeing = [
        r
        for r in divergence.culprits
        if (state := case.index.states[r]).exception is not None and (state.phase is Phase.BLOCKED or met[r].fleeing)
    ]
    if fleeing:
        return replace(in_flight_exception(case, fleeing, victims, divergence.expected), proof=Proof.MET)
    return contradiction(case, divergence, victims)


def _waits_outside(case: Case, rank: int, victims: Sequence[int]) -> bool:
    """Return whether the rank waits for keys of a store alone, or on its host while no rank waits for it."""
    kinds = {type(wait) for wait in case.index.waits(rank)}
    return kinds == {StoreWait} or (kinds == {HostWait} and not victims)


def _blocked_alone(case: Case, rank: int, victims: list[int]) -> Diagnosis:
    needs: Sequence[RemoteNeed] = case.graph.needs.get(rank, ())
    for need in needs:
        if isinstance(need.wait, CallWait) and need.wait.record.is_p2p:
            return unmatched(case, need.wait.record, [rank, *victims])
    return host_wait(case, [rank], victims)


def _never_came(
    case: Case,
    rank: int,
    victims: list[int],
    absent: dict[tuple[int, int], tuple[CallRecord, list[int], list[int]]],
    starved: dict[int, tuple[CallRecord, list[int]]],
    diagnoses: list[Diagnosis],
) -> None:
    """Classify a rank for which others wait and which has ended normally or still runs, by the call that it did not
    make."""
    call = case.first_wait([rank])
    if call is None:  # only host or store waits point at it
        waiting = case.graph.waiters_on([rank])
        if not waiting:  # it died in a call itself, at its very end, and those it waited for may still move
            diagnoses.append(death(case, [rank], victims))
            return
        waiter = waiting[0][0]
        if not any(d.kind is Kind.HOST_STUCK and waiter in d.culprits for d in diagnoses):
            diagnoses.append(host_wait(case, [waiter], [v for v in victims if v != waiter]))
        return
    if call.remote is not None:
        diagnoses.append(death(case, [rank], victims))
        return
    if call.is_p2p:
        starved.setdefault(id(call), (call, []))[1].extend(v for v in victims if v != call.rank)
        return
    log = case.index.group_log(call)
    _, ranks, all_victims = absent.setdefault((log.id if log else -1, call.seq), (call, [], []))
    ranks.append(rank)
    all_victims += victims


def _with_refused(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Return *diagnosis* with the ranks that strict ended because of this contradiction elsewhere than in the call.

    An asynchronous call raises in its wait().
    """
    if diagnosis.kind not in INCONSISTENT or diagnosis.group is None:
        return diagnosis
    ends = diagnosis.pair or diagnosis.group.ranks
    late = [
        rank
        for rank in ends
        if rank not in (*diagnosis.culprits, *diagnosis.victims) and _refused(case, rank, diagnosis)
    ]
    if not late:
        return diagnosis
    return replace(
        diagnosis, victims=tuple(sorted((*diagnosis.victims, *late))), sites={**case.sites(late), **diagnosis.sites}
    )


def _not_made(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis as a warning if no rank is blocked in a call that level strict refused.

    The program may catch the exception, so the job may continue until a rank ends because of it.
    """
    group, call = diagnosis.group, diagnosis.call
    if group is None or call is None or diagnosis.pair is not None:
        return diagnosis
    refused = {
        record.seq
        for rank in group.ranks
        for record in case.index.records(rank)
        if record.group == group and was_refused(record)
    }
    left = {r: at for r, at in diagnosis.stuck.items() if at.seq not in refused or at.group_ranks != group.ranks}
    diagnosis = diagnosis if len(left) == len(diagnosis.stuck) else replace(diagnosis, stuck=left)
    may_go_on = call.seq in refused and Proof.REFUSED in PROOFS[diagnosis.kind] and not case.any_raised(group.ranks)
    return replace(diagnosis, proof=Proof.REFUSED) if may_go_on and diagnosis.proof is Proof.MET else diagnosis


def _one_group_mismatch(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Return *diagnoses* with one group mismatch of the same ranks: two swapped groups contradict two groups' calls."""
    seen: set[tuple[int, ...]] = set()
    left = []
    for d in diagnoses:
        if d.kind is not Kind.GROUP_MISMATCH or d.culprits not in seen:
            left.append(d)
        if d.kind is Kind.GROUP_MISMATCH:
            seen.add(d.culprits)
    return left


def _refused(case: Case, rank: int, diagnosis: Diagnosis) -> bool:
    state = case.index.states[rank]
    if state.phase is not Phase.RAISED:
        return False
    words = f"{state.traceback}\n{state.exception}"  # the program may have raised something else from it
    return any(
        was_refused(call) and str(call.error) in words
        for call in case.index.records(rank)
        if call.group == diagnosis.group and call.is_p2p == (diagnosis.pair is not None)
    )


def _refused_to_begin(case: Case) -> bool:
    """Return whether all ranks exited in the same way before any communication, as after a wrong flag.

    The program has then already reported the reason.
    """
    states, records = case.index.states, case.index.evidence.records
    codes = {state.exit_code for state in states.values()}
    return (
        len(states) == case.index.evidence.world_size - len(case.index.evidence.not_run)
        and all(state.phase is Phase.EXITED for state in states.values())
        and len(codes) == 1
        and not any(records.values())
    )


def _unwaited_deaths(case: Case, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Diagnose ranks that failed while no other rank waits for them yet."""
    if _refused_to_begin(case):
        return []
    named = {rank for d in diagnoses for rank in (*d.culprits, *d.victims)}
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, state in case.index.states.items():
        if state.phase in (Phase.FINISHED, Phase.RUNNING, Phase.BLOCKED) or rank in named:
            continue
        if state.phase is Phase.EXITED and state.exit_code == 0:  # `sys.exit()` at the end of a program
            continue
        if state.phase is Phase.ABSENT and state.leaving:
            continue  # its program has ended well without a rendezvous that nobody waits in
        if state.over:
            continue  # only its exit code is lost: `messages.after_the_end`
        live = bool(case.index.evidence.hang_after_s)
        if live and (state.phase is Phase.HOST_STUCK or (state.phase is Phase.KILLED and state.signal is None)):
            continue  # it computes on, or went nobody knows how, and nobody needs it
        key = (state.phase, exception_text(state), state.signal, state.exit_code)
        groups.setdefault(key, []).append(rank)
    return [death(case, ranks, ()) for ranks in groups.values()]
