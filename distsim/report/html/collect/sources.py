"""Six lines of source round each place that a diagnosis names: `{"file", "line", "function", "ranks", "first",
"lines"}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.debug.records import Site
from distsim.report.html.collect.material import Material

__all__ = ["sources"]

BEFORE, AFTER = 3, 3
MOST_SITES = 40
LONGEST = 300
"""Letters of a line."""


def sources(material: Material) -> list[dict[str, Any]]:
    """The culprits' places first, each once."""
    texts: Mapping[str, str] = {} if material.evidence is None else material.evidence.sources
    ranks: dict[Site, set[int]] = {}
    for d in material.diagnoses:
        accused = set(d.culprits)
        for rank in (*d.culprits, *(r for r in d.sites if r not in accused)):
            if (site := d.sites.get(rank)) is not None and (site in ranks or len(ranks) < MOST_SITES):
                ranks.setdefault(site, set()).add(rank)
    found = []
    for site, at in ranks.items():
        lines = texts.get(site.file, "").splitlines()
        if not 0 < site.line <= len(lines):
            continue
        first = max(1, min(site.line - BEFORE + 1, len(lines) - BEFORE - AFTER + 1))
        shown = [line[:LONGEST] for line in lines[first - 1 : first - 1 + BEFORE + AFTER]]
        found.append(
            {
                "file": site.file,
                "line": site.line,
                "function": site.function,
                "ranks": sorted(at),
                "first": first,
                "lines": shown,
            }
        )
    return found
