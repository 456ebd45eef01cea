"""Faults in a world: who is asked what, and what holds without any."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sim.running import ranks

from distsim.sim import Outcome
from distsim.sim.faults.fault import Rule
from distsim.sim.faults.planted import Faults
from distsim.sim.faults.rank_faults import Crash, Jitter, Straggler
from distsim.sim.world.conditions import Conditions


def planted(*rules: Rule) -> Faults:
    """In a world that has nothing but a clock, at zero."""
    world: Any = SimpleNamespace(facts=SimpleNamespace(network=SimpleNamespace(cluster=None), seed=0), now_s=0.0)
    return Faults(world, rules)


def test_a_world_without_rules_asks_nobody() -> None:
    """Every question has its answer, whatever it is about."""
    faults, nothing = planted(), Any
    faults.on_call(nothing, nothing)  # type: ignore[arg-type]
    faults.on_start([nothing])  # type: ignore[list-item]
    faults.after_data([nothing])  # type: ignore[list-item]
    assert faults.compute_s(nothing, 0.0, 2.5) == 2.5  # type: ignore[arg-type]
    assert (faults.notes, faults.never_struck, faults.findings()) == ([], [], [])


def test_faults_answer_in_the_order_of_their_rules() -> None:
    """A computation goes from one fault to the next; whom it is not about never strikes."""
    slow = Straggler(ranks=(1,), factor=3.0)
    other = Straggler(ranks=(2,), factor=9.0)
    faults = planted(slow, Crash(ranks=(1,)), Jitter(period_s=1.0, pause_s=0.5), other)
    rank: Any = SimpleNamespace(rank=1)
    assert faults.compute_s(rank, 0.0, 1.0) == 3.0 + 5 * 0.5  # three times as long, in halves of seconds
    assert [str(rule) for rule in faults.never_struck] == ["rank 1 killed by SIGKILL", str(other)]


def leaves() -> None:
    """Rank 1 goes while its collective is under way."""
    dist.init_process_group("gloo")
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if dist.get_rank() == 1:
        os._exit(3)
    assert work is not None
    work.wait()


def test_a_collective_of_a_dead_rank_never_ends_with_or_without_faults() -> None:
    """An ordinary run and a scenario say the same of a rank that leaves in the middle of a collective."""

    def told(outcome: Outcome) -> Sequence[Any]:
        return [(d.kind, d.culprits, d.victims) for d in outcome.diagnoses]

    plain = ranks(leaves, 3, check=False)
    assert told(plain) == [("rank_exited", (1,), (0, 2))]
    assert told(ranks(leaves, 3, check=False, conditions=Conditions())) == told(plain)
