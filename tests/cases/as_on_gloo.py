"""How ranks end for real where a simulation says that they have finished, or are blocked: the same records, told by a
launcher, sockets and a process that is on its way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distsim.debug.records import CallWait, Evidence, Phase, RankState, State

__all__ = ["endings"]

CLOSED = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30373"
)


def endings(evidence: Evidence) -> Iterator[tuple[str, Evidence]]:
    """The *evidence* of a simulation as real runs would have left it, each with what is told of it."""
    ended = [rank for rank, state in evidence.ranks.items() if state.phase is Phase.FINISHED]
    if not ended:
        return
    yield "ended by the launcher", _with(evidence, {r: _terminated(evidence.ranks[r]) for r in ended})
    leaving = _with(evidence, {r: _leaving(evidence.ranks[r]) for r in ended})
    yield "on its way out", replace(leaving, hang_after_s=0.0)
    waiting = {r: s for r, s in evidence.ranks.items() if s.phase is Phase.BLOCKED and _for_one_of(ended, s)}
    if waiting:
        lost = {rank: _lost(state) for rank, state in waiting.items()}
        first = min(lost)
        yield "connections closed", _with(evidence, lost, set(lost))
        yield (
            "one connection closed, the rest ended by the launcher",
            _with(evidence, {first: lost[first]} | {r: _terminated(evidence.ranks[r]) for r in ended}, {first}),
        )


def _for_one_of(ended: list[int], state: RankState) -> bool:
    """It waits in a collective with a rank whose sockets are closed."""
    calls = [wait.record for wait in state.waits if isinstance(wait, CallWait)]
    return any(not call.is_p2p and set(ended) & set(call.group.ranks) for call in calls)


def _terminated(state: RankState) -> RankState:
    return replace(state, phase=Phase.KILLED, signal="SIGTERM", exit_code=-15, over=True, site=None, stack=())


def _leaving(state: RankState) -> RankState:
    return replace(state, phase=Phase.RUNNING, leaving=True, exit_code=None, site=None, stack=())


def _lost(state: RankState) -> RankState:
    return replace(state, phase=Phase.RAISED, waits=(), exception=CLOSED, traceback=CLOSED, exit_code=1)


def _with(evidence: Evidence, states: dict[int, RankState], failed: set[int] = frozenset()) -> Evidence:  # type: ignore[assignment]
    """With other states; the open calls of those who *failed* ended in the error."""
    records = {
        rank: [
            replace(call, state=State.FAILED, error=CLOSED.partition(": ")[2])
            if rank in failed and call.state in (State.ISSUED, State.STARTED) and not call.is_p2p
            else call
            for call in calls
        ]
        for rank, calls in evidence.records.items()
    }
    return replace(evidence, ranks={**evidence.ranks, **states}, records=records)
