"""Writes the results of a calibration: the cluster file, and charts of before and after."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import REGIMES, Bench, regime
from distsim.calibration.logs.fit import FitToLogs, value_of
from distsim.calibration.logs.folder import Logs
from distsim.calibration.logs.parse import FORCING
from distsim.cluster import Cluster, preset_names
from distsim.cluster.files.load import kind_of, merged
from distsim.cluster.files.spec import check_spec, to_toml
from distsim.text.units import format_bytes

# -- Before and after a calibration: a table, bars for the terminal, and curves as SVG.
#
# The SVG is written by hand: a still picture of plotly takes a Chrome, which a login node does not have.

Array = NDArray[np.float64]

_BAR = 12
"""Characters of a bar to each side."""
_NOTICED = 0.02
"""A median error that grew by less is not worth a word."""
_FULL = 1.0
"""Relative error of a full bar: twice the measured time, or half of it."""


def table(benches: Sequence[Bench], before: Sequence[Array], after: Sequence[Array]) -> list[str]:
    """Return a line an operation and size of job: median absolute error by size class, before and after."""
    lines = [f"{'':16s}{'nodes x GPUs':>13s}" + "".join(f"{name:>17s}" for name in REGIMES)]
    errors = _errors(benches, before, after)
    for (op, nodes, gpus), errors_of in errors.items():
        lines.append(_row(op, f"{nodes} x {gpus}", [np.abs(each) for each in errors_of]))
    if len(errors) > 1:
        every = [np.abs([one for errors_of in errors.values() for one in errors_of[column]]) for column in range(6)]
        lines.append(_row("all", "", every))
    return lines


def worse(benches: Sequence[Bench], before: Sequence[Array], after: Sequence[Array], like: str) -> list[str]:
    """Return a line for each place of the table that the fit made noticeably worse, the worst first."""
    lines: list[tuple[float, str]] = []
    for (op, nodes, gpus), errors in _errors(benches, before, after).items():
        for index, name in enumerate(REGIMES):
            if not errors[index]:
                continue
            old, new = (float(np.median(np.abs(errors[index + at]))) for at in (0, 3))
            if new - old > _NOTICED:
                side = "slow" if np.median(errors[index + 3]) > 0 else "quick"
                line = f"{op} on {nodes} x {gpus}, {name}: {old:.1%} off as {like} has it, {new:.1%} now (too {side})"
                lines.append((old - new, line))
    return [line for _, line in sorted(lines)]


def _errors(
    benches: Sequence[Bench], before: Sequence[Array], after: Sequence[Array]
) -> dict[tuple[str, int, int], list[list[float]]]:
    """Return signed errors by operation and size of job: for three classes of sizes, first before the fit and then
    after it.
    """
    errors: dict[tuple[str, int, int], list[list[float]]] = {}
    for bench, one, other in zip(benches, before, after, strict=True):
        key = (bench.table.op, bench.table.nnodes, bench.table.nproc_per_node)
        cells = errors.setdefault(key, [[] for _ in range(6)])
        for row, a, b in zip(bench.table.rows, one, other, strict=True):
            index = regime(row.size_bytes)
            cells[index].append(a / row.time_us - 1)
            cells[3 + index].append(b / row.time_us - 1)
    return dict(sorted(errors.items()))


def _row(name: str, where: str, errors: Sequence[Array]) -> str:
    line = f"{name:16s}{where:>13s}"
    for index in range(3):
        if not len(errors[index]):
            line += f"{'-':>17s}"
            continue
        text = f"{np.median(errors[index]):.1%} -> {np.median(errors[3 + index]):.1%}"
        line += f"{text:>17s}"
    return line


def bars(benches: Sequence[Bench], before: Sequence[Array], after: Sequence[Array]) -> list[str]:
    """Chart the median signed error by size. Bars left of the line mean that the simulation is too fast, right of it
    too slow.
    """
    errors_of: dict[int, tuple[list[float], list[float]]] = {}
    for bench, one, other in zip(benches, before, after, strict=True):
        for row, a, b in zip(bench.table.rows, one, other, strict=True):
            kept = errors_of.setdefault(int(math.log2(row.size_bytes)) // 2, ([], []))
            kept[0].append(math.log(a / row.time_us))
            kept[1].append(math.log(b / row.time_us))
    lines = [f"{'size':>10s}  {'before: too fast | too slow':^31s}  {'after: too fast | too slow':^31s}".rstrip()]
    for power in sorted(errors_of):
        old, new = (float(np.median(errors)) for errors in errors_of[power])
        lines.append(f"{format_bytes(4**power):>10s}  {_bar(old)}  {_bar(new)}".rstrip())
    return lines


def _bar(error: float) -> str:
    long = min(_BAR, round(abs(error) / math.log(1 + _FULL) * _BAR))
    left, right = ("#" * long, "") if error < 0 else ("", "#" * long)
    return f"{left:>{_BAR}s}|{right:<{_BAR}s}{math.expm1(error):>+6.0%}"


_WIDE, _HIGH, _COLUMNS = 360, 240, 3
_LEFT, _TOP, _RIGHT, _BOTTOM = 48, 30, 10, 34


def svg(benches: Sequence[Bench], before: Sequence[Array], after: Sequence[Array], title: str) -> str:
    """Return time over size, both logarithmic, a picture a log: measured as points, before dashed, after as a line."""
    columns = min(_COLUMNS, len(benches))
    rows = -(-len(benches) // columns)
    wide, high = columns * _WIDE, rows * _HIGH + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="12" y="18" font-size="14">{escape(title)}</text>',
        '<text x="12" y="36" fill="#666">points: measured; dashed: before; line: after. us over bytes</text>',
    ]
    for index, (bench, one, other) in enumerate(zip(benches, before, after, strict=True)):
        x, y = index % columns * _WIDE, index // columns * _HIGH + 44
        parts.append(f'<g transform="translate({x},{y})">{_picture(bench, one, other)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _picture(bench: Bench, before: Array, after: Array) -> str:
    sizes = np.log10([row.size_bytes for row in bench.table.rows])
    curves = [np.log10(times) for times in (bench.measured_us, before, after)]
    low, high = min(map(np.min, curves)), max(map(np.max, curves))
    first, last = float(sizes[0]), float(max(sizes[-1], sizes[0] + 0.1))

    def at(size: float, time: float) -> tuple[float, float]:
        x = _LEFT + (size - first) / (last - first) * (_WIDE - _LEFT - _RIGHT)
        y = _HIGH - _BOTTOM - (time - low) / max(high - low, 0.1) * (_HIGH - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    def line(curve: Array, style: str) -> str:
        points = " ".join(f"{x},{y}" for x, y in (at(s, t) for s, t in zip(sizes, curve, strict=True)))
        return f'<polyline points="{points}" fill="none" {style}/>'

    name = f"{bench.table.op}, {bench.table.nnodes} x {bench.table.nproc_per_node} ({bench.table.name})"
    parts = [f'<text x="{_LEFT}" y="18">{escape(name[:60])}</text>']
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = at(first, power)[1]
        parts.append(f'<path d="M{_LEFT} {y}H{_WIDE - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 4}" y="{y + 4}" text-anchor="end" fill="#666">{10**power:,}</text>')
    for power in range(math.ceil(first / math.log10(1024)), math.floor(last / math.log10(1024)) + 1):
        x = at(power * math.log10(1024), low)[0]
        label = format_bytes(1024**power)
        parts.append(f'<text x="{x}" y="{_HIGH - 12}" text-anchor="middle" fill="#666">{label}</text>')
    parts.append(line(curves[1], 'stroke="#cc6677" stroke-dasharray="5 4"'))
    parts.append(line(curves[2], 'stroke="#4477aa" stroke-width="2"'))
    parts += [
        f'<circle cx="{x}" cy="{y}" r="2.5" fill="#222"/>'
        for x, y in (at(s, t) for s, t in zip(sizes, curves[0], strict=True))
    ]
    return "".join(parts)


# -- The cluster file that a calibration writes: the preset, the software of the logs, and what was fitted to them.


def cluster_file(
    logs: Logs,
    fitted: FitToLogs,
    errors: Mapping[str, tuple[float, float, tuple[str, ...]]],
    cluster: Cluster,
    like: str,
    name: str,
    folder: str,
) -> str:
    """Return the text, which `--on FILE` reads. On a preset only what differs from it, otherwise the whole cluster.
    *errors* are those of `fit.spreads`.
    """
    base = kind_of(like)
    nodes = max(run.nnodes for run in logs.runs)
    first = logs.runs[0]
    rows = sum(len(run.rows) for run in logs.runs)
    nccl = {"version": logs.version or cluster.nccl.version}
    plugin = next((run.plugin for run in logs.runs if run.plugin), "")
    settings = {key: value for run in logs.runs for key, value in run.settings.items() if key not in FORCING}
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
        "measured": f"{sources_text(logs)} ({rows} times{gpu}); everything else comes from {base}",
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
    """Return the fitted constants that the cluster file already had before this fit."""
    return {
        name: {"value": one.value, "uncertainty": one.uncertainty, "source": one.source}
        for name, one in cluster.constants.items()
    }


def sources_text(logs: Logs) -> str:
    """Describe what the logs contain, for example `all_reduce on 1 x 8 and 2 x 8, alltoall on 2 x 8`."""
    where: dict[str, dict[str, None]] = {}
    for run in sorted(logs.runs, key=lambda run: (run.op, run.nnodes, run.nproc_per_node)):
        where.setdefault(run.op, {})[run.where] = None
    return ", ".join(f"{op} on {_joined(list(places))}" for op, places in where.items())


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
