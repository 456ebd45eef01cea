"""The shrinker by itself: what it leaves fails, nothing more can go, and what it asks is worth asking."""

from __future__ import annotations

import random

from distsim.scenario.shrink import shrink


class Failure:
    """A failure drawn from a seed: up to 24 parts in any order, one to three sets of which each fail by themselves."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.parts = draw.sample(range(30), draw.randint(1, 24))
        sizes = [draw.randint(0, min(6, len(self.parts))) for _ in range(draw.randint(1, 3))]
        self.reasons = [frozenset(draw.sample(self.parts, size)) for size in sizes]
        self.asked: list[list[int]] = []

    def __call__(self, parts: list[int]) -> bool:
        self.asked.append(parts)
        return any(reason <= set(parts) for reason in self.reasons)


SEEDS = range(300)


def test_what_is_left_fails_and_nothing_more_can_go() -> None:
    """The answer is one of the reasons and no part more, in the order that the parts had."""
    for seed in SEEDS:
        fails = Failure(seed)
        whole = list(fails.parts)
        left = shrink(fails.parts, fails)
        assert frozenset(left) in fails.reasons, seed
        assert left == [part for part in whole if part in left]
        assert fails.parts == whole, "the caller's own list is as it was"
        assert not any(fails([p for p in left if p != gone]) for gone in left), seed


def test_it_asks_only_for_less() -> None:
    """Each question leaves something out of the last list that failed, and that list is the answer."""
    for seed in SEEDS:
        fails = Failure(seed)
        left = shrink(fails.parts, fails, singly=bool(seed % 2))
        last = fails.parts
        for question in list(fails.asked):
            assert set(question) < set(last), seed
            if fails(question):
                last = question
        assert left == last


def test_one_reason_among_many_parts_costs_few_questions() -> None:
    """Halving finds one part among a thousand in tens of questions, not in a thousand."""
    for part in (0, 1, 499, 998, 999):
        fails = Failure(0)
        fails.reasons = [frozenset({part})]
        assert shrink(range(1000), fails) == [part]
        assert len(fails.asked) < 50


def test_singly_asks_once_for_each_part() -> None:
    """A part that was needed when it was asked for is not asked for again."""
    for seed in SEEDS:
        fails = Failure(seed)
        shrink(fails.parts, fails, singly=True)
        assert len(fails.asked) == len(fails.parts)


def test_where_all_fails_nothing_is_left() -> None:
    """A failure that needs no part has none; where there is no part nothing is asked."""
    assert shrink(range(9), lambda _: True) == []
    assert shrink([], lambda _: 1 / 0 > 0) == []


def test_a_failure_that_comes_and_goes_is_kept_as_it_failed_last() -> None:
    """Fewer parts may pass where still fewer fail: the answer is a list of which *fails* was true, or the whole."""
    assert shrink(range(8), lambda parts: len(parts) % 2 == 0 and 5 in parts) == [4, 5]
    assert shrink(range(5), lambda _: False) == [0, 1, 2, 3, 4]
