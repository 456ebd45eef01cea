"""What a guard costs over plain gloo, with TORCH_DISTRIBUTED_DEBUG=DETAIL's wrapper beside it.

Plain is the very group that stands behind the guard, so both use the same sockets (two gloo groups differ
by up to 40 % at 1 MiB). They take turns in short blocks; printed is the median over the blocks of the ratio to
the plain block beside it, so a noisy machine hits both alike. The column `plain` is such a group against itself:
how far it is from 1 is the noise of the figures beside it.

Peer: plain gloo, and DETAIL. Aim: check 1.05 at 4 B, 1.03 at 1 MiB, 1.01 at 64 MiB; strict 1.5 at 4 B on 2 ranks.

    python -m tools.benchmarks.guard_overhead [--ranks 2,4,8] [--sizes 4,1M,64M] [--blocks 40] [--kinds check,strict]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

from tools.benchmarks.arguments import Arguments, count, known, several

LIMITS = {("check", 4): 1.05, ("check", 1 << 20): 1.03, ("check", 64 << 20): 1.01}
STRICT_LIMIT = 1.5
ELEMENT = 4
"""Bytes of a float32."""
KINDS = ("check", "strict", "plain", "detail")
CALLS = {4: 50, 1 << 20: 5, 64 << 20: 1}
TURNS = {4: 4, 1 << 20: 16, 64 << 20: 3}
"""Times the blocks that were asked for."""
UNTOUCHED = types.FunctionType(
    dist.all_reduce.__code__,
    dist.all_reduce.__globals__,
    closure=(types.CellType(dist.all_reduce.__wrapped__),),
)
"""torch's all_reduce as it is before the guard is installed."""


def detail_group(rank: int, world: int, store: Any) -> Any:
    """A group as TORCH_DISTRIBUTED_DEBUG=DETAIL makes it."""
    prefix = dist.PrefixStore("detail", store)
    backend = dist.ProcessGroupGloo(prefix, rank, world, timedelta(seconds=300))
    helper = dist.ProcessGroupGloo(dist.PrefixStore("helper", prefix), rank, world, timedelta(seconds=300))
    group = dist.ProcessGroup(prefix, rank, world)
    wrapped = c10d._ProcessGroupWrapper(backend, helper)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, wrapped)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def adopt(group: Any, like: Any) -> None:
    """Let torch.distributed's functions take this group."""
    world = c10d._world
    world.pg_map[group] = world.pg_map[like]
    world.pg_names[group] = f"bench-{id(group)}"
    world.pg_group_ranks[group] = dict(world.pg_group_ranks[like])
    world.pg_backend_config[group] = world.pg_backend_config[like]
    world.pg_to_tag[group] = ""


def guarded(rank: int, world: int, port: int, folder: str) -> Callable[[], Any]:
    """Join a job under the guard. Return a function that makes a group at the level strict."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    import distsim.debug
    from distsim.realexec.install import current_session
    from distsim.realexec.strict.peers import Peers
    from distsim.realexec.strict.strict import Strict

    distsim.debug.install("check", dir=folder)
    dist.init_process_group("gloo")
    session = current_session()
    assert session is not None

    def strict_group() -> Any:
        group: Any = dist.new_group()
        group.strict = Strict(session.recorder, Peers(session.directory, session.ring, 0))
        group.decide_way()
        return group

    return strict_group


def leave(rank: int, folder: str, found: dict[str, Any]) -> None:
    """Write what was found, and end the rank's part of the job."""
    import distsim.debug

    if rank == 0:
        Path(folder, "bench.json").write_text(json.dumps(found))
    dist.barrier()
    distsim.debug.remove()
    dist.destroy_process_group()


def block(group: Any, tensor: torch.Tensor, calls: int) -> float:
    """Seconds a call."""
    all_reduce = dist.all_reduce if hasattr(group, "recorder") else UNTOUCHED
    start = time.perf_counter()
    for _ in range(calls):
        all_reduce(tensor, group=group)
    return (time.perf_counter() - start) / calls


def worker(rank: int, world: int, port: int, folder: str, sizes: list[int], blocks: int, kinds: list[str]) -> None:
    strict_group = guarded(rank, world, port, folder)
    groups: dict[str, Any] = {"check": dist.new_group(), "strict": strict_group()}
    groups["plain"] = dist.new_group().inner
    behind = {"check": groups["check"].inner, "strict": groups["strict"].inner, "plain": groups["plain"]}
    if "detail" in kinds:
        groups["detail"] = detail_group(rank, world, c10d._get_default_store())
        behind["detail"] = dist.new_group().inner
    for group in {*behind.values(), *groups.values()}:
        if group not in c10d._world.pg_map:
            adopt(group, groups["strict"])
    groups = {kind: groups[kind] for kind in kinds}
    found: dict[str, dict[int, list[float]]] = {kind: {size: [] for size in sizes} for kind in kinds}
    plain_us: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        tensor = torch.zeros(size // ELEMENT)
        calls = CALLS.get(size, 20)
        turns = blocks * TURNS.get(size, 1)
        for kind, group in groups.items():
            plain = behind[kind]
            for _ in range(4 if kind == "detail" else 10):
                for warm in (plain, group):
                    block(warm, tensor, calls)
            for turn in range(max(turns // 4, 1) if kind == "detail" else turns):
                # Plain before and after in turn: a trend of the machine cancels.
                if turn % 2:
                    base = block(plain, tensor, calls)
                    mine = block(group, tensor, calls)
                else:
                    mine = block(group, tensor, calls)
                    base = block(plain, tensor, calls)
                found[kind][size].append(mine / base)
                plain_us[size].append(base * 1e6)
    out = {kind: {size: statistics.median(ratios) for size, ratios in sizes_.items()} for kind, sizes_ in found.items()}
    leave(rank, folder, {"ratios": out, "plain_us": {size: statistics.median(us) for size, us in plain_us.items()}})


def spawn(worker: Callable[..., None], ranks: int, *words: Any) -> dict[str, Any]:
    """What rank 0 of *ranks* processes has written, each a `worker(rank, ranks, port, folder, *words)`."""
    port = get_free_port()
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base, ignore_cleanup_errors=True) as folder:
        mp.spawn(worker, args=(ranks, port, folder, *words), nprocs=ranks)
        return dict(json.loads(Path(folder, "bench.json").read_text()))


def parse_size(text: str) -> int:
    """`4`, `1M`."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper(), re.ASCII)
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    nbytes = int(found[1]) * units[found[2]] if found else 0
    if nbytes < ELEMENT:
        raise argparse.ArgumentTypeError(f"expected a size as 4, 64K or 1M, at least {ELEMENT}, got {text!r}")
    return nbytes


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--ranks", type=several(count), default="2,4,8")
    parser.add_argument("--sizes", type=several(parse_size), default="4,1M,64M")
    parser.add_argument("--blocks", type=count, default=40)
    parser.add_argument("--kinds", type=several(known(KINDS)), default=",".join(KINDS))
    args = parser.parse_args()
    worst = False
    print("ranks      size   plain us  " + "  ".join(f"{kind:>7}" for kind in args.kinds))
    for ranks in args.ranks:
        result = spawn(worker, ranks, args.sizes, args.blocks, args.kinds)
        for size in args.sizes:
            row = {kind: ratios[str(size)] for kind, ratios in result["ratios"].items()}
            print(
                f"{ranks:5} {size:9} {result['plain_us'][str(size)]:10.1f}  "
                + "  ".join(f"{ratio:7.3f}" for ratio in row.values()),
                flush=True,
            )
            worst |= row.get("check", 0) > LIMITS.get(("check", size), 9)
            worst |= ranks == 2 and size == 4 and row.get("strict", 0) > STRICT_LIMIT
    print("limits: check 1.05 at 4 B, 1.03 at 1 MiB, 1.01 at 64 MiB; strict 1.5 at 4 B on 2 ranks")
    sys.exit(int(worst))


if __name__ == "__main__":
    main()
