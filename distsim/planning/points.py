"""Keeps points of a sweep or a search that have ended until all have, and claims those that run.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim import __version__
from distsim.scenario.expect.result import Result
from distsim.scenario.file.load import Scenario
from distsim.scenario.sources import own_sources, parsed_sources
from distsim.text.codec import encode, read
from distsim.text.output_files import write_text
from distsim.text.untrusted_input import LARGEST_DOCUMENT, LARGEST_SOURCE, read_bytes

ROLES = {
    "micro_batch": r"mbs|bs|batch|((micro|local|train|device|per-device(-train)?|train-micro)-)?batch-size(-per-gpu)?",
    "accumulation": r"accum|grad(ient)?-accum(ulation)?(-steps)?|accumulation-steps|num-micro-?batches",
    "recomputation": r"ckpt|ac|ac-mode|checkpoint-activations|recompute(-activations|-granularity)?"
    r"|(grad(ient)?|activation)-(ckpt|checkpoint(ing)?)",
    "tensor_parallel": r"tp|tp-size|tp-degree|tensor(-model)?-parallel(-size|-degree)?",
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
    """Results of an interrupted command, stored in a folder of the user's cache.

    Args:
        scenario: The scenario that all points vary. If its program, a module beside it or its cluster file has changed,
            another folder is used.
        command: Everything else that determines the points, as plain data.
    """

    def __init__(self, scenario: Scenario, command: Any) -> None:
        digest = hashlib.sha256(json.dumps([__version__, scenario.data, command], sort_keys=True).encode())
        clusters = [scenario.path.parent / str(scenario.spec.on).partition(":")[0]]
        for file in [*(own_sources(scenario.file) if scenario.file is not None else ()), *clusters]:
            with suppress(OSError):
                digest.update(str(file).encode() + read_bytes(file, LARGEST_SOURCE))
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = Path(cache) / "distsim" / f"points-{digest.hexdigest()[:12]}"
        self._claims: dict[Path, int] = {}

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("*.json")) if self.folder.is_dir() else 0

    def _file(self, settings: Mapping[str, Any], stage: str) -> Path:
        name = hashlib.sha256(json.dumps([settings, stage], sort_keys=True).encode()).hexdigest()
        return self.folder / f"{name[:16]}.json"

    def load(self, settings: Mapping[str, Any], stage: str = "") -> Result | None:
        """Return the result of the point with *settings*, if it has ended before."""
        try:
            return read(self._file(settings, stage), Result, LARGEST_DOCUMENT)
        except (OSError, ValueError):
            return None

    def claim(self, settings: Mapping[str, Any], stage: str = "") -> bool:
        """Return whether this command may run the point; False: another one on this folder runs it.

        A claim is a lock on a file, which ends with its process. It ends by `save` or `release`.
        """
        file = self._file(settings, stage).with_suffix(".claim")
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

    def release(self, settings: Mapping[str, Any], stage: str = "") -> None:
        """End this command's claim, if it has one."""
        claim_fd = self._claims.pop(self._file(settings, stage).with_suffix(".claim"), None)
        if claim_fd is not None:
            fcntl.flock(claim_fd, fcntl.LOCK_UN)  # a forked point may hold the same descriptor
            os.close(claim_fd)

    def save(self, settings: Mapping[str, Any], result: Result, stage: str = "") -> None:
        """Store *result*, and end the claim. Nothing is stored if the folder is not writable."""
        file = self._file(settings, stage)
        with suppress(OSError):
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            write_text(part, encode(result).decode())
            part.replace(file)
        self.release(settings, stage)

    @property
    def continues(self) -> str:
        """Return the end of the sentence that says that a command was interrupted."""
        return f"; they are kept in {self.folder}: the same command continues from there"

    def discard(self) -> None:
        """Delete the kept results, because all points have ended; not while another command runs some of them."""
        for file in self.folder.glob("*.claim"):
            with suppress(OSError), open(file) as claim:
                try:
                    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
        shutil.rmtree(self.folder, ignore_errors=True)
