"""The page of one run, without a browser: its texts, its data, that nothing in it comes from outside."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.silent.facts import Severity, SilentFinding, SilentKind
from distsim.debug.messages import group_name
from distsim.debug.records import Site
from distsim.debug.records.kinds import Kind
from distsim.report.document import report_document
from distsim.report.html.collect import thinned
from distsim.report.html.draw.drawing import cluster
from distsim.report.html.draw.plots import ACCUSED
from distsim.report.html.draw.tables import table
from distsim.report.html.draw.timeline import timeline
from distsim.report.html.draw.training import memory_plot
from distsim.report.html.page import html, run_page
from distsim.report.html.reports import outcome_document, records_document
from tests.debug.builders import all_reduce, fail, finding, play
from tests.report.html.pages import Seen, circle, document, many_ranks, seen_of, unpacked
from tests.report.made import finished

REST = ("gradients", "optimizer", "communication")
LOADING = ("src", "href", "action", "data", "poster", "srcset", "xlink:href")


@pytest.fixture(scope="module")
def hang() -> Seen:
    """Two ranks in a circle, a message without an other end."""
    return seen_of(document(circle()))


def test_the_verdict_says_kind_ranks_lines_next_and_replay(hang: Seen) -> None:
    """Part one: who, where, six lines of source round each place, what to do, how to see it again."""
    assert "HANG deadlock cycle · ranks 0,1" in hang.text
    assert "ranks 0,1 wait" in hang.text.lower() or "wait for each other" in hang.text
    for number in range(3, 9):
        assert f"{number} statement_{number}()" in hang.text
    assert "next:" in hang.text
    assert "replay: distsim diagnose DIR copy" in hang.text


def test_two_groups_of_the_same_ranks_are_told_apart(hang: Seen) -> None:
    """Who waits in which group is said of the rank's own call, also where only the report is left."""
    for page in (hang, seen_of({**document(circle()), "picture": None})):
        assert "rank 0 waits in all_reduce #1 on tp, train.py:5" in page.text
        assert "rank 1 waits in all_reduce #1 on dp, train.py:5" in page.text


def test_lanes_have_computing_waiting_and_open_calls() -> None:
    """Part two: a simulated run's lanes; late members make others wait, and a click finds the record."""
    page = unpacked(seen_of(outcome_document(finished())))
    traces = {trace["name"]: trace for trace in page["figures"]["run-lanes"]["data"]}
    assert traces["computing"]["y"] == [0, 1]
    assert traces["computing"]["x"] == pytest.approx([0.8, 2.8])
    waits = traces["waiting for others"]
    assert "all_reduce #2 on default_pg" in waits["hovertext"]
    assert waits["marker"]["pattern"]["shape"] == "/"
    calls = page["calls"]["run"]
    assert calls[waits["customdata"][0]]["line"] == "train.py:12 in step"


def test_of_very_many_slices_short_neighbours_are_merged_but_no_open_call() -> None:
    """A lane keeps what can be drawn: neighbours of one kind become one that says how many it is; what never ended
    stands by itself."""
    short = [("computing", 0.01 * n, 0.01 * n + 0.009, "compute", None) for n in range(1000)]
    never = [("open", 9.0 + 0.001 * n, 9.0005 + 0.001 * n, f"all_reduce #{n}", None) for n in range(5)]
    left = thinned([*short, *never], 10.0, 50)
    assert [piece for piece in left if piece[0] == "open"] == never
    merged = [piece for piece in left if piece[0] == "computing"]
    assert len(merged) <= 45
    assert sum(int(text.rpartition("and ")[2].split()[0]) + 1 for _, _, _, text, _ in merged if "and" in text) >= 900


def test_an_open_call_fades_out_behind_the_end(hang: Seen) -> None:
    """Part two: what never ended has a tail of falling opacity."""
    traces = [t for t in unpacked(hang)["figures"]["run-lanes"]["data"] if t["name"] == "never ended"]
    opacity = [trace["marker"].get("opacity", 1.0) for trace in traces]
    assert opacity == sorted(opacity, reverse=True)
    assert len(set(opacity)) > 3


def test_the_wait_for_graph_has_calls_groups_and_lines(hang: Seen) -> None:
    """Part three: the circle is red, an edge says which call on which group at which line."""
    figure = unpacked(hang)["figures"]["run-waits"]
    (arrows,) = (trace for trace in figure["data"] if trace["line"]["color"] == ACCUSED)
    assert {text for text in arrows["hovertext"] if text} == {
        "rank 0 in all_reduce #1 on tp, train.py:5",
        "rank 1 in all_reduce #1 on dp, train.py:5",
    }
    assert sum(size > 0 for size in arrows["marker"]["size"]) == 2
    names = [note["text"].partition("<br>")[0] for note in figure["layout"]["annotations"] if "bgcolor" in note]
    assert names[:2] == ["rank 0", "rank 1"]
    assert ("div", "aria-label", figure["layout"]["meta"]["words"]) in hang.attributes


def test_two_ranks_that_wait_for_each_other_have_a_text_on_either_side(hang: Seen) -> None:
    """Both arrows are on one line: one text is to its left, the other to its right, each at its arrow."""
    notes = unpacked(hang)["figures"]["run-waits"]["layout"]["annotations"]
    one, other = (note for note in notes if note.get("font") == {"color": ACCUSED})
    assert {one["xanchor"], other["xanchor"]} == {"left", "right"}
    assert abs(one["y"] - other["y"]) > 20


def test_a_group_that_has_only_a_number_is_called_a_group() -> None:
    """`on 1` would read as a rank or a node."""
    assert (group_name("1"), group_name("dp")) == ("group 1", "dp")


def test_a_graph_is_drawn_from_the_diagnosis_alone() -> None:
    """A plain report has no records; who waits for whom is still there, and what is lacking is said."""
    plain = document(circle())
    del plain["picture"]
    seen = seen_of(plain)
    assert "all_reduce #1" in str(unpacked(seen)["figures"]["run-waits"])
    assert seen.text.count("This report has no records to draw") == 1


def test_stacks_are_an_icicle_of_ranks() -> None:
    """Part four: widths are ranks, and the one rank of many is wide enough to be seen."""
    figure = unpacked(seen_of(document(many_ranks(100, 3))))["figures"]["run-stacks"]
    (trace,) = figure["data"]
    widths = dict(zip(trace["labels"], trace["values"], strict=True))
    assert widths["step  train.py:5"] == 99
    assert widths["load  data.py:9"] >= 4
    assert "ranks 0-2,4-99" in trace["text"]


def test_the_times_say_whose_they_are_and_how_sure() -> None:
    """The collectives' software and the step's interval, as the terminal has them; neither where a report has none."""
    training = {"step_time_s": 0.0004, "step_low_s": 0.0003, "step_high_s": 0.0005, "step_regime": "one node"}
    training |= {"num_gpus": 8, "gpu": "h100"}
    report = report_document(finished()) | {"software": "NCCL 2.21.5, aws-ofi-nccl 1.9.1", "training": training}
    text = seen_of(report).text
    assert "software assumed: NCCL 2.21.5, aws-ofi-nccl 1.9.1" in text
    assert "step 400 us 300 us to 500 us in 8 cases of 10" in text
    text = seen_of(report | {"training": training | {"num_gpus": 4096, "gpu": "mi355x"}}).text
    assert "in 8 cases of 10; no measurement at this size: the largest published step has 512 GPUs" in text
    assert "no published step on mi355x" in text
    unsure = {"step_time_s": 0.0004, "step_low_s": None, "step_high_s": None}
    text = seen_of(report | {"software": None, "training": unsure}).text
    assert "software" not in text
    assert "step 400 us" in text
    assert "in 8 cases" not in text


def test_the_first_screen_of_training_has_figures_and_bars() -> None:
    """Step, tokens, MFU and memory; where a step goes, what memory holds, what would help."""
    memory = {"activations": 6 << 30, "parameters": 2 << 30, "other": 0}
    parts = {"compute_s": 0.6, "exposed_s": 0.3, "bubble_s": 0.0, "host_s": 0.05, "saving_s": 0.05}
    rank = {"rank": 3, "step_s": 1.0, **parts, "memory": memory}
    training = {
        "step_time_s": 1.0, "tokens_per_s": 8000.0, "num_gpus": 8, "gpu": "h100", "mfu": 0.4,
        "peak_memory_bytes": 10 << 30, "gpu_memory_bytes": 81 << 30, "context_bytes": 1 << 30,
        "ranks": [rank | {"peak_allocated_bytes": 8 << 30, "peak_reserved_bytes": 10 << 30}],
        "gains": [{"name": "ideal network", "how": "communication takes no time", "step_s": 0.75}],
        "cost": {"tokens": 1e12, "seconds": 1e6, "price": 10.0, "price_basis": "list price", "amount": 2.5e5},
    }  # fmt: skip
    text = seen_of(report_document(finished()) | {"training": training}).text
    for shown in (
        "tokens/s 8,000 1,000 per GPU",
        "cost 250k 1T tokens in 11.6 days, 10 a GPU hour (list price)",
        "peak memory 10 GiB 12% of 80 GiB",
        "Step time of rank 3",
        "checkpoints 50 ms, 5.0%",
        "exposed communication 300 ms, 30.0%",
        "reserved, not allocated 2 GiB, 2.5%",
        "ideal network: communication takes no time 25.0% less",
    ):
        assert shown in text, shown
    assert "bubble 0" not in text


def test_memory_is_drawn_over_the_step_with_its_peak() -> None:
    """An area a kind that matters, and the highest point with its bytes."""
    curve = [{"parameters": 1 << 30, "activations": n << 30, "other": 0} | dict.fromkeys(REST, 0) for n in (1, 5, 2)]
    plot = memory_plot({"memory_curve": curve})
    assert plot is not None
    assert [(area["name"], area["y"]) for area in plot["data"]] == [
        ("parameters", [1, 1, 1]),
        ("activations", [1, 5, 2]),
    ]
    (mark,) = plot["layout"]["annotations"]
    assert (mark["text"], mark["y"]) == ("peak 6 GiB", 6)
    assert memory_plot({}) is None


def test_steps_and_checkpoints_are_bands_below_the_lanes() -> None:
    """Every second step is shaded; a checkpoint has a band of its own; both are named."""
    picture = outcome_document(finished())["picture"]
    plain = timeline(picture)
    steps = [[0.0, 0.001, "step 1"], [0.001, 0.003, "step 2"], [0.003, 0.004, "checkpoint"]]
    banded = timeline(picture | {"steps": steps})
    assert plain is not None
    assert banded is not None
    assert not plain["layout"]["shapes"]
    assert [shape["x1"] - shape["x0"] for shape in banded["layout"]["shapes"]] == pytest.approx([2.0, 1.0])
    assert [note["text"] for note in banded["layout"]["annotations"]] == ["step 1", "step 2", "checkpoint"]


@pytest.mark.parametrize(("groups", "switch"), [(1, "group0/switch0"), (12, "group*/switch*")])
def test_every_nic_is_drawn_to_its_switch(groups: int, switch: str) -> None:
    """Also where the fabric has groups with switches of their own; very many are drawn as one."""
    names = ["n0/gpu0->n0/nic0", *(f"n0/nic0->group{n}/switch{n}" for n in range(groups)), "group0/switch0->n1/nic0"]
    figures = {"mean_utilisation": 0.5, "peak_utilisation": 1.0, "bandwidth_bytes_per_s": 1e9}
    figure = cluster([{"name": name, **figures} for name in names])
    assert figure is not None
    boxes = {note["hovertext"]: note["y"] for note in figure["layout"]["annotations"]}
    assert sorted(boxes) == sorted([switch, "n0/gpu0", "n0/nic0", "n1/nic0"])
    joined = {text.partition(":")[0] for trace in figure["data"] for text in trace["hovertext"] if text}
    assert joined == {"n0/gpu0 - n0/nic0", f"{switch} - n0/nic0", f"{switch} - n1/nic0"}
    assert boxes[switch] > boxes["n0/nic0"]


def test_links_are_a_heat_map_with_faults_as_bands() -> None:
    """Part six: percent in use by link and time; a planted fault from when to when."""
    page = unpacked(seen_of(outcome_document(finished(), faults=[(0.003, 0.004, "link cut")])))
    figure = page["figures"]["run-links"]
    assert figure["data"][0]["z"][0][0] == 97
    assert figure["data"][0]["y"] == ["n0/gpu0-&gt;n0/nvswitch0"]
    (band,) = figure["layout"]["shapes"]
    assert (band["x0"], band["x1"]) == pytest.approx((3.0, 4.0))
    assert figure["layout"]["annotations"][0]["text"] == "link cut"


def test_the_cluster_is_drawn_with_what_its_links_had_in_use() -> None:
    """Part six: boxes of the parts that carried bytes, a line says how much under the pointer, and in its colour."""
    figure = unpacked(seen_of(report_document(finished())))["figures"]["run-cluster"]
    assert {"n0/gpu0", "n0/nvswitch0", "n0/nic0", "leaf0"} <= {note["text"] for note in figure["layout"]["annotations"]}
    lines = {text: trace["name"] for trace in figure["data"] for text in trace["hovertext"]}
    text = next(text for text in lines if "50.0 GB/s, 93.0% in use on average, 100% at its peak" in text)
    assert lines[text] == "from 90%"


def test_tables_sort_by_values_and_the_json_is_whole() -> None:
    """Part seven: cells carry the number that sorting goes by; the page's JSON is the report, with its picture."""
    report = outcome_document(finished())
    seen = seen_of(report)
    assert ("td", "data-v", "4096.0") in seen.attributes
    assert unpacked(seen)["documents"]["run"] == report
    assert {"picture", *report_document(finished())} == set(report)


def test_small_figures_and_none_are_told_as_in_a_terminal() -> None:
    """A barrier has no bandwidth, a few bytes have next to none; a figure that is not there stands with the others."""
    report = outcome_document(finished())
    one = dict(report["collectives"][0], algbw_bytes_per_s=78_500.0, busbw_bytes_per_s=0.0)
    report["collectives"] = [one, dict(one, busbw_bytes_per_s=78e9, time_s=None)]
    report["links"] = [dict(report["links"][0], mean_utilisation=0.0001, peak_utilisation=0.0)]
    page = html(run_page(report))
    for cell in ('8500.0">78.5 kB/s<', '"0.0">-<', '0001">&lt;0.1%<', '"0.0">0.0%<', '<td class="n">-<'):
        assert cell in page


def test_nothing_is_loaded_from_anywhere(hang: Seen) -> None:
    """No address in any attribute that a browser loads from, none in the styles, and a policy that forbids it."""
    loaded = [value for tag, name, value in hang.attributes if name in LOADING and tag != "a"]
    assert loaded == []
    assert all(value.startswith("#") for tag, name, value in hang.attributes if (tag, name) == ("a", "href"))
    policy = next(value for tag, name, value in hang.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy
    css = (Path(__file__).parents[3] / "distsim/report/html/templates/page.css").read_text()
    assert not re.search(r"@import|url\((?!#)", css)


def test_what_the_program_says_is_text() -> None:
    """A group named <script>, a line of source with a tag, a file name with quotes: none is markup anywhere."""
    evil = "<script>alert(1)</script>"
    source = "\n".join([f"x = '{evil}'"] * 20)
    found = circle(tp=evil, file_text=source)
    for records in found.records.values():
        for record in records:
            record.site = (
                Site('"><img src=x onerror=alert(2)>.py', record.site.line, record.site.function)
                if record.site
                else None
            )
    found.sources = {'"><img src=x onerror=alert(2)>.py': source}
    page = html(run_page(document(found, replay=f"distsim run {evil}")))
    seen = Seen(page)
    assert seen.tags.count("script") == 3
    assert "img" not in seen.tags
    assert evil not in page
    assert not any(name.startswith("on") for _, name, _ in seen.attributes)
    assert f"all_reduce #1 on {evil}" in seen.text
    figures = unpacked(seen)["figures"]
    shown = [text for trace in figures["run-lanes"]["data"] for text in trace.get("hovertext", ())]
    assert any("&lt;script&gt;" in text for text in shown)
    assert not any("<script" in text for text in shown)


def test_what_a_browser_would_obey_is_shown_as_it_is_written() -> None:
    """Marks that turn the direction of text come as their escapes."""
    seen = seen_of(document(circle(tp="tp\u202eevil")))
    assert "\\u202e" in seen.text
    assert "\u202e" not in seen.text


@pytest.mark.slow
def test_a_thousand_ranks_fit_into_six_megabytes() -> None:
    """The budget, with a lane for ranks that do the same, and what was left out is said."""
    page = html(run_page(document(many_ranks(1024, 6))))
    assert len(page) < 6_000_000
    seen = Seen(page)
    assert "2 kinds of 1,024 ranks" in seen.text
    assert [trace["y"] for trace in unpacked(seen)["figures"]["run-lanes"]["data"]]


def test_more_kinds_of_ranks_than_lanes_are_counted() -> None:
    """A hundred ranks of which no two do the same: the accused are among the lanes, the rest are counted."""
    evidence = play(100, lambda rank: [all_reduce(3 + rank), *([fail("ValueError: no", 9)] if rank == 99 else [])])
    made = document(evidence)
    assert len(made["picture"]["lanes"]) == 64
    assert any(99 in lane["ranks"] for lane in made["picture"]["lanes"])
    assert "Left out: 36 ranks of 36 more kinds." in made["picture"]["left_out"]["lanes"]


@pytest.mark.slow
def test_ten_thousand_findings_stay_usable() -> None:
    """A dozen in full, the others a line for each kind and place; the JSON has all."""
    evidence = circle()
    evidence.findings = [finding(Kind.NAN, 2, text=f"gradient {number} is NaN") for number in range(10_000)]
    diagnoses = diagnose(evidence)
    many = [d for d in diagnoses for _ in range(10_000 // len(diagnoses) + 1)][:10_000]
    page = html(run_page(records_document(many, evidence)))
    seen = Seen(page)
    assert len(page) < 6_000_000
    assert len(unpacked(seen)["documents"]["run"]["diagnoses"]) == 10_000
    assert sum(value == "diagnosis" for _, name, value in seen.attributes if name == "class") == 12
    assert "different)" in seen.text


def test_a_run_with_no_record_has_a_page_that_says_so() -> None:
    """Nothing happened: one line says so, parts without anything to show are left out, and the verdict stands."""
    empty = replace(finished(), records={}, compute={}, links=[], link_samples=[], collectives=[])
    seen = seen_of(outcome_document(empty))
    assert "FINISHED" in seen.text
    assert "No call and no computation" in seen.text
    assert "Who waits for whom" not in seen.text


@pytest.mark.parametrize("name", ["lanes", "waits", "stacks", "links", "cluster"])
def test_plotly_knows_every_name_in_a_figure(name: str) -> None:
    """plotly.py's own check of traces and layouts, which plotly.js passes over in silence."""
    report = outcome_document(finished(), faults=[(0.003, None, "cut")])
    if name in ("waits", "stacks"):
        report = document(circle())
    figure: dict[str, Any] = unpacked(seen_of(report))["figures"][f"run-{name}"]
    made = graph_objects.Figure(figure)
    assert len(made.data) == len(figure["data"])


def test_equal_reports_give_equal_pages() -> None:
    """Nothing of the clock or of hashes is in a page."""
    report = document(circle())
    assert html(run_page(report)) == html(run_page(report))


def test_silent_findings_stand_under_the_verdict() -> None:
    """Kind, ranks, tensors, step, why and next of each; what came from the program is text, and never markup."""
    silent = SilentFinding(
        SilentKind.REPLICAS_DIVERGE,
        Severity.ERROR,
        (0, 1),
        ("<b>ln.weight", "ln.bias"),
        3,
        Site("train.py", 41, "train"),
        "DistributedDataParallel keeps them equal.",
        "The gradients differ.",
        "Reduce them.",
        0.41,
    )
    page = seen_of({**outcome_document(finished()), "silent": [silent.to_json()]})
    section = page.text[page.text.index("Silent wrong results (1)") :]
    assert "ERROR replicas diverge · ranks 0,1 · <b>ln.weight, ln.bias at step 3" in section
    assert "The gradients differ. DistributedDataParallel keeps them equal." in section
    assert "train.py:41 in train" in section
    assert "distance: 0.41" in section
    assert "next: Reduce them. See docs/silent.md#replicas_diverge" in section
    assert "Silent wrong results" not in seen_of(outcome_document(finished())).text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("end_s", 0.002, "2 ms"), ("low_us", 5.0, "5 us"), ("bytes", 2048, "2 KiB"), ("busy_bytes_per_s", 0, "-"),
     ("mean_utilisation", 0.25, "25.0%"), ("count", 12_000, "12,000"), ("op", "send", "send"), ("line", None, "-")],
)  # fmt: skip
def test_a_cell_has_the_unit_of_its_column(name: str, value: object, text: str) -> None:
    """The end of a key's name says what its value is."""
    cells = table("t", {name: "head", "x": "y"}, [{name: value, "x": 1}]).rows[0]
    assert [cell.text for cell in cells][-2:] == ([text, "1"] if value is not None else ["1"])
