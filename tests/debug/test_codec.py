"""Typed data is read as it was written, and what does not fit its type is one line."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from msgspec import Struct

from distsim.debug.records import Site
from distsim.debug.rings.files import RecordedWorld
from distsim.text.codec import Number, Rank, Unfit, Whole, convert, decode, encode, pack, plain, unpack


@dataclasses.dataclass
class Inner:
    ranks: tuple[Rank, ...] = ()
    seconds: Number | None = None


class Outer(Struct):
    name: str
    line: Whole = 0
    inner: Inner = Inner()
    by_rank: dict[int, Inner] | None = None


VALUE = Outer("a\n\u00e9", 3, Inner((1, 2), 1.5), {4: Inner()})


def test_both_forms_return_what_was_written() -> None:
    """Nested values, numbers as keys and letters beyond ASCII."""
    assert decode(encode(VALUE), Outer) == VALUE
    assert convert(plain(VALUE), Outer) == VALUE
    assert unpack(pack(VALUE), Outer) == VALUE


def test_text_of_a_document_is_printable() -> None:
    """Escape codes are shown, also as keys, and a file name that is not UTF-8 is no fault."""
    assert decode(b'{"a\\u001b": "\\u202e\\u00e9"}', dict[str, str]) == {"a\\x1b": "\\u202e\u00e9"}
    name = b"\xff.py".decode(errors="surrogateescape")
    assert decode(encode(Site(name, 1, "f")), Site).file == "\\udcff.py"
    assert unpack(pack(Site(name, 1, "f")), Site).file == "\\udcff.py"


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (b'{"line": 1}', "object missing required field name"),
        (b'{"name": 1}', "name: expected str, got int"),
        (b'{"name": "a", "line": -1}', "line: expected int >= 0"),
        (b'{"name": "a", "line": 1e400}', "number out of range|line"),
        (b'{"name": "a", "line": 9223372036854775808}', "line: expected int"),
        (b'{"name": "a", "inner": {"ranks": [0, 262144]}}', r"inner\.ranks\[1\]: expected int <= 262143"),
        (b'{"name": "a", "inner": {"seconds": NaN}}', "malformed|not a number"),
        (b'{"name": "a", "inner": ' + b"[" * 100_000, "expected object, got array"),
        (b'{"name": "a", "more": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"name": "\\u0007", "more": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"name": "a"', "truncated"),
        (b"\xff\xfe", "Expecting value"),
    ],
)
def test_what_does_not_fit_is_one_line(document: bytes, complaint: str) -> None:
    """Where it is, what was expected and what there is."""
    with pytest.raises(ValueError, match=complaint) as caught:
        decode(document, Outer)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("data", [b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc1", b"", b"\xdf\xff\xff\xff\xff"])
def test_no_size_that_is_claimed_is_believed(data: bytes) -> None:
    """A few bytes that name four billion items, and nesting without end."""
    kinds: list[Any] = [list[int], tuple[int, ...], dict[str, int], list[Any], Outer]
    for kind in kinds:
        with pytest.raises(ValueError, match=r"\w"):
            unpack(data, kind)


def test_a_wrong_type_and_a_torn_document_differ() -> None:
    """A reader may wait for the rest of the second one."""
    with pytest.raises(Unfit):
        decode(b"[1]", str)
    with pytest.raises(ValueError, match="truncated") as caught:
        decode(b'["a"', list[str])
    assert not isinstance(caught.value, Unfit)


def test_numbers_without_bounds_cross_over() -> None:
    """MessagePack has infinity and NaN."""
    there = unpack(pack((math.inf, -math.inf, math.nan)), tuple[float, float, float])
    assert repr(there) == "(inf, -inf, nan)"


def test_a_rank_is_below_the_size_of_its_world() -> None:
    """Else the numbers of a job would have no end."""
    for rank, fits in ((1, True), (2, False)):
        content = ["id", rank, 2, "default", "here:29500", False, ""]
        if fits:
            assert convert(content, RecordedWorld).rank == rank
        else:
            with pytest.raises(ValueError, match="expected a rank below"):
                convert(content, RecordedWorld)
