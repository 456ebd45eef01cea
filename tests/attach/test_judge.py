"""What the positions of ranks say: pure rules on positions that stand here as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distsim.debug.attach import Doing, HostPositions, Judged, Position, judge, judge_hosts, position_of
from distsim.debug.attach.ranks import Frame, RankProcess, StackSample, Thread
from distsim.debug.records import Site
from distsim.debug.records.kinds import Kind
from distsim.debug.report.render import render_diagnoses


def at(rank: int, op: str = "all_reduce", line: int = 9, doing: Doing = Doing.CALL, **more: Any) -> Position:
    site = Site("train.py", line, "main")
    return Position(rank, 100 + rank, doing, op, site, (site,), **more)


def host(rank: int, line: int = 5, **more: Any) -> Position:
    return at(rank, "", line, Doing.HOST, **more)


def meeting(rank: int, members: str) -> Position:
    return at(rank, "new_group", 5, Doing.MEETING, members=members)


def turn(rank: int, step: int, op: str = "all_reduce", line: int = 9) -> Position:
    return at(rank, op, line, counters={("main", "step"): step, ("main", "rank"): rank})


@pytest.mark.parametrize(
    ("positions", "kind", "culprits"),
    [
        pytest.param([at(0), at(1), at(2, "barrier", 12)], Kind.MISSING_RANK, (2,), id="in another call"),
        pytest.param([at(0), at(1), at(2, line=12)], Kind.MISSING_RANK, (2,), id="in the same call at another line"),
        pytest.param([at(0, blocks=None), at(1, "barrier", 12)], Kind.WRONG_ORDER, (0, 1), id="two ranks are a tie"),
        pytest.param(
            [at(0), at(1), at(2, "barrier", 12), at(3, "broadcast", 3)],
            Kind.WRONG_ORDER,
            (0, 1, 2, 3),
            id="no majority",
        ),
        pytest.param([at(0), host(1), at(2)], Kind.HOST_STUCK, (1,), id="on the host"),
        pytest.param([host(0), at(1), host(2)], Kind.MISSING_RANK, (1,), id="most wait for a thread of theirs"),
        pytest.param([at(0), at(1, "", 5, Doing.RUNS, busy=True)], Kind.STRAGGLER, (1,), id="computes"),
        pytest.param([host(0), host(1, 7)], Kind.HOST_STUCK, (0, 1), id="all on the host"),
        pytest.param([turn(0, 4), turn(1, 3), turn(2, 4)], Kind.UNEVEN_ITERATIONS, (1,), id="a turn behind"),
        pytest.param([turn(0, 4), turn(1, 3, "barrier", 12)], Kind.UNEVEN_ITERATIONS, (1,), id="turns settle a tie"),
        pytest.param(
            [at(0, "recv", peer=1), at(1, "recv", peer=2), at(2, "recv", peer=0)],
            Kind.DEADLOCK_CYCLE,
            (0, 1, 2),
            id="a circle of messages",
        ),
        pytest.param([at(0, "recv", 4, peer=1), at(1), at(2)], Kind.P2P_UNMATCHED, (1,), id="no other end"),
        pytest.param(
            [at(0, "barrier", 12), at(1, "send", 4, peer=2), at(2, "barrier", 12), at(3, "recv", 6, peer=1)],
            Kind.P2P_UNMATCHED,
            (1,),
            id="sends past the rank that waits for it",
        ),
        pytest.param(
            [at(0, "barrier", 12), at(1, "irecv", 4, peer=2), at(2, "barrier", 12), at(3, "isend", 6, peer=1)],
            Kind.P2P_UNMATCHED,
            (1,),
            id="receives from another rank than the one that sends",
        ),
        pytest.param(
            [at(0, "barrier", 12), at(1, "send", 4, peer=2), at(2, "barrier", 12), at(3, "send", 6, peer=1)],
            Kind.P2P_UNMATCHED,
            (2,),
            id="two sends are no two ends",
        ),
        pytest.param(
            [at(0, "barrier", 12), at(1, "send", 4, peer=0), at(2, "send", 4, peer=0), at(3, "recv", 6, peer=2)],
            Kind.P2P_UNMATCHED,
            (2,),
            id="only the one that is waited for is wrong",
        ),
        pytest.param(
            [at(0, "broadcast", root=0), at(1, "broadcast", root=1), at(2, "broadcast", root=0)],
            Kind.ROOT_MISMATCH,
            (1,),
            id="another root",
        ),
        pytest.param(
            [at(0, "broadcast", root=0), at(1, "broadcast", root=1), at(2, "barrier", 12)],
            Kind.ROOT_MISMATCH,
            (1,),
            id="another root, and the others are past",
        ),
        pytest.param(
            [at(0, "broadcast", root=0, on_group=True), at(1, "broadcast", root=2, on_group=True)],
            Kind.DEADLOCK_CYCLE,
            (0, 1),
            id="roots of two groups may differ",
        ),
        pytest.param(
            [meeting(0, "[0, 1]"), meeting(1, "[1, 2]"), meeting(2, "[0, 1]")],
            Kind.GROUP_CREATION_ORDER,
            (1,),
            id="another group",
        ),
        pytest.param(
            [at(0, "barrier", 18), meeting(1, "[0, 1]"), at(2, line=16, on_group=True), at(3, "barrier", 18)],
            Kind.GROUP_CREATION_ORDER,
            (0, 1, 2, 3),
            id="a group that not all create, and no majority",
        ),
        pytest.param(
            [at(0, on_group=True), at(1, on_group=True)], Kind.DEADLOCK_CYCLE, (0, 1), id="all in calls on groups"
        ),
        pytest.param([at(0, line=12), at(1)], Kind.MISSING_RANK, (0,), id="past a call that no rank can have passed"),
        pytest.param(
            [at(0, line=12, blocks=("For 3 body",)), at(1, blocks=("For 3 body",))],
            Kind.WRONG_ORDER,
            (0, 1),
            id="in a loop nobody is past the other",
        ),
        pytest.param(
            [at(0, line=12, blocks=("If 3 orelse",)), at(1, blocks=("If 3 body",))],
            Kind.WRONG_ORDER,
            (0, 1),
            id="nor in two branches",
        ),
        pytest.param(
            [at(0, line=12), at(1, "broadcast", root=0)], Kind.WRONG_ORDER, (0, 1), id="a root does not wait for all"
        ),
    ],
)
def test_who_is_elsewhere_is_named(positions: list[Position], kind: Kind, culprits: tuple[int, ...]) -> None:
    """The minority by call, line, turn of a loop, root; the other end of a message; no minority: all of them."""
    (found,) = judge(positions, len(positions)).diagnoses
    assert (found.kind, found.culprits) == (kind, culprits)
    assert found.explanation.endswith("By stacks only: the earlier calls of the ranks are not known.")
    assert set(culprits).isdisjoint(found.victims)


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param([at(0, moved=True), at(1, moved=True)], id="they move"),
        pytest.param([at(0, moved=True), host(1, moved=True)], id="one on the host, and they move"),
    ],
)
def test_ranks_that_move_are_no_hang(positions: list[Position]) -> None:
    """A healthy job may be met in a collective at both samples."""
    judged = judge(positions, 2)
    assert (judged.diagnoses, judged.inconclusive) == ([], None)
    assert judged.running


def test_ranks_at_one_place_accuse_nobody() -> None:
    """Two groups, shapes, the network: stacks do not show them."""
    judged = judge([at(0), at(1)], 2)
    assert judged.diagnoses == []
    assert "ranks 0,1 wait at the same line" in str(judged.inconclusive).lower()


def test_a_send_and_its_receive_are_no_circle() -> None:
    """They meet."""
    judged = judge([at(0, "send", peer=1), at(1, "recv", line=9, peer=0)], 2)
    assert Kind.DEADLOCK_CYCLE not in {found.kind for found in judged.diagnoses}


def test_a_rank_without_a_process_is_named() -> None:
    """Before what the others do: they wait for it."""
    (found,) = judge([at(0), at(2)], 3, gone=[1]).diagnoses
    assert (found.kind, found.culprits, found.victims) == (Kind.RANK_EXITED, (1,), (0, 2))


def test_ranks_of_other_hosts_are_not_accused() -> None:
    """Nobody looked at them; the report says how many."""
    judged = judge([at(0), at(1)], 4)
    assert judged.diagnoses == []
    assert "2 of 4 ranks are not on the examined hosts" in judged.evidence.notes


def test_who_waits_to_meet_names_who_is_not_there() -> None:
    """Every rank that was found is in init_process_group, and the world is larger."""
    (found,) = judge([at(0, "init_process_group", 3, Doing.MEETING)], 2).diagnoses
    assert (found.kind, found.culprits) == (Kind.NEVER_JOINED, (1,))


def _two_hosts() -> Judged:
    first = HostPositions("a", 4, [at(0), at(1)], (), {"train.py": {9: "dist.all_reduce(t)"}})
    second = HostPositions(
        "b", 4, [at(2), host(3)], (), {"train.py": {5: "batch = next(data)", 9: "dist.all_reduce(t)"}}
    )
    return judge_hosts([HostPositions.from_json(one.to_json()) for one in (first, second)])


def test_hosts_are_judged_together() -> None:
    """As one job, with the lines that each host sent."""
    judged = _two_hosts()
    (found,) = judged.diagnoses
    assert (found.kind, found.culprits, found.victims) == (Kind.HOST_STUCK, (3,), (0, 1, 2))
    text = render_diagnoses(judged.diagnoses, judged.evidence).plain(100)
    assert "train.py:5  |  batch = next(data)" in text


@pytest.mark.parametrize(
    "change", [{"schema": "other/1"}, {"places": [{}]}, {"world_size": "many"}, {"gone": [-(10**30)]}]
)
def test_another_hosts_answer_is_checked(change: dict[str, Any]) -> None:
    """It may come from another release, or from anything else that was found under the name."""
    data = HostPositions("a", 2, [at(0)]).to_json() | change
    with pytest.raises((ValueError, KeyError, TypeError)):
        HostPositions.from_json(data)


def test_a_place_says_what_its_call_was_given(tmp_path: Path) -> None:
    """A group among the arguments, the members of a new group, and the blocks around the line."""
    program = tmp_path / "train.py"
    program.write_text("for step in x:\n    if step:\n        a()\n    else:\n        b()\nc()\n")
    torch = "/x/torch/distributed/"
    given = (("args", "(<Tensor at 0x1>)"), ("kwargs", '{"group": <torch._C._distributed_c10d.ProcessGroup at 0x2>}'))

    def position(line: int, function: str, variables: Any, *wrapped: Any) -> Position:
        frames = (
            Frame(f"{torch}distributed_c10d.py", 9, function, variables),
            Frame(f"{torch}c10d_logger.py", 8, "wrapper", wrapped),
            Frame(str(program), line, "<module>"),
        )
        found = position_of(StackSample(RankProcess(1, 0), (Thread("MainThread", frames),)))
        assert found is not None
        return found

    assert position(6, "all_reduce", (), *given).on_group
    assert not position(
        6, "all_reduce", (("group", "<ProcessGroup at 0x2>"),), ("args", "()"), ("kwargs", "{}")
    ).on_group
    assert position(6, "new_group", (("ranks", "[0, 1]"),)).members == "[0, 1]"
    assert [position(line, "barrier", ()).blocks for line in (3, 5, 6)] == [
        ("For 1 body", "If 2 body"),
        ("For 1 body", "If 2 orelse"),
        (),
    ]
    assert position_of(StackSample(RankProcess(1, 0), ended=True)) is None


def test_waits_for_a_key_and_for_the_end_of_rpc_are_calls(tmp_path: Path) -> None:
    """Both wait for other ranks; the second is several frames deep in torch, in a lock of Python's."""
    program = tmp_path / "train.py"
    program.write_text('name = store.get("run-id")\nrpc.shutdown()\nbatch = queue.get()\n')

    def position(line: int, *inner: Frame) -> Position:
        thread = Thread("MainThread", (*inner, Frame(str(program), line, "<module>")))
        found = position_of(StackSample(RankProcess(1, 0), (thread,)))
        assert found is not None
        return found

    api = "/x/site-packages/torch/distributed/rpc/api.py"
    lock = Frame("/usr/lib/python3.11/threading.py", 327, "wait")
    assert (position(1).doing, position(1).op) == (Doing.CALL, "store.get")
    ending = position(2, lock, Frame(api, 300, "_all_gather"), Frame(api, 382, "shutdown"))
    assert (ending.doing, ending.op) == (Doing.CALL, "rpc.shutdown")
    assert position(3, lock).doing is Doing.HOST


@pytest.mark.parametrize(
    ("roots", "culprits", "tie"),
    [
        ((0, 1), (1,), True),
        ((1, 0, 0), (0,), False),
        ((0, 1, 2), (1, 2), True),
        ((0, 0, 1, 2), (2, 3), False),
        ((0, 1, 1, 0), (1, 2), True),
    ],
)
def test_the_root_of_most_ranks_is_the_right_one(roots: tuple[int, ...], culprits: tuple[int, ...], tie: bool) -> None:
    """If several have as many ranks, that of the lowest rank, and that is said."""
    (d,) = judge([at(rank, "broadcast", root=root) for rank, root in enumerate(roots)], len(roots)).diagnoses
    assert (d.kind, d.culprits) == (Kind.ROOT_MISMATCH, culprits)
    assert ("split evenly" in d.explanation) is tie


def test_few_messages_without_another_end_are_shown() -> None:
    """Four of them; a message for a rank that is on its host is none of them."""
    ends = [at(rank, "send", 4, peer=0) for rank in range(1, 6)]
    (d,) = judge([at(0, "barrier", 12), *ends], 6).diagnoses
    assert (d.kind, d.culprits, d.explanation.count("waits in send")) == (Kind.P2P_UNMATCHED, (0,), 4)
    other = judge([at(0, "barrier", 12), ends[0], at(2, "recv", 6, peer=3), host(3)], 4).diagnoses
    assert [(d.kind, d.culprits) for d in other] == [(Kind.P2P_UNMATCHED, (0,))]
