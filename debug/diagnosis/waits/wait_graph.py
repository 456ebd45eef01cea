"""The wait-for graph over collectives, messages, remote calls and host waits: which ranks are deadlocked.

A collective waits for *all* its absent members (AND), a receive from any source for *one* sender (OR); a remote call
waits for the thread that serves it, or for any thread of a worker whose threads are all busy (OR). This is the model
of MUST (Hilbrich et al., "MPI runtime error detection with MUST", 2012). A blocked rank is freed when every one of
its waits can be met by ranks that still move; the ranks that remain after this fixpoint are deadlocked. Terminal
components of the remaining graph are the root causes: a rank that is gone, a call whose members contradict each
other, or a cycle (with OR waits: a knot).

The directed graph is implemented here, because importing networkx takes a fifth of a second, and every run looks for
hangs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

from distsim.debug.matching.index import DEAD, Actor, EvidenceIndex, GroupCalls, anyone, rank_of, serving
from distsim.debug.matching.secondary_errors import aftermath, last_words, own_fault
from distsim.debug.records import CallRecord, CallWait, HostWait, Phase, State, StoreWait, Wait


@dataclass(frozen=True, slots=True)
class RemoteNeed:
    """A wait for ranks, or for threads that serve calls: for all of them or for any one."""

    wait: Wait
    ranks: tuple[Actor, ...]
    any_of: bool = False
    mismatch: int | None = None
    """Number of the contradiction that the call ran into, so that the need can never be met; None if it can."""

    @property
    def hopeless(self) -> bool:
        return self.mismatch is not None or (self.any_of and not self.ranks)


class RemoteWaits:
    """The part of a wait-for graph that is torch.distributed.rpc's. *moving*: the running ranks that are trusted."""

    def __init__(self, index: EvidenceIndex, moving: Collection[int], nothing_moves: bool) -> None:
        self._index = index
        self._moving = frozenset(moving)
        self._nothing_moves = nothing_moves
        self._patience_s = 0.0 if nothing_moves else index.evidence.hang_after_s
        self.since_s: dict[Actor, float] = {serving(one): one.issued_s for one in self.served()}
        """Time since which each thread serves a call, or each worker owes a reply."""
        self._comers: dict[tuple[Actor, ...], tuple[Actor, ...]] = {}

    def served(self) -> Iterator[CallRecord]:
        """Return all served and unanswered calls."""
        for calls in self._index.remote.open.values():
            yield from calls

    def to_serve(self, served: CallRecord, need_of: Callable[[CallRecord], RemoteNeed | None]) -> list[RemoteNeed]:
        """Return the calls in which a serving thread waits; empty if unknown."""
        if self._is_gone(served.rank):
            return [RemoteNeed(CallWait(served), (served.rank,))]
        calls = self._index.remote.waits_of(served, self._index.records(served.rank))
        return [need for call in calls if (need := need_of(call)) is not None]

    def who_comes(self, ranks: tuple[Actor, ...]) -> tuple[Actor, ...]:
        """Return the actors that may reach a group's call of *ranks*: for a serving rank any of its threads. The same
        ranks give the same tuple."""
        serves = self._index.remote.open
        if not serves:
            return ranks
        if ranks not in self._comers:
            several = [r for r in ranks if isinstance(r, int) and r in serves and not self._is_gone(r)]
            self._comers[ranks] = tuple(anyone(r) if r in several and isinstance(r, int) else r for r in ranks)
        comers = self._comers[ranks]
        return ranks if comers == ranks else comers

    def comers(self) -> dict[Actor, list[RemoteNeed]]:
        """Return the threads of a serving rank; any one that continues may reach the call."""
        return {
            anyone(rank): [RemoteNeed(HostWait("a thread"), (rank, *(serving(one) for one in calls)), any_of=True)]
            for rank, calls in self._index.remote.open.items()
        }

    def _is_gone(self, rank: int) -> bool:
        """Return whether the process no longer serves. A program blocked on its host does not keep RPC threads from
        serving."""
        state = self._index.states[rank]
        gone = state.phase in DEAD and state.phase is not Phase.HOST_STUCK
        return rank not in self._moving and (gone or state.silent_s is not None)

    def trusted(self, needs: Mapping[Actor, Sequence[RemoteNeed]]) -> list[Actor]:
        """Return threads and workers that are alive, have shown nothing else, and for which others have not yet waited
        longer than the hang timeout."""
        patience_s, watched_s = self._patience_s, self._index.evidence.watched_s
        return [
            actor
            for actor, since_s in self.since_s.items()
            if not needs.get(actor) and (patience_s is None or watched_s(since_s) < patience_s)
        ]

    def need(self, call: CallRecord) -> RemoteNeed | None:
        """Return the actors that a remote call waits for, or None."""
        assert call.remote is not None
        to, limit_s, patience_s = call.peer, call.remote.gives_up_s, self._index.evidence.hang_after_s
        if to is None:
            return None
        if call.done:  # it failed, and its rank with it
            return RemoteNeed(CallWait(call), (to,)) if self._is_gone(to) and aftermath(call.error) else None
        if limit_s is not None and not self._nothing_moves and (patience_s is None or limit_s <= patience_s):
            return None  # it ends by itself: the program has said when
        if self._is_gone(to):
            return RemoteNeed(CallWait(call), (to,))
        if self._may_be_overwritten(call, to):
            return None
        answer = self._index.remote.answer(call)
        for actor in answer.actors:
            if actor not in self.since_s:
                self.since_s[actor] = call.issued_s
        return RemoteNeed(CallWait(call), answer.actors, any_of=answer.busy is not None)

    def _may_be_overwritten(self, call: CallRecord, to: int) -> bool:
        """Return whether the record of a call's other end may have been overwritten by thousands of later ones.

        A trainer's whole training may be a single remote call.
        """
        assert call.remote is not None
        index, rref = self._index, call.remote.rref
        request = index.remote.request_of(call)
        if request is call and call.op == "to_here":
            return rref is not None and index.truncated(rref[0])
        if index.remote.served(request) is not None or not index.truncated(to):
            return False
        records = index.records(to)
        return not records or records[0].issued_s > request.issued_s

    def to_shut_down(self, call: CallRecord) -> RemoteNeed | None:
        """Return what a worker in its shutdown waits for: all workers must arrive, and no call may be in progress."""
        left = [one for one in self.served() if one.rank in call.group.ranks]
        return RemoteNeed(CallWait(call), tuple(serving(one) for one in left)) if left else None


Node = Actor
"""An actor, a meeting ("meeting", log, seq), or a contradiction ("mismatch", its number, 0)."""
ACTORS = frozenset({"serving", "agent", "anyone"})

MEETINGS_OF_PROGRAMS = frozenset({"init_process_group", "init_rpc", "rpc_shutdown"})
"""Calls that functions served for other workers never make."""

Meeting = tuple[int, int, tuple[int, ...] | None]
"""GroupLog, number, and of a new_group the ranks it is for."""

INIT = "init_process_group"
ABSENT, UNABLE, LATE, HERE = range(4)
"""States of a member of a call: it never arrived; it arrived and then left or raised; it arrived after others gave up;
it is waiting."""
N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Root:
    """A terminal component of the graph: its ranks wait only for each other, or for nothing."""

    ranks: tuple[int, ...]
    """One rank that is gone or stuck by itself, or several ranks that wait for each other."""
    remote: tuple[Actor, ...] = ()
    """All actors of the component, if it has threads that serve calls, or a worker that answers none."""
    mismatch: int | None = None
    """Number of a contradiction."""


@dataclass(slots=True)
class Contradictions:
    """Calls of one number that contradict each other, with numbers that the caller chooses."""

    group_logs: dict[int, tuple[int, int, frozenset[int]]] = field(default_factory=dict)
    """GroupLog id -> (its number, the call from which on nothing fits, the culprits)."""
    pairs: dict[int, int] = field(default_factory=dict)
    """id(record) of a send or receive -> number."""


class WaitGraph:
    """Graph of all waits in an index. *moving* are the running ranks that are expected to make their next call."""

    def __init__(
        self,
        index: EvidenceIndex,
        moving: Collection[int],
        contradictions: Contradictions | None = None,
        nothing_moves: bool = False,
    ) -> None:
        self.index = index
        self.contradictions = contradictions or Contradictions()
        self.moving = frozenset(moving)
        self._missing: dict[tuple[Meeting, int], tuple[int, ...]] = {}
        """Meeting and degree of absence -> the members that are further from it."""
        self._degrees: dict[Meeting, dict[int, int]] = {}
        self.needs: dict[Actor, list[RemoteNeed]] = {}
        self.remote = RemoteWaits(index, self.moving, nothing_moves)
        for rank in index.states:
            if needs := self._needs_of(rank):
                self.needs[rank] = needs
        for served in self.remote.served():
            self.needs[serving(served)] = self.remote.to_serve(served, self._call)
        self.needs.update(self.remote.comers())
        self.stuck: tuple[Actor, ...] = self._fixpoint()
        self.too_late = self._too_late()
        self.graph = self._graph()

    # --- edges

    def _needs_of(self, rank: int) -> list[RemoteNeed]:
        calls = self.index.call_waits(rank)
        needs = [need for call in calls if (need := self._call(call)) is not None]
        if self.index.states[rank].phase is Phase.BLOCKED:
            for wait in self.index.waits(rank):
                if isinstance(wait, StoreWait):
                    needs.append(self._store(rank, wait))
                elif isinstance(wait, HostWait):
                    others = tuple(r for r in wait.on_ranks if r != rank)
                    needs.append(RemoteNeed(wait, others, any_of=True))
        return needs

    def _call(self, call: CallRecord) -> RemoteNeed | None:
        if call.remote is not None:
            return self.remote.need(call)
        need = self._met(call)
        if need is None or call.op in MEETINGS_OF_PROGRAMS:
            return need
        ranks = self.remote.who_comes(need.ranks)
        return need if ranks is need.ranks else replace(need, ranks=ranks)

    def _met(self, call: CallRecord) -> RemoteNeed | None:
        if call.is_p2p:
            if id(call) in self.contradictions.pairs:
                return RemoteNeed(CallWait(call), (), mismatch=self.contradictions.pairs[id(call)])
            if self.index.pairs.of(call) is not None:
                return None  # bytes move
            if call.peer is None:
                return RemoteNeed(CallWait(call), tuple(r for r in call.group.ranks if r != call.rank), any_of=True)
            return RemoteNeed(CallWait(call), (call.peer,))
        log = self.index.group_log(call)
        if log is None:
            return RemoteNeed(CallWait(call), tuple(r for r in call.members if r != call.rank))
        missing = self._missing_ranks(log, call)
        number, first, culprits = self.contradictions.group_logs.get(log.id, (0, None, frozenset()))
        if first is not None and call.seq >= first:
            others = tuple(r for r in missing if r not in culprits)
            return RemoteNeed(CallWait(call), others, mismatch=number)
        if not missing and call.op == "rpc_shutdown":
            return self.remote.to_shut_down(call)
        return RemoteNeed(CallWait(call), missing) if missing else None

    def _missing_ranks(self, log: GroupCalls, call: CallRecord) -> tuple[int, ...]:
        """Return the members that a rank waits for in its call.

        These are the members that are further from the call than the rank itself, so that members of one call never
        form a cycle.
        """
        key = (log.id, call.seq, call.new_ranks)
        if key not in self._degrees:
            self._degrees[key] = self._absence(log, call)
        degrees = self._degrees[key]
        mine = degrees.get(call.rank, HERE)
        if (key, mine) not in self._missing:
            self._missing[key, mine] = tuple(rank for rank, degree in degrees.items() if degree < mine)
        return self._missing[key, mine]

    def _absence(self, log: GroupCalls, call: CallRecord) -> dict[int, int]:
        """Return the members that have not arrived, or can no longer take part, with their distance from the call."""
        met = log.meetings.get(call.seq, {})
        members = log.group.ranks if call.new_ranks is None else call.new_ranks
        failed = [rank for rank, record in met.items() if self._failed_by_itself(record)]
        if any(met[rank].op == INIT for rank in failed):  # what was wrong here, no rank still to come would mend
            return dict.fromkeys(failed, UNABLE)
        given_up = min(
            (
                r.completed_s
                for r in met.values()
                if r.completed_s is not None and r.state is State.FAILED and r.rank not in failed
            ),
            default=None,
        )
        result: dict[int, int] = {}
        for rank in members:
            if rank not in met:
                if not self._overwritten(log, call.seq, rank):
                    result[rank] = ABSENT
            elif not met[rank].done and self._cannot_serve(rank):
                result[rank] = UNABLE
            elif given_up is not None and met[rank].issued_s > given_up:
                result[rank] = LATE
        if not result and call.new_ranks is not None:  # members alone wait, unless torch is told otherwise
            result = {r: ABSENT for r in log.absent(call.seq) if r not in members and self._cannot_serve(r)}
        if not result and len(failed) < len(met):  # they came and raised in it, by no fault of the others'
            result = dict.fromkeys(failed, UNABLE)
        return result

    def _failed_by_itself(self, record: CallRecord) -> bool:
        state = self.index.states[record.rank]
        if state.phase is not Phase.RAISED or (record.state is not State.FAILED and record.op != INIT):
            return False
        return own_fault(last_words(record, state)) and self.index.died_inside(record.rank) is record

    def _overwritten(self, log: GroupCalls, seq: int, rank: int) -> bool:
        """Return whether the call existed but its record was overwritten."""
        calls = log.calls.get(rank)
        return calls is not None and calls[0].seq > seq and self.index.truncated(rank)

    def _cannot_serve(self, rank: int) -> bool:
        phase = self.index.states[rank].phase
        if rank in self.moving:
            return False
        if phase in (Phase.RAISED, Phase.HOST_STUCK):
            return phase is Phase.RAISED and self.index.died_inside(rank) is None
        return phase in DEAD

    def _store(self, rank: int, wait: StoreWait) -> RemoteNeed:
        """Return the ranks that may set the awaited key: first of all those that do not wait for it themselves."""
        states = self.index.states
        absent = tuple(r for r, s in states.items() if s.phase is Phase.ABSENT)
        if absent:
            return RemoteNeed(wait, absent)
        keys = {r: {key for w in s.waits if isinstance(w, StoreWait) for key in w.keys} for r, s in states.items()}
        elsewhere = tuple(r for r in states if r != rank and keys[r].isdisjoint(wait.keys))
        return RemoteNeed(wait, elsewhere, any_of=True)

    # --- who can never go on

    def _fixpoint(self) -> tuple[Actor, ...]:
        """Free the actors that can continue until nothing changes, and return the stuck rest."""
        states = self.index.states
        free: list[Actor] = [
            rank
            for rank, state in states.items()
            if rank in self.moving or (state.phase is Phase.BLOCKED and rank not in self.needs)
        ]
        free += self.remote.trusted(self.needs)
        freed = set(free)
        open_needs: dict[Actor, int] = {rank: len(needs) for rank, needs in self.needs.items()}
        counters: dict[Actor, list[tuple[Actor, int]]] = {}  # needed rank -> [(waiter, its need)]
        lacking: dict[tuple[Actor, int], int] = {}
        for waiter, needs in self.needs.items():
            for i, need in enumerate(needs):
                lacking[waiter, i] = -1 if need.hopeless else (1 if need.any_of else len(need.ranks))
        # Waiters of one meeting share their needed ranks: index by the tuple, not by every pair.
        shared: dict[int, tuple[tuple[Actor, ...], list[tuple[Actor, int]]]] = {}
        for waiter, needs in self.needs.items():
            for i, need in enumerate(needs):
                if not need.hopeless:
                    shared.setdefault(id(need.ranks), (need.ranks, []))[1].append((waiter, i))
        for ranks, waiting in shared.values():
            for rank in ranks:
                counters.setdefault(rank, []).extend(waiting)
        queue = deque(free)
        while queue:
            for waiter, i in counters.get(queue.popleft(), ()):
                if lacking[waiter, i] <= 0:
                    continue
                lacking[waiter, i] -= 1
                if lacking[waiter, i] == 0:
                    open_needs[waiter] -= 1
                    may_go = not isinstance(waiter, int) or states[waiter].phase is Phase.BLOCKED
                    if open_needs[waiter] == 0 and may_go and waiter not in freed:
                        freed.add(waiter)
                        queue.append(waiter)
        actors = {**self.needs, **dict.fromkeys(self.remote.since_s)}
        return tuple(actor for actor in actors if actor not in freed)

    def _too_late(self) -> frozenset[int]:
        """Return ranks that still move but for which others gave up: these raised a timeout, and no dead rank is to
        blame."""
        late: set[int] = set()
        gone = {r for r, s in self.index.states.items() if s.phase in DEAD and self.index.died_inside(r) is None}
        for rank in self.stuck:
            if isinstance(rank, int) and self.index.states[rank].phase is Phase.RAISED:
                for need in self.needs[rank]:
                    if need.mismatch is None and gone.isdisjoint(need.ranks):
                        late.update(r for r in need.ranks if isinstance(r, int) and r not in self.needs)
        return frozenset(late)

    # --- why

    def _graph(self) -> Digraph[Node]:
        graph: Digraph[Node] = Digraph()
        stuck = frozenset(self.stuck)
        states = self.index.states
        blocked_for_good = {r for r, s in states.items() if s.phase is not Phase.BLOCKED and r not in self.moving}
        for rank in self.stuck:
            graph.add(rank)
            for need in self.needs.get(rank, ()):
                if need.mismatch is not None:
                    graph.add(rank, [("mismatch", need.mismatch, 0)])
                targets = [r for r in need.ranks if r in stuck or r in blocked_for_good or r in self.too_late]
                if isinstance(need.wait, StoreWait):  # who would set the key is not known, only who no longer can
                    targets = [
                        r
                        for r in targets
                        if isinstance(r, int) and r in blocked_for_good and states[r].phase is not Phase.FINISHED
                    ]
                if len(targets) < 2 or not isinstance(need.wait, CallWait):
                    graph.add(rank, targets)
                    continue
                record = need.wait.record  # one node a meeting keeps the graph linear in the ranks
                log = self.index.group_log(record)
                meeting = ("meeting", log.id if log else -1 - rank_of(rank), record.seq)
                if record.is_of_two:
                    meeting = ("any", rank_of(rank), record.index)
                if meeting not in graph:
                    graph.add(meeting, targets)
                graph.add(rank, [meeting])
        return graph

    def roots(self) -> list[Root]:
        """Return the terminal components, those with the lowest ranks first."""
        roots: list[Root] = []
        for members in self.graph.terminal_components():
            ranks = tuple(sorted(n for n in members if isinstance(n, int)))
            mismatch = next((n for n in members if isinstance(n, tuple) and n[0] == "mismatch"), None)
            actors = tuple(sorted(filter(_is_actor, members), key=_by_rank))
            remote = actors if len(actors) > len(ranks) else ()
            roots.append(Root(ranks, remote, None if mismatch is None else mismatch[1]))
        return sorted(roots, key=lambda root: (root.ranks, -1 if root.mismatch is None else root.mismatch))

    def victims(self, root: Root) -> tuple[int, ...]:
        """Return every stuck rank from which the root is reached."""
        starts: list[Node] = [*root.remote, *root.ranks]
        if root.mismatch is not None:
            starts.append(("mismatch", root.mismatch, 0))
        reached: set[Node] = set(starts)
        queue: deque[Node] = deque(starts)
        while queue:
            for node in self.graph.predecessors(queue.popleft()):
                if node not in reached:
                    reached.add(node)
                    queue.append(node)
        own = frozenset(root.ranks)
        return tuple(sorted(n for n in reached if isinstance(n, int) and n not in own))

    def waiters_on(self, ranks: Collection[Actor]) -> list[tuple[int, RemoteNeed]]:
        """Return stuck ranks that directly wait for one of *ranks*, in their program or in a serving thread."""
        wanted = frozenset([*ranks, *(anyone(rank) for rank in ranks if isinstance(rank, int))])
        hit = {key for key, needed in self._needed.items() if not wanted.isdisjoint(needed)}
        return [
            (rank_of(rank), need) for rank in self.stuck for need in self.needs.get(rank, ()) if id(need.ranks) in hit
        ]

    @cached_property
    def _needed(self) -> dict[int, frozenset[Actor]]:
        """Sets of actors for which stuck ranks wait, by the identity of `RemoteNeed.ranks`, which many ranks share."""
        shared = {id(need.ranks): need.ranks for rank in self.stuck for need in self.needs.get(rank, ())}
        return {key: frozenset(ranks) for key, ranks in shared.items()}

    def cycle(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the shortest cycle within a component, from its lowest rank; each waits for the next."""
        return tuple(rank_of(actor) for actor in self.actors_cycle(ranks))

    def actors_cycle(self, actors: Sequence[Actor]) -> tuple[Actor, ...]:
        """Return a cycle of the given actors."""
        inside = frozenset(actors)
        best: list[Actor] | None = None
        for start in sorted(actors, key=_by_rank)[:64]:
            came: dict[Node, Node] = {}
            queue: deque[Node] = deque([start])
            while queue and start not in came:
                node = queue.popleft()
                for after in sorted(self.graph.successors(node), key=_by_rank):
                    if after in came or (_is_actor(after) and after not in inside):
                        continue
                    came[after] = node
                    queue.append(after)
            if start not in came:
                continue
            path: list[Actor] = []
            node = came[start]
            while node != start:
                if _is_actor(node):
                    path.append(node)
                node = came[node]
            path.append(start)
            path.reverse()
            if best is None or len(path) < len(best):
                best = path
            if len(best) == 2:
                break
        return tuple(best or actors)


def _is_actor(node: Node) -> bool:
    return isinstance(node, int) or node[0] in ACTORS


def _by_rank(node: Node) -> tuple[bool, Node]:
    """Sort key: ranks before meetings, each by number."""
    return isinstance(node, tuple), node


class Digraph(Generic[N]):
    """Directed graph without parallel edges. Nodes keep the order in which they were added."""

    def __init__(self) -> None:
        self._after: dict[N, dict[N, None]] = {}
        self._before: dict[N, dict[N, None]] = {}

    def __contains__(self, node: N) -> bool:
        return node in self._after

    def add(self, node: N, after: Iterable[N] = ()) -> None:
        """Add *node*, and edges from it to each of *after*."""
        mine = self._after.setdefault(node, {})
        for other in after:
            mine[other] = None
            self._after.setdefault(other, {})
            self._before.setdefault(other, {})[node] = None

    def successors(self, node: N) -> Iterable[N]:
        return self._after[node]

    def predecessors(self, node: N) -> Iterable[N]:
        return self._before.get(node, ())

    def terminal_components(self) -> list[list[N]]:
        """Return the strongly connected components without outgoing edges.

        Source: Tarjan, "Depth-first search and linear graph algorithms", 1972; implemented without recursion.
        """
        number: dict[N, int] = {}
        lowest: dict[N, int] = {}
        open_nodes: dict[N, None] = {}
        """Seen, and in no component yet."""
        component: dict[N, int] = {}
        components: list[list[N]] = []
        for root in self._after:
            if root in number:
                continue
            path: list[tuple[N, Iterator[N]]] = []
            number[root] = lowest[root] = len(number)
            open_nodes[root] = None
            path.append((root, iter(self._after[root])))
            while path:
                node, rest = path[-1]
                for other in rest:
                    if other not in number:
                        number[other] = lowest[other] = len(number)
                        open_nodes[other] = None
                        path.append((other, iter(self._after[other])))
                        break
                    if other in open_nodes:
                        lowest[node] = min(lowest[node], number[other])
                else:
                    path.pop()
                    if path:
                        above = path[-1][0]
                        lowest[above] = min(lowest[above], lowest[node])
                    if lowest[node] == number[node]:
                        members: list[N] = []
                        while not members or members[-1] != node:
                            members.append(open_nodes.popitem()[0])
                        component.update(dict.fromkeys(members, len(components)))
                        components.append(members)
        return [
            members
            for component_number, members in enumerate(components)
            if all(component[other] == component_number for node in members for other in self._after[node])
        ]
