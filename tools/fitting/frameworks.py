"""Published training programs as rows of the yardstick: a checkout at its commit, unmodified, with data to read."""

from __future__ import annotations

import importlib.metadata
import io
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["FRAMEWORKS", "Framework", "NotHere"]

VARIABLE = "DISTSIM_REPOSITORIES"


class NotHere(Exception):
    """A framework that this machine lacks; the text is the command that brings it."""


@dataclass(frozen=True)
class Framework:
    """A table of frameworks.toml, where the keys are explained."""

    repository: str
    commit: str
    paths: Sequence[str]
    steps: str
    torch: str
    prepare: str = ""
    needs: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    flags: str = ""
    run: Sequence[str] = ()

    def put(self, folder: Path) -> None:
        """Write the program and its data to *folder*.

        Raises:
            NotHere: The checkout, its commit or a package is missing.
        """
        missing = [need for need in self.needs if not _installed(need)]
        if missing:
            raise NotHere(f"pip install -c constraints.txt {' '.join(missing)}")
        clone = Path(os.environ.get(VARIABLE, "repositories")) / self.repository
        archive = subprocess.run(
            ["git", "-C", str(clone), "archive", self.commit, "--", *self.paths], capture_output=True, check=False
        )
        if archive.returncode:
            raise NotHere(
                f"git clone https://github.com/{self.repository} {clone} "
                f"({'' if VARIABLE in os.environ else f'and {VARIABLE}=FOLDER; '}commit {self.commit[:9]} is needed)"
            )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        subprocess.run([sys.executable, "-c", self.prepare], cwd=folder, check=True)


def _installed(need: str) -> bool:
    name, _, version = need.partition("==")
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name) == version or not version
    return False


FRAMEWORKS = {
    name: Framework(**table)
    for name, table in tomllib.loads((Path(__file__).parent / "frameworks.toml").read_text()).items()
}
"""By name."""
