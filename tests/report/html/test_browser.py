"""The pages in a real browser: nothing on the console, no request, and what a reader does works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.report.html.draw.plots import PageEntry
from distsim.report.html.page import run_page, suite_page, sweep_page, write_page
from distsim.report.html.reports import outcome_document
from tests.report.html.browser import CHROMIUM, Browser
from tests.report.html.pages import circle, document, many_ranks
from tests.report.made import finished

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]

DRAWN = "[...document.querySelectorAll('.chart')].filter(c => c.offsetParent).every(c => c.dataset.drawn)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests, with a window as high as the pages, so that all charts are in sight."""
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        started.size(1280, 5000)
        yield started


def quiet(browser: Browser) -> None:
    """It said nothing on its console, and asked for nothing but the file and pictures that it made itself."""
    asked = [address for address in browser.requests if not address.startswith(("file:", "data:", "blob:"))]
    assert (browser.complaints, asked) == ([], [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_hang_is_drawn_in_light_and_dark(scheme: str, browser: Browser, tmp_path: Path) -> None:
    """All parts are there, texts stand out from the ground, nothing is complained of, nothing is asked for."""
    write_page(run_page(document(circle())), str(tmp_path / "page.html"))
    browser.colours(scheme)
    browser.open(tmp_path / "page.html")
    browser.until(DRAWN)
    assert browser.run("document.querySelectorAll('.chart .main-svg').length") > 0
    text = browser.run("document.querySelector('.chart text').style.fill")
    assert text == ("rgb(27, 31, 36)" if scheme == "light" else "rgb(230, 233, 237)")
    shown = browser.run("document.body.innerText")
    for said in ("deadlock cycle", "next:", "statement_5()", "all_reduce #1 on tp", "never ended"):
        assert said in shown
    quiet(browser)


def test_every_part_of_a_run_that_finished_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """Lanes, the heat map with a fault, the cluster."""
    write_page(run_page(outcome_document(finished(), faults=[(0.003, 0.004, "cut")])), str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html")
    browser.until(DRAWN)
    assert browser.run("[...document.querySelectorAll('.chart')].map(c => c.dataset.figure)") == [
        "run-lanes",
        "run-links",
        "run-cluster",
    ]
    quiet(browser)


def test_the_keyboard_shows_calls_zooms_and_sorts(browser: Browser, tmp_path: Path) -> None:
    """Arrows go from call to call, plus zooms, a column's button sorts both ways."""
    write_page(run_page(outcome_document(finished())), str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html")
    browser.until(DRAWN)
    browser.run("document.querySelector('.chart').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert "all_reduce #2 on default_pg" in browser.run("document.querySelector('.record').innerText")
    browser.press("ArrowDown")
    assert "rank\n1" in browser.run("document.querySelector('.record').innerText")
    width = "(([a, b]) => b - a)(document.querySelector('.chart').layout.xaxis.range)"
    before = browser.run(width)
    browser.press("+")
    browser.until(f"{width} < {before} * 0.6")
    first = "document.querySelector('section.table tbody tr td').innerText"
    assert browser.run(first) == "0"
    for expected in ("0", "1"):
        browser.run("document.querySelector('section.table th button').click()")
        assert browser.run(first) == expected
    quiet(browser)


def test_a_click_on_a_slice_shows_its_record(browser: Browser, tmp_path: Path) -> None:
    """Part two's click: which call, where, when."""
    write_page(run_page(document(circle())), str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html")
    browser.until(DRAWN)
    browser.run("document.querySelector('.chart').emit('plotly_click', {points: [{customdata: 0}]})")
    shown = browser.run("document.querySelector('.record').innerText")
    assert "all_reduce #1 on default_pg" in shown
    assert "train.py:3" in shown


def test_the_download_is_the_report_with_its_picture(browser: Browser, tmp_path: Path) -> None:
    """What the button saves is what `distsim html` reads."""
    report = document(circle())
    write_page(run_page(report), str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html")
    browser.until(DRAWN)
    browser.run("URL.createObjectURL = (blob) => { window.saved = blob.text(); return '#'; }; 1")
    browser.run("document.querySelector('#download').click()")
    browser.until("Boolean(window.saved)")
    assert json.loads(browser.run("window.saved")) == report


def test_a_thousand_ranks_are_drawn(browser: Browser, tmp_path: Path) -> None:
    """The largest page opens like any other."""
    write_page(run_page(document(many_ranks(1024, 6))), str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html")
    browser.until(DRAWN)
    assert "ranks 0-2,4-1023" in browser.run("document.body.innerText")
    quiet(browser)


def test_a_suite_leads_to_each_run_and_back(browser: Browser, tmp_path: Path) -> None:
    """The index alone is in sight; a link shows one run, drawn then; a bar of a sweep does the same."""
    entries = [
        PageEntry("fine", True, "healthy", document=outcome_document(finished()), figures={"virtual_time_s": 0.01}),
        PageEntry("stuck", False, "deadlock_cycle", ["expect.kind"], document=document(circle())),
    ]
    write_page(suite_page(entries, "1 passed, 1 failed"), str(tmp_path / "suite.html"))
    browser.open(tmp_path / "suite.html")
    visible = "[...document.querySelectorAll('article')].filter(a => a.offsetParent).map(a => a.id)"
    assert browser.run(visible) == ["overview"]
    browser.run("document.querySelector('a[href=\"#run-2\"]').click()")
    browser.until(f"{visible}[0] === 'run-2'")
    browser.until(DRAWN)
    browser.run("document.querySelector('#run-2 a').click()")
    browser.until(f"{visible}[0] === 'overview'")
    for entry, nodes in zip(entries, (1, 2), strict=True):
        entry.settings = {"cluster.nodes": nodes}
        entry.figures = {"virtual_time_s": 0.01 * nodes}
    write_page(sweep_page("s.toml", entries, "virtual_time_s"), str(tmp_path / "sweep.html"))
    browser.open(tmp_path / "sweep.html")
    browser.until(DRAWN)
    browser.run("document.querySelector('.chart').emit('plotly_click', {points: [{customdata: 'run-2'}]})")
    browser.until(f"{visible}[0] === 'run-2'")
    quiet(browser)


def test_what_nobody_has_scrolled_to_is_on_paper(browser: Browser, tmp_path: Path) -> None:
    """A window as small as a laptop's: charts below it are drawn as well, for whoever prints the page at once."""
    browser.size(1280, 100)
    write_page(run_page(document(circle())), str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html")
    below = "[...document.querySelectorAll('.chart')].at(-1).getBoundingClientRect().top > 700"
    assert browser.run(below)
    browser.until(DRAWN)
    quiet(browser)
    browser.size(1280, 5000)


def test_a_phone_shows_the_whole_cluster(browser: Browser, tmp_path: Path) -> None:
    """A graph that is wider than the screen is made smaller, not cut, and its names stay legible."""
    browser.size(420, 5000)
    content = outcome_document(finished())
    link = content["links"][0]
    content["links"] = [link | {"name": f"n0/gpu{i}->n0/nvswitch0"} for i in range(8)]
    write_page(run_page(content), str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html")
    browser.until(DRAWN)
    box = "document.querySelector('[data-figure$=cluster]')"
    assert browser.run(f"{box}.getBoundingClientRect().right") <= 420
    assert browser.run(f"parseFloat(getComputedStyle({box}.querySelector('.annotation text')).fontSize)") >= 12
    quiet(browser)
    browser.size(1280, 5000)


def test_paper_is_white(browser: Browser, tmp_path: Path) -> None:
    """Printed from a dark screen: dark ink, no buttons."""
    write_page(run_page(document(circle())), str(tmp_path / "page.html"))
    browser.colours("dark")
    browser.open(tmp_path / "page.html")
    browser.until(DRAWN)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.colours("dark", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("document.querySelector('#download').offsetParent") is None
    browser.until("document.querySelector('.chart text').style.fill === 'rgb(27, 31, 36)'")
    browser.colours("light")
