"""What a handled exception costs under guard: a loop of try and except, with and without the report of its handler.

The loop raises and handles one exception a round, the cheapest that Python has. Under guard the handler writes it to
the rank's ring. A round that raises nothing costs the same in both: the handler's code is not entered.

Peer: the same loop as Python compiles it. Aim: a ratio under 50, for an exception takes Python a tenth of a
microsecond, and a program that handles 10,000 of them a second loses no more than a twentieth of its time.

    python -m tools.benchmarks.guard_handled [--rounds 100000] [--times 5]
"""

from __future__ import annotations

import os
import tempfile
import time
from types import CodeType

from tools.benchmarks.arguments import Arguments, count

LOOPS = {
    "handled": b"""
def loop(rounds):
    for _ in range(rounds):
        try:
            raise ValueError
        except ValueError:
            pass
""",
    "not raised": b"""
def loop(rounds):
    for _ in range(rounds):
        try:
            pass
        except ValueError:
            pass
""",
}


def seconds(code: CodeType, rounds: int, times: int) -> float:
    """The shortest of *times* loops."""
    names: dict[str, object] = {"__name__": "loop"}
    exec(code, names)
    loop = names["loop"]
    assert callable(loop)
    shortest = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        loop(rounds)
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--rounds", type=count, default=100_000)
    parser.add_argument("--times", type=count, default=5)
    given = parser.parse_args()
    import torch.distributed as dist

    import distsim.debug
    from distsim.debug.evidence.watched_source import compiled

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "loop.py")
        os.environ.update(DISTSIM_DIR=folder, DISTSIM_MONITOR="0")
        distsim.debug.install()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for name, source in LOOPS.items():
            plain = seconds(compile(source, path, "exec"), given.rounds, given.times)
            guarded = seconds(compiled(source, path), given.rounds, given.times)
            each_us = (guarded - plain) / given.rounds * 1e6
            print(
                f"{name:12} ratio {guarded / plain:6.2f}  ({each_us:.2f} us more a round; plain {plain * 1e3:.1f} ms)"
            )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
