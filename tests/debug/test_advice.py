"""What to do next, in words that fit one rank and several."""

from __future__ import annotations

import pytest

from distsim.debug.records.kinds import Kind
from distsim.debug.words.advice import advice, no_record_advice


@pytest.mark.parametrize(
    ("who", "said"), [("rank 2", "rank 2 spends its time on"), ("ranks 2,3", "ranks 2,3 spend their time on")]
)
def test_one_straggler_or_several(who: str, said: str) -> None:
    """One rank spends its time, several spend theirs."""
    assert advice(Kind.STRAGGLER, who=who).startswith(f"Look at what {said}: ")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([2], ["rank 2: read its log", "if it wrote any"]), ([2, 3], ["ranks 2,3: read their log", "if they wrote any"])],
)
def test_one_rank_without_a_record_or_several(ranks: list[int], said: list[str]) -> None:
    """One rank has its log, several have theirs."""
    text = no_record_advice(ranks)
    assert all(part in text for part in said)
