"""Two ranks, or as many here as there: habit decides, else convention, and the report says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Phase, Site, State
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.report.render import render_diagnoses
from tests.debug.builders import FILE, Step, all_reduce, barrier, coll, group, play, recv, run, send, wait_all


def test_without_history_the_lowest_rank_is_the_reference() -> None:
    """A tie names the side without the lowest rank, shows both lines, and says it is a tie."""
    (d,) = diagnose(play(2, lambda r: [all_reduce(10 + r, reduce_op="MAX" if r else "SUM")]))
    assert (d.kind, d.culprits) == (Kind.REDUCE_OP_MISMATCH, (1,))
    assert {r: s.line for r, s in d.sites.items()} == {0: 10, 1: 11}
    assert "chosen by rank order" in d.explanation


def test_habit_settles_a_tie() -> None:
    """Rank 0 says something else than in its earlier iterations: it is the culprit, and no tie."""

    def steps(rank: int) -> list[Step]:
        return [all_reduce(10)] * 3 + [all_reduce(10, shape=(5,) if rank == 0 else (4,))]

    (d,) = diagnose(play(2, steps))
    assert (d.kind, d.culprits, d.victims) == (Kind.SHAPE_MISMATCH, (0,), (1,))
    assert "rank order" not in d.explanation


def test_two_against_two() -> None:
    """Four ranks, two sides: both culprits of the side without rank 0."""
    (d,) = diagnose(play(4, lambda r: [coll("broadcast", 10, root=r % 2)]))
    assert (d.kind, d.culprits) == (Kind.ROOT_MISMATCH, (1, 3))
    assert "rank order" in d.explanation


def test_habit_settles_swapped_lines_of_two() -> None:
    """Two ranks, calls alike, one leaves the order it kept so far: it is named."""
    usual = [all_reduce(10), all_reduce(11)]
    (d,) = diagnose(play(2, lambda r: usual * 2 + (usual if r == 0 else usual[::-1])))
    assert (d.kind, d.culprits) == (Kind.WRONG_ORDER, (1,))


def test_skip_by_one_of_two() -> None:
    """Two ranks, one skips a call that looks like the next and ends: it is missing."""
    (d,) = diagnose(
        play(
            2,
            lambda r: [all_reduce(10), all_reduce(11), barrier(12)] if r == 0 else [all_reduce(11), barrier(12)],
        )
    )
    assert (d.kind, d.culprits, str(d.call)) == (Kind.MISSING_RANK, (1,), "all_reduce #1")


def test_size_habit_settles_a_pair() -> None:
    """The end of a message that changed its size is the culprit."""
    (d,) = diagnose(play(2, {0: [send(1, 10), send(1, 10, shape=(8,))], 1: [recv(0, 11), recv(0, 11)]}))
    assert (d.kind, d.culprits, d.pair) == (Kind.P2P_SIZE_MISMATCH, (0,), (0, 1))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("differs", ["tag", "receiver"])
def test_who_came_first_to_a_message_does_not_matter(first: int, differs: str) -> None:
    """Crossed tags, and a message to the wrong rank, are told alike, whichever end was there first."""
    mine = send(1, 10, tag=5) if differs == "tag" else send(2, 10)
    theirs = recv(0, 11, tag=7) if differs == "tag" else recv(0, 11)
    evidence = play(3, {0: [mine, barrier(12)], 1: [theirs, barrier(12)], 2: [barrier(12)]})
    for rank in (0, 1):
        evidence.records[rank][0].issued_s = 1.0 if rank == first else 2.0
    (d,) = diagnose(evidence)
    assert (d.kind, d.pair, str(d.call)) == (Kind.P2P_UNMATCHED, (0, 1), "recv #1")
    assert d.culprits == ((0, 1) if differs == "tag" else (0,))


def test_a_message_as_always_is_only_ahead() -> None:
    """A ring in which rank 2 receives from a wrong neighbour: who has sent on, as before, is not at fault."""

    def ring(rank: int) -> list[Step]:
        left = (rank - 1) % 4 if rank != 2 else 0
        turn = [send((rank + 1) % 4, 9, is_async=True), recv(left, 9, is_async=True), wait_all()]
        return [*turn, *turn, *turn]

    (d,) = diagnose(play(4, ring))
    assert (d.kind, d.culprits) == (Kind.P2P_UNMATCHED, (2,))
    assert "rank 2 receives from rank 0, and rank 1 waits for a receive by it" in d.suggestion
    assert d.suggestion.count(":9") == 1


def test_a_stage_that_has_fed_the_next_is_not_the_other_end_of_its_circle() -> None:
    """Ranks 1 and 2 both receive first; rank 0, a message ahead, does not make one of them a wrong peer."""
    forward = {0: [send(1, 8), send(1, 8)], 1: [recv(0, 7), send(2, 8)], 2: [recv(1, 7)]}
    steps = {0: forward[0], 1: [*forward[1], recv(2, 11)], 2: [*forward[2], recv(1, 7)]}
    (d,) = diagnose(play(3, steps))
    assert (d.kind, d.culprits) == (Kind.DEADLOCK_CYCLE, (1, 2))


def test_calls_of_one_line_by_two_ways_are_not_told_to_pad() -> None:
    """A helper called from two lines: the tensors differ because the calls are different ones."""

    def flush(line: int, shape: int) -> Step:
        return all_reduce(3, shape=(shape,), callers=(Site(FILE, line, "main"),))

    (d,) = diagnose(play(3, lambda r: [flush(20, 99), flush(20 if r == 1 else 21, 99 if r == 1 else 72)]))
    assert (d.kind, d.culprits) == (Kind.SHAPE_MISMATCH, (1,))
    assert d.suggestion == (
        f"Find the call that was left out or added before: rank 1 comes to {FILE}:3 by {FILE}:20, and the others by "
        f"{FILE}:21."
    )
    (same,) = diagnose(play(3, lambda r: [flush(20, 99 if r == 1 else 72)]))
    assert (same.kind, same.suggestion.partition(" at ")[0]) == (Kind.SHAPE_MISMATCH, "Give the tensor")


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("lines", [(13, 14), (13, 13)])
def test_the_rank_with_swapped_groups_is_named(odd: int, lines: tuple[int, int]) -> None:
    """Its call meets another line's on the wrong group, and is awaited at its own line on the right one."""

    def steps(rank: int) -> list[Step]:
        tp = group(*((0, 1) if rank < 2 else (2, 3)), name=f"tp{rank // 2}")
        dp = group(*((0, 2) if rank % 2 == 0 else (1, 3)), name=f"dp{rank % 2}")
        if rank == odd:
            tp, dp = dp, tp
        return [all_reduce(lines[0], tp, shape=(8,)), all_reduce(lines[1], dp, shape=(32,)), barrier(15)]

    told = diagnose(play(4, steps))
    if lines[0] == lines[1]:  # one line for both: nothing shows which group was meant
        assert {d.kind for d in told} == {Kind.SHAPE_MISMATCH}
        return
    (d,) = told
    assert (d.kind, d.culprits, d.exit_code) == (Kind.GROUP_MISMATCH, (odd,), 4)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_messages_that_never_come_the_lower_ranks_is_told(first: int) -> None:
    """Two ranks wait for a message of a third that has ended: one diagnosis, whichever waited first."""
    evidence = play(3, lambda r: [recv(2, 10)] if r < 2 else [])
    for rank in (0, 1):
        evidence.records[rank][0].issued_s = 1.0 if rank == first else 2.0
    told = diagnose(evidence)[0]
    assert (told.kind, told.culprits, told.pair) == (Kind.P2P_UNMATCHED, (2,), (2, 0))


def test_a_helper_may_be_called_for_any_group() -> None:
    """The same innermost line on two groups, from two callers, in another order: a cycle, and no wrong group."""

    def sync(line: int, name: str) -> Step:
        return all_reduce(3, group(0, 1, name=name), callers=(Site("train.py", line, "main"),))

    dp, tp = sync(20, "dp"), sync(21, "tp")
    (d,) = diagnose(play(2, lambda r: [dp, dp, *((tp, dp) if r == 0 else (dp, tp))]))
    assert (d.kind, d.culprits) == (Kind.DEADLOCK_CYCLE, (0, 1))


def test_two_ranks_uneven() -> None:
    """Of two ranks, the one with fewer rounds is named."""
    (d,) = diagnose(play(2, lambda r: [all_reduce(10)] * (3 if r == 0 else 5)))
    assert (d.kind, d.culprits, d.victims) == (Kind.UNEVEN_ITERATIONS, (0,), (1,))


@pytest.mark.parametrize("first", [0, 1])
def test_a_collective_comes_before_a_message(first: int) -> None:
    """One waits for the ended rank in a message, one in a collective: whoever came first, the collective is told."""
    pair = group(1, 2, name="1")
    evidence = play(3, {0: [recv(2, 10)], 1: [all_reduce(11, pair)], 2: []})
    for rank in (0, 1):
        evidence.records[rank][-1].issued_s = 1.0 if rank == first else 2.0
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims, str(d.call)) == (Kind.MISSING_RANK, (2,), (0, 1), "all_reduce #1")


def test_as_often_as_the_others_is_no_shorter_loop() -> None:
    """Ranks that ended made the line that rank 0 waits at as often as it did: it makes another call too many."""
    once = all_reduce(10)
    found = diagnose(play(3, lambda r: [once, once] if r else [once, all_reduce(11), once]))
    assert {(d.kind, d.culprits) for d in found} == {(Kind.EXTRA_COLLECTIVE, (0,))}


PROGRAM = """\
def mean(value):
    all_reduce(value)


def train(batches):
    for batch in range(batches):
        mean(batch)


def main():
    for epoch in range(2):
        for step in range(3):
            mean(step)
        if get_rank() == 0:
            mean(epoch)
        if epoch == 1:
            barrier()
    train(4)
    barrier()
"""


def told(steps: Callable[[int], list[Step]], size: int = 2) -> Diagnosis:
    """The diagnosis of ranks that run parts of PROGRAM."""
    (d,) = diagnose(replace(play(size, steps), sources={FILE: PROGRAM}))
    return d


def mean(line: int, *above: Site) -> Step:
    """The helper's all_reduce, called at *line* of main."""
    return all_reduce(2, function="mean", callers=(*above, Site(FILE, line, "main")))


@pytest.mark.parametrize("size", [2, 4])
def test_a_call_for_rank_0_only_is_that_ranks_extra_one(size: int) -> None:
    """Through a helper that all use, also in a world of two, whose call is under `if get_rank() == 0` is named."""
    d = told(lambda r: [mean(13)] * 3 + [mean(15)] * (r == 0) + [barrier(17)], size)
    assert (d.kind, d.culprits, str(d.call)) == (Kind.EXTRA_COLLECTIVE, (0,), "all_reduce #4")
    assert "rank order" not in d.explanation


@pytest.mark.parametrize("size", [2, 4])
def test_an_extra_call_in_mid_training_is_told_where_it_was_made(size: int) -> None:
    """The helper's line is the same for both: only the lines above it tell that rank 0 made one call more."""
    d = told(lambda r: [mean(13)] * 3 + [mean(15)] * (r == 0) + [mean(13)] * 3 + [barrier(17)], size)
    assert (d.kind, d.culprits, str(d.call)) == (Kind.EXTRA_COLLECTIVE, (0,), "all_reduce #4")


def test_one_barrier_for_rank_0_is_no_uneven_loop() -> None:
    """Rank 0 leaves the loop for a call of its own, and would come back: drop_last would be no help."""
    own = [barrier(2, function="mean", callers=(Site(FILE, 15, "main"),))]
    d = told(lambda r: [mean(13)] * 3 + own * (r == 0) + [mean(13)] * 3)
    assert (d.kind, d.culprits) == (Kind.EXTRA_COLLECTIVE, (0,))
    assert "drop_last" not in d.suggestion


def test_an_uneven_loop_of_two_stays_a_tie() -> None:
    """One went round once more than the other, in a function of its own: nobody knows who is right, which is said."""
    train = Site(FILE, 7, "train")
    d = told(lambda r: [mean(18, train)] * (4 + (r == 0)) + [barrier(19)])
    assert (d.kind, d.culprits) == (Kind.UNEVEN_ITERATIONS, (1,))
    assert "rank order" in d.explanation


def test_a_loop_that_one_of_two_has_finished_is_a_tie() -> None:
    """Rank 1 is done after four rounds, rank 0 waits in its fifth: nobody knows whose number is right."""
    train = Site(FILE, 7, "train")
    d = told(lambda r: [mean(18, train)] * (4 + (r == 0)))
    assert d.kind is Kind.UNEVEN_ITERATIONS
    assert "the records do not show which number of calls is right" in d.explanation


def test_a_round_that_is_cut_short_is_no_call_too_many() -> None:
    """A rank that always made one call before another left it out, however far it went on with wrong data."""
    usual = [mean(13), all_reduce(15, shape=(1,))]
    d = told(lambda r: usual * 2 + ([usual[1], *usual] if r == 1 else usual), 4)
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (1,))


def test_a_call_that_both_have_made_is_not_for_some_ranks_only() -> None:
    """`if rank != 1 or step != 2` asks for the rank, and yet rank 1 has been there in each round before."""
    usual = [mean(13), barrier(15)]
    d = told(lambda r: [*usual, *usual, mean(13), *([barrier(15)] if r == 0 else []), *usual])
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (1,))


def test_nobody_hangs_in_a_call_that_strict_refused() -> None:
    """Every rank is told, or about to be told, that its call did not go out: the verdict is no hang."""
    evidence = play(2, lambda r: [mean(13)] * 3 + [mean(15)] * (r == 0) + [barrier(17)])
    last = evidence.records[0][-1]
    last.state, last.error = State.FAILED, "CollectiveMismatch: op_mismatch: ..."
    evidence.ranks[0].phase, evidence.ranks[0].waits = Phase.RAISED, ()
    (d,) = diagnose(replace(evidence, sources={FILE: PROGRAM}))
    assert d.stuck == {}
    assert "HANG" not in render_diagnoses([d]).plain().splitlines()[0]


def test_a_rank_that_hung_up_after_fewer_rounds_left_the_loop() -> None:
    """Rank 1 has destroyed its group and still runs; rank 0 lost it in a round more: a loop, not a missing barrier."""
    evidence = play(2, lambda r: [mean(13)] * (3 + (r == 0)) + [run(19)] * (r == 1))
    last = evidence.records[0][-1]
    last.state, last.error = State.FAILED, "RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:5"
    state = evidence.ranks[0]
    state.phase, state.exception, state.exit_code = Phase.RAISED, last.error, 1
    (d,) = diagnose(replace(evidence, sources={FILE: PROGRAM}))
    assert (d.kind, d.culprits) == (Kind.UNEVEN_ITERATIONS, (1,))


def shards(rounds_of_others: int, odd: bool = True) -> Diagnosis:
    """Two shard groups of a mesh; rank 2 leaves out the backward of its third round. *odd*: ranks 0 and 1 do not."""
    text = "for step in steps:\n    forward()\n    backward()\n"

    def steps(rank: int) -> list[Step]:
        own = group(0, 1, name="1", desc="mesh_shard") if rank < 2 else group(2, 3, name="2", desc="mesh_shard")
        forward = [coll("all_gather", 2, own)] * 2
        backward = [coll("all_gather", 3, own), coll("reduce_scatter", 3, own)]
        rounds = [*forward, *backward] * (rounds_of_others if rank < 2 else 2)
        if rank == 2 or (rank < 2 and not odd):
            return [*rounds, *forward, *forward]
        return [*rounds, *forward, *backward]

    found = diagnose(play(4, steps, sources={FILE: text}))
    return next(d for d in found if 2 in (*d.culprits, *d.victims))


def test_the_other_group_of_a_mesh_settles_a_tie() -> None:
    """Two ranks are at two lines: the one is odd that does not what the other shard group does at that number."""
    d = shards(2)
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (2,))
    assert "rank order" not in d.explanation
    assert shards(2, odd=False).culprits == (3,)


def test_a_group_of_a_mesh_that_is_elsewhere_settles_nothing() -> None:
    """A pipeline stage whose group has made other calls so far is no witness: the tie stays one."""
    assert "rank order" in shards(0).explanation
