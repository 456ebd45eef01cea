"""The JSON report, for programs."""

from __future__ import annotations

import json
from pathlib import Path

from distsim.report import SCHEMA, report_document, write_report
from tests.documents import checked
from tests.golden import assert_golden
from tests.report.made import finished, raised

GOLDEN = Path(__file__).parent / "golden"


def test_the_report_reads_as_it_did(tmp_path: Path) -> None:
    """Every field, its name and its place."""
    write_report(finished(), str(tmp_path / "report.json"))
    document = checked((tmp_path / "report.json").read_text())
    document["version"] = "*"
    assert_golden(GOLDEN / "report.json", json.dumps(document, indent=1) + "\n")
    assert document["schema"] == SCHEMA == "distsim.report/1"


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    """The wall time of the simulation is nobody's result."""
    for name, wall_time_s in (("a", 1.0), ("b", 2.0)):
        run = finished()
        run.wall_time_s = wall_time_s
        write_report(run, str(tmp_path / name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_figures_that_are_not_finite_are_null() -> None:
    """JSON knows no infinity, and a strict reader refuses the word."""
    run = finished()
    run.links[0].bandwidth_bytes_per_s = float("inf")
    document = checked(report_document(run))
    assert document["links"][0]["bandwidth_bytes_per_s"] is None
    json.dumps(document, allow_nan=False)


def test_equal_failures_are_merged_and_carry_no_addresses() -> None:
    """Two ranks with one traceback are one entry; addresses differ from run to run."""
    failures = checked(report_document(raised()))["failures"]
    assert [failure["ranks"] for failure in failures] == [[0, 1], [3]]
    assert "0x7f" not in json.dumps(failures)
