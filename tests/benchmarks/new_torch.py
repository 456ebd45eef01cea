"""What a release of torch changes for distsim.

    python -m tests.benchmarks.new_torch [RELEASE] [--against RELEASE] [--record]

Every entry of `distsim.torch_compat` is looked up in that release, and its signature and body are compared with those
that were recorded of the release before it (tests/torch_compat/recorded.json); the behaviour tests run. The release is
the one of this Python, or one that `.ci/versions RELEASE` has made an environment for.

Peer: the release that was recorded before. Aim: no entry fails its test, or is missing against what it says.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from distsim.torch_compat.names import MISSING, Name, all_names
from tests.benchmarks.arguments import Arguments

RECORDED = Path(__file__).parents[1] / "torch_compat" / "recorded.json"
"""Release -> path -> [signature, hash of the body]; null for what that release lacks."""
Look = list[str] | None


def look(name: Name) -> Look:
    """Signature and hash of the source of an entry's value; of a value without source, of its kind."""
    value = name.get()
    if value is MISSING:
        return None
    value = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
    try:
        signature = str(inspect.signature(value)) if callable(value) else type(value).__name__
    except (TypeError, ValueError):
        signature = (getattr(value, "__doc__", None) or "").strip().split("\n")[0]
    try:
        body = inspect.getsource(value)
    except (TypeError, OSError):
        body = "" if callable(value) else type(value).__name__
    return [signature[:200], hashlib.sha256(body.encode()).hexdigest()[:12]]


def looks() -> dict[str, Look]:
    """Of every entry, in this Python's torch."""
    return {path: look(name) for path, name in sorted(all_names().items())}


def differences(before: dict[str, Look], now: dict[str, Look]) -> list[str]:
    """One line for each entry that is gone, new or changed."""
    lines = []
    for path in sorted(before.keys() | now.keys()):
        if path not in before:
            lines.append(f"not recorded     {path}")
            continue
        old, new = before[path], now.get(path)
        if old == new:
            continue
        if new is None:
            lines.append(f"gone             {path}")
        elif old is None:
            lines.append(f"new              {path}")
        elif old[0] != new[0]:
            lines.append(f"other signature  {path}: {old[0]} -> {new[0]}")
        else:
            lines.append(f"other body       {path}")
    return lines


def failures(release: str) -> list[str]:
    """Entries that fail their behaviour test, or exist against what `since` and `until` say of *release*."""
    lines = []
    for path, name in sorted(all_names().items()):
        exists = name.exists()
        if exists and not name.works():
            lines.append(f"fails its test   {path}: {name.feature} ({name.need.name or 'OPTIONAL'})")
        until = release if name.until is None else name.until
        expected = _parts(name.since) <= _parts(release) <= _parts(until)
        if exists != expected and not name.cuda_build:
            there = "there" if exists else "missing"
            lines.append(f"{there}, but said to be {name.since} to {name.until or 'the newest'}: {path}")
    return lines


def _parts(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("+")[0].split(".")[:2])


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("release", nargs="?", help="a release, as 2.14.1 (default: this Python's)")
    parser.add_argument(
        "--against", metavar="RELEASE", help="the recorded release to compare with (default: the newest)"
    )
    parser.add_argument("--record", action="store_true", help="write what this release has into the recorded file")
    args = parser.parse_args()
    import torch

    here = torch.__version__.split("+")[0]
    if args.release not in (None, here):
        folder = Path(os.environ.get("DISTSIM_ENVIRONMENTS") or Path.home() / ".cache/distsim/environments")
        python = folder / f"torch-{args.release}" / "bin" / "python"
        if not python.exists():
            parser.error(f"no environment with torch {args.release} in {folder}: .ci/versions {args.release} makes one")
        return subprocess.run([str(python), "-m", "tests.benchmarks.new_torch", *sys.argv[1:]], check=False).returncode
    recorded: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    now = looks()
    if args.record:
        recorded[here] = now
        RECORDED.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        print(f"recorded {len(now)} names of torch {here}")
        return 0
    others = sorted((release for release in recorded if release != here), key=_parts)
    against = args.against or (others[-1] if others else here)
    if against not in recorded:
        parser.error(f"expected a recorded release ({', '.join(recorded)}), got {against!r}")
    changed, wrong = differences(recorded[against], now), failures(here)
    print(
        f"torch {here} against {against}: {len(now)} names, {len(changed)} changed, {len(wrong)} against what is said"
    )
    print("\n".join([*changed, *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
