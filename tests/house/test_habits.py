"""News fragments, workflows and hooks, as far as a file can be wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT, files, project, python_files

KINDS = [kind["directory"] for kind in project()["tool"]["towncrier"]["type"]]
FRAGMENTS = [path for path in (ROOT / ".changes").iterdir() if path.suffix == ".md" and path.name != "README.md"]


def test_the_changelog_has_the_line_under_which_a_release_is_written() -> None:
    """Exactly once: towncrier puts a release below it."""
    start = project()["tool"]["towncrier"]["start_string"]
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count(start) == 1


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_a_fragment_is_of_a_known_kind_and_says_something(path: Path) -> None:
    """`NAME.KIND.md`; one paragraph without a bullet of its own."""
    kind = path.name.split(".")[-2]
    text = path.read_text(encoding="utf-8").strip()
    assert kind in KINDS
    assert text
    assert not text.startswith(("-", "*", "#"))
    assert "\n\n" not in text


def test_nothing_points_to_a_package_that_is_not_published() -> None:
    """Hints and pages install from a clone, until a release is on an index."""
    places = [*files("distsim", "debug", "realexec"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    places += (ROOT / ".github").rglob("*.yml")
    wrong = re.compile(
        r"pip install [^\n`&#]*(torch-distsim|(?<!/)\bdistsim\b(?! *\S*[/.]))|torch-distsim\[|DISTSIM: torch"
    )
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in places
        if path.suffix in (".py", ".md", ".yml")
        for match in wrong.finditer(path.read_text(encoding="utf-8"))
        if "clone of distsim" not in match[0]
    ]
    assert found == []


def test_no_test_forbids_a_word_that_a_path_holds() -> None:
    """The folder of a clone is named distsim, and may hold the environment: a traceback has the name in every path."""
    forbids = re.compile(r"""["']distsim["'] (not in |in str\()""")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in python_files("tests", "scenarios")
        for line in path.read_text(encoding="utf-8").splitlines()
        if forbids.search(line) and "read_text" not in line and "sys.modules" not in line
    ]
    assert found == []


def test_what_the_macos_job_runs_is_there() -> None:
    """The files that its commands name."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    named = re.findall(r"scenarios/\S+\.toml", workflow)
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_hooks_are_the_programs_of_the_suite() -> None:
    """Nothing is fetched from elsewhere, so a commit is checked by the versions of constraints.txt."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"repo: (\S+)", hooks) == ["local"]
    assert set(re.findall(r"id: (\S+)", hooks)) == {"ruff", "ruff-format", "codespell", "mypy"}
