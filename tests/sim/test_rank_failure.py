"""The text of RankFailure: what a person reads who called `distsim.simulate` from Python."""

from __future__ import annotations

import os
import pickle
import pty
import re
import termios
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from sim.running import ranks
from sim.test_errors import text_of

import distsim
from distsim.debug.report.console import stream_width


def _caught(body: Any, num_ranks: int) -> distsim.RankFailure:
    with pytest.raises(distsim.RankFailure) as caught:
        ranks(body, num_ranks)
    return caught.value


def test_messages_that_differ_in_numbers_are_one() -> None:
    """32 ranks, each with its rank and its loss: one traceback, all ranks, the first message and the last."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        raise ValueError(f"bad batch of rank {rank}: loss {rank * 0.37:.3f}")

    failure = _caught(body, 32)
    lines = str(failure).splitlines()
    assert lines[0] == "ranks 0-31, the same but for numbers; of rank 0:"
    assert lines[-3:] == [
        "ValueError: bad batch of rank 0: loss 0.000",
        "... and 31 more that differ in numbers, the last of rank 31:",
        "ValueError: bad batch of rank 31: loss 11.470",
    ]
    assert str(failure).count("Traceback") == 1
    assert len(failure.failures) == 32, "as data they are what they were"


def test_a_headline_names_the_first_of_many_pieces_of_ranks() -> None:
    """As those of reports; as data they are whole."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        if rank % 2:
            raise ValueError(f"bad {rank % 4}")

    failure = _caught(body, 40)
    lines = str(failure).splitlines()
    assert lines[0] == "ranks 1,3,5,7 and 16 more, the same but for numbers; of ranks 1,5,9,13 and 6 more:"
    assert lines[-2:] == [
        "... and one more that differs in numbers, of ranks 3,7,11,15 and 6 more:",
        "ValueError: bad 3",
    ]
    assert [one.ranks for one in failure.failures] == [tuple(range(1, 40, 4)), tuple(range(3, 40, 4))]


def test_every_place_and_every_word_has_its_traceback() -> None:
    """Another line, another word or another type is another failure; equal ones are said as before."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        if rank < 2:
            raise ValueError(f"no file {rank}")
        if rank < 4:
            raise ValueError(f"no file {rank}")
        if rank < 6:
            raise ValueError(f"no {'train' if rank == 4 else 'test'} file")
        raise KeyError("same")

    text = str(_caught(body, 8))
    heads = ["ranks 0,1, the same but for numbers; of rank 0:", "ranks 2,3, the same but for numbers; of rank 2:"]
    assert re.findall("^ranks? .*:$", text, re.MULTILINE) == [*heads, "rank 4:", "rank 5:", "ranks 6,7:"]
    assert "... and one more that differs in numbers, of rank 3:\nValueError: no file 3\n" in text


def test_a_chain_is_alike_in_all_its_messages() -> None:
    """Numbers of the first exception count as little as those of the last one."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        try:
            {}[rank]
        except KeyError as error:
            raise ValueError(f"{rank}: read\nat {rank}") from error

    text = str(_caught(body, 3))
    assert text.count("Traceback") == 2
    assert text.endswith("the last of rank 2:\nKeyError: 2")


def _second_line(rank: int) -> None:
    raise ValueError(f"bad\nsecond {rank}")


def _cause(rank: int) -> None:
    raise ValueError("cannot read") from KeyError(f"shard {rank}")


def _worker(rank: int, line: int = 10) -> None:
    """As a DataLoader hands on what its worker raised."""
    raise ValueError(
        f"Caught KeyError in worker {rank}.\nOriginal Traceback (most recent call last):\n"
        f"  File \"d.py\", line {line}, in f\n    x = d[k]\nKeyError: 'k'"
    )


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        (_second_line, "second 2"),
        (_cause, "KeyError: 'shard 2'"),
        (_worker, "ValueError: Caught KeyError in worker 2."),
    ],
)
def test_the_line_that_differs_is_said(raises: Callable[[int], None], said: str) -> None:
    """Of the last one, wherever it stands: in a message of many lines, in the cause's, before another's traceback."""

    def body() -> None:
        raises(int(os.environ["RANK"]))

    failure = _caught(body, 3)
    assert str(failure).endswith(f"... and 2 more that differ in numbers, the last of rank 2:\n{said}")
    assert failure.outcome is not None
    if len(failure.outcome.diagnoses) > 1:  # one that names them all shows the tracebacks of two
        assert f"ranks 1,2 (all of them: --report FILE); rank 2: {said}" in _words(failure.outcome)
    failure.outcome.diagnoses = []
    assert f"ranks 1,2 (--report FILE); rank 2: {said}" in _words(failure.outcome)


def _words(outcome: distsim.Outcome) -> str:
    return " ".join(text_of(outcome).split())


def test_another_line_within_a_message_is_another_failure() -> None:
    """What a DataLoader's workers raised at two lines differs in more than numbers."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        _worker(rank, 20 if rank == 2 else 10)

    text = str(_caught(body, 3))
    assert re.findall("^ranks? .*:$", text, re.MULTILINE) == [
        "ranks 0,1, the same but for numbers; of rank 0:",
        "rank 2:",
    ]


def test_who_waits_is_said_once() -> None:
    """Twelve different exceptions and four ranks that wait for them all: the report has one diagnosis, and counts none
    that it does not know of."""

    def body() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if rank < 12:
            raise ValueError("abcdefghijkl"[rank])
        dist.barrier()

    failure = _caught(body, 16)
    assert str(failure).count("Traceback") == 12
    assert failure.report.count("rank raised") == 1
    assert "Ranks 12-15 wait in barrier #1" in " ".join(failure.report.split())
    assert "more diagnos" not in failure.report
    assert failure.outcome is not None
    assert len(failure.outcome.diagnoses) == 12


def test_who_waits_elsewhere_is_said_too() -> None:
    """Two groups, in each a rank that raised: both who wait are named."""

    def body() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        if rank % 2:
            raise ValueError("ab"[rank // 2])
        dist.barrier(pairs[rank // 2])

    report = " ".join(_caught(body, 4).report.split())
    assert [rank for rank in (0, 2) if f"Rank {rank} waits in barrier #1" in report] == [0, 2]


def test_nothing_is_said_of_a_command_line() -> None:
    """What is left out is in the Outcome: there is no flag to give."""

    def body() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        groups = [dist.new_group([2 * i, 2 * i + 1]) for i in range(8)]
        if rank == 0:
            raise ValueError("no data")
        if rank > 1 and rank % 2:
            dist.barrier(groups[rank // 2])
        elif rank > 1:
            os._exit(rank)
        dist.barrier()

    report = _caught(body, 16).report
    assert "more diagnoses (all of them: the Outcome)" in report
    assert "--report" not in report


def test_another_process_can_be_told() -> None:
    """A pool of processes gets it whole, but for the run."""
    failure = distsim.RankFailure([], "a report")
    told = pickle.loads(pickle.dumps(failure))
    assert (str(told), told.report, told.outcome) == ("a report", "a report", None)


def test_it_is_as_wide_as_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `distsim run`: the terminal's columns, or 120 where there is none; COLUMNS says otherwise."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal, open(os.devnull, "w") as file:
        termios.tcsetwinsize(theirs, (24, 97))
        assert (stream_width(terminal), stream_width(file)) == (97, 120)
        monkeypatch.setenv("COLUMNS", "70")
        assert (stream_width(terminal), stream_width(file)) == (70, 70)

    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("no data")
        dist.barrier()

    for columns in (70, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert len(_caught(body, 3).report.splitlines()[0]) == columns
