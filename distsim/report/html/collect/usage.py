"""Utilisation of the busiest links over time: `{"names", "times_s", "rows"}`, a row of fractions for each link, or for
several that were used alike."""

from __future__ import annotations

from typing import Any

from distsim.report.html.collect.material import Material

__all__ = ["usage"]

MOST_LINKS = 48


def usage(material: Material) -> dict[str, Any] | None:
    """None where nobody took samples (a real run), or nothing moved."""
    samples: dict[int, list[tuple[float, float]]] = {}
    for time_s, index, fraction in material.link_samples:
        samples.setdefault(index, []).append((time_s, fraction))
    if not samples:
        return None
    times = sorted({time_s for changes in samples.values() for time_s, _ in changes})
    rows: list[tuple[float, int, list[float]]] = []
    for index, changes in samples.items():
        values = dict(changes)
        row: list[float] = []
        now = 0.0
        for time_s in times:
            now = values.get(time_s, now)
            row.append(now)
        rows.append((-sum(row), index, row))
    rows.sort(key=lambda one: one[:2])
    alike: dict[tuple[float, ...], list[str]] = {}
    for _, index, row in rows:
        alike.setdefault(tuple(round(value, 3) for value in row), []).append(material.link_names[index])
    chosen = list(alike.items())[:MOST_LINKS]
    return {
        "names": [names[0] + (f" (and {len(names) - 1} alike)" if names[1:] else "") for _, names in chosen],
        "times_s": [round(time_s, 9) for time_s in times],
        "rows": [list(row) for row, _ in chosen],
    }
