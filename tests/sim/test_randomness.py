"""Random numbers: every rank has its own streams, all of them from the world's seed."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sim.running import HEAD, Scripts, ranks

DRAWS = """
import random, uuid, secrets
import numpy as np
def draw():
    return (random.random(), float(np.random.rand()), torch.rand(1).item())
"""


def test_seeded_streams_do_not_touch_each_other(script: Scripts) -> None:
    """What a rank draws after seeding is what a process alone would draw, whatever others seed meanwhile."""
    ran = script(
        HEAD
        + DRAWS
        + """
random.seed(rank); np.random.seed(rank); torch.manual_seed(rank)
dist.barrier()
first = draw()
if rank == 0:
    random.seed(99); np.random.seed(99); torch.manual_seed(99)
dist.barrier()
print((first, draw()))
"""
    )
    own = random.Random(1)
    numpy_own = np.random.RandomState(1)
    generator = torch.Generator().manual_seed(1)
    alone = [(own.random(), float(numpy_own.rand()), torch.rand(1, generator=generator).item()) for _ in range(2)]
    assert ran.of(1) == [str(tuple(alone))]


def test_unseeded_ranks_differ_and_repeat(script: Scripts) -> None:
    """Without a seed ranks differ, as processes do (torch's default seed is the same everywhere); a second
    run with the same world seed repeats every draw, another seed does not."""
    text = (
        HEAD
        + DRAWS
        + """
random_, numpy_, torch_ = draw()
print(random_, numpy_, np.random.default_rng().random(), random.Random().random(), uuid.uuid4(), secrets.token_hex(4))
print(torch_, torch.initial_seed())
"""
    )
    first, again, other = script(text, seed=1), script(text, seed=1), script(text, seed=2)
    assert first.out == again.out
    assert first.of(0)[0] != first.of(1)[0]
    assert first.of(0)[1] == first.of(1)[1]
    assert not set(first.of(0)[0].split()) & set(other.of(0)[0].split())


def test_generators_and_states(script: Scripts) -> None:
    """A torch.Generator, fork_rng and get / set_rng_state across calls that change ranks."""
    ran = script(
        HEAD
        + """
g = torch.Generator().manual_seed(3)
torch.manual_seed(rank)
state = torch.get_rng_state()
first = torch.rand(1).item()
dist.barrier()
torch.set_rng_state(state)
assert torch.rand(1).item() == first
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(7)
    dist.barrier()
    inside = torch.rand(1).item()
torch.manual_seed(7)
assert torch.rand(1).item() == inside
print(torch.rand(2, generator=g).tolist())
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ran.of(1) == [str(torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist())]


def test_the_callers_streams_are_untouched() -> None:
    """A simulation neither advances nor seeds the generators of the process around it."""

    def body() -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        torch.rand(3), np.random.rand(3), random.random()

    def state() -> Any:
        return (
            torch.get_rng_state().tolist(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
            random.getstate(),
        )

    before = state()
    ranks(body)
    assert state() == before


@pytest.mark.slow
def test_the_first_simulation_of_a_process_draws_none_of_its_numbers() -> None:
    """What is imported for it (rich) draws when it is imported."""
    script = """
import random, sys
import numpy as np, torch
import torch.distributed as dist

def states():
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()

before = states()
import distsim
distsim.simulate(dist.init_process_group, on="ethernet-cpu:2", nproc_per_node=1, args=("gloo",))
assert "rich.style" in sys.modules
print([a == b for a, b in zip(before, states())])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[True, True, True]"
