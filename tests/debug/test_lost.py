"""Which of its calls a rank died in, where it had several under way: the one whose error it raised, not the last."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.matching.secondary_errors import aftermath, last_words, lost_in, own_fault, timed_out, unrelated
from distsim.debug.records import CallRecord, Evidence, Group, Phase, RankState, State
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from tests.debug.builders import Programs, Step, all_reduce, fail, group, killed, play, recv, send, wait_all

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:16811"
OWN = "ValueError: bad batch"


def lost(
    programs: Programs,
    failed: Sequence[int],
    *,
    waited: Sequence[int] = (),
    raised: str = CLOSED,
    traceback: str | None = None,
    origins: str | None = None,
    size: int = 2,
) -> Evidence:
    """Rank 0 raised; of its calls those numbered *failed* had lost their peer, and those after the first never ended.
    It has waited for *waited*."""
    evidence = play(size, programs)
    calls = evidence.records[0]
    for call in calls:
        call.waited = not call.is_async or call.index in waited
        if call.index in failed:
            call.state, call.error = State.FAILED, CLOSED
        elif call.index > failed[0]:
            call.state = State.ISSUED
    state = evidence.ranks[0]
    state.phase, state.waits, state.exception, state.exit_code = Phase.RAISED, (), raised, 1
    state.traceback, state.origins = traceback or raised, origins
    return evidence


def messages(rank: int) -> list[Step]:
    return [send(1 - rank, 11, is_async=True), recv(1 - rank, 11, is_async=True)]


def pending(rank: int) -> list[Step]:
    """Rank 0 alone has an all_reduce under way while the two exchange messages."""
    return [*([] if rank else [all_reduce(10, is_async=True)]), *messages(rank), wait_all(12)]


@pytest.mark.parametrize("waited", [[0], []])
def test_messages_after_it_do_not_hide_the_call_that_failed(waited: list[int]) -> None:
    """Rank 1 never came to the all_reduce and has ended: rank 0, which lost it there, is its victim, whether it waited
    for the handle or in C++."""
    (d,) = diagnose(lost(pending, [0], waited=waited))
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.MISSING_RANK, (1,), (0,), 3)
    assert d.stuck[0].line == 10


def test_of_two_receives_the_first_is_lost() -> None:
    """A message that failed before another, which never came either."""
    steps = [recv(1, 10, is_async=True), recv(1, 11, is_async=True), wait_all(12)]
    (d,) = diagnose(lost(lambda r: [] if r else steps, [0], waited=[0]))
    assert (d.kind, d.victims, d.stuck[0].line) == (Kind.P2P_UNMATCHED, (0,), 10)


def test_one_lost_peer_fails_all_that_is_under_way() -> None:
    """Of several calls that failed alike it is the one that was waited for."""
    steps = [all_reduce(line, is_async=True) for line in (10, 11, 12)]
    (d,) = diagnose(lost(lambda r: [*steps[: 1 + 2 * (r == 0)], wait_all(13)], [1, 2], waited=[0, 1]))
    assert (d.kind, d.culprits, d.stuck[0].line) == (Kind.MISSING_RANK, (1,), 11)


def test_what_a_program_raises_from_a_loss_is_still_one() -> None:
    """`raise ValueError from error`: the traceback tells."""
    traceback = f"{CLOSED}\n\nThe above exception was the direct cause of the following exception:\n\n{OWN}"
    (d,) = diagnose(lost(pending, [0], waited=[0], raised=OWN, traceback=traceback))
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (1,), (0,))


def test_an_exception_of_its_own_is_not_the_loss_behind_its_back() -> None:
    """Rank 0 raised before it waited for a call that had failed meanwhile: nobody else is accused of that."""
    (d,) = diagnose(lost(lambda r: [] if r else [all_reduce(10, is_async=True), wait_all(12)], [0], raised=OWN))
    assert (d.kind, d.culprits, d.exit_code) == (Kind.RANK_RAISED, (0,), 1)


def caught(origins: str | None) -> list[Diagnosis]:
    """Rank 0 has lost rank 1 in a synchronous call, and made none since; what it raised came from *origins*."""
    return diagnose(lost(lambda r: [] if r else [all_reduce(10)], [0], raised=OWN, origins=origins))


def test_a_loss_that_was_dealt_with_is_history() -> None:
    """A rank that caught what it lost in a synchronous call, and raised something of its own later, is no victim."""
    (d,) = caught(OWN)
    assert (d.kind, d.culprits, d.exit_code) == (Kind.RANK_RAISED, (0,), 1)


@pytest.mark.parametrize("origins", [f"{OWN}\n{CLOSED}", None], ids=["from the loss", "not known"])
def test_what_comes_from_a_loss_is_one_whatever_the_traceback_shows(origins: str | None) -> None:
    """`raise ValueError from None` while the loss is handled; and where nobody has kept what it came from."""
    (d,) = caught(origins)
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (1,), (0,))


def test_a_loss_that_a_rank_went_on_from_is_history() -> None:
    """It made good calls since, if only in the handler, so that the loss stands in the traceback of what it raised."""
    other = group(0, 1)
    evidence = lost(
        lambda r: [*([] if r else [all_reduce(10, other, is_async=True)]), all_reduce(11)],
        [0],
        waited=[0],
        raised=OWN,
        origins=f"{OWN}\n{CLOSED}",
        traceback=f"{CLOSED}\n\nDuring handling of the above exception, another exception occurred:\n\n{OWN}",
    )
    failed, good = evidence.records[0]
    failed.completed_s, good.issued_s, good.completed_s, good.state = 1.0, 2.0, 3.0, State.COMPLETED
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.exit_code) == (Kind.RANK_RAISED, (0,), 1)


def test_of_losses_one_after_the_other_the_last_is_it() -> None:
    """Each of another group, all with the same words, and all but the last caught."""
    steps = [all_reduce(10 + n, group(0, 1, name=str(n + 1)), is_async=True) for n in range(3)]
    (d,) = diagnose(lost(lambda r: [] if r else [*steps, wait_all(13)], [0, 1, 2], waited=[0, 1, 2]))
    assert (d.kind, d.culprits, d.stuck[0].line) == (Kind.MISSING_RANK, (1,), 12)


@pytest.mark.parametrize(
    ("end", "kind"), [(fail(OWN, 20), Kind.RANK_RAISED), (killed(), Kind.RANK_KILLED)], ids=["raised", "killed"]
)
def test_how_the_lost_peer_ended_comes_first(end: Step, kind: Kind) -> None:
    """It is no hang where the peer raised, or was killed: that is the root, and rank 0 its victim."""
    first, *rest = diagnose(lost(lambda r: [*pending(r), *([end] if r else [])], [0], waited=[0]))
    assert (first.kind, first.culprits, first.victims, rest) == (kind, (1,), (0,), [])


WORLD = Group("0", "default_pg", (0, 1))
LATE = "RuntimeError: Timed out waiting 1000ms for recv operation to complete"
MINE = "DistBackendError: NCCL error: ncclInvalidUsage, NCCL version 2.21.5"


@pytest.mark.parametrize(
    ("words", "is_timeout", "is_aftermath"),
    [
        (None, False, False),
        (OWN, False, False),
        (CLOSED, False, True),
        (LATE, True, True),
        (MINE, False, False),
        (f"{MINE}: Timed out", True, False),
        ("ValueError: the peer of this pipeline has no timeout", False, False),
    ],
)
def test_texts_of_other_ranks_ends(words: str | None, is_timeout: bool, is_aftermath: bool) -> None:
    """A timeout or a loss comes from another rank; a wrong use does not, whatever else its text says."""
    assert (timed_out(words), aftermath(words)) == (is_timeout, is_aftermath)
    assert own_fault(words) is (words is not None and not is_aftermath)


def handle(
    number: int, *, failed: bool = True, error: str | None = CLOSED, group: Group = WORLD, **kw: object
) -> CallRecord:
    state = State.FAILED if failed else State.COMPLETED
    values = {"state": state, "error": error, "is_async": True, "index": number, "issued_s": float(number), **kw}
    return CallRecord(0, group, number, "all_reduce", **values)  # type: ignore[arg-type]


B = Group("1", "", (0, 1))
LOST_IN: list[tuple[str, list[CallRecord], int | None]] = [
    ("nothing", [], None),
    ("nothing that failed", [handle(1, failed=False)], None),
    ("nothing with a text", [handle(1, error=None)], None),
    ("nothing of these words", [handle(1, error="RuntimeError: socket closed")], None),
    ("no loss", [handle(1, error=OWN)], None),
    ("of handles nobody waited for, the first", [handle(1), handle(2)], 0),
    ("one that was waited for", [handle(1), handle(2, waited=True), handle(3)], 1),
    ("of a group the first", [handle(1, waited=True), handle(2, waited=True)], 0),
    ("of groups the last", [handle(1, waited=True), handle(2, waited=True, group=B)], 1),
    ("of calls that block the last", [handle(n, is_async=False) for n in (1, 2)] + [handle(3, waited=True)], 1),
    (
        "not one that the thread got over",
        [handle(1, completed_s=2.0), handle(3, failed=False, completed_s=4.0)],
        None,
    ),
    ("a call made before the end", [handle(1, completed_s=3.0), handle(3, failed=False)], 0),
    ("a call that failed, too", [handle(1, completed_s=2.0), handle(3)], 0),
    ("another thread's call", [handle(1, completed_s=2.0), handle(3, failed=False, thread="T")], 0),
    ("an end that is not known", [handle(1), handle(3, failed=False)], 0),
]


@pytest.mark.parametrize(("law", "calls", "which"), LOST_IN, ids=[law for law, _, _ in LOST_IN])
def test_the_call_of_an_exception(law: str, calls: list[CallRecord], which: int | None) -> None:
    """The call whose loss the exception of the rank tells, wherever it tells it."""
    words = f"{CLOSED}\n{OWN}"
    for name in ("exception", "traceback", "origins"):
        state = RankState(0, Phase.RAISED, **{name: words})  # type: ignore[arg-type]
        assert lost_in(calls, state) is (None if which is None else calls[which])


@pytest.mark.parametrize(
    ("error", "origins", "raised", "is_unrelated"),
    [
        (CLOSED, OWN, OWN, True),
        (CLOSED, f"{CLOSED}\n{OWN}", OWN, False),
        (CLOSED, None, OWN, False),
        (None, OWN, OWN, False),
        (OWN, "KeyError: 1", "KeyError: 1", False),
        (CLOSED, OWN, LATE, False),
        (CLOSED + "x" * 2000, CLOSED + "x" * 900, OWN, True),
        (CLOSED + "x" * 2000, CLOSED + "x" * 1000, OWN, False),
    ],
)
def test_a_loss_that_an_exception_did_not_come_from(
    error: str | None, origins: str | None, raised: str, is_unrelated: bool
) -> None:
    """Known only if the origins of the exception are; long texts are compared by their beginnings."""
    state = RankState(0, Phase.RAISED, exception=raised, origins=origins)
    call = handle(1, error=error)
    assert unrelated(call, state) is is_unrelated
    assert last_words(call, state) == (error or raised)
    assert last_words(None, state) == raised
