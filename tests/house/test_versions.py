"""One table says which releases of torch and Python are tested; what runs and declares them follows it."""

from __future__ import annotations

import json
import re
import subprocess

from distsim.torch_compat.names import GUARD, SIM
from distsim.torch_compat.releases import PYTHONS, TESTED
from tests.house.tree import ROOT, project

RELEASE = re.compile(r"\b2\.\d+\.\d+\b")


def _pinned() -> str:
    (line,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return str(line)


def test_the_workflow_runs_every_tested_release_and_python() -> None:
    """The first Python with each release of torch, each other one with the suite's own."""
    done = subprocess.run([ROOT / ".ci" / "versions", "--matrix"], capture_output=True, text=True, check=True)
    pairs = [(pair["torch"], pair["python"]) for pair in json.loads(done.stdout)["include"]]
    assert pairs == [*((torch, PYTHONS[0]) for torch in TESTED[GUARD]), *((_pinned(), later) for later in PYTHONS[1:])]


def test_no_release_of_torch_is_named_beside_the_table() -> None:
    """`.ci/versions` and its workflow read the table; the soak names a release of it, and the suite's own is one."""
    for file in (".ci/versions", ".github/workflows/versions.yml"):
        assert not RELEASE.findall((ROOT / file).read_text(encoding="utf-8")), file
    soak = set(RELEASE.findall((ROOT / ".ci" / "soak").read_text(encoding="utf-8")))
    assert soak | {_pinned()} <= set(TESTED[SIM]) <= set(TESTED[GUARD])


def test_the_package_declares_the_pythons_that_are_tested() -> None:
    """Its classifiers, no more and no fewer."""
    found = [
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line)
        for line in project()["project"]["classifiers"]
    ]
    assert tuple(match[1] for match in found if match) == PYTHONS
