"""`python -m tests.fuzz --inputs 20000`: mutated files over all readers, and how many of them broke one.

With --commands they go through the commands of distsim (tests/fuzz/commands.py), as a user would give them.
A break is an exception other than UsageError, a refusal that nobody could read, more than 8 s of CPU time (a command:
20 s), or more than 2 GiB of memory above what the process has. Every input comes from its number alone:
`--reader NAME --only NUMBER` makes it again.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.attempt import Break, attempt, bounded_memory, made
from tests.fuzz.commands import COMMANDS
from tests.fuzz.readers import READERS


def main() -> int:
    """Run and print; 1 where something broke."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first input of each reader")
    parser.add_argument("--reader", default="", help="only readers whose name contains this")
    parser.add_argument("--only", type=int, default=None, help="one input, with the whole traceback")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the inputs that broke a reader")
    parser.add_argument("--commands", action="store_true", help="commands in the place of readers")
    args = parser.parse_args()
    readers = [reader for reader in (COMMANDS if args.commands else READERS) if args.reader in reader.name]
    if args.only is not None:
        found = attempt(readers[0], args.only)
        print(found.trace if found else "no break")
        print(found or "")
        return int(found is not None)
    total = sum(reader.weight for reader in readers)
    breaks: list[Break] = []
    done, began, slowest = 0, time.perf_counter(), (0.0, "")
    for reader in readers:
        count = max(1, round(args.inputs * reader.weight / total))
        start, of_this = time.process_time(), list[Break]()
        for number in range(args.seed, args.seed + count):
            before_s = time.process_time()
            with bounded_memory():
                found = attempt(reader, number)
            slowest = max(slowest, (time.process_time() - before_s, f"{reader.name} [{number}]"))
            if found is not None:
                of_this.append(found)
                _keep(args.keep, reader, number)
        done += count
        breaks += of_this
        took = (time.process_time() - start) / count * 1e3
        print(f"{reader.name:34s}{count:7,d} inputs{took:8.1f} ms each{len(of_this):6d} breaks", flush=True)
        kinds = Counter((one.where, one.why.partition(":")[0]) for one in of_this)
        for (where, why), times in kinds.most_common(12):
            first = next(one for one in of_this if (one.where, one.why.partition(":")[0]) == (where, why))
            print(f"    {times:5d} x {why} at {where}: [{first.seed}] {first.why[:150]!r}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{done:,} inputs, {len(readers)} readers, {len(breaks)} breaks, {time.perf_counter() - began:.0f} s, "
        f"{slowest[0]:.1f} s of CPU time for the slowest ({slowest[1]}), {peak:.1f} GiB at the peak"
    )
    return int(bool(breaks))


def _keep(folder: Path | None, reader: object, number: int) -> None:
    if folder is None:
        return
    where = folder / f"{reader.name}-{number}".replace("/", "_").replace(" ", "_")  # type: ignore[attr-defined]
    where.mkdir(parents=True, exist_ok=True)
    for name, content in made(reader, number).items():  # type: ignore[arg-type]
        (where / name).write_bytes(content) if isinstance(content, bytes) else content(where / name)


if __name__ == "__main__":
    sys.exit(main())
