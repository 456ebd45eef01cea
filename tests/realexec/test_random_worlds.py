"""Healthy programs of random worlds, ranks and groups run to their end under guard, and nobody is accused."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import Zygote

SEEDS = 200
QUICK = (0,)
WORLDS = 32
"""Ports that one program may need."""


def free_ports(number: int) -> int:
    """The first of so many ports in a row that were free a moment ago."""
    for first in range(20000 + os.getpid() % 128 * 64, 32000, number):
        with ExitStack() as held:
            try:
                for port in range(first, first + number):
                    probe = held.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError(f"no {number} free ports in a row")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["check", "strict"])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in QUICK else pytest.mark.soak) for seed in range(SEEDS)]
)
def test_nobody_is_accused(seed: int, level: str, zygote: Zygote, folder: Path) -> None:
    """Whatever numbers processes give themselves, in however many worlds, and however late some come."""
    ranks = 2 + seed % 4
    args = (str(seed), str(free_ports(WORLDS)))
    script = Path(__file__).parent / "random_worlds.py"
    result = zygote.run(script, ranks, directory=folder, level=level, args=args, limit_s=120.0)
    assert result.codes == dict.fromkeys(range(ranks), 0), (result.report, result.outputs)
    assert [d for d in result.diagnoses if d.exit_code] == [], result.report
