"""Reads a folder of logs of one machine with one software, and checks that they fit the cluster."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distsim.calibration.compare import REGIMES, regime
from distsim.calibration.logs.parse import FORCING, FailedRun, LogRun, parse_log
from distsim.cluster import Cluster, load_cluster, preset_names
from distsim.collectives.libraries.nccl_tuning import strange_release
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

_MOST_FILES = 4096
_APART = 1.25
"""Runs of one configuration whose times differ more than this in the median of a regime contradict each other."""
_OF_A_LINE = re.compile(r"^[^\n]*?:\d+: left out: ")


@dataclass(frozen=True)
class Logs:
    """Runs, and sentences about what was left out or is doubtful."""

    runs: tuple[LogRun, ...]
    notes: tuple[str, ...]
    failed: tuple[FailedRun, ...] = ()

    @property
    def version(self) -> str | None:
        """Return NCCL's version if a log contains it, else None."""
        return next((run.version for run in self.runs if run.version), None)


def read_logs(folder: Path) -> Logs:
    """Return every log in *folder*, in folders below it too (or the one file that it is). UsageError if there is
    none.
    """
    if folder.is_file():
        paths = [folder]
    elif folder.is_dir():
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
    else:
        raise UsageError(f"no such folder: {folder} (expected logs of nccl-tests, or tables with an _index.csv)")
    if len(paths) > _MOST_FILES:
        raise UsageError(f"{folder}: {len(paths)} files: expected at most {_MOST_FILES}, all logs of nccl-tests")
    runs: list[LogRun] = []
    notes: list[str] = []
    failed: list[FailedRun] = []
    for path in paths:
        name = str(path.relative_to(folder)) if path != folder else path.name
        try:
            parsed, parse_notes, failures = parse_log(path, name)
        except OSError as error:
            notes.append(f"{name}: left out: cannot be read ({error.strerror})")
            continue
        runs += parsed
        notes += parse_notes
        failed += failures
    if not runs:
        whole = [note for note in notes if not _OF_A_LINE.search(note)]  # why a run is left out says more than a line's
        why = f" ({[*whole, *notes][0]})" if notes else ""
        files = f"{len(paths)} file{'s' * (len(paths) != 1)}"
        raise UsageError(f"{folder}: no log of nccl-tests or rccl-tests with a table in {files}{why}")
    return Logs(tuple(runs), tuple(notes), tuple(failed))


def agreed(logs: Logs) -> Logs:
    """Return the logs with notes on contradictions between them.

    Raises:
        UsageError: The logs are of several machines or releases.
    """
    runs = logs.runs
    _one("GPUs", runs, lambda run: run.gpu or None)
    _one("libraries", runs, lambda run: run.library.upper())
    _one("versions of the library", runs, lambda run: run.version)
    _one("networks", [run for run in runs if run.nnodes > 1], lambda run: run.net)
    _one("network plugins", [run for run in runs if run.nnodes > 1], lambda run: run.plugin or None)
    for name in sorted({name for run in runs for name in run.settings} - {*FORCING}):
        _one(f"values of {name}", runs, lambda run, name=name: run.settings.get(name))  # type: ignore[misc]
    return Logs(runs, (*_contradictions(runs), *logs.notes), logs.failed)


def _one(noun: str, runs: Sequence[LogRun], of: Callable[[LogRun], str | None]) -> None:
    first_file: dict[str, str] = {}
    for run in runs:
        value = of(run)
        if value is not None:
            first_file.setdefault(value, run.file)
    if len(first_file) > 1:
        (one, first), (other, second) = list(first_file.items())[:2]
        raise UsageError(
            f"the logs are of several {noun}: {brief(one)} in {first}, {brief(other)} in {second}: put each into a "
            "folder of its own"
        )


def _contradictions(runs: Sequence[LogRun]) -> list[str]:
    """Return a line with both figures for each configuration whose runs differ."""
    result: list[str] = []
    first: dict[tuple[object, ...], LogRun] = {}
    for run in runs:
        other = first.setdefault(run.configuration, run)
        if other is run:
            continue
        known = {row.size_bytes: row.time_us for row in other.rows}
        common = [(row.size_bytes, known[row.size_bytes], row.time_us) for row in run.rows if row.size_bytes in known]
        for index, name in enumerate(REGIMES):
            some = [(abs(np.log(b / a)), size, a, b) for size, a, b in common if regime(size) == index]
            if some and np.median([one[0] for one in some]) > np.log(_APART):
                _, size, a, b = sorted(some)[len(some) // 2]
                result.append(
                    f"{run.op} on {run.where} contradicts itself at {name}: {size} bytes take {a:,.1f} us in "
                    f"{other.file} and {b:,.1f} us in {run.file}; both count, and the uncertainty is as large"
                )
    return result


def fits(logs: Logs, like: str | None) -> tuple[Cluster, list[str]]:
    """Return the cluster *like* as the base for the logs, and notes on what it contributes.

    The cluster is never guessed from the name of the GPU.

    Raises:
        UsageError: The logs are of another machine.
    """
    runs = logs.runs
    gpu = next((run.gpu for run in runs if run.gpu), "")
    most = max(run.nproc_per_node for run in runs)
    if like is None:
        known = [
            name
            for name in preset_names()
            if _is_model(load_cluster(name).node.gpu_model, gpu) and load_cluster(name).node.num_gpus >= most
        ]
        offered = f"presets with such GPUs: {', '.join(known)}" if known else "no preset has such GPUs: make a file"
        raise UsageError(
            f"the logs are of {most} {gpu or 'GPUs'} a node: expected --like CLUSTER, the most similar cluster "
            f"({offered})"
        )
    cluster = load_cluster(like)
    if cluster.spec is None:
        raise UsageError(f"--like {like}: expected a preset or a cluster TOML, not a graph")
    node = cluster.node
    if gpu and not _is_model(node.gpu_model, gpu):
        raise UsageError(f"--like {like}: its GPUs are {node.gpu_model or 'none'}, those of the logs {gpu}")
    if most > node.num_gpus:
        raise UsageError(f"--like {like}: it has {node.num_gpus} GPUs a node, {runs[0].file} has {most}")
    if runs[0].library != cluster.nccl.library:
        mine = cluster.nccl.library.upper()
        raise UsageError(f"--like {like}: its library is {mine}, but the logs are of {runs[0].library.upper()}")
    net = next(((run.net, run.file) for run in runs if run.nnodes > 1 and run.net), None)
    if net and not _same_net(net[0] or "", cluster.nccl.net):
        raise UsageError(
            f"--like {like}: its nodes are joined by {cluster.nccl.net}, NCCL used {net[0]} in {net[1]}: take another, "
            "or a file of your own with node.nic.net"
        )
    _possible(runs, cluster, like)
    return cluster, _lent(logs, cluster, like)


def _lent(logs: Logs, cluster: Cluster, like: str) -> list[str]:
    unnamed = [f"the logs do not name their GPUs: assuming the {cluster.node.gpu_model} of {like}"]
    return [*(unnamed if not any(run.gpu for run in logs.runs) else []), *_version(logs, cluster, like)]


def _version(logs: Logs, cluster: Cluster, like: str) -> list[str]:
    if logs.version is None:
        library, version = cluster.nccl.library.upper(), cluster.nccl.version
        return [
            f"no log names its version of {library}: taken for {version}, "
            f"as {like} has it (NCCL_DEBUG=VERSION prints it)"
        ]
    if not logs.version.startswith("2."):
        file = next(run.file for run in logs.runs if run.version == logs.version)
        raise UsageError(
            f"{file}: it says {cluster.nccl.library.upper()} {brief(logs.version)}: expected a release 2.x, whose "
            "choices distsim follows; leave that log out, or repair the line if it is damaged"
        )
    note = strange_release(logs.version) if cluster.nccl.library == "nccl" else None
    return [] if note is None else [note]


def _is_model(model: str, gpu: str) -> bool:
    """Return whether the driver's name of a GPU denotes a model: H100 for h100, but GB200 not for b200."""
    words = [word for word in re.split(r"[^a-z0-9]+", gpu.lower()) if word]
    return bool(model) and model.lower() in {*words, *(a + b for a, b in itertools.pairwise(words))}


def _same_net(heard: str, net: str) -> bool:
    if heard in ("ib", "roce"):
        return net in ("ib", "roce") and heard == net
    return net in {"tcp": ("tcp",), "libfabric": ("efa", "slingshot"), "tcpx": ("tcpx",), "tcpxo": ("tcpxo",)}.get(
        heard, (net,)
    )


def _possible(runs: Sequence[LogRun], cluster: Cluster, like: str) -> None:
    """Check that no time is shorter than its bytes need on the links; otherwise the cluster is another machine."""
    node = cluster.node
    for run in runs:
        size = run.nnodes * run.nproc_per_node
        many = run.nnodes > node.nvlink_domain_nodes
        if many:
            rate, share = node.num_nics * node.nic_spec_bytes_per_s, (run.nnodes - 1) / run.nnodes
            links = f"{node.num_nics} NICs of {node.nic_spec_bytes_per_s * 8e-9:.0f} Gbit/s"
            share *= run.nproc_per_node if run.op == "alltoall" else 1
        else:
            rate, share = node.nvlink_spec_bytes_per_s, (size - 1) / size
            links = f"a GPU's NVLinks of {rate / 1e9:.0f} GB/s"
        if not rate or run.op not in ("all_reduce", "all_gather", "reduce_scatter", "alltoall"):
            continue
        row = run.rows[-1]
        least_us = row.size_bytes * share / rate * 1e6
        if row.time_us < 0.98 * least_us:
            raise UsageError(
                f"--like {like}: {run.file}:{row.line}: {run.op} of {row.size_bytes} bytes on {run.where} took "
                f"{row.time_us:,.0f} us, and {links} need {least_us:,.0f} us at least: it is another machine"
            )
