"""A call that torch refused at its own rank: who caught its exception and went on is the one who is missing."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType

import pytest
import torch.distributed as dist

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import COLLECTIVES, P2P, CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.arguments import FIRST_CALLS, came_out
from distsim.debug.records.kinds import Kind

WORLD = Group("0", "default_pg", (0, 1))
WORDS = "TypeError: Invalid function argument."


def calls(rank: int, *said: tuple[str, int]) -> list[CallRecord]:
    """Of (operation, line) pairs; a line below 0 was refused, the last call is the one the rank is in."""
    records: list[CallRecord] = []
    seq = 1
    for index, (op, line) in enumerate(said):
        refused = line < 0
        state = State.FAILED if refused else State.COMPLETED if index < len(said) - 1 else State.ISSUED
        site = Site("train.py", abs(line), "main")
        records.append(
            CallRecord(
                rank,
                WORLD,
                seq,
                op,
                site=site,
                stack=(site,),
                issued_s=seq + rank / 10,
                state=state,
                error=WORDS if refused else None,
                rejected=refused,
                index=index,
            )
        )
        seq += not refused
    return records


def hung(*ranks: list[CallRecord]) -> Evidence:
    states = {r: RankState(r, Phase.BLOCKED, (CallWait(records[-1]),)) for r, records in enumerate(ranks)}
    return Evidence(2, states, dict(enumerate(ranks)), now_s=9.0)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_refused_call_that_was_not_made_again_is_missing(culprit: int) -> None:
    """The rank that went on is named, not the other, whose extra call is the right one."""
    went_on = calls(culprit, ("all_gather", 3), ("all_gather", -7), ("all_gather", 9), ("barrier", 10))
    right = calls(1 - culprit, ("all_gather", 3), ("all_gather", 8), ("all_gather", 9))
    (told,) = diagnose(hung(*((right, went_on) if culprit else (went_on, right))))
    assert (told.kind, told.culprits, told.call and told.call.seq) == (Kind.MISSING_RANK, (culprit,), 2)
    assert told.sites[culprit].line == 7
    assert f"ank {culprit}'s all_gather at train.py:7 was refused by torch with TypeError" in told.explanation


def test_a_rank_that_never_called_again() -> None:
    """It caught the exception and ended: the call that the other waits in was refused at it."""
    evidence = hung(calls(0, ("all_reduce", 3), ("all_reduce", 8)), calls(1, ("all_reduce", 3), ("all_reduce", -7)))
    evidence = Evidence(
        2, {0: evidence.ranks[0], 1: RankState(1, Phase.FINISHED, exit_code=0)}, evidence.records, now_s=9.0
    )
    (told,) = diagnose(evidence)
    assert (told.kind, told.culprits, told.victims) == (Kind.MISSING_RANK, (1,), (0,))
    assert "refused by torch with TypeError" in told.explanation


def test_a_call_that_was_made_again_is_not_missing() -> None:
    """Refused, made again, and later another operation at the same line: the refusal has nothing to do with it."""
    again = calls(0, ("all_reduce", -7), ("all_reduce", 8), ("all_reduce", 9), ("all_reduce", 10), ("barrier", 11))
    right = calls(1, ("all_reduce", 7), ("all_reduce", 9), ("all_reduce", 10), ("broadcast", 11))
    told = diagnose(hung(again, right))
    assert told
    assert all("refused" not in d.explanation for d in told)


def test_the_table_names_torchs_public_functions() -> None:
    """Each logs its exceptions, and begins with an operation that is on record."""
    for name, op in FIRST_CALLS.items():
        function = getattr(dist.distributed_c10d, name)
        assert function.__code__.co_filename.endswith("c10d_logger.py"), name
        assert function.__name__ == name
        assert op in COLLECTIVES | P2P


def raised_in(*names: str) -> BaseException:
    """An exception that came through functions of these names, or files where a name ends in `.py`."""
    step: Callable[[], None] = _fail
    for name in reversed(names):
        text = "def step(): below()"
        code = compile(text if name.endswith(".py") else text.replace("step", name), name, "exec")
        space: dict[str, Callable[[], None]] = {"below": step}
        exec(code, space)  # type: ignore[arg-type]
        step = space["step" if name.endswith(".py") else name]
    try:
        step()
    except ValueError as error:
        return error
    raise AssertionError


def _fail() -> None:
    raise ValueError


@pytest.mark.parametrize(
    ("names", "recorded", "came"),
    [
        (("wrapper", "all_reduce"), None, False),
        (("wrapper", "all_reduce"), "all_reduce", True),
        (("wrapper", "all_reduce"), "_fail", True),
        (("wrapper",), "wrapper", False),
        (("wrapper", "gather_object", "/torch/c10d_logger.py"), None, True),
        (("/torch/c10d_logger.py", "all_reduce"), None, False),
        (("wrapper", "_tensor_to_object"), None, True),
    ],
)
def test_an_exception_from_behind_a_call(names: tuple[str, ...], recorded: str | None, came: bool) -> None:
    """A frame below the outermost, which is torch's logger, has made a record, is of another public function, or
    unpickles what has arrived."""
    innermost = {}

    def made_record(code: CodeType, is_innermost: bool) -> bool:
        innermost[code.co_name] = is_innermost
        return code.co_name == recorded

    error = raised_in(*names)
    assert error.__traceback__ is not None
    error = error.with_traceback(error.__traceback__.tb_next)  # the frame of this file
    assert came_out(error, made_record) is came
    assert all(innermost[name] is (name == "_fail") for name in innermost)
    assert came_out(ValueError("never raised"), made_record) is False
