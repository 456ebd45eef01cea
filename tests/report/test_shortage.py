"""What is advised where memory was too small, from figures made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.report.training.section import remedies
from distsim.sim.observe.metrics import OutOfMemory, Training

GIB = 1 << 30


def advised(ranks: int = 2, in_backward: bool = False, sharded: bool = False, **facts: Any) -> str:
    """Of a GPU of 80 GiB; *facts*: GiB held by kind, what was `asked` for and `asked_as`, what is `coming`."""
    asked, asked_as = facts.pop("asked", 1) * GIB, facts.pop("asked_as", "activations")
    one, expandable = facts.pop("one_sequence", False), facts.pop("expandable", False)
    gradients, optimizer = facts.pop("coming", (0, None))
    kinds = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
    held = {kind: facts.pop(kind, 0) * GIB for kind in kinds}
    allocated = sum(held.values())
    coming = None if optimizer is None else optimizer * GIB
    missing = max(0, allocated + asked - 80 * GIB)
    short = OutOfMemory(
        (0,),
        asked,
        80 * GIB,
        allocated,
        allocated,
        missing,
        held,
        sharded,
        in_backward,
        asked_as,
        gradients * GIB,
        coming,
        one,
        expandable=expandable,
    )
    return "\n".join(remedies(short, Training("h100", ranks, 80 * GIB, 0)))


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            {"parameters": 40, "gradients": 40, "asked_as": "optimizer", "coming": (0, 120)},
            "100 GiB sharded over all 2: not enough alone",
        ),
        ({"parameters": 30, "gradients": 30, "optimizer": 20, "asked_as": "optimizer", "coming": (0, 40)}, "2: enough"),
        ({"parameters": 60, "activations": 20, "in_backward": True, "coming": (60, 120)}, "2: not enough alone"),
        ({"parameters": 40, "gradients": 40}, "2: the optimizer's state is added to this"),
        ({"parameters": 40, "activations": 70, "coming": (0, 0)}, "2: not enough alone"),
        (
            {"parameters": 60, "activations": 20, "coming": (0, 0)},
            "2: later activations are added to this",
        ),
    ],
)
def test_shards_are_enough_only_with_all_that_is_to_come(held: dict[str, Any], said: str) -> None:
    """What gradients and the optimizer still have to make counts, and what nobody can count is named."""
    assert said in advised(**held)


def test_shards_are_not_told_to_be_sharded() -> None:
    """Who has shards is told of more ranks."""
    text = advised(parameters=20, gradients=20, optimizer=40, asked_as="optimizer", sharded=True, coming=(0, 20))
    assert "sharding" not in text
    assert "more ranks" in text
    assert "20 GiB of the optimizer's state" in text


def test_without_activations_no_second_number_is_too_much() -> None:
    """Where an optimizer's state has no room, no batch is to blame, and how much is missing is said once."""
    text = advised(parameters=40, gradients=40, asked_as="optimizer", coming=(0, 120))
    assert "a smaller micro-batch does not help: no memory is used by activations" in text
    assert "too much" not in text


def test_one_sequence_is_not_told_to_be_fewer() -> None:
    """A micro-batch of one cannot be smaller; its sequence can be shorter."""
    assert "a micro-batch of at most 84% of this one" in advised(parameters=10, activations=78)
    text = advised(parameters=10, activations=78, one_sequence=True)
    assert "the micro-batch is one sequence: shorten it to at most 84% of its length" in text
    assert "of this one" not in text


def test_segments_that_grow_are_not_asked_to_grow() -> None:
    """Where memory is free but cannot be had, who has `expandable_segments:True` is not told to set it."""
    assert "expandable_segments:True" in advised(parameters=40, activations=39)
    assert "expandable_segments:True" not in advised(parameters=40, activations=39, expandable=True)
