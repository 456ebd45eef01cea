"""Reading and diagnosing the rings of a large job, one rank of which never came to the last call.

Peer: none; plain torch keeps no rings. Aim: 2 s, and rank 3 is named.

    python -m tools.benchmarks.guard_postmortem [--ranks 512] [--calls 4000]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from distsim.debug.postmortem import examine
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import ring_path
from distsim.debug.rings.writer import RingWriter
from tools.benchmarks.arguments import Arguments, at_least, count

LIMIT_S = 2.0
BEHIND = 3
"""The rank that never came."""


def write(folder: Path, ranks: int, calls: int) -> None:
    """Rings as a job leaves them that was killed while all but one rank waited."""
    for rank in range(ranks):
        ring = RingWriter(
            ring_path(folder, rank, 0, "bench"), rank=rank, world_size=ranks, local_rank=rank, job="bench", attempt=0
        )
        ring.header(rings.W_LIFE, rings.LIFE_JOINED)
        ring.header(rings.W_JOINED, time.monotonic_ns())
        world = ring.group("0", "default_pg", range(ranks))
        half = ring.group("1", "pair", [rank - rank % 2, rank - rank % 2 + 1])
        thread = ring.entry(rings.TABLE_THREAD, (1, "MainThread"), [1, "MainThread"])
        site = ring.entry(rings.TABLE_SITE, "s", [["train.py", 131, "train"], ["train.py", 200, "main"]])
        said = Signature("all_reduce", ((4096, 1024),), dtypes=("float32",), nbytes=1 << 24, reduce_op="SUM")
        signature, print_ = ring.signature("all_reduce", lambda _key, said=said: (said, False))
        numbers = {world: 0, half: 0}
        own = calls - (1 if rank == BEHIND else 0)
        for call in range(own):
            group = half if call % 4 == 3 and call != calls - 1 else world
            numbers[group] += 1
            open_ = call == calls - 1
            flags = rings.ISSUED | rings.WAITING
            index = ring.issue(flags, group, thread, numbers[group], signature, site, print_, 7, -1, 0)
            if not open_:
                ring.finish(index, rings.COMPLETED)
        ring.beat()
        ring.close()


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--ranks", type=at_least(BEHIND + 1), default=512)
    parser.add_argument("--calls", type=count, default=4000)
    args = parser.parse_args()
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        child = os.fork()  # the writers must be dead
        if child == 0:
            write(Path(folder), args.ranks, args.calls)
            os._exit(0)
        os.waitpid(child, 0)
        start = time.perf_counter()
        found = examine(Path(folder))
        took_s = time.perf_counter() - start
    first = found.diagnoses[0] if found.diagnoses else None
    said = f"{first.kind} of ranks {list(first.culprits)}" if first else "nothing"
    print(f"{args.ranks} rings of {args.calls} calls: {said} in {took_s:.2f} s (limit {LIMIT_S:g} s)")
    sys.exit(int(took_s > LIMIT_S or first is None or first.culprits != (BEHIND,)))


if __name__ == "__main__":
    main()
