"""`distsim schema`: each report's JSON Schema is made from its type, and changes only where somebody means it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distsim.cli import main
from distsim.cli.agents.schema import REPORTS, json_schema
from distsim.errors import UsageError
from tests.documents import checked
from tests.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden" / "schemas"
OWN = sorted(REPORTS.keys() - {"scenario"})
"""Reports; the scenario file's schema is held by tests/scenario."""


@pytest.mark.parametrize("name", OWN)
def test_a_schema_is_the_published_one(name: str) -> None:
    """Whoever takes a key away sees that here: it makes the version 2."""
    assert_golden(GOLDEN / f"{name}.json", json.dumps(json_schema(name), indent=1) + "\n")


@pytest.mark.parametrize("name", OWN)
def test_a_schema_names_its_report_and_explains_it(name: str) -> None:
    """Whoever has only the schema knows what it is for."""
    schema = json_schema(f"distsim.{name}/1")
    assert schema["$id"] == schema["properties"]["schema"]["const"] == f"distsim.{name}/1"
    assert schema["description"]


def test_the_command_lists_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """All names with a line each, or one schema."""
    assert main(["schema"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(REPORTS)
    assert main(["schema", "fits"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema("fits")


def test_the_schema_of_scenario_files_is_the_one_that_editors_get(capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands print it."""
    assert main(["scenario", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema("scenario")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("memory", "expected one of report, events, fits"),
        ("report/2", "expected report or report/1, the version that this distsim writes, got 'report/2'"),
    ],
)
def test_an_unknown_schema_is_one_line(name: str, expected: str) -> None:
    """It says which there are."""
    with pytest.raises(UsageError, match=expected):
        json_schema(name)


@pytest.mark.parametrize(
    "document",
    [
        {"schema": "distsim.sweep/1", "scenario": "x", "points": [], "more": 1},
        {"schema": "distsim.sweep/1", "scenario": "x"},
        {"schema": "distsim.sweep/1", "scenario": 3, "points": []},
    ],
    ids=["a key too many", "a key too few", "another type"],
)
def test_reports_in_tests_are_held_to_their_types(document: dict[str, Any]) -> None:
    """The check of all other tests can fail."""
    with pytest.raises(ValueError, match="1 validation error"):
        checked(document)
