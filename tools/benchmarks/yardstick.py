"""How quick this machine is just now: the one yardstick of all benchmarks.

    python -m tools.benchmarks.yardstick

Peer: simpy, which is all there is here. Aim: none; our aims are told for 750,000 events/s.

Our aims are for a machine on which simpy alone carries out 0.75 M events in a CPU second, of 50 processes that wait in
turns. What a benchmark took is scaled by what it does here, measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tools.benchmarks.arguments import Arguments

__all__ = ["AIMS_EVENTS_PER_S", "scaled", "simpy_events_per_s", "told"]

AIMS_EVENTS_PER_S = 750_000
"""Of the machine that the aims are for."""


def simpy_events_per_s(events: int = 100_000, repeats: int = 3) -> float:
    """Events that simpy alone carries out in a CPU second: the best of some times, as others use the machine too."""
    return max(_rate(events) for _ in range(repeats))


def _rate(events: int) -> float:
    import simpy  # here: what a benchmark measures may include its import

    def process(env: simpy.Environment) -> Iterator[simpy.Event]:
        for _ in range(events // 50):
            yield env.timeout(1.0)

    env = simpy.Environment()
    for _ in range(50):
        env.process(process(env))
    begun = time.process_time()
    env.run()
    return events / (time.process_time() - begun)


def scaled(figure: float, events_per_s: float) -> float:
    """*figure*, a time measured where simpy makes *events_per_s*, on the machine that the aims are for."""
    return figure * events_per_s / AIMS_EVENTS_PER_S


def told(events_per_s: float) -> str:
    """One line for a benchmark to print."""
    return f"simpy alone: {events_per_s:,.0f} events/s of CPU; the aims are for {AIMS_EVENTS_PER_S:,}"


def main() -> None:
    Arguments(__doc__).parse_args()
    print(told(simpy_events_per_s()))


if __name__ == "__main__":
    main()
