"""Who waits for whom, for a picture: the wait-for graph with equal waits merged."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.debug.diagnosis.waits.hang_timeout import lateness, patience
from distsim.debug.diagnosis.waits.wait_graph import Need, WaitGraph
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.matching.remote_calls import rank_of
from distsim.debug.messages import call_text, place
from distsim.debug.records import CallWait, Evidence, Phase, Site, StoreWait

__all__ = ["WaitEdge", "wait_edges"]


@dataclass(slots=True)
class WaitEdge:
    """*ranks* wait, in *what* at *where*, for all of *needs*, or for any one of them."""

    ranks: list[int]
    needs: tuple[int, ...]
    """A rank stands for those of its threads that serve remote calls, too."""
    any_of: bool
    what: str
    where: str


def wait_edges(evidence: Evidence) -> list[WaitEdge]:
    """The waits of all ranks that can not go on by themselves."""
    index = EvidenceIndex(evidence)
    moving, _ = patience(index, lateness(index))
    graph = WaitGraph(index, moving)
    merged: dict[tuple[object, ...], WaitEdge] = {}
    ranks_of: dict[int, tuple[int, ...]] = {}
    for actor in graph.stuck:
        rank = rank_of(actor)
        state = index.states[rank]
        serves = index.remote.record(actor) is not None
        if not serves and (actor != rank or state.phase is not Phase.BLOCKED):
            continue
        for need in graph.needs.get(actor, ()):
            what, where = _said(need, state.site)
            key = (what, where, id(need.ranks) if isinstance(need.wait, CallWait) else need.ranks, need.any_of)
            if id(need.ranks) not in ranks_of:
                ranks_of[id(need.ranks)] = tuple(dict.fromkeys(map(rank_of, need.ranks)))
            needs = ranks_of[id(need.ranks)]
            edge = merged.setdefault(key, WaitEdge([], needs, need.any_of, what, where))
            if rank not in edge.ranks[-1:]:  # a thread that serves calls is its rank's
                edge.ranks.append(rank)
    return list(merged.values())


def _said(need: Need, site: Site | None) -> tuple[str, str]:
    wait = need.wait
    if isinstance(wait, CallWait):
        call = wait.record
        on = "" if call.is_of_two else f" on {call.group.label}"
        return call_text(call) + on, "" if call.site is None else place(call.site, through=False)
    where = "" if site is None else place(site, through=False)
    if isinstance(wait, StoreWait):
        return wait.purpose or "a key of the store", where
    return wait.what, where
