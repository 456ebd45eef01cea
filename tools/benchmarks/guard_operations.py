"""What a guard costs, operation by operation: CPU time of a rank beside plain torch's and DETAIL's.

Peer: plain torch, and DETAIL. Aim: record 8 us more, check 15 us more and 1.1 times plain, strict 1.5, steps 1.02.

Plain is the very group that stands behind the guard and torch's own functions, as they are before the guard is
installed. A kind and plain take turns, call by call, so whatever disturbs the machine hits both alike, and the kinds
take turns, round by round: gloo's threads meet in their locks or do not, for seconds on end. Of a round the mean of the
middle half of the calls counts, over all ranks; printed are the median of the rounds' ratios to plain, how far that
median is to be trusted (its standard error, from the rounds' quartiles), and the microseconds more, with the error of
theirs. CPU time is that of the whole process: gloo's threads, the strict level's, the heartbeat. At the levels record
and check a rank does the same; they differ in the monitor, which is no rank: `record` is another group than `check`,
measured as often, against the limit of its own. The rows `plain` are plain against itself: the noise of the figures
beside them. A limit is missed where the figure less twice its error lies beyond it.

    python -m tools.benchmarks.guard_operations [--ranks 2] [--calls 960] [--kinds check,strict] [--ops "send recv,..."]
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tools.benchmarks.arguments import Arguments, at_least, count, known, several
from tools.benchmarks.guard_overhead import adopt, detail_group, guarded, leave, spawn

RECORD_LIMIT_US, CHECK_LIMIT, CHECK_LIMIT_US, STRICT_LIMIT, STEP_LIMIT = 8.0, 1.10, 15.0, 1.5, 1.02
LIMITS: dict[str, tuple[float, ...]] = {
    "record": (math.inf, RECORD_LIMIT_US),
    "check": (CHECK_LIMIT, CHECK_LIMIT_US),
    "strict": (STRICT_LIMIT,),
}
WARM = 30
ROUNDS = 12
LIKELY = 1.349
"""Distance of a normal distribution's quartiles, in standard deviations."""
MEDIAN = 1.253
"""Standard error of a normal distribution's median over that of its mean."""
SHARE = {"plain": 0.5, "detail": 0.1}
"""Of the calls: what is noise, and what is far from any limit."""
GUARDED = ("record", "check", "strict")
KINDS = (*GUARDED, "plain", "detail")
MESSAGES = ("send recv", "isend irecv", "batch_isend_irecv")
"""Rows of two calls."""
Call = Callable[[Any, Any], object]
"""One call, by the functions of a module (torch's own, or those under guard) on a group."""

NAMES = (
    "all_reduce broadcast reduce all_gather all_gather_single reduce_scatter_single all_to_all_single barrier send recv"
)


def untouched() -> types.SimpleNamespace:
    """torch's functions as they are before the guard is installed."""
    found = types.SimpleNamespace(**vars(c10d))
    for name in NAMES.split():
        public = getattr(c10d, name)
        cell = types.CellType(public.__wrapped__)
        setattr(found, name, types.FunctionType(public.__code__, public.__globals__, name, None, (cell,)))
    # torch's batch compares its operations with the isend that it knows.
    own = dict(vars(c10d))
    for name in ("isend", "irecv", "batch_isend_irecv"):
        public = getattr(c10d, name)
        own[name] = types.FunctionType(public.__code__, own, name, public.__defaults__)
        setattr(found, name, own[name])
    return found


def below(frames: int, call: Callable[[], object]) -> object:
    """Programs make few calls in their loop itself."""
    return below(frames - 1, call) if frames else call()


def operations(rank: int, world: int) -> dict[str, Call]:
    """A call of each, the smallest there is: 4 B a rank."""
    one, many, outs = torch.zeros(1), torch.zeros(world), [torch.zeros(1) for _ in range(world)]
    other = torch.zeros(1)
    more = [torch.zeros(1) for _ in range(4)]
    left, right = (rank - 1) % world, (rank + 1) % world

    def future(f: Any, g: Any) -> None:
        f.all_reduce(one, group=g, async_op=True).get_future().wait()

    def coalesced(f: Any, g: Any) -> None:
        with f._coalescing_manager(group=g):
            for tensor in more:
                f.all_reduce(tensor, group=g)

    def send_recv(f: Any, g: Any) -> None:
        if rank % 2 == 0:
            f.send(one, right, group=g)
            f.recv(other, left, group=g)
        else:
            f.recv(other, left, group=g)
            f.send(one, right, group=g)

    def isend_irecv(f: Any, g: Any) -> None:
        works = [f.isend(one, right, group=g), f.irecv(other, left, group=g)]
        for work in works:
            work.wait()

    def batch(f: Any, g: Any) -> None:
        ops = [dist.P2POp(c10d.isend, one, right, group=g), dist.P2POp(c10d.irecv, other, left, group=g)]
        ops[0].op, ops[1].op = f.isend, f.irecv
        for work in f.batch_isend_irecv(ops):
            work.wait()

    return {
        "all_reduce": lambda f, g: f.all_reduce(one, group=g),
        "all_reduce 6 frames below": lambda f, g: below(6, lambda: f.all_reduce(one, group=g)),
        "all_reduce async": lambda f, g: f.all_reduce(one, group=g, async_op=True).wait(),
        "all_reduce future": future,
        "all_reduce coalesced": coalesced,
        "broadcast": lambda f, g: f.broadcast(one, 0, group=g),
        "broadcast async": lambda f, g: f.broadcast(one, 0, group=g, async_op=True).wait(),
        "reduce": lambda f, g: f.reduce(one, 0, group=g),
        "all_gather": lambda f, g: f.all_gather(outs, one, group=g),
        "all_gather_single": lambda f, g: f.all_gather_single(many, one, group=g),
        "all_gather_single async": lambda f, g: f.all_gather_single(many, one, group=g, async_op=True).wait(),
        "reduce_scatter_single": lambda f, g: f.reduce_scatter_single(one, many, group=g),
        "reduce_scatter_single async": lambda f, g: f.reduce_scatter_single(one, many, group=g, async_op=True).wait(),
        "all_to_all_single": lambda f, g: f.all_to_all_single(many, torch.empty_like(many), group=g),
        "barrier": lambda f, g: f.barrier(group=g),
        "send recv": send_recv,
        "isend irecv": isend_irecv,
        "batch_isend_irecv": batch,
    }


def steps(groups: dict[str, Any]) -> dict[str, dict[str, Callable[[], object]]]:
    """A training step of each kind of group, by what trains."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def model() -> Any:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers)

    data = torch.randn(128, 512)

    def step(net: Any) -> Callable[[], object]:
        optimizer = torch.optim.SGD(net.parameters(), 1e-4)

        def once() -> None:
            optimizer.zero_grad()
            net(data).square().mean().backward()
            optimizer.step()

        return once

    def fsdp(group: Any) -> Any:
        mesh = DeviceMesh.from_group(group, "cpu")
        net = model()
        for layer in net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    return {
        "DDP step": {kind: step(DistributedDataParallel(model(), process_group=g)) for kind, g in groups.items()},
        "FSDP2 step": {kind: step(fsdp(g)) for kind, g in groups.items()},
    }


def cpu_us(call: Callable[[], object]) -> float:
    """Microseconds of CPU time."""
    start = time.process_time_ns()
    call()
    return (time.process_time_ns() - start) / 1e3


def compare(mine: Callable[[], object], plain: Callable[[], object], calls: int) -> tuple[float, float]:
    """Microseconds of mine and of plain."""
    own: list[float] = []
    base: list[float] = []
    for turn in range(calls):
        # Plain before and after in turn: a trend of the machine cancels.
        for which in (plain, mine) if turn % 2 else (mine, plain):
            (base if which is plain else own).append(cpu_us(which))
    return middle(own), middle(base)


def in_rounds(
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]], calls: int
) -> dict[str, list[tuple[float, float]]]:
    """Of each kind and round: microseconds of mine and of plain."""
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, (mine, plain) in list(pairs.items()):
        try:
            for warm in (plain, mine) * min(WARM, calls):
                warm()
        except (RuntimeError, NotImplementedError):
            if kind != "detail":
                raise
            del pairs[kind]  # DETAIL's wrapper lacks some
            continue
        found[kind] = []
    for _ in range(ROUNDS):
        for kind, (mine, plain) in pairs.items():
            found[kind].append(compare(mine, plain, max(int(calls * SHARE.get(kind, 1)) // ROUNDS, 2)))
    return found


def middle(values: list[float]) -> float:
    """Mean of the middle half."""
    values = sorted(values)
    return statistics.fmean(values[len(values) // 4 : -(len(values) // 4) or None])


def worker(rank: int, world: int, port: int, folder: str, calls: int, kinds: list[str], only: list[str]) -> None:
    bare = untouched()
    strict_group = guarded(rank, world, port, folder)
    made: dict[str, Any] = {
        kind: strict_group() if kind == "strict" else dist.new_group() for kind in (*GUARDED, "plain", "behind detail")
    }
    behind = {kind: made[kind].inner for kind in (*GUARDED, "plain")}
    behind["detail"] = made["behind detail"].inner
    groups = {**{kind: made[kind] for kind in GUARDED}, "plain": made["plain"].inner}
    if "detail" in kinds:
        groups["detail"] = detail_group(rank, world, c10d._get_default_store())
    for group in {*behind.values(), *groups.values()}:
        if group not in c10d._world.pg_map:
            adopt(group, made["strict"])
    ways = {kind: c10d if kind in GUARDED else bare for kind in kinds}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, call in operations(rank, world).items():
        if only and name not in only:
            continue
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            kind: (partial(call, ways[kind], groups[kind]), partial(call, bare, behind[kind])) for kind in kinds
        }
        found[name] = in_rounds(pairs, calls)
    trained = {"check": groups["check"], "behind": behind["check"]}
    for name, step in steps(trained).items() if not only else ():
        found[name] = in_rounds({"check": (step["check"], step["behind"])}, calls // 4)
    of_ranks: list[Any] = [None] * world
    dist.all_gather_object(of_ranks, found)
    leave(rank, folder, {"ranks": of_ranks})


class Figure(NamedTuple):
    """The median over rounds."""

    ratio: float
    ratio_error: float
    more_us: float
    more_error_us: float
    plain_us: float

    @classmethod
    def of(cls, rounds: list[list[tuple[float, float]]]) -> Figure:
        """*rounds*: of each rank."""
        together = list(zip(*rounds, strict=True))
        means = [(statistics.fmean(m for m, _ in one), statistics.fmean(p for _, p in one)) for one in together]
        ratio, more = [mine / plain for mine, plain in means], [mine - plain for mine, plain in means]
        plain_us = statistics.median(plain for _, plain in means)
        return cls(statistics.median(ratio), error(ratio), statistics.median(more), error(more), plain_us)

    def __str__(self) -> str:
        ratio, more = f"{self.ratio:.2f}±{self.ratio_error:.2f}", f"{self.more_us:+.1f}±{self.more_error_us:.1f}"
        return f"{self.plain_us:9.1f} {ratio:>13} {more:>15}"

    def beyond(self, limit: float, limit_us: float = math.inf) -> bool:
        return self.ratio - 2 * self.ratio_error > limit or self.more_us - 2 * self.more_error_us > limit_us


def error(values: list[float]) -> float:
    """Standard error of the median."""
    low, _, high = statistics.quantiles(values, n=4)
    return MEDIAN * (high - low) / LIKELY / math.sqrt(len(values))


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--calls", type=count, default=960)
    parser.add_argument("--kinds", type=several(known(KINDS)), default=",".join(KINDS))
    parser.add_argument("--ops", type=several(known(operations(0, 2))), default=[], help="only these, by commas")
    args = parser.parse_args()
    of_ranks = spawn(worker, args.ranks, args.calls, args.kinds, args.ops)["ranks"]
    print(f"{'CPU time of a rank a call':34} {'plain us':>9} {'times plain':>13} {'us more':>15}")
    missed = []
    for name, kinds_found in of_ranks[0].items():
        row = {kind: Figure.of([found[name][kind] for found in of_ranks]) for kind in kinds_found}
        for kind in row if name.endswith(" step") else args.kinds:
            print(f"{name:27} {kind:6} {row.get(kind, '-')}")  # DETAIL's wrapper lacks some
        limits = {"check": (STEP_LIMIT,)} if name.endswith(" step") else LIMITS
        if name in MESSAGES:
            limits = {**limits, "record": (math.inf, 2 * RECORD_LIMIT_US)}
        missed += [f"{name} at {kind}" for kind in row if kind in limits and row[kind].beyond(*limits[kind])]
    print(
        f"limits: record {RECORD_LIMIT_US:+g} us a call, check {CHECK_LIMIT:g} and {CHECK_LIMIT_US:+g} us, "
        f"strict {STRICT_LIMIT:g}, steps {STEP_LIMIT:g}"
    )
    print(f"missed, by more than twice the figure's error: {', '.join(missed) or 'none'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
