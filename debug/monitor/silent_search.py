"""The search for silent wrong results at a job's end, after the verdict, which it does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distsim.debug.diagnosis.silent.real_job import search
from distsim.debug.monitor.host import Host
from distsim.debug.report.news import show
from distsim.debug.report.silent import SilentReport
from distsim.debug.settings import Settings

__all__ = ["search_silent"]


def search_silent(host: Host, settings: Settings, say: Callable[[str], None]) -> list[dict[str, Any]] | None:
    """Print what the ranks' own records show, and answer it as the report has it; None: nobody looked."""
    rings = {rank: reader.path for rank, reader in host.readers.items()}
    try:
        result = search(rings, host.world_size, settings.silent_patterns)
    except Exception as error:  # an extra: the verdict stands
        say(f"silent faults: not searched, a {type(error).__name__} of the search itself")
        return None
    for note in result.notes:
        say(note)
    if result.findings:
        show(SilentReport(result.findings))
    return [finding.to_json() for finding in result.findings]
