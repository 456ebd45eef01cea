"""Every simulated rank has a hash seed of its own, as a process has; and what it handles is in the evidence."""

from __future__ import annotations

import pytest

from distsim.debug.records.kinds import Kind
from tests.sim.running import Scripts

PLAN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tables = {"user": 8, "item": 16, "query": 32, "ad": 64, "geo": 128, "page": 256}
plan = list(set(tables) & {"user", "item", "query", "ad", "geo", "page"})
print(",".join(plan), hash("user"), len({*plan}), [n for n in {1, 2, 3}], *{5})
for name in plan:
    dist.all_reduce(torch.ones(tables[name]))
"""

SORTED = PLAN.replace("list(", "sorted(")

SWALLOWED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(5):
    try:
        if dist.get_rank() == 2 and step == 1:
            raise ValueError("corrupt record 77")
        dist.all_reduce(torch.ones(4))
    except ValueError:
        continue
dist.barrier()
"""


def test_a_set_of_strings_has_an_order_of_its_own_on_each_rank(
    script: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan differs, and the advice is to sort it; two runs are alike, byte for byte."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first, second = script(PLAN, 4), script(PLAN, 4)
    (d,) = first.outcome.diagnoses
    assert d.kind is Kind.SHAPE_MISMATCH
    assert d.suggestion.startswith("Sort what the loop runs over: `sorted(plan)`")
    lines = {line.split("] ", 1)[1] for line in first.out.splitlines()}
    assert len(lines) == 4
    assert all(line.endswith(" 6 [1, 2, 3] 5") for line in lines)
    assert first.out == second.out


def test_sorted_or_with_one_seed_the_plan_is_one(script: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """sorted() heals it, and so does PYTHONHASHSEED."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert not script(SORTED, 4).outcome.diagnoses
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not script(PLAN, 4).outcome.diagnoses


def test_what_a_rank_handles_is_in_the_evidence(script: Scripts) -> None:
    """A rank that swallows an exception and skips a call is told so, with its line."""
    (d,) = script(SWALLOWED, 3).outcome.diagnoses
    assert d.culprits == (2,)
    assert "Rank 2 caught ValueError: corrupt record 77 (raised at " in d.explanation
    assert d.suggestion.startswith("Do not let the ValueError pass: rank 2 caught it at ")
    assert [site.line for site in d.causes] == [9, 7]
