"""The cluster file that a calibration writes: the preset, the software of the logs, and what was fitted to them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from distsim.calibration.logs.fit import FitToLogs
from distsim.calibration.logs.folder import Logs
from distsim.calibration.logs.physical import value_of
from distsim.cluster import Cluster, preset_names
from distsim.cluster.files.load import merged
from distsim.cluster.files.spec import check_spec
from distsim.cluster.files.to_toml import to_toml

__all__ = ["cluster_file", "told"]


def cluster_file(
    logs: Logs,
    fitted: FitToLogs,
    errors: Mapping[str, tuple[float, float, tuple[str, ...]]],
    cluster: Cluster,
    like: str,
    name: str,
    folder: str,
) -> str:
    """The text, which `--on FILE` reads. On a preset only what differs from it, otherwise the whole cluster. *errors*
    are those of `fit.spreads`."""
    base = like.rpartition(":")[0] if like.rpartition(":")[2].isdigit() else like
    nodes = max(run.nnodes for run in logs.runs)
    first = logs.runs[0]
    rows = sum(len(run.rows) for run in logs.runs)
    nccl = {"version": logs.version or cluster.nccl.version}
    plugin = next((run.plugin for run in logs.runs if run.plugin), "")
    settings = {key: value for run in logs.runs for key, value in run.settings.items() if not _forces(key)}
    constants = {
        key: {
            "value": float(f"{value_of(fitted.after, key):.4g}"),
            "uncertainty": float(f"{sigma:.2g}"),
            "source": "logs",
        }
        for key, sigma in sorted(fitted.uncertainty.items())
    }
    gpu = f" of {first.gpu}" if first.gpu else ""
    head = {
        "name": name,
        "description": f"{cluster.description}, as measured",
        "source": f"{cluster.source}; {len({run.file for run in logs.runs})} logs of {folder}",
        "measured": f"{told(logs)} ({rows} times{gpu}); all else is borrowed from {base}",
        "nodes": nodes,
    }
    lines = [f"# Written by distsim calibrate --from {folder} --like {like}: times of this cluster, for --on FILE."]
    if base.partition(":")[0] not in preset_names():
        assert cluster.spec is not None
        over = {**head, "nccl": {**nccl, **({"plugin": plugin} if plugin else {}), "settings": settings}}
        known = tomllib.loads(cluster.to_toml())
        for table in ("constants", "errors"):
            known.pop(table, None)
        whole = merged(known, {**over, "constants": {**_kept(cluster), **constants}, "errors": _tables(errors)})
        return "\n".join([*lines, *to_toml(check_spec(whole, name)).splitlines()[1:]]) + "\n"
    lines.append(f"base = {json.dumps(base)}")
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    lines += ["", "[nccl]", f"version = {json.dumps(nccl['version'])}"]
    lines += [f"plugin = {json.dumps(plugin)}"] if plugin else []
    if settings:
        lines += ["", "[nccl.settings]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    lines += ["", "[constants]  # of the model of NCCL; uncertainty: standard deviation of the logarithm"]
    lines += [
        f'"{key}" = {{ value = {one["value"]}, uncertainty = {one["uncertainty"]}, source = "logs" }}'
        for key, one in constants.items()
    ]
    lines += ["", "[errors]  # measured / simulated time of the logs after the fit: 10th and 90th percentile"]
    lines += [
        f'"{key}" = {{ low = {one["low"]}, high = {one["high"]}, operations = {json.dumps(one["operations"])} }}'
        for key, one in sorted(_tables(errors).items())
    ]
    return "\n".join(lines) + "\n"


def _tables(errors: Mapping[str, tuple[float, float, tuple[str, ...]]]) -> dict[str, dict[str, Any]]:
    return {
        name: {"low": round(low, 3), "high": round(high, 3), "operations": ", ".join(operations)}
        for name, (low, high, operations) in errors.items()
    }


def _kept(cluster: Cluster) -> dict[str, dict[str, object]]:
    """What the file that was started from had already been fitted to."""
    return {
        name: {"value": one.value, "uncertainty": one.uncertainty, "source": one.source}
        for name, one in cluster.constants.items()
    }


def _forces(setting: str) -> bool:
    """Chosen for a test, not for the cluster."""
    return setting in ("NCCL_ALGO", "NCCL_PROTO")


def told(logs: Logs) -> str:
    """`all_reduce on 1 x 8 and 2 x 8, alltoall on 2 x 8`."""
    where: dict[str, dict[str, None]] = {}
    for run in sorted(logs.runs, key=lambda run: (run.op, run.nnodes, run.nproc_per_node)):
        where.setdefault(run.op, {})[run.where] = None
    return ", ".join(f"{op} on {_joined(list(places))}" for op, places in where.items())


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
