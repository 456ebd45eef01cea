"""A thousand ranks: small graphs, short texts. (The time is printed by tools/benchmarks/diagnosis.py.)"""

from __future__ import annotations

from typing import Any

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.waits.wait_graph import WaitGraph
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State, StoreWait
from distsim.debug.records.kinds import Kind
from distsim.debug.report.render import render_diagnoses

SIZE = 1024
WORLD = Group("0", "default_pg", tuple(range(SIZE)))
SITE = Site("train.py", 10, "step")


def thousand(missing: int) -> Evidence:
    ranks, records = {}, {}
    for rank in range(SIZE):
        made = [
            CallRecord(rank, WORLD, seq, "all_reduce", ((4,),), reduce_op="SUM", site=SITE, index=seq - 1)
            for seq in (1, 2)
        ]
        made[0].state = State.COMPLETED
        if rank == missing:
            del made[1]
        records[rank] = made
        ranks[rank] = RankState(rank, Phase.KILLED, signal="SIGKILL")
        if rank != missing:
            ranks[rank] = RankState(rank, Phase.BLOCKED, (CallWait(made[1]),))
    return Evidence(SIZE, ranks, records)


def test_one_of_a_thousand() -> None:
    """One rank of 1,024 is named, its victims are ranges, the report is short."""
    evidence = thousand(missing=700)
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, len(d.victims)) == (Kind.RANK_KILLED, (700,), SIZE - 1)
    assert "Ranks 0-699,701-1023 wait in all_reduce #2" in d.explanation
    assert len(render_diagnoses([d], evidence).plain(120).splitlines()) < 12


def test_graph_is_linear_in_the_ranks() -> None:
    """Half of the ranks wait for the other half in one call: one node for the call, not 2**18 edges."""
    a, b = (Group(n, n, tuple(range(SIZE))) for n in "ab")
    ranks, records = {}, {}
    for rank in range(SIZE):
        call = CallRecord(rank, a if rank < SIZE // 2 else b, 1, "barrier", site=SITE)
        records[rank] = [call]
        ranks[rank] = RankState(rank, Phase.BLOCKED, (CallWait(call),))
    evidence = Evidence(SIZE, ranks, records)
    graph = WaitGraph(EvidenceIndex(evidence), ())
    assert len({node for rank in range(SIZE) for node in graph.graph.successors(rank)}) == 2
    (d,) = diagnose(evidence)
    assert (d.kind, d.cycle, len(d.victims)) == (Kind.DEADLOCK_CYCLE, (0, 512), SIZE - 2)


def test_long_cycle_is_short_to_read() -> None:
    """A ring of 1,024 blocking sends: the whole cycle in the data, a few steps in the text."""
    ranks, records = {}, {}
    for rank in range(SIZE):
        call = CallRecord(rank, WORLD, 1, "send", ((4,),), peer=(rank + 1) % SIZE, tag=0, site=SITE)
        records[rank] = [call]
        ranks[rank] = RankState(rank, Phase.BLOCKED, (CallWait(call),))
    (d,) = diagnose(Evidence(SIZE, ranks, records))
    assert d.cycle == tuple(range(SIZE))
    assert len(d.explanation) < 800


class Counted(dict[str, str]):
    """Sources that count how often they are read."""

    times = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.times += 1
        return super().get(key, default)


def circle_of_keys(size: int) -> Counted:
    """Diagnose ranks that wait for one another's keys, and return the sources."""
    here = (Site("train.py", 2, "main"), Site("train.py", 4, "<module>"))
    text = 'def main():\n    store.wait([f"go{rank + 1}"])\n    store.set(f"go{rank}", "1")\nmain()\n'
    sources, ranks = Counted({"train.py": text}), {}
    for rank in range(size):
        waits = (StoreWait((f"go{rank}",)),)
        ranks[rank] = RankState(rank, Phase.BLOCKED, waits, site=here[0], stack=here, since_s=0.0)
    evidence = Evidence(size, ranks, {rank: [] for rank in ranks}, now_s=2.0, sources=sources, hang_after_s=300.0)
    (d,) = diagnose(evidence)
    assert (d.kind, len(d.culprits)) == (Kind.DEADLOCK_CYCLE, size)
    return sources


def test_the_text_is_read_once_for_all_ranks() -> None:
    """What sets a key is the same for every rank that awaits one."""
    assert circle_of_keys(128).times == circle_of_keys(8).times
