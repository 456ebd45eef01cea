"""Diagnoses sends and receives that have no partner or do not fit their partner, and finds the closest candidate.

`diagnose` pairs messages by counting, so it ignores completed ones of ranks whose first calls are overwritten. The
comparer of a live job identifies both ends of a message by their numbers; `with_messages` examines those that it
suspects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.ranking import order
from distsim.debug.diagnosis.waits.wait_graph import WaitGraph
from distsim.debug.matching.agreement import Mismatch, check_pair, payload_text
from distsim.debug.matching.comparer import PAIR, StreamKey
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.messages import call_text, capital, no_record_advice, ranks_text, site_text
from distsim.debug.records import CallRecord, CallWait, Evidence, Phase, State
from distsim.debug.records.call import was_refused
from distsim.debug.records.diagnosis import Diagnosis, message_key
from distsim.debug.records.kinds import Kind, Proof


@dataclass(frozen=True, slots=True)
class NearMiss:
    """An unmatched call that differs in one property from the partner that another call needs."""

    call: CallRecord
    differs: str
    """`tag`, `group`, `receiver` or `sender`."""
    culprits: tuple[int, ...]


def near_miss(index: EvidenceIndex, call: CallRecord) -> NearMiss | None:
    """Return the best candidate among the other unmatched calls: one with another tag, group or rank; None without
    one.
    """
    others = index.pairs.lonely_sends if call.op == "recv" else index.pairs.lonely_recvs
    ranked: list[tuple[int, int, NearMiss]] = []
    for other in others:
        if other.rank == call.rank or (other.done and other.error):
            continue
        if call.group.has_signals and other.group != call.group:
            continue  # a signal on another channel is another signal
        meets_me = other.peer == call.rank
        from_peer = other.rank == call.peer or call.peer is None
        same_tag = (other.tag or 0) == (call.tag or 0)
        same_group = other.group.name == call.group.name
        if meets_me and from_peer and not same_tag:
            miss = NearMiss(other, "tag", _strayed(index, call, other))
            ranked.append((0, -other.index, miss))
        elif meets_me and from_peer and not same_group:
            ranked.append((1, -other.index, NearMiss(other, "group", _strayed(index, call, other))))
        elif from_peer and call.peer is not None and same_group and same_tag and not other.done:
            if _met_before(index, other):
                continue  # as always, and ahead of the rank that it waits for
            # the peer is in a send (recv) to somebody else, who does not want it either
            side = "receiver" if call.op == "recv" else "sender"
            ranked.append((2, -other.index, NearMiss(other, side, (other.rank,))))
        elif meets_me and same_group and same_tag and not other.done and call.peer is not None:
            before = _earlier(index, call, call.group.name)
            if _met_before(index, other) and not _breaks_habit(call, before, lambda r: r.peer):
                continue  # this line had no other peers
            side = "sender" if call.op == "recv" else "receiver"
            ranked.append((3, -other.index, NearMiss(other, side, (call.rank,))))
    return min(ranked, key=lambda r: r[:2])[2] if ranked else None


def _fewest(index: EvidenceIndex, call: CallRecord) -> tuple[tuple[int, ...], int, int] | None:
    """Return the ranks that sent the fewest messages to a receive from any rank, their number, and that of the other
    ranks.
    """
    sent = {
        rank: sum(r.op == "send" and r.peer == call.rank and r.tag == call.tag for r in index.records(rank))
        for rank in call.group.ranks
        if rank != call.rank
    }
    many = max(sent.values(), default=0)
    few = tuple(rank for rank, number in sent.items() if number < many)
    numbers = {sent[rank] for rank in few}
    return (few, numbers.pop(), many) if len(numbers) == 1 and len(few) * 2 <= len(sent) else None


def _strayed(index: EvidenceIndex, call: CallRecord, other: CallRecord) -> tuple[int, ...]:
    """Return the culprit of two ends that differ in tag or group: the one that broke its habit, else both."""
    odd = [r.rank for r in (call, other) if _breaks_habit(r, _to_peer(index, r), lambda r: (r.tag, r.group.name))]
    return (odd[0],) if len(odd) == 1 else tuple(sorted((call.rank, other.rank)))


def _met_before(index: EvidenceIndex, record: CallRecord) -> bool:
    """Return whether an earlier message of this line to (from) this rank has met its other end."""
    return any(r.done and not r.error and r.peer == record.peer for r in _earlier(index, record, record.group.name))


def _earlier(index: EvidenceIndex, record: CallRecord, group: str | None = None) -> list[CallRecord]:
    """Return the earlier messages of this line and direction, of one *group* if it is given."""
    before = (r for r in index.records(record.rank) if r.index < record.index)
    alike = (r for r in before if r.op == record.op and r.site == record.site)
    return [r for r in alike if group in (None, r.group.name)]


def _to_peer(index: EvidenceIndex, record: CallRecord) -> list[CallRecord]:
    return [r for r in _earlier(index, record) if r.peer == record.peer]


def _breaks_habit(record: CallRecord, earlier: Sequence[CallRecord], read: Callable[[CallRecord], Hashable]) -> bool:
    """Return whether *read* gives another value of this message than of all *earlier* ones."""
    habit = {read(r) for r in earlier}
    return bool(habit) and read(record) not in habit


def unmatched(case: Case, call: CallRecord, stuck: Sequence[int], cycle: tuple[int, ...] | None = None) -> Diagnosis:
    """Return the diagnosis `p2p_unmatched` for a send or receive that waits forever."""
    miss = near_miss(case.index, call)
    if miss is not None and miss.differs in ("tag", "group") and call.op == "send" and _suffers(case, miss.call.rank):
        # Two ends of one message: the receiver tells it, whichever of them was looked at first.
        stuck = [*stuck, call.rank]
        miss, call = replace(miss, call=call), miss.call
    peer = call.peer
    culprits: tuple[int, ...]
    never = "sent it" if call.op == "recv" else "received it"
    signals = call.group.has_signals
    head = f"Rank {call.rank} waits {'for' if signals else 'in'} {call_text(call)}, at {site_text(call.site)}."
    if miss is not None:
        other = miss.call
        verb = "sent" if other.op == "send" and other.done else ("sends" if other.op == "send" else "receives")
        preposition = "to" if other.op == "send" else "from"
        toward = f"{preposition} {'any rank' if other.peer is None else f'rank {other.peer}'}"
        if miss.differs == "tag":
            toward += f" with tag {other.tag or 0}, not {call.tag or 0}"
        elif call.group.is_beside(other.group):
            toward += f" with a tensor on {_device(other)}, not on {_device(call)}"
        elif miss.differs == "group":
            toward += f" on group {other.group.label}, not {call.group.label}"
        elif miss.differs in ("receiver", "sender") and miss.culprits == (call.rank,):
            toward += f", which is waiting for rank {peer}"
        text = f"{head} Rank {other.rank} {verb} {toward}, at {site_text(other.site)}."
        culprits = miss.culprits
        pair = (other.rank, call.rank) if call.op == "recv" else (call.rank, other.rank)
        if miss.differs in ("receiver", "sender") and peer is not None:
            pair = (peer, call.rank) if call.op == "recv" else (call.rank, peer)
        suggestion = {
            "tag": "Give both ends the same tag.",
            "group": "Move the tensor of one end to the kind of device that the other uses: .to(device)."
            if call.group.is_beside(other.group)
            else "Give both ends the same group=.",
        }.get(miss.differs, _peer_advice(call, other, miss.culprits))
        if miss.differs in ("tag", "group") and len(culprits) == 2:
            suggestion += " The records do not show which of the two is wrong."
    elif peer is None:
        senders = [r for r in call.group.ranks if r != call.rank]
        text = (
            f"{head} None of the other {len(senders)} ranks of the group has a message for it, and none will send one."
        )
        culprits, pair = (call.rank,), None
        suggestion = "Receive only as many messages as are sent: count the messages, or send an end mark."
        if (counts := _fewest(case.index, call)) is not None:
            culprits, few, many = counts
            text += f" {capital(ranks_text(culprits))} sent {few} to rank {call.rank}, and the others {many} each."
    else:
        text = f"{head} Rank {peer} never {never}: it {case.where(peer)}."
        culprits = (peer,)
        pair = (peer, call.rank) if call.op == "recv" else (call.rank, peer)
        other_end = "send" if call.op == "recv" else "recv"
        own_end = "wait" if signals else call.op
        suggestion = f"Make rank {peer} {other_end}{' it' * signals}, or drop the {own_end} at {site_text(call.site)}."
    kind = Kind.P2P_UNMATCHED
    if miss is None and peer is not None and case.unknown(peer):
        kind = Kind.MISSING_RANK
        text = f"{head} Rank {peer} left no record: whether it {never}, and where it is, is not known."
        suggestion = no_record_advice([peer])
    return case.diagnosis(
        kind,
        culprits,
        stuck,
        call=call,
        explanation=text,
        suggestion=suggestion,
        cycle=cycle,
        pair=pair,
        sites={} if miss is None or miss.call.site is None else {miss.call.rank: miss.call.site},
    )


def _device(call: CallRecord) -> str:
    return "the CPU" if call.device == "cpu" else "a GPU"


def _peer_advice(call: CallRecord, other: CallRecord, culprits: tuple[int, ...]) -> str:
    """Return which peer to check where a send and a receive name other ranks than each other."""
    wrong, right = (call, other) if culprits == (call.rank,) else (other, call)
    does = "receives from" if wrong.op == "recv" else "sends to"
    peer = "any rank" if wrong.peer is None else f"rank {wrong.peer}"
    awaited = f"rank {right.rank} waits for {'a message from' if right.op == 'recv' else 'a receive by'} it"
    at = "" if right.site == wrong.site else f", at {site_text(right.site)}"
    return f"Check the peer's rank at {site_text(wrong.site)}: rank {wrong.rank} {does} {peer}, and {awaited}{at}."


Disagreement = tuple[Mismatch, CallRecord, CallRecord]


def disagreeing(index: EvidenceIndex) -> list[Disagreement]:
    """Return matched pairs whose sizes or dtypes differ; pairs of the same two lines are reported once."""
    result: list[Disagreement] = []
    reported: set[tuple[object, ...]] = set()
    for send, recv in index.pairs_in_order():
        mismatch = check_pair(send, recv)
        if mismatch is None:
            continue
        key = (send.rank, recv.rank, send.site, recv.site, mismatch.kind, send.done and recv.done)
        if key not in reported:
            reported.add(key)
            result.append((mismatch, send, recv))
    return result


def disagreement(case: Case, disagreement: Disagreement, victims: Sequence[int]) -> Diagnosis:
    """Return the diagnosis `p2p_size_mismatch` or `dtype_mismatch` for a pair of messages."""
    mismatch, send, recv = disagreement
    culprits = mismatch.culprits
    odd = [r.rank for r in (send, recv) if _breaks_habit(r, _to_peer(case.index, r), payload_text)]
    if len(odd) == 1:
        culprits = (odd[0],)
    tie = "" if len(odd) == 1 else " The records do not show which of the two is wrong."
    swapped = _in_other_order(case.index, send, recv)
    cure = "Give both ends the same number of elements and the same dtype." + tie
    if swapped:
        cure = (
            f"Post the messages between ranks {send.rank} and {recv.rank} in one order on both ends, or give each a "
            "tag of its own (tag=)."
        )
    diagnosis = case.diagnosis(
        mismatch.kind,
        culprits,
        [*victims, *(r for r in (send.rank, recv.rank) if _suffers(case, r))],
        call=recv,
        explanation=f"Rank {send.rank} sends {payload_text(send)} to rank {recv.rank}, "
        f"at {site_text(send.site)}. Rank {recv.rank} receives {payload_text(recv)}, at {site_text(recv.site)}."
        f"{' The two ends have the same messages, in another order.' if swapped else ''}",
        suggestion=cure,
        since_s=max(send.issued_s, recv.issued_s),
        pair=(send.rank, recv.rank),
        sites={r.rank: r.site for r in (send, recv) if r.site is not None},
    )
    caught = was_refused(send) and was_refused(recv) and not case.any_raised(diagnosis.pair or ())
    return replace(diagnosis, proof=Proof.REFUSED if caught else Proof.MET)


def _in_other_order(index: EvidenceIndex, send: CallRecord, recv: CallRecord) -> bool:
    """Return whether the sender has the expected messages from here on, in another order."""
    sent, expected = (
        [
            payload_text(r)
            for r in index.records(own.rank)
            if r.op == own.op and r.peer == other.rank and r.tag == own.tag and r.index >= own.index
        ]
        for own, other in ((send, recv), (recv, send))
    )
    return len(sent) > 1 and sorted(sent) == sorted(expected)


def _suffers(case: Case, rank: int) -> bool:
    state = case.index.states[rank]
    return state.phase is Phase.BLOCKED and any(isinstance(w, CallWait) for w in case.index.waits(rank))


def with_messages(
    diagnoses: Sequence[Diagnosis], evidence: Evidence, focus: Mapping[StreamKey, int]
) -> list[Diagnosis]:
    """Return *diagnoses* and those for suspected messages of *focus* that really do not match, the root cause first."""
    pairs = [pair for key, number in focus.items() if (pair := _pair(evidence, key, number)) is not None]
    if not pairs:
        return list(diagnoses)
    index = EvidenceIndex(evidence)
    case = Case(index, WaitGraph(index, index.states), [], pairs)
    answer = list(diagnoses)
    reported = {message_key(diagnosis) for diagnosis in diagnoses}
    for pair in pairs:
        diagnosis = disagreement(case, pair, ())
        if message_key(diagnosis) not in reported:
            reported.add(message_key(diagnosis))
            answer.append(diagnosis)
    return order(index, answer)


def _pair(evidence: Evidence, key: StreamKey, index: int) -> Disagreement | None:
    mark, ranks, sent = key
    if mark != PAIR:
        return None
    send, recv = _call(evidence, ranks[0], sent), _call(evidence, ranks[1], index)
    if send is None or recv is None or (send.op, recv.op) != ("send", "recv"):
        return None
    if (send.peer, recv.peer, send.tag, send.group) != (recv.rank, send.rank, recv.tag, recv.group):
        return None  # of an earlier attempt: the numbers are the same
    if State.FAILED in (send.state, recv.state):
        return None  # who failed may never have met the other
    mismatch = check_pair(send, recv)
    return None if mismatch is None else (mismatch, send, recv)


def _call(evidence: Evidence, rank: int, index: int) -> CallRecord | None:
    return next((call for call in reversed(evidence.records.get(rank, ())) if call.index == index), None)
