"""What an operator on CPU tensors costs more inside a simulated rank, in microseconds of CPU.

    python -m tools.benchmarks.sim_operator

Peer: the same under a dispatch mode of torch's that does nothing, the least that any simulator pays. Aim: at most
10 us more than plain torch, where simpy alone makes 750,000 events/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.benchmarks.arguments import Arguments
from tools.benchmarks.yardstick import simpy_events_per_s, told

TIMES, REPEATS = 200, 15
_clock = time.thread_time  # a rank's own is virtual


def operators() -> dict[str, float]:
    """Microseconds of each, the least of several loops."""
    x, y, square = torch.ones(16), torch.ones(16), torch.ones(8, 8)
    some, others = [torch.ones(4) for _ in range(20)], [torch.ones(4) for _ in range(20)]
    calls: dict[str, Callable[[], object]] = {
        "add_": lambda: x.add_(y),
        "mm": lambda: square @ square,
        "view": lambda: x.view(4, 4),
        "zeros": lambda: torch.zeros(4),
        "_foreach_add_ of 20": lambda: torch._foreach_add_(some, others),
    }
    spent = {}
    for name, call in calls.items():
        least_s = float("inf")
        for _ in range(REPEATS):
            begun = _clock()
            for _ in range(TIMES):
                call()
            least_s = min(least_s, _clock() - begun)
        spent[name] = least_s / TIMES * 1e6
    return spent


class Nothing(TorchDispatchMode):
    """Passes everything on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def main() -> None:
    Arguments(__doc__).parse_args()
    import distsim

    plain = operators()
    with Nothing():
        least = operators()
    ours = distsim.simulate(operators, nproc_per_node=1).results[0]
    for name, plain_us in plain.items():
        more_us, empty_us = ours[name] - plain_us, least[name] - plain_us
        print(f"{name:20s} {plain_us:5.1f} us, an empty mode {empty_us:+6.1f}, ours {more_us:+6.1f}")
    print(told(simpy_events_per_s()))


if __name__ == "__main__":
    main()
