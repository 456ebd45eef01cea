"""Keeps points of a sweep or a search that have ended for a day, and claims those that run.

A script's flags of size and layout are read from its source.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from distsim import __version__
from distsim.scenario.expect.result import Result
from distsim.scenario.file.load import Scenario
from distsim.scenario.sources import own_sources, parsed_sources
from distsim.text.codec import encode, read
from distsim.text.output_files import write_text
from distsim.text.untrusted_input import LARGEST_DOCUMENT, LARGEST_SOURCE, read_bytes

KEPT_S = 86400.0
"""Seconds for which the result of a point is kept."""
CONFIGURATION = (".cfg", ".ini", ".toml", ".yaml", ".yml")
"""Endings of files beside a script that it may read."""
ENVIRONMENT = ("CUDA_", "NCCL_", "PYTHONPATH", "PYTORCH_", "TORCH_")
ROLES = {
    "micro_batch": r"mbs|bs|batch|((micro|local|train|device|per-device(-train)?|train-micro)-)?batch-size(-per-gpu)?",
    "accumulation": r"accum|grad(ient)?-accum(ulation)?(-steps)?|accumulation-steps|num-micro-?batches",
    "recomputation": r"ckpt|ac|ac-mode|checkpoint-activations|recompute(-activations|-granularity)?"
    r"|(grad(ient)?|activation)-(ckpt|checkpoint(ing)?)",
    "sharding": r"sharding(-strategy)?|zero(-stage)?",
    "sequence": r"(max-)?seq(uence)?(-len(gth)?)?|context-len(gth)?|block-size",
    "tensor_parallel": r"tp|tp-size|tp-degree|tensor(-model)?-parallel(-size|-degree)?",
    "context_parallel": r"cp|cp-size|cp-degree|context-parallel(-size|-degree)?",
    "expert_parallel": r"ep|ep-size|ep-degree|expert(-model)?-parallel(-size|-degree)?",
    "pipeline": r"pp|pp-size|pp-degree|pipeline(-model)?-parallel(-size|-degree)?",
}
"""Roles of flags with the patterns of their names, without leading dashes, with - for _ and without the part before a
dot.
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a script."""

    name: str
    """Name of the flag as written: `--micro-batch-size`."""
    value: str | None
    """Value on the command line, or else the default; None if it is not known."""
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    """Whether the flag takes no value; its `value` is then "True" if it is given."""


def script_flags(script: Path, arguments: Sequence[str]) -> list[Flag]:
    """Return the flags of *script* and those in *arguments*.

    Flags are found in calls of argparse's `add_argument` in *script* and in the modules beside it that it imports.
    """
    flags: dict[str, Flag] = {}
    for call in _added_arguments(script):
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        name = next((n for n in names if n.startswith("--")), None)
        if name is not None:
            flags.setdefault(name, _flag(name, {word.arg: word.value for word in call.keywords if word.arg}))
    given = list(arguments)
    for i, word in enumerate(given):
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            continue
        name = next((n for n in flags if n == name or n.replace("_", "-") == name.replace("_", "-")), name)
        known = flags.get(name)
        if not equals:
            following = given[i + 1] if i + 1 < len(given) else "--"
            takes_value = not following.startswith("--") and not (known is not None and known.is_switch)
            value = following if takes_value else "True"
        is_switch = known.is_switch if known is not None else value == "True"
        flags[name] = Flag(name, value, () if known is None else known.choices, is_switch)
    return list(flags.values())


def _flag(name: str, keywords: dict[str, ast.expr]) -> Flag:
    action = _constant(keywords.get("action"))
    choices = keywords.get("choices")
    values = choices.elts if isinstance(choices, ast.Tuple | ast.List) else []
    words = tuple(str(v.value) for v in values if isinstance(v, ast.Constant))
    default = _constant(keywords.get("default"))
    return Flag(name, default, words if len(words) == len(values) else (), action == "store_true")


def _constant(node: ast.expr | None) -> str | None:
    return str(node.value) if isinstance(node, ast.Constant) and node.value is not None else None


def _added_arguments(script: Path) -> Iterator[ast.Call]:
    for _, tree in parsed_sources(script):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                yield node


def role_of(flag: Flag) -> str | None:
    """Return what *flag* is for: one of `ROLES`, None for any other."""
    name = flag.name.lstrip("-").rpartition(".")[2].replace("_", "-")
    return next((role for role, pattern in ROLES.items() if re.fullmatch(pattern, name)), None)


def with_flag(arguments: Sequence[str], name: str, value: str | None) -> list[str]:
    """Return *arguments* in which the flag *name* has *value* (None: it is a switch), wherever it stood before."""
    left: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == name:
            if value is not None and rest:
                rest.pop(0)
        elif not word.startswith(f"{name}="):
            left.append(word)
    return [*left, name if value is None else f"{name}={value}"]


class KeptPoints:
    """Results of points, stored in a folder of the user's cache for a day: no command runs a point that another ran.

    Args:
        scenario: The scenario that all points vary. If its program, a module or a configuration file beside it,
            distsim, torch or the environment of torch and NCCL has changed, another folder is used.
    """

    def __init__(self, scenario: Scenario) -> None:
        environment = sorted(item for item in os.environ.items() if item[0].startswith(ENVIRONMENT))
        digest = hashlib.sha256(json.dumps([_release(), version("torch"), environment]).encode())
        for file in own_sources(scenario.file) if scenario.file is not None else ():
            with suppress(OSError):
                digest.update(str(file.resolve()).encode() + read_bytes(file, LARGEST_SOURCE))
        for file in sorted(scenario.path.parent.iterdir()):
            if file.suffix in CONFIGURATION:
                digest.update(_stamp(file))
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = Path(cache) / "distsim" / f"points-{digest.hexdigest()[:12]}"
        self._claims: dict[Path, int] = {}

    def __len__(self) -> int:
        return sum(_is_recent(file) for file in self.folder.glob("*.json")) if self.folder.is_dir() else 0

    def _file(self, point: Scenario, stage: str) -> Path:
        """Return the file of a point; files that its arguments or its cluster name are part of its key."""
        words = [*point.data.get("args", ()), str(point.spec.on), str(point.spec.on).rpartition(":")[0]]
        words += [str(point.spec.lengths or ""), point.spec.routing.removeprefix("measured:")]
        named = [_stamp(point.path.parent / word.rpartition("=")[2]).hex() for word in words if "." in word]
        name = hashlib.sha256(json.dumps([point.data, named, stage], sort_keys=True).encode()).hexdigest()
        return self.folder / f"{name[:16]}.json"

    def load(self, point: Scenario, stage: str = "") -> Result | None:
        """Return the result of *point*, if it has ended within the last day."""
        file = self._file(point, stage)
        try:
            return read(file, Result, LARGEST_DOCUMENT) if _is_recent(file) else None
        except (OSError, ValueError):
            return None

    def claim(self, point: Scenario, stage: str = "") -> bool:
        """Return whether this command may run the point; False: another one runs it.

        A claim is a lock on a file, which ends with its process. It ends by `save` or `release`.
        """
        file = self._file(point, stage).with_suffix(".claim")
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            claim_fd = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            return True  # nothing can be kept there, so nobody shares it
        try:
            fcntl.flock(claim_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(claim_fd)
            return False
        self._claims[file] = claim_fd
        return True

    def release(self, point: Scenario, stage: str = "") -> None:
        """End this command's claim, if it has one."""
        claim_fd = self._claims.pop(self._file(point, stage).with_suffix(".claim"), None)
        if claim_fd is not None:
            fcntl.flock(claim_fd, fcntl.LOCK_UN)  # a forked point may hold the same descriptor
            os.close(claim_fd)

    def save(self, point: Scenario, result: Result, stage: str = "") -> None:
        """Store *result*, unless a limit ended it, and end the claim. Nothing is stored if the folder is not
        writable.
        """
        file = self._file(point, stage)
        if result.ran and not result.limit:
            with suppress(OSError):
                self.folder.mkdir(0o700, parents=True, exist_ok=True)
                part = file.with_suffix(".part")
                write_text(part, encode(result).decode())
                part.replace(file)
        self.release(point, stage)

    @property
    def continues(self) -> str:
        """Return the end of the sentence that says that a command was interrupted."""
        return f"; they are kept in {self.folder}: the same command continues from there"

    def discard_old(self) -> None:
        """Delete folders of points in which nothing has been written for a day."""
        for folder in self.folder.parent.glob("points-*"):
            if not any(map(_is_recent, folder.iterdir())):
                shutil.rmtree(folder, ignore_errors=True)


def _is_recent(file: Path) -> bool:
    try:
        return time.time() - file.stat().st_mtime < KEPT_S
    except OSError:
        return False


def _stamp(file: Path) -> bytes:
    """Return what changes if *file* is written; nothing for a file that does not exist."""
    try:
        facts = file.stat()
    except (OSError, ValueError):
        return b""
    return f"{file} {facts.st_mtime_ns} {facts.st_size}".encode()


@cache
def _release() -> list[str]:
    """Return the version of distsim, and the time of its newest file: a clone changes without a new version."""
    package = Path(str(files("distsim")))
    newest = max(file.stat().st_mtime_ns for ending in ("py", "toml", "csv") for file in package.rglob(f"*.{ending}"))
    return [__version__, str(newest)]
