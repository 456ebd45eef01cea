"""Fits a cluster's constants to its logs, and limits how far each may move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import Bench, Measured, MeasuredTable, regime
from distsim.calibration.logs.parse import LogRun
from distsim.cluster import Cluster, load_cluster
from distsim.cluster.files.load import kind_of
from distsim.collectives import Compiler
from distsim.collectives.constants import Constants
from distsim.collectives.uncertainty import NODE_CLASSES, node_class, size_class

# -- What a constant of the model of NCCL is, in words, and how far a fit may take it.

_FAR = 8.0
"""A fitted constant is at most this many times larger or smaller than the preset's."""
_LEAST_US = 0.05
_PROTOCOLS = ("LL128", "LL", "Simple")
_INSIDE = ("ampere", "hopper", "blackwell", "pcie")
_WORDS = {
    "launch.shared_process_per_gpu": "starting a call on each GPU of a process, us",
    "launch.fill": "filling the pipeline, of a chunk's time",
    "p2p.base": "grouped sends and receives, us",
    "p2p.per_peer": "the same for each peer inside a node, us",
    "p2p.net_channel_GBps": "one channel of a send between nodes, GB/s",
    "p2p.shared_process_per_gpu": "the same from a process of several GPUs, us",
    "p2p.fill": "filling their pipeline, of a chunk's time",
    "efa.hop": "latency of a hop between nodes, relative to the latency that EFA's plugin reports",
    "efa-sendrecv.hop": "latency of a hop between nodes, relative to the latency that EFA's plugin reports",
}
_KEYS = {
    "hop": "a hop {where}, us",
    "tree": "a tree's hop between nodes, in hops of LL",
    "ring": "a ring's hop between nodes, in hops of LL",
    "ring_more": "additional time of a ring's hop between nodes compared with LL, us",
    "tree_more": "additional time of a tree's hop between nodes compared with LL, us",
    "message": "each further message of a ring's step, us over the NICs",
    "message_pair": "the same on two nodes, as a factor",
    "growth": "growth of a hop's time up to 64 KiB",
    "remote": "each further message of an all-to-all, us",
    "efficiency": "bandwidth of the links {where}, relative to the preset's",
    "remote_tiny": "the same for very short messages, as a factor",
    "rendezvous": "additional time of a message that needs a rendezvous, us",
    "loss": "share of the bandwidth that is lost when the nodes double",
    "ring_loss": "share of the bandwidth that a ring loses when the nodes double",
    "tree_share": "share of the bandwidth that a tree gets",
    "p2p_efficiency": "share of the link bandwidth that sends and receives get",
    "channel": "one channel, GB/s",
    "rate": "highest rate of a GPU through its NIC, GB/s",
    "root": "bandwidth of a PCIe slot between two devices across the root ports",
    "local": "memory traffic in addition to the transfer, as a share of its time",
    "nvls": "bandwidth of NVLink SHARP, relative to the links",
    "nvls_base": "starting NVLink SHARP, us",
    "nvls_tree_hop": "a hop of NVLink SHARP's tree between nodes, in hops of a tree",
    "nvls_tree_fill": "filling its pipeline, of its chunks' time",
    "process_intel": "starting a call, us",
    "process_amd": "starting a call, us",
    "process_arm": "starting a call, us",
}
_SHARES = ("efficiency", "p2p_efficiency", "nvls", "tree_share")


def meaning(name: str) -> str:
    """Return the meaning of the constant *name* with its unit."""
    if name in _WORDS:
        return _WORDS[name]
    table, _, key = name.rpartition(".")
    proto = next((proto for proto in _PROTOCOLS if key.endswith(f"_{proto}")), "")
    quantity = key.removesuffix(f"_{proto}") if proto else key
    inside = table in _INSIDE
    usual = "starting, us" if table == "launch" else quantity
    if quantity == "tree" and (inside or table == "launch"):
        return f"rate of a tree relative to a ring, {proto}"
    if table == "launch" and key in _PROTOCOLS:
        return f"starting in {key}, us"
    if quantity == "channel" and proto and not inside:
        return f"rate at which a node stores a tree's data for its NIC, one channel, GB/s, {proto}"
    if quantity == "p2p":
        usual = (
            "share of the link bandwidth that sends and receives get"
            if inside
            else "a message's hop, of a tree's in LL"
        )
    label = _KEYS.get(quantity, usual).format(where="inside a node" if inside else "between nodes")
    return f"{label}, {proto}" if proto else label


def value_of(constants: Constants, name: str) -> float:
    """Return the constant `table.key`, inherited from another table if this one does not define it."""
    table, _, key = name.rpartition(".")
    return constants.get(table, key)


def bounds(name: str, start: Constants, cluster: Cluster) -> tuple[float, float]:
    """Return the least and the most that a constant can be: links give no more than specified, and nothing takes no
    time.
    """
    value = value_of(start, name)
    table, _, key = name.rpartition(".")
    node = cluster.node
    low, high = value / _FAR, value * _FAR
    if key.startswith("efficiency") or key in _SHARES or (key == "p2p" and table in _INSIDE):
        if table in _INSIDE:
            given = node.nvlink_bytes_per_s / node.nvlink_spec_bytes_per_s if node.nvlink_spec_bytes_per_s else 1.0
        else:
            given = node.nic_bytes_per_s / node.nic_spec_bytes_per_s if node.nic_spec_bytes_per_s else 1.0
        return low, max(value, 1.0 / given)
    if name == "pcie.root":
        return low, 1.0
    if key.startswith(("hop", "base", "per_peer", "process", "shared_process", "nvls")):
        low = max(low, _LEAST_US)
    return min(low, value), high


# -- What logs say of a cluster's constants, and only that.
#
# Each constant that a time hangs on has the preset's value and its uncertainty to begin with. What the logs add to that
# is weighed: a constant of which they tell less than the preset already knew, or that only moves together with another,
# keeps its value; the others are fitted, within what links can do.

Array = NDArray[np.float64]

_NOISE = 0.10
"""Runs of one configuration differ by about so much from one day to the next (standard deviation of log time)."""
_COUNT = 3.0
"""The sizes of one run and regime are not independent: together they count as this many measurements."""
_PRIOR = 0.7
_TOLD = 0.6
"""A constant is fitted only if the data reduce its uncertainty below this share of the preset's uncertainty."""
_HUBER = 0.25
_STEP = 0.02
_ROUNDS = 10
_MOST_SIZES = 18
"""Maximum number of sizes of one run that are used; of more, every second or third."""
_DAY = 0.03
_LEAST_ROWS = 5
_KEPT = ("chunk_MiB", "channel_GBps", "told_us")
"""Constants that are never fitted: NCCL's published figures, and what a plugin reports about itself."""


@dataclass(frozen=True)
class FitToLogs:
    """A fit to logs: which constants were fitted, and which were not."""

    before: Constants
    after: Constants
    uncertainty: Mapping[str, float]
    """Standard deviation of the logarithm, by name; those that are not here have the preset's value."""
    untold: tuple[str, ...]
    """Constants that influence the times in these logs but cannot be determined from them."""
    at_bound: tuple[str, ...]
    """Fitted constants that were stopped at a bound, because links cannot be faster."""


def benches_of(runs: Sequence[LogRun], like: str, version: str | None) -> list[Bench]:
    """Return a simulation of each run on the cluster *like* with the run's number of nodes."""
    one = load_cluster(like)
    unit = one.spec.unit_nodes if one.spec is not None else 1
    clusters: dict[int, Cluster] = {}
    benches: list[Bench] = []
    for run in runs:
        cluster = clusters.get(run.nnodes) or load_cluster(f"{kind_of(like)}:{-(-run.nnodes // unit)}")
        clusters[run.nnodes] = cluster
        table = MeasuredTable(
            name=run.file,
            op=run.op,
            on=like,
            machine=like,
            nnodes=run.nnodes,
            nproc_per_node=run.nproc_per_node,
            launcher=run.launcher,
            algo=run.settings.get("NCCL_ALGO"),
            nccl=version,
            use="fit",
            rows=tuple(Measured(row.size_bytes, row.time_us) for row in run.rows),
            source=run.file,
        )
        compiler = Compiler(
            cluster,
            algo=_forced(run, "NCCL_ALGO"),
            proto=_forced(run, "NCCL_PROTO"),
            nccl_version=version,
            launcher=run.launcher,
        )
        devices = tuple(slot.device for slot in cluster.place(run.nnodes, run.nproc_per_node))
        benches.append(Bench(table, compiler, devices))
    return benches


def _forced(run: LogRun, name: str) -> str | None:
    """Return a single algorithm or protocol; lists and exclusions (^NVLS) leave NCCL a choice, which is its own
    here.
    """
    value = run.settings.get(name, "")
    return value if value and not set(value) & set("^,;:") else None


def fit_to_logs(benches: Sequence[Bench], start: Constants, bounds: Callable[[str], tuple[float, float]]) -> FitToLogs:
    """Fit the constants in *start* to the runs of *benches*. *bounds* gives the lowest and highest value of each
    constant by its name.
    """
    places = [_some(bench) for bench in benches]
    weight = np.concatenate([_weights(bench, row, benches) for bench, row in zip(benches, places, strict=True)])
    error = _errors(benches, places, start)
    names = [name for name in _read(benches, start) if name.rpartition(".")[2] not in _KEPT]
    slopes = {name: _slope(benches, places, start, name, error) for name in names}
    names = [name for name in names if np.abs(slopes[name]).max(initial=0.0) > 1e-4]
    informed = _told(names, slopes, weight)
    values, spread, at_bound = _solve(benches, places, start, informed, weight, bounds)
    after = start.changed(dict(zip(informed, np.exp(values).tolist(), strict=True)))
    untold = tuple(name for name in names if name not in informed)
    return FitToLogs(start, after, dict(zip(informed, spread.tolist(), strict=True)), untold, at_bound)


def spreads(benches: Sequence[Bench], constants: Constants) -> dict[str, tuple[float, float, tuple[str, ...]]]:
    """Return the 10th and 90th percentile of measured / simulated time for each class of nodes and sizes with enough
    data, and the operations that were measured.

    The interval is never narrower than the spread between runs of one day.
    """
    ratios_of: dict[str, list[float]] = {}
    of: dict[str, dict[str, None]] = {}
    for bench in benches:
        bench.use(constants)
        inside = -(-bench.table.nnodes // bench.compiler.cluster.node.nvlink_domain_nodes) <= 1
        nodes = NODE_CLASSES[0] if inside else node_class(bench.table.nnodes)
        for row, ratio in zip(bench.table.rows, (bench.measured_us / bench.times_us()).tolist(), strict=True):
            name = f"{nodes}, {size_class(row.size_bytes)}"
            ratios_of.setdefault(name, []).append(ratio)
            of.setdefault(name, {})[bench.table.op] = None
    return {
        name: (
            min(1 - _DAY, float(np.percentile(ratios, 10))),
            max(1 + _DAY, float(np.percentile(ratios, 90))),
            tuple(of[name]),
        )
        for name, ratios in ratios_of.items()
        if len(ratios) >= _LEAST_ROWS
    }


def _some(bench: Bench) -> NDArray[np.int64]:
    every = np.arange(len(bench.table.rows))
    return every[:: -(-len(every) // _MOST_SIZES)]


def _weights(bench: Bench, places: NDArray[np.int64], benches: Sequence[Bench]) -> Array:
    """Return every configuration counts the same in every regime, however many sizes and logs it has."""
    alike = sum(_alike(bench.table) == _alike(other.table) for other in benches)
    regimes = np.array([regime(bench.table.rows[row].size_bytes) for row in places])
    weights = np.zeros(len(places))
    for number in range(3):
        mask = regimes == number
        if mask.any():
            weights[mask] = min(1.0, _COUNT / mask.sum()) / alike
    return weights / _NOISE**2


def _alike(table: MeasuredTable) -> tuple[object, ...]:
    return (table.op, table.nnodes, table.nproc_per_node, table.launcher, table.algo)


def _errors(benches: Sequence[Bench], places: Sequence[NDArray[np.int64]], constants: Constants) -> Array:
    errors = []
    for bench, some in zip(benches, places, strict=True):
        bench.use(constants)
        errors.append(np.log(bench.times_us(some) / bench.measured_us[some]))
    return np.concatenate(errors)


def _read(benches: Sequence[Bench], constants: Constants) -> list[str]:
    """Return the constants that the simulation of these runs uses."""
    seen: dict[str, None] = {}

    class Watched(Constants):
        def get(self, table: str, key: str) -> float:
            seen[f"{table}.{key}"] = None
            return super().get(table, key)

    watched = Watched(constants.values, constants.like)
    for bench in benches:
        bench.use(watched)
        bench.times_us()
    return list(seen)


def _slope(
    benches: Sequence[Bench], places: Sequence[NDArray[np.int64]], constants: Constants, name: str, error: Array
) -> Array:
    moved = constants.changed({name: value_of(constants, name) * float(np.exp(_STEP))})
    slope: Array = (_errors(benches, places, moved) - error) / _STEP
    return slope


def _told(names: Sequence[str], slopes: Mapping[str, Array], weight: Array) -> list[str]:
    """Return the constants that the data determine: the least determined is given up until all that remain are."""
    left = list(names)
    while left:
        slope = np.stack([slopes[name] for name in left], axis=1)
        normal = slope.T @ (weight[:, None] * slope) + np.eye(len(left)) / _PRIOR**2
        share = np.sqrt(np.diag(np.linalg.inv(normal))) / _PRIOR
        worst = int(np.argmax(share))
        if share[worst] <= _TOLD:
            break
        left.pop(worst)
    return left


def _solve(
    benches: Sequence[Bench],
    places: Sequence[NDArray[np.int64]],
    start: Constants,
    names: Sequence[str],
    weight: Array,
    bounds: Callable[[str], tuple[float, float]],
) -> tuple[Array, Array, tuple[str, ...]]:
    """Fit by robust Gauss-Newton on the logarithm of time, with the starting values as priors and with bounds."""
    origin = np.log([value_of(start, name) for name in names])
    low = np.array([np.log(bounds(name)[0]) for name in names])
    high = np.array([np.log(bounds(name)[1]) for name in names])
    if not names:
        return origin, origin, ()

    def constants(point: Array) -> Constants:
        return start.changed(dict(zip(names, np.exp(point).tolist(), strict=True)))

    def loss(error: Array, point: Array) -> float:
        size = np.abs(error)
        huber = np.where(size < _HUBER, 0.5 * size**2, _HUBER * (size - 0.5 * _HUBER))
        return float((weight * huber).sum() + 0.5 * (((point - origin) / _PRIOR) ** 2).sum())

    values = np.clip(origin, low, high)
    error = _errors(benches, places, constants(values))
    best, damping = loss(error, values), 1e-2
    normal = np.eye(len(names))
    for _ in range(_ROUNDS):
        slope = np.stack([_slope(benches, places, constants(values), name, error) for name in names], axis=1)
        robust = weight * np.minimum(1.0, _HUBER / np.maximum(np.abs(error), 1e-12))
        normal = slope.T @ (robust[:, None] * slope) + np.eye(len(names)) / _PRIOR**2
        pull = slope.T @ (robust * error) + (values - origin) / _PRIOR**2
        gained = 0.0
        for _ in range(5):
            trial = np.clip(values - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull), low, high)
            trial_error = _errors(benches, places, constants(trial))
            if (trial_loss := loss(trial_error, trial)) < best:
                gained, values, error, best, damping = best - trial_loss, trial, trial_error, trial_loss, damping / 3
                break
            damping *= 4
        if gained < 1e-3 * best:
            break
    # A model that misses by more than the noise knows its constants less well.
    misfit = max(1.0, float(np.sqrt((weight * error**2).sum() / max((weight * _NOISE**2).sum(), 1e-9))))
    spread = np.sqrt(np.diag(np.linalg.inv(normal))) * misfit
    stuck = tuple(name for name, at, top in zip(names, values, high, strict=True) if at > top - 1e-6)
    return values, np.minimum(spread, 2.0), stuck
