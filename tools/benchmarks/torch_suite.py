"""PyTorch's own gloo tests (`torch_tests.py`), plain and under guard: results that differ, and false alarms.

The guard's arms are its levels: a test is `python`, or `distsim run --on gloo`, and every rank a new interpreter.
TORCH_TESTS_WORLD sets the number of ranks: 3 runs tests of groups that are part of the world, which 2 skips. The
simulator runs torch's tests in tests/conformance/test_torchs_own.py.

Peer: the same tests on plain gloo. Aim: no result differs, no alarm.

    python -m tools.benchmarks.torch_suite --arm check [--tests PATTERN] [--out FILE]
    python -m tools.benchmarks.torch_suite --arm strict --only FILE   # those that passed plain, from an earlier --out
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.benchmarks.arguments import Arguments

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "torch_tests.py"
SKIPPED = 77
LIMIT_S = 150.0
LEVELS = ("check", "strict")
"""Levels of the guard, each an arm."""


@dataclass
class Outcome:
    """How one test went on one arm."""

    test: str
    arm: str
    code: int
    """Of the process that ran the test; -9: it had to be killed."""
    seconds: float
    alarms: list[str] = field(default_factory=list)
    """Kinds of the diagnoses, warnings included."""
    said: str = ""
    """The end of what it printed, where that is of interest."""


def run(test: str, arm: str) -> Outcome:
    """One test by `python`, or by `distsim run --on gloo`."""
    with scratch() as folder:
        words = [str(PROGRAM), test]
        if arm != "plain":
            words = [
                *("-m", "distsim", "run", "--on", "gloo", "--level", arm, "--rings", str(folder / "rings")),
                *("--max-restarts", "0", "--master-port", "0", *words),
            ]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("DISTSIM_")}
        environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(HERE.parents[1]), TEMP_DIR=str(folder / "temp"))
        began = time.monotonic()
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *words], env=environ, stdout=out, stderr=out, start_new_session=True
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
        seconds = time.monotonic() - began
        verdicts = sorted((folder / "rings").glob("verdict.*.json")) or [folder / "rings" / "verdict.json"]
        alarms = [kind for path in verdicts for kind in kinds_in(path)]
        said = (folder / "out").read_text(errors="replace")
    if "OK (skipped=" in said:
        code = SKIPPED
    return Outcome(test, arm, code, round(seconds, 2), alarms, said[-6000:])


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one test, in memory as rings are."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="torch-suite-", dir=base))
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / "temp" / name).mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kinds_in(path: Path) -> list[str]:
    """The kinds of a report's diagnoses."""
    try:
        return [str(said["kind"]) for said in json.loads(path.read_text())["diagnoses"]]
    except (OSError, ValueError, KeyError):
        return []


def all_names() -> list[str]:
    """Every test of the program."""
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, check=True)
    return done.stdout.split()


def report(outcomes: Sequence[Outcome], plain: dict[str, int]) -> int:
    """What differs from the plain arm, and who cried wolf; 1 if there is any of it."""
    bad = 0
    for arm in dict.fromkeys(outcome.arm for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.arm == arm]
        counts = Counter({0: "passed", SKIPPED: "skipped", -9: "timed out"}.get(o.code, "failed") for o in mine)
        said = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
        base = [o for o in mine if plain.get(o.test) == 0]
        changed = [o for o in base if o.code != 0]
        alarmed = [o for o in base if o.alarms]
        print(f"{arm}: {said}; of {len(base)} that pass plain {len(changed)} differ, {len(alarmed)} have alarms")
        for outcome in mine:
            if outcome in changed or outcome in alarmed:
                print(f"  {outcome.test}: code {outcome.code}, {', '.join(outcome.alarms) or 'no alarm'}")
        bad += len(changed) + len(alarmed)
    return int(bad > 0)


def earlier(text: str) -> dict[str, int]:
    """Exit codes on the plain arm of an earlier --out."""
    try:
        said = [json.loads(line) for line in Path(text).read_text().splitlines()]
        plain = {row["test"]: row["code"] for row in said if row["arm"] == "plain"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no such lines"
        raise argparse.ArgumentTypeError(f"expected a file that --out has written, got {text!r}: {why}") from None
    if not plain:
        raise argparse.ArgumentTypeError(f"expected a file with tests of the plain arm, got {text!r}")
    return plain


def writable(text: str) -> Path:
    """A file to add lines to."""
    try:
        Path(text).open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"expected a file to write, got {text!r}: {error.strerror}") from None
    return Path(text)


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("--arm", action="append", choices=["plain", *LEVELS])
    parser.add_argument("--tests", default="*", help="a shell pattern over CLASS.test_name")
    parser.add_argument(
        "--only",
        type=earlier,
        default={},
        metavar="FILE",
        help="tests that passed on the plain arm of this earlier --out",
    )
    parser.add_argument("--out", type=writable, metavar="FILE", help="one JSON line per test and arm")
    args = parser.parse_args()
    plain: dict[str, int] = args.only
    names = [name for name in plain or all_names() if fnmatch.fnmatch(name, args.tests)]
    if not names:
        parser.error(f"argument --tests: expected a pattern that some test matches, got {args.tests!r}")
    arms = list(dict.fromkeys(args.arm or LEVELS))
    if not plain and "plain" not in arms:
        arms.insert(0, "plain")
    outcomes = []
    for name in names:
        for arm in arms:
            if arm != "plain" and plain.get(name) != 0:
                continue  # it needs a GPU, more ranks, or fails by itself
            outcome = run(name, arm)
            if arm == "plain":
                plain[name] = outcome.code
            outcomes.append(outcome)
            print(f"{arm:6} {outcome.code:4} {outcome.seconds:6.1f} s  {name}  {' '.join(outcome.alarms)}", flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    return report(outcomes, plain)


if __name__ == "__main__":
    sys.exit(main())
