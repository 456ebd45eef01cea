"""The pages of many runs: a suite of scenarios, a sweep."""

from __future__ import annotations

from distsim.report.html.draw.plots import PageEntry
from distsim.report.html.page import html, suite_page, sweep_page
from distsim.report.html.reports import outcome_document
from distsim.scenario.expect.result import NOT_RUN, Result, entry
from tests.report.html.pages import Seen, circle, document, unpacked
from tests.report.made import finished


def entries() -> list[PageEntry]:
    """Two points that ran and one that hung."""
    found = [
        PageEntry(
            f"s{nodes}", True, "healthy", document=outcome_document(finished()), settings={"cluster.nodes": nodes}
        )
        for nodes in (1, 2)
    ]
    found.append(
        PageEntry("s4", False, "deadlock_cycle", ["kind: wrong"], {"cluster.nodes": 4}, document=document(circle()))
    )
    for point, time_s in zip(found, (0.010, 0.0125, 0.001), strict=True):
        point.figures = {"virtual_time_s": time_s}
    return found


def test_the_index_of_a_suite_links_each_run() -> None:
    """Passed and failed, what came of each, and below it each run's own page with its wrong expectations."""
    seen = Seen(html(suite_page(entries(), "2 passed, 1 failed")))
    links = [value for tag, name, value in seen.attributes if (tag, name) == ("a", "href")]
    assert [link for link in links if link.startswith("#run")] == ["#run-1", "#run-2", "#run-3"]
    ids = {value for tag, name, value in seen.attributes if (tag, name) == ("article", "id")}
    assert ids == {"overview", "run-1", "run-2", "run-3"}
    assert "2 passed, 1 failed" in seen.text
    assert "kind: wrong" in seen.text
    assert set(unpacked(seen)["documents"]) == {"run-1", "run-2", "run-3"}


def test_a_sweep_has_bars_with_units_and_marks_what_failed() -> None:
    """Bars from zero in one unit, the failed point in a trace of its own, each leading to its run."""
    page = unpacked(Seen(html(sweep_page("step.toml", entries(), "virtual_time_s"))))
    figure = page["figures"]["overview-bars"]
    ran, failed = figure["data"]
    assert figure["layout"]["xaxis"]["title"]["text"] == "virtual time (ms)"
    assert figure["layout"]["xaxis"]["range"][0] == 0
    assert (ran["x"], ran["customdata"]) == ([10.0, 12.5], ["run-1", "run-2"])
    assert (failed["name"], failed["y"], failed["customdata"]) == ("failed", ["cluster.nodes=4"], ["run-3"])
    assert "deadlock_cycle" in failed["text"][0]


def test_a_point_of_a_sweep_is_judged_by_how_it_ended() -> None:
    """A scenario passes by what its file expects; a point of a sweep by its end alone: no hang, no limit."""
    made = {
        "well, as not expected": (Result("a", "x.toml", ["expect.kind: no"]), (False, True)),
        "a hang, as expected": (Result("b", "x.toml", kind="missing_rank", exit_code=3), (True, False)),
        "a limit, as expected": (Result("c", "x.toml", limit="events"), (True, False)),
        "it could not run": (Result("d", "x.toml", ["no"], kind=NOT_RUN), (False, False)),
    }
    assert {name: (entry(one).passed, entry(one, {"seed": 1}).passed) for name, (one, _) in made.items()} == {
        name: said for name, (_, said) in made.items()
    }


def test_efficiency_is_against_the_first_point() -> None:
    """Weak: the time should stay; strong: it should fall with the ranks. A failed point has none."""
    page = unpacked(Seen(html(sweep_page("step.toml", entries(), "virtual_time_s"))))
    weak, strong = page["figures"]["overview-efficiency"]["data"]
    assert weak["x"] == [100.0, 80.0, None]
    assert strong["x"] == [100.0, 40.0, None]


def test_no_efficiency_where_ranks_do_not_vary() -> None:
    """A sweep over seeds has bars only."""
    points = [PageEntry("s", True, "healthy", settings={"seed": n}, figures={"virtual_time_s": 1.0}) for n in (1, 2)]
    page = sweep_page("step.toml", points, "virtual_time_s")
    assert [part.name for part in page.parts] == ["bars"]


def test_of_very_many_runs_those_that_failed_are_whole() -> None:
    """A page holds sixty; the others are in the table, and a line counts them."""
    many = [PageEntry(f"s{n}", n != 99, "healthy", document=outcome_document(finished())) for n in range(100)]
    page = suite_page(many, "99 passed, 1 failed")
    assert len(page.runs) == 60
    assert page.runs[-1].key == "run-100"
    assert "40 more runs are in the table only" in page.lines[1]
    assert len(page.tables[0].rows) == 100
