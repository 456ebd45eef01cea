"""What a release of torch changes for distsim.

    python -m tools.benchmarks.new_torch [RELEASE] [--against RELEASE] [--record]

Every entry of `distsim.torch_compat` is looked up in that release, its behaviour test runs, and its signature and body
are compared with those that are recorded (tests/torch_compat/recorded.json) of that release, or else of the newest. The
release is the one of this Python, or one that `.ci/versions RELEASE` has made an environment for. Below the releases
that simulations are tested on, only what the guard of real jobs needs is judged.

Exit code 1 if an entry is there, missing, or behaves against what it says, or its signature is not the recorded one;
other bodies, and entries that are not recorded, are listed and do not count.

Peer: the release that was recorded before. Aim: exit code 0 on every tested release.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from distsim.torch_compat.cuda_api import STAND_INS
from distsim.torch_compat.names import GUARD, MISSING, SIM, TorchName, all_names
from distsim.torch_compat.releases import compared
from tools.benchmarks.arguments import Arguments

RECORDED = Path(__file__).parents[2] / "tests" / "torch_compat" / "recorded.json"
"""Release -> path -> [signature, hash of the body]; null for what that release lacks."""
LONGEST = 200
"""Characters of a signature that are recorded."""
Look = list[str] | None


def look(name: TorchName) -> Look:
    """Signature and hash of the source of an entry's value; of a value without source, of its kind."""
    value = name.get()
    if value is MISSING:
        return None
    value = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
    signature = _signature(value) if callable(value) else type(value).__name__
    try:
        body = inspect.getsource(value)
    except (TypeError, OSError):
        body = "" if callable(value) else type(value).__name__
    signature = re.sub(r" at 0x[0-9a-f]+", "", signature)  # a default without a repr of its own
    return [signature[:LONGEST], hashlib.sha256(body.encode()).hexdigest()[:12]]


def _signature(value: Any) -> str:
    if isinstance(value, enum.EnumMeta):  # Python 3.12 has another signature for it
        return "enum"
    if inspect.isbuiltin(value) and value.__doc__ is None:  # from Python 3.13 on, one is made of its calling convention
        return ""
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return (getattr(value, "__doc__", None) or "").strip().split("\n")[0]


def looks() -> dict[str, Look]:
    """Of every entry, in this Python's torch."""
    return {path: look(name) for path, name in sorted(all_names().items())}


def differences(before: dict[str, Look], now: dict[str, Look]) -> tuple[list[str], list[str]]:
    """One line for each entry whose signature changed, and for each that changed otherwise."""
    counted, others = [], []
    conditional = {path for path, name in all_names().items() if name.only}
    for path in sorted(now):
        old, new = before.get(path), now[path]
        if path not in before:
            others.append(f"not recorded     {path}")
        elif old == new or (path in conditional and (old is None or new is None)):
            continue
        elif old is None or new is None:  # `failures` compares what is there with the entry
            others.append(f"{'gone' if new is None else 'new':<16} {path}")
        elif differ(old[0], new[0]) and path in STAND_INS:
            others.append(f"other build      {path}")
        elif differ(old[0], new[0]):
            counted.append(f"other signature  {path}: {old[0]} -> {new[0]}")
        elif old[1] != new[1]:
            others.append(f"other body       {path}")
    return counted, others


def differ(old: str, new: str) -> bool:
    """Whether two signatures do, as far as both are recorded. Python 3.14 prints `typing.Any` as `Any`."""
    short = [text.replace("typing.", "") for text in (old, new)]
    end = min(map(len, short)) if LONGEST in (len(old), len(new)) else LONGEST
    return short[0][:end] != short[1][:end]


def failures(release: str, paths: set[str]) -> list[str]:
    """Those of *paths* that are there, missing or behave against what their entries say of *release*."""
    lines = []
    for path, name in sorted(all_names().items()):
        if path not in paths:
            continue
        exists = name.exists()
        if exists and name.works() != _in_range(release, name.since, name.passes_until):
            until = f"said to pass it until {name.passes_until}" if name.passes_until else "said to pass it"
            answer = "passes" if name.works() else "fails"
            lines.append(f"{answer} its test, but {until}: {path}: {name.feature} ({name.need.name or 'OPTIONAL'})")
        if exists != _in_range(release, name.since, name.until) and not name.only:
            there = "there" if exists else "missing"
            lines.append(f"{there}, but said to be {name.since} to {name.until or 'the newest'}: {path}")
    return lines


def judged(release: str) -> set[str]:
    """Paths of the entries that *release* is judged by."""
    names = all_names()
    return {path for path, name in names.items() if compared(release, SIM) >= 0 or GUARD in name.need}


def _in_range(release: str, since: str, until: str | None) -> bool:
    return _parts(since) <= _parts(release) <= _parts(until or release)


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
        name = "torch-{}-py{}.{}".format(args.release, *sys.version_info[:2])
        python = folder / name / "bin" / "python"
        if not python.exists():
            parser.error(f"no environment with torch {args.release} in {folder}: .ci/versions {args.release} makes one")
        return subprocess.run([str(python), "-m", "tools.benchmarks.new_torch", *sys.argv[1:]], check=False).returncode
    recorded: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    if args.record:
        names = judged(here)
        recorded[here] = {path: value for path, value in looks().items() if path in names}
        RECORDED.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        print(f"recorded {len(recorded[here])} names of torch {here}")
        return 0
    against = args.against or record_of(here, list(recorded))
    if against not in recorded:
        parser.error(f"expected a recorded release ({', '.join(recorded)}), got {against!r}")
    return report(here, against, recorded[against])


def record_of(release: str, recorded: list[str]) -> str:
    """The recorded release of the same minor, or else the newest."""
    newest_first = sorted(recorded, key=_parts, reverse=True)
    return next((other for other in newest_first if _parts(other) == _parts(release)), newest_first[0])


def report(release: str, against: str, record: dict[str, Look]) -> int:
    """Print what differs in this Python's torch; the exit code."""
    names = judged(release)
    now = {path: value for path, value in looks().items() if path in names}
    signatures, others = differences(record, now)
    wrong = [*failures(release, names), *signatures]
    print(f"torch {release} against {against}: {len(now)} names, {len(wrong)} not as said, {len(others)} other changes")
    print("\n".join([*others, *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
