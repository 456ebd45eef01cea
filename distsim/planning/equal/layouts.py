"""Runs one program in two layouts as often as it takes to compare them.

1. The sharded layout, and beside it the other one as it is. 2. That one again from the sharded one's parameters, if it
drew others. 3. Once more with parameters changed by one rounding, which says how far healthy tensors move.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from distsim.errors import UsageError
from distsim.planning.equal.child import Spec
from distsim.planning.equal.compare import Comparison, compare, starts, teams
from distsim.planning.equal.record import RecordedRun, read_run

LINES = 12
"""Number of output lines that the message about a failed run shows."""


def compare_layouts(sharded: Spec, whole: Spec, folder: Path, say: Callable[[str], None]) -> Comparison:
    """Run both layouts in *folder* and compare them.

    Args:
        sharded: The layout whose ranks hold parts.
        whole: The layout without model parallelism.
        folder: Folder for the recorded tensors.
        say: Receives a line of progress.

    Raises:
        UsageError: A layout cannot run, or nothing can be compared.
    """
    say("both layouts")
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(_run, (sharded, whole), (folder, folder), ("first", "second"))
    if not (first.ranks and second.ranks):  # no rank called a module
        raise UsageError(f"nothing was compared: {_why_nothing(first, second, {})}")
    needed = starts(first, second, teams(first, second))
    if any(needed.values()):
        say("the second layout again, from the first one's parameters")
        path = folder / "start.npz"
        np.savez(path, **{f"{rank}/{name}": v for rank, of in needed.items() for name, v in of.items()})  # type: ignore[arg-type]
        whole = dataclasses.replace(whole, start=str(path))
        second = _run(whole, folder, "second")
    say("the second layout again, from parameters changed by one rounding")
    moved = _run(dataclasses.replace(whole, perturbed=True), folder, "moved")
    comparison = compare(first, second, moved)
    comparison.replaced = sorted({name for of in needed.values() for name in of})
    for run in (first, second):
        comparison.left_out |= {name: f"its values cannot be read ({kind})" for name, kind in run.unreadable.items()}
    if not comparison.compared.get("gradient", 0) + comparison.compared.get("parameter", 0):
        raise UsageError(f"nothing was compared: {_why_nothing(first, second, comparison.left_out)}")
    return comparison


def _run(spec: Spec, folder: Path, name: str) -> RecordedRun:
    out, file = folder / f"{name}.npz", folder / f"{name}.json"
    spec = dataclasses.replace(spec, out=str(out))
    spec.write(file)
    done = subprocess.run(
        [sys.executable, "-m", "distsim.planning.equal.child", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode or not out.exists():
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        refusals = [line.removeprefix("distsim: error: ") for line in lines if line.startswith("distsim: error: ")]
        if refusals:
            raise UsageError(refusals[-1])
        layout = "second layout" if name != "first" else "first layout"
        command = " ".join([Path(spec.program).name, *spec.arguments])
        output = "\n".join(f"  {line}" for line in lines[-LINES:])
        raise UsageError(f"the {layout} does not run ({command}, exit code {done.returncode}):\n{output}")
    return read_run(out)


def _why_nothing(first: RecordedRun, second: RecordedRun, left_out: Mapping[str, str]) -> str:
    for run, layout in ((first, "first"), (second, "second")):
        keys = [key for entries in run.ranks.values() for key in entries]
        if not any(key.kind == "start" for key in keys):
            return f"no rank of the {layout} layout called a model that has parameters"
        if not any(key.kind == "gradient" for key in keys):
            return f"no optimizer of the {layout} layout made a step with a gradient of the model"
    name, why = next(iter(left_out.items()), ("", "the two have no parameter in common"))
    return f"{name}: {why}" if name else why
