"""A call made on the way out of an exception: the exception is the cause."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sim.running import ranks


def test_a_finally_that_waits_hides_no_exception() -> None:
    """A rank that raised and waits in a barrier of its `finally` block is named with what it raised."""

    def body() -> None:
        dist.init_process_group("gloo")
        try:
            if dist.get_rank() == 1:
                raise ValueError("a bad shard")
            dist.all_reduce(torch.ones(2))
        finally:
            dist.barrier()

    outcome = ranks(body, 3, check=False)
    found = outcome.diagnoses[0]
    assert (found.kind.value, found.culprits, outcome.exit_code) == ("rank_raised", (1,), 1)
    assert "ValueError: a bad shard" in found.explanation


def test_an_exception_that_was_dealt_with_is_history() -> None:
    """After the `except` block, a rank that is missing in a call is just missing."""

    def body() -> None:
        dist.init_process_group("gloo")
        try:
            raise ValueError("a bad shard")
        except ValueError:
            pass
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(2))
        dist.barrier()

    outcome = ranks(body, 3, check=False)
    assert (outcome.diagnoses[0].kind.value, outcome.diagnoses[0].culprits) == ("missing_rank", (1,))
