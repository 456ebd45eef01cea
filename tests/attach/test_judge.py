"""What the positions of ranks say: pure rules on positions that stand here as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.attach import Doing, HostPositions, Judged, Position, judge, judge_hosts, position_of
from distsim.debug.attach.ranks import Frame, RankProcess, StackSample, Thread
from distsim.debug.records import RankThread, Site
from distsim.debug.records.kinds import Kind
from distsim.debug.report.render import render_diagnoses
from distsim.text.codec import encode, plain


def at(rank: int, op: str = "all_reduce", line: int = 9, doing: Doing = Doing.CALL, **more: Any) -> Position:
    site = Site("train.py", line, "main")
    return Position(rank, 100 + rank, doing, op, site, (site,), **more)


def host(rank: int, line: int = 5, **more: Any) -> Position:
    return at(rank, "", line, Doing.HOST, **more)


def stopped(rank: int) -> Position:
    return at(rank, Doing.STOPPED.value, 5, Doing.STOPPED)


def meeting(rank: int, members: str) -> Position:
    return at(rank, "new_group", 5, Doing.MEETING, members=members)


def turn(rank: int, step: int, op: str = "all_reduce", line: int = 9) -> Position:
    return at(rank, op, line, counters={"main.step": step, "main.rank": rank})


@pytest.mark.parametrize(
    ("positions", "kind", "culprits"),
    [
        pytest.param([at(0), at(1), at(2, "barrier", 12)], Kind.MISSING_RANK, (2,), id="in another call"),
        pytest.param([at(0), at(1), at(2, line=12)], Kind.MISSING_RANK, (2,), id="in the same call at another line"),
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
        pytest.param(
            [at(0, on_group=True), at(1), at(2, on_group=True)], Kind.GROUP_MISMATCH, (1,), id="one passes no group"
        ),
        pytest.param([at(0), stopped(1), at(2)], Kind.PROCESS_FROZEN, (1,), id="stopped"),
        pytest.param([at(0, moved=True), stopped(1)], Kind.PROCESS_FROZEN, (1,), id="stopped, and the others move yet"),
        pytest.param(
            [at(0, "store.wait", 4), at(1), at(2, "store.wait", 4)], Kind.MISSING_RANK, (0, 2), id="at a store's key"
        ),
        pytest.param([at(0, "store.wait", 4), host(1)], Kind.HOST_STUCK, (1,), id="a key, and a rank on its host"),
        pytest.param([at(0, "store.wait", 4), at(1, "store.get", 6)], Kind.HOST_STUCK, (0, 1), id="only keys"),
        pytest.param(
            [at(0, "init_process_group", 3, Doing.MEETING), host(1)], Kind.NEVER_JOINED, (1,), id="not at init yet"
        ),
        pytest.param([at(0), at(1, "", 1, Doing.ENDING)], Kind.RANK_EXITED, (1,), id="at its end, while others wait"),
        pytest.param([at(0, "", 1, Doing.ENDING)], Kind.HOST_STUCK, (0,), id="the script is through"),
    ],
)
def test_who_is_elsewhere_is_named(positions: list[Position], kind: Kind, culprits: tuple[int, ...]) -> None:
    """The minority by call, line, turn of a loop, root; the other end of a message; no minority: all of them."""
    (found,) = judge(positions, len(positions)).diagnoses
    assert (found.kind, found.culprits) == (kind, culprits)
    assert f"rank {culprits[0]} is pid {100 + culprits[0]}" in found.explanation.lower()
    assert found.explanation.endswith("By stacks only: the earlier calls of the ranks are not known.")
    assert set(culprits).isdisjoint(found.victims)


STRAIGHT = "\n".join(["pass"] * 20)
LOOP = "for step in x:\n" + "    pass\n" * 19
BRANCHES = "\n" * 7 + "if rank:\n    a()\n    b()\nelse:\n    b()\n    a()\n"
GROUPS = BRANCHES.replace("a()", "dist.barrier(group=a)").replace("b()", "dist.barrier(group=b)")
KEYS = "if rank:\n    store.wait(['b'])\n    store.set('a', 1)\nelse:\n    store.wait(['a'])\n    store.set('b', 1)\n"
ENDS = "if rank == 0:\n    dist.send(t, 1)\nelse:\n    dist.barrier()\n    dist.recv(t, 0)\n\ndist.barrier()\n"
LEFT = "\n" * 7 + "for step in x:\n    dist.all_reduce(t)\n\n\n\n\ndist.barrier()\n"
LOCK = "with lock:\n    dist.all_reduce(t, group=a)\ndef f():\n    with lock:\n        dist.all_reduce(t, group=b)\n"


def key(rank: int, line: int, name: str) -> Position:
    return at(rank, "store.wait", line, keys=(name,))


def holds(rank: int, line: int, other: int) -> Position:
    """A rank in a call at *line* while another thread of its is at the lock of line *other*."""
    main, side = ("MainThread", "sync") if line == 2 else ("sync", "MainThread")
    threads = tuple(RankThread(name, False, (Site("train.py", n, ""),)) for name, n in ((main, line), (side, other)))
    return at(rank, line=line, on_group=True, threads=threads, thread="" if line == 2 else main)


@pytest.mark.parametrize(
    ("positions", "text", "kind", "culprits"),
    [
        pytest.param([at(0, line=12), at(1)], STRAIGHT, Kind.MISSING_RANK, (0,), id="past a call"),
        pytest.param([at(0, line=12), at(1)], LOOP, Kind.WRONG_ORDER, (0, 1), id="in a loop nobody is past the other"),
        pytest.param([turn(0, 3, line=12), turn(1, 3)], LOOP, Kind.MISSING_RANK, (0,), id="but in one turn of it"),
        pytest.param([at(0, line=12), at(1)], BRANCHES, None, (), id="in two branches"),
        pytest.param(
            [at(0, line=12, on_group=True), at(1, on_group=True)], GROUPS, Kind.DEADLOCK_CYCLE, (0, 1), id="two groups"
        ),
        pytest.param([at(0, line=12), at(1, "broadcast", root=0)], STRAIGHT, None, (), id="a root waits for nobody"),
        pytest.param([at(0, line=12), at(1)], "", None, (), id="without the text"),
        pytest.param([key(0, 5, "a"), key(1, 2, "b")], KEYS, Kind.DEADLOCK_CYCLE, (0, 1), id="keys"),
        pytest.param([key(0, 5, "a"), key(1, 2, "c")], KEYS, Kind.HOST_STUCK, (0, 1), id="a key that nobody sets"),
        pytest.param(
            [at(0, "store.wait", 5), at(1, "store.wait", 2)],
            KEYS,
            Kind.DEADLOCK_CYCLE,
            (0, 1),
            id="keys that cannot be read",
        ),
        pytest.param([at(0, "send", 2, peer=1), at(1, "barrier", 4)], ENDS, Kind.DEADLOCK_CYCLE, (0, 1), id="message"),
        pytest.param([at(0, "send", 2, peer=1), at(1, "barrier", 7)], ENDS, Kind.P2P_UNMATCHED, (1,), id="no receive"),
        pytest.param([at(0), at(1), at(2, "barrier", 14)], LEFT, Kind.UNEVEN_ITERATIONS, (2,), id="has left the loop"),
        pytest.param([holds(0, 2, 4), holds(1, 5, 1)], LOCK, Kind.DEADLOCK_CYCLE, (0, 1), id="locks"),
        pytest.param([holds(0, 2, 4), at(1, line=5, on_group=True)], LOCK, None, (), id="one of them holds none"),
    ],
)
def test_the_text_tells_what_lies_below(
    positions: list[Position], text: str, kind: Kind | None, culprits: tuple[int, ...]
) -> None:
    """Lines that a rank comes to later, in its block; a key, a lock and a group by their names."""
    diagnoses = judge(positions, len(positions), sources={"train.py": text}).diagnoses
    assert [(d.kind, d.culprits) for d in diagnoses] == ([] if kind is None else [(kind, culprits)])


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
    """Before what the others do, if they wait for it: a message waits for its peer alone."""
    (found,) = judge([at(0), at(2)], 3, gone=[1]).diagnoses
    assert (found.kind, found.culprits, found.victims) == (Kind.RANK_EXITED, (1,), (0, 2))
    assert judge([at(0, "send", peer=2), at(2, "recv", 7, peer=0)], 3, gone=[1]).diagnoses == []


def test_ranks_of_other_hosts_are_not_accused() -> None:
    """Nobody looked at them; the report says how many."""
    judged = judge([at(0), at(1)], 4)
    assert judged.diagnoses == []
    assert "2 of 4 ranks are not on the examined hosts" in judged.evidence.notes


def test_who_waits_to_meet_names_who_is_not_there() -> None:
    """Every rank that was found is in init_process_group, and the world is larger."""
    (found,) = judge([at(0, "init_process_group", 3, Doing.MEETING)], 2).diagnoses
    assert (found.kind, found.culprits) == (Kind.NEVER_JOINED, (1,))


def test_ranks_that_import_have_not_begun() -> None:
    """Neither a hang nor a job that runs."""
    importing = [at(rank, "", 2, Doing.STARTING, busy=rank == 1) for rank in range(2)]
    assert judge(importing, 2).running.startswith("NOT YET  ranks 0,1 have not begun: ")
    assert judge(importing[:1], 1).running.startswith("NOT YET  rank 0 has not begun: ")
    arriving = [at(rank, "rendezvous", 3, Doing.MEETING, moved=True) for rank in range(2)]
    assert judge(arriving, 2).running.startswith("NOT YET  ranks 0,1 have not begun: ")


def test_a_worker_is_where_its_rank_is() -> None:
    """The line in the data set, the worker's process, and what to do about it."""
    waits = host(1, worker=77, worker_stack=(Site("data.py", 3, "Images.__getitem__"),), records="/dev/shm/run")
    (found,) = judge([at(0), waits], 2, hosts={1: "b"}).diagnoses
    assert (found.kind, found.culprits, str(found.sites[1])) == (Kind.HOST_STUCK, (1,), "data.py:3")
    assert "Look at what process 77, a worker of rank 1, waits for at data.py:3" in found.suggestion
    assert "Rank 1 is pid 101 on b. Its records are in /dev/shm/run." in found.explanation


def test_a_stopped_process_is_continued() -> None:
    """By its number."""
    (found,) = judge([at(0), stopped(1), stopped(2)], 3).diagnoses
    assert found.suggestion.startswith("kill -CONT 101 102 lets them go on")


def _two_hosts() -> Judged:
    text = "\n" * 4 + "batch = next(data)" + "\n" * 4 + "dist.all_reduce(t)\n"
    first = HostPositions("a", 4, [at(0), at(1)], (), {"train.py": text})
    second = HostPositions("b", 4, [at(2), host(3)], (), {"train.py": text})
    return judge_hosts([HostPositions.from_json(encode(one).decode()) for one in (first, second)])


def test_hosts_are_judged_together() -> None:
    """As one job, with the lines that each host sent."""
    judged = _two_hosts()
    (found,) = judged.diagnoses
    assert (found.kind, found.culprits, found.victims) == (Kind.HOST_STUCK, (3,), (0, 1, 2))
    text = render_diagnoses(judged.diagnoses, judged.evidence).plain(100)
    assert "train.py:5  |  batch = next(data)" in text
    assert "Rank 3 is pid 103 on b." in text


@pytest.mark.parametrize(
    "change", [{"schema": "other/1"}, {"positions": [{}]}, {"world_size": "many"}, {"gone": [-(10**30)]}]
)
def test_another_hosts_answer_is_checked(change: dict[str, Any]) -> None:
    """It may come from another release, or from anything else that was found under the name."""
    data = plain(HostPositions("a", 2, [at(0)])) | change
    with pytest.raises(ValueError, match=r"expected|missing"):
        HostPositions.from_json(json.dumps(data))


def test_a_place_says_what_its_call_was_given(tmp_path: Path) -> None:
    """A group among the arguments, and the members of a new group."""
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
    assert (position(1).doing, position(1).op, position(1).keys) == (Doing.CALL, "store.get", ("run-id",))
    ending = position(2, lock, Frame(api, 300, "_all_gather"), Frame(api, 382, "shutdown"))
    assert (ending.doing, ending.op) == (Doing.CALL, "rpc.shutdown")
    assert position(3, lock).doing is Doing.HOST


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("store.wait([f'a{i}', 'b'])", ("a3", "b")),
        ("store.get(name)", ("c/d",)),
        ("store.get(f'{other}')", ()),
        ("store.wait(keys)", ()),
        ("x = store.get(", ()),
    ],
)
def test_a_key_is_read_from_its_line(line: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    """With the local variables that it names; a key that they do not show is not guessed."""
    program = tmp_path / "train.py"
    program.write_text(line)
    frame = Frame(str(program), 1, "work", (("i", "3"), ("name", '"c/d"'), ("other", "<Thing at 0x1>")))
    found = position_of(StackSample(RankProcess(1, 0), (Thread("MainThread", (frame,)),)))
    assert found is not None
    assert found.keys == keys


@pytest.mark.parametrize(
    ("file", "function", "doing"),
    [
        ("/usr/lib/python3.11/threading.py", "_shutdown", Doing.ENDING),
        ("/usr/lib/python3.11/multiprocessing/util.py", "_exit_function", Doing.ENDING),
        ("<frozen importlib._bootstrap>", "_find_and_load", Doing.STARTING),
    ],
)
def test_the_interpreters_own_frames_tell_begin_and_end(file: str, function: str, doing: Doing) -> None:
    """Python waits for threads and processes of a program that is over, or imports its modules."""
    thread = Thread("MainThread", (Frame(file, 9, function), Frame("/home/train.py", 1, "<module>")))
    found = position_of(StackSample(RankProcess(1, 0), (thread,)))
    assert found is not None
    assert found.doing is doing


def test_a_forked_worker_has_no_frames_of_its_parent() -> None:
    """The idle one waits for work, and the rank for the other."""
    spawn = (
        Frame("/usr/lib/python3.11/multiprocessing/process.py", 314, "BaseProcess._bootstrap"),
        Frame("/home/train.py", 18, "<module>"),
    )
    idle = (Frame("/usr/lib/python3.11/multiprocessing/queues.py", 113, "Queue.get"), *spawn)
    busy = (Frame("/home/data.py", 3, "Images.__getitem__"), *spawn)
    children = tuple(
        StackSample(RankProcess(pid, 0), (Thread("MainThread", frames),)) for pid, frames in ((7, idle), (8, busy))
    )
    main = Thread("MainThread", (Frame("/home/train.py", 18, "<module>"),))
    found = position_of(StackSample(RankProcess(1, 0), (main,), children=children))
    assert found is not None
    assert (found.worker, [site.function for site in found.worker_stack]) == (8, ["Images.__getitem__"])


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
