"""Runs points of a sweep or a search side by side, and keeps those that have ended until all have."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from distsim import __version__
from distsim.scenario.expect.result import Result
from distsim.scenario.explore.script_flags import own_sources
from distsim.scenario.file.load import Scenario
from distsim.scenario.run import run_scenario
from distsim.scenario.subprocess_runner import as_they_end
from distsim.scenario.suite import import_for

__all__ = ["KeptPoints", "run_points"]


class KeptPoints:
    """Results of one command that was interrupted, in a folder of the user's cache.

    Args:
        scenario: What all points vary. The folder is another one once its program, a module beside it or its cluster
            file has changed.
        command: What else makes the points what they are, as plain data.
    """

    def __init__(self, scenario: Scenario, command: Any) -> None:
        digest = hashlib.sha256(json.dumps([__version__, scenario.data, command], sort_keys=True).encode())
        clusters = [scenario.path.parent / str(scenario.spec.on).partition(":")[0]]
        for file in [*(own_sources(scenario.file) if scenario.file is not None else ()), *clusters]:
            with suppress(OSError):
                digest.update(str(file).encode() + file.read_bytes())
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = Path(cache) / "distsim" / f"points-{digest.hexdigest()[:12]}"

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("*.json")) if self.folder.is_dir() else 0

    def _file(self, settings: Mapping[str, Any], stage: str) -> Path:
        name = hashlib.sha256(json.dumps([settings, stage], sort_keys=True).encode()).hexdigest()
        return self.folder / f"{name[:16]}.json"

    def load(self, settings: Mapping[str, Any], stage: str = "") -> Result | None:
        """Return the result of the point with *settings*, if it has ended before."""
        try:
            result = Result(**json.loads(self._file(settings, stage).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        result.place = None if result.place is None else (result.place[0], result.place[1])
        result.culprits = tuple(result.culprits)
        return result

    def save(self, settings: Mapping[str, Any], result: Result, stage: str = "") -> None:
        """Keep *result*; a folder that cannot be written keeps nothing."""
        file = self._file(settings, stage)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(asdict(result)), encoding="utf-8")
            part.replace(file)

    def discard(self) -> None:
        """Delete the kept results, because all points have ended."""
        shutil.rmtree(self.folder, ignore_errors=True)


def run_points(
    scenarios: Sequence[Scenario], workers: int, apart: bool, picture: bool = False, last_step: int | None = None
) -> Iterator[tuple[int, Result]]:
    """Run *scenarios*, which are scripts, and yield each result with its place, whichever ends first.

    Args:
        scenarios: The points.
        workers: How many run at a time.
        apart: Whether this process may fork: then each point has a process of its own. Else they run here, one by one.
        picture: Whether documents have what a page draws.
        last_step: The training step after which a point ends; None: when its program does.
    """
    run = partial(run_scenario, picture=picture, sampled=True, last_step=last_step)
    import_for(scenarios)
    if apart:
        yield from as_they_end(scenarios, workers, partial(_quietly, run))
        return
    for number, scenario in enumerate(scenarios):
        yield number, run(scenario)


def _quietly(run: Callable[[Scenario], Result], scenario: Scenario) -> Result:
    """Run *scenario* in a process of its own without warnings, which would mix with the progress lines."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    return run(scenario)
