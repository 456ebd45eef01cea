"""How long a diagnosis of many ranks takes, fault by fault.

Peer: none. Aim: none; guard_postmortem.py has that of a whole verdict.

    python -m tools.benchmarks.diagnosis
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.matching.agreement import check_meeting
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.report.render import render_diagnoses
from tools.benchmarks.arguments import Arguments

SITES = [Site("train.py", line, "step") for line in (10, 11, 12, 13)]


def all_reduce(rank: int, group: Group, seq: int, index: int, numel: int = 1 << 20) -> CallRecord:
    site = SITES[index % 4]
    return CallRecord(
        rank, group, seq, "all_reduce", ((numel,),), dtypes=("float32",), reduce_op="SUM", site=site,
        stack=(site, Site("train.py", 99, "main")), issued_s=index * 0.1, state=State.COMPLETED, index=index,
    )  # fmt: skip


def trained(num_ranks: int, num_calls: int) -> tuple[Group, Evidence]:
    """A world and subgroups of 8, every rank with the same number of completed calls."""
    world = Group("0", "default_pg", tuple(range(num_ranks)))
    parts = [Group(str(1 + i), f"tp{i}", tuple(range(8 * i, 8 * i + 8))) for i in range(num_ranks // 8)]
    records = {}
    for rank in range(num_ranks):
        made: list[CallRecord] = []
        seqs = {world.name: 0, parts[rank // 8].name: 0}
        for index in range(num_calls):
            group = parts[rank // 8] if index % 4 else world
            seqs[group.name] += 1
            made.append(all_reduce(rank, group, seqs[group.name], index))
        records[rank] = made
    states = {rank: RankState(rank) for rank in range(num_ranks)}
    return world, Evidence(num_ranks, states, records, now_s=num_calls * 0.1)


def hang(num_ranks: int, num_calls: int, call: Callable[[int, Group], CallRecord | None]) -> Evidence:
    world, evidence = trained(num_ranks, num_calls)
    states, records = dict(evidence.ranks), dict(evidence.records)
    for rank in range(num_ranks):
        record = call(rank, world)
        if record is None:
            states[rank] = RankState(rank, Phase.KILLED, signal="SIGKILL")
            continue
        record.state = State.ISSUED
        records[rank] = [*records[rank], record]
        states[rank] = RankState(rank, Phase.BLOCKED, (CallWait(record),))
    evidence.ranks, evidence.records = states, records
    return evidence


def faults_of(num_ranks: int, num_calls: int) -> dict[str, Callable[[int, Group], CallRecord | None]]:
    """The last call of each rank; None: it was killed."""
    last = num_calls // 4 + 1
    halves = [Group(n, n, tuple(range(num_ranks))) for n in "ab"]
    return {
        "rank killed": lambda r, w: None if r == 7 else all_reduce(r, w, last, num_calls),
        "shape mismatch": lambda r, w: all_reduce(r, w, last, num_calls, 5 if r == 7 else 6),
        "halves in two groups": lambda r, w: all_reduce(r, halves[2 * r // num_ranks], 1, num_calls),
        "ring of sends": lambda r, w: CallRecord(
            r, w, 1, "send", ((4,),), dtypes=("float32",), peer=(r + 1) % num_ranks, index=num_calls
        ),
    }


def main() -> None:
    """A line for each fault and size."""
    Arguments(__doc__).parse_args()
    print("fault                ranks    records  diagnose s   json s  render s")
    for num_ranks, num_calls in ((512, 200), (1024, 200), (1024, 1000)):
        for name, call in faults_of(num_ranks, num_calls).items():
            evidence = hang(num_ranks, num_calls, call)
            started = time.perf_counter()
            found = diagnose(evidence)
            diagnose_s = time.perf_counter() - started
            started = time.perf_counter()
            json.dumps([d.to_json() for d in found])
            json_s = time.perf_counter() - started
            started = time.perf_counter()
            render_diagnoses(found, evidence).plain(120)
            render_s = time.perf_counter() - started
            total = sum(map(len, evidence.records.values()))
            print(f"{name:<21}{num_ranks:>5} {total:>10}  {diagnose_s:10.2f} {json_s:8.2f} {render_s:9.2f}")
    _, evidence = trained(1024, 1)
    meeting = [records[0] for records in evidence.records.values()]
    started = time.perf_counter()
    for _ in range(100):
        check_meeting(meeting)
    print(f"one meeting of 1,024 ranks checked in {(time.perf_counter() - started) * 1e4:.0f} us")


if __name__ == "__main__":
    main()
