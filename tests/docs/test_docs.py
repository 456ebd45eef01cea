"""The documentation: what is made is up to date, every block of code is run or checked, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distsim.cli.dispatch import COMMANDS, parse
from distsim.cluster import load_cluster
from distsim.debug.records.kinds import Kind
from distsim.scenario import load_scenario, run_scenario
from tests.docs.blocks import DOCS, PAGES, Block, blocks, commands, write_titled
from tests.docs.pictures import FOLDER, PICTURES, files
from tests.docs.reference import PAGES as MADE
from tests.docs.reports import OUTPUT, RECORDED, SHOWN, output, report
from tests.house.readme_pictures import without_wall_time
from tests.house.tree import ROOT
from tests.kin import one_in

NOT_OURS = ("pip", "pytest", "python")
"""Commands that are not parsed here."""


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_up_to_date(name: str) -> None:
    """The reference says what the schemas, the parsers and the docstrings say."""
    told = (DOCS / name).read_text(encoding="utf-8")
    assert told == MADE[name]().rstrip() + "\n", "python -m tests.docs.generate writes it anew"


def test_every_kind_has_its_section() -> None:
    """With a report, cause, cure and neighbours; the JSON report names it."""
    text = (DOCS / "kinds.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [kind.value for kind in Kind if kind is not Kind.HEALTHY]
    for name, section in sections.items():
        assert SHOWN.search(section), name
        assert re.findall(r"^\*\*(\w+)\.\*\*", section, re.MULTILINE) == ["Cause", "Remedy", "Related"], name


def shown() -> list[Any]:
    """Every report that a page shows: (page, scenario, text)."""
    return [
        pytest.param(page, m[1], m[2], id=f"{page.stem}-{m[1]}")
        for page in PAGES
        for m in SHOWN.finditer(page.read_text(encoding="utf-8"))
    ]


@pytest.mark.filterwarnings("ignore")  # a program's warnings are its own
@pytest.mark.parametrize(("page", "scenario", "text"), one_in(6, shown(), first=1))
def test_a_report_that_is_shown_is_what_the_run_prints(page: Path, scenario: str, text: str) -> None:
    """Word for word."""
    assert report(scenario) == text, f"{page.name}: python -m tests.docs.generate takes the new one"


def outputs() -> list[Any]:
    """Every output that a page shows: (page, command, text). The soak runs the commands that take minutes."""
    return [
        pytest.param(page, m[1], m[2], id=f"{page.stem}-{number}", marks=marks)
        for page in PAGES
        for pattern, marks in ((OUTPUT, []), (RECORDED, [pytest.mark.soak, pytest.mark.timeout(3600)]))
        for number, m in enumerate(pattern.finditer(page.read_text(encoding="utf-8")))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command", "text"), outputs())
def test_an_output_that_is_shown_is_what_the_command_prints(page: Path, command: str, text: str) -> None:
    """Every line, figures included, but for the time that this machine took."""
    printed = without_wall_time("\n".join(output(page, command, text)))
    assert without_wall_time(text).rstrip() in printed, (
        f"{page.name}: python -m tests.docs.generate (--recorded) takes the new one; printed was:\n{printed}"
    )


def is_checked(block: Block) -> bool:
    """Whether one of the tests here looks at it."""
    match block.language:
        case "shell" | "python" | "mermaid":
            return True
        case "toml" | "yaml" | "dockerfile" | "json":
            return block.title is not None
        case "text":
            return block.before.startswith(("<!-- report of ", "<!-- output of ", "<!-- recorded from "))
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_one_that_is_checked(page: Path) -> None:
    """Shell, Python, scenarios, and reports that are taken from runs."""
    assert [block for block in blocks(page) if not is_checked(block)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one_that_the_parsers_take(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and flags are those there are; files of the repository that are named are there."""
    monkeypatch.setattr("distsim.text.output_files.check_writable", lambda *_: None)  # on the reader's machine
    for block in blocks(page):
        for words in commands(block) if block.language == "shell" and block.title is None else ():
            if words[0] == "distsim":
                assert words[1] in COMMANDS
                parse(words[1:])
            elif words[0] == "torchrun":
                from torch.distributed.run import get_args_parser

                get_args_parser().parse_args(words[1:])
            else:
                assert words[0] in NOT_OURS, words
            for word in words:
                if word.startswith("scenarios/"):
                    assert (ROOT / word).exists(), word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_was_recorded_comes_from_a_command_of_the_page(page: Path) -> None:
    """An output that takes minutes is not made anew: its command stands on the page, before it."""
    text = page.read_text(encoding="utf-8")
    shell = {" ".join(words) for block in blocks(page) if block.language == "shell" for words in commands(block)}
    for recorded in re.findall(r"^<!-- recorded from (.+) -->$", text, re.MULTILINE):
        assert recorded in shell


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_runs(page: Path) -> None:
    """What stands alone runs in this process, on simulated ranks."""
    for block in blocks(page):
        if block.language == "python" and block.title is None:
            exec(compile(block.text, page.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scenarios_hold(page: Path, tmp_path: Path) -> None:
    """A page's file says what comes of the page's program, or is a cluster."""
    for path in write_titled(page, tmp_path):
        if path.suffix == ".toml" and "program =" not in path.read_text():
            assert load_cluster(str(path)).devices
        elif path.suffix == ".toml":
            assert run_scenario(load_scenario(path)).wrong == []


def test_scripts_are_scripts() -> None:
    """Titled blocks of shell and Python parse, and so does YAML."""
    for block in (block for page in PAGES for block in blocks(page) if block.title is not None):
        if block.language == "shell":
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), block.title
        elif block.language == "python":
            compile(block.text, block.title, "exec")
        elif block.language == "yaml" and importlib.util.find_spec("yaml") is not None:
            assert list(importlib.import_module("yaml").safe_load_all(block.text)), block.title


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("distsim.test") is None, reason="the marker has another name yet")
def test_tests_pass(tmp_path: Path) -> None:
    """Every `test_*.py` that a page shows, under pytest."""
    pages = [DOCS / "pytest.md", DOCS / "tutorials" / "first-test.md"]
    files = [path for page in pages for path in write_titled(page, tmp_path) if path.name.startswith("test_")]
    assert len(files) > 1
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_page_is_in_the_table_of_contents() -> None:
    """mkdocs builds a page that no one can reach only with a warning."""
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in DOCS.rglob("*.md") if str(page.relative_to(DOCS)) not in contents] == []


def test_every_link_leads_somewhere() -> None:
    """Files and sections that a page links to exist; a page of the documentation links to no file outside of it."""
    for page in [
        *DOCS.rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "scenarios/README.md")),
    ]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text):
            linked = page if not target else page.parent / target
            assert linked.exists(), f"{page.name}: {target}"
            if linked.suffix == ".md":
                assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"
            if DOCS in page.parents:
                assert linked.resolve().is_relative_to(DOCS), f"{page.name}: {target} is not on the built pages"


def test_every_picture_is_one_that_a_command_of_a_page_makes() -> None:
    """In light and dark, with a text for those who do not see it, and small."""
    pages = {page: page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "README.md"]}
    shell = {" ".join(words) for page in PAGES for b in blocks(page) if b.language == "shell" for words in commands(b)}
    for picture in PICTURES:
        assert picture.command in shell
        for scheme, path in files(picture):
            assert path.stat().st_size <= 150 << 10
            named = rf"!\[[^\]]{{20,}}\]\((?:\.\./)?pictures/{path.name}#gh-{scheme}-mode-only\)"
            assert any(re.search(named, text) for text in pages.values()), path.name
    assert set(FOLDER.iterdir()) == {path for picture in PICTURES for _, path in files(picture)}


def test_a_picture_has_the_figures_that_its_page_shows() -> None:
    """Taken of the same run: `python -m tests.docs.pictures` takes new ones, the text beside them is by hand."""
    page = DOCS / "tutorials" / "first-simulation.md"
    shown = "\n".join(block.text for block in blocks(page) if block.before.startswith("<!-- output of "))
    texts = re.findall(r"!\[([^\]]+)\]\(", page.read_text(encoding="utf-8"))
    figures = {figure for text in texts for figure in re.findall(r"[\d.]+ (?:ms|GiB|%)", text)}
    assert len(figures) == 4
    assert [figure for figure in figures if figure.replace(" %", "%") not in shown] == []


def test_the_json_report_names_the_section() -> None:
    """`see` leads to a heading of the page of kinds."""
    path = Path(__file__).parents[1] / "debug" / "golden" / "missing_rank.json"
    first = json.loads(path.read_text(encoding="utf-8"))["diagnoses"][0]
    file, _, anchor = first["see"].partition("#")
    assert (ROOT / file).is_file()
    assert anchor == first["kind"]
    assert anchor in anchors(ROOT / file)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install -e '.[docs]'")
def test_the_pages_are_built(tmp_path: Path) -> None:
    """`mkdocs build --strict`: no link without an end, no page that nobody lists."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "kinds" / "index.html").is_file()
