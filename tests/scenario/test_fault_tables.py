"""The table of a fault is its rule: nothing about it is written twice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt, Le
from pydantic import ValidationError

from distsim.errors import UsageError
from distsim.scenario.file.schema import FAULT_TABLES, FaultTable, table_of
from distsim.sim.faults.fault import CallPoint, Rank, Rule, When


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheat(Rule):
    """A GPU that is too hot."""

    rank: Rank
    """Whose GPU it is."""
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Fraction of its clock
    that is left."""
    every_s: Annotated[float, Gt(0)] | None = None
    """How often (default: always)."""
    alarms: tuple[Literal["log", "mail"], ...] = ()
    """Who learns of it."""

    def __post_init__(self) -> None:
        if self.alarms and self.every_s is None:
            raise UsageError("expected every_s beside alarms")

    def check(self, cluster: Any, world_size: int) -> None:
        raise NotImplementedError


TABLE = table_of("overheat", Overheat)


def test_a_table_becomes_the_rule_that_it_was_derived_from() -> None:
    """Times have units, lists are tuples, the keys of the moment are the rule's `when`."""
    written = {"what": "overheat", "rank": 3, "every_s": "5ms", "alarms": ["log"], "call": "all_reduce #2", "for_s": 1}
    assert TABLE.model_validate(written).rule("faults[7]") == Overheat(
        path="faults[7]",
        rank=3,
        every_s=0.005,
        alarms=("log",),
        when=When(call=CallPoint(2, "all_reduce"), for_s=1.0),
    )
    assert TABLE.model_validate({"what": "overheat", "rank": 0}).rule("faults") == Overheat(rank=0)


REFUSED = {
    "rank": ({"rank": -1}, {"rank": 1.0}, {"rank": "1"}, {"rank": True}),
    "share": ({"share": 0}, {"share": 1.5}, {"share": float("nan")}),
    "every_s": ({"every_s": 0}, {"every_s": "5 parsecs"}, {"every_s": True}),
    "at_s": ({"at_s": -1}, {"at_s": "soon"}),
    "alarms": ({"alarms": ["siren"]}, {"alarms": "log"}),
    "call": ({"call": "the third"}, {"call": False}),
    "colour": ({"colour": "red"},),
    "": ({"at_s": 1, "call": 2}, {"alarms": ["log"]}),
}


@pytest.mark.parametrize(("key", "values"), [(key, values) for key, cases in REFUSED.items() for values in cases])
def test_a_table_refuses_what_the_rule_does_not_allow(key: str, values: dict[str, Any]) -> None:
    """The key that is wrong is named; a rule that contradicts itself is wrong as a whole."""
    with pytest.raises(ValidationError) as caught:
        TABLE.model_validate({"what": "overheat", "rank": 1, **values})
    assert {str(error["loc"][0]) if error["loc"] else "" for error in caught.value.errors()} == {key}


def test_the_docstrings_of_a_rule_are_the_descriptions_of_its_table() -> None:
    """Those of the class, of its fields and of its moment, as editors show them."""
    schema = TABLE.model_json_schema()
    described = {key: value["description"] for key, value in schema["properties"].items() if key != "what"}
    assert schema["description"] == "A GPU that is too hot."
    assert described["share"] == "fraction of its clock\nthat is left"
    assert described["after_s"] == "strike this long after the time or call"
    assert set(described) == {"rank", "share", "every_s", "alarms", "at_s", "call", "after_s", "for_s"}


@pytest.mark.parametrize("table", FAULT_TABLES.values(), ids=FAULT_TABLES)
def test_every_key_of_a_fault_is_a_field_of_its_rule(table: type[FaultTable]) -> None:
    """A table adds nothing but `what` and the keys of the moment."""
    own = {field.name for field in dataclasses.fields(table.rule_class)} - {"path", "when"}
    assert set(table.model_fields) == own | {"what"} | {field.name for field in dataclasses.fields(When)}
