"""How long the first word takes: `import distsim` and `distsim --help`, each in fresh interpreters.

    python tests/benchmarks/startup.py

Prints the median of 15 starts, less the bare interpreter's own, and the limit it has to keep.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

STARTS = 15
BARE = ["-c", "pass"]
LIMITS_S = {
    "import distsim": (["-c", "import distsim"], 0.050),
    "distsim --help": (["-m", "distsim", "--help"], 0.300),
}


def median_s(arguments: list[str]) -> float:
    """Median wall time of a fresh interpreter with *arguments*."""
    times = []
    for _ in range(STARTS):
        begin = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> int:
    """Print one line a figure; exit code 1 where one is over its limit."""
    bare_s = median_s(BARE)
    print(f"bare interpreter  {bare_s * 1e3:6.1f} ms")
    slow = False
    for name, (arguments, limit_s) in LIMITS_S.items():
        spent_s = median_s(arguments) - (bare_s if name.startswith("import") else 0.0)
        slow |= spent_s > limit_s
        print(f"{name:<16}  {spent_s * 1e3:6.1f} ms   (limit {limit_s * 1e3:.0f} ms)")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
