"""What memory was taken for, when most of it was in use."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from distsim.sim.device.allocator.allocator import ACTIVATIONS, GRADIENTS, KINDS, MOST_POINTS, OTHER, Ledger
from distsim.sim.device.allocator.claims import site_reader


def test_a_ledger_finds_the_peak_by_what_is_known_later() -> None:
    """What was a gradient is known at the end of the step; at the peak it counts as one."""
    ledger = Ledger()
    ledger.born(10)
    ledger.kind = ACTIVATIONS
    activation, gradient = ledger.born(100), ledger.born(30)
    ledger.died(activation)
    gradient.kind = GRADIENTS
    ledger.settle()
    assert (ledger.peak_bytes, ledger.in_use) == (140, 40)
    assert {kind: n for kind, n in ledger.peak.items() if n} == {OTHER: 10, ACTIVATIONS: 100, GRADIENTS: 30}
    assert not ledger.has_risen
    ledger.born(90)
    ledger.settle()
    assert ledger.peak_bytes == 140, "130 bytes are no new peak"
    assert ledger.now()[ACTIVATIONS] == 90


def test_the_curve_is_that_of_the_step_with_the_peak() -> None:
    """Bytes by kind over its allocations, by what is known at its end; a later, lower step leaves it as it is."""
    ledger = Ledger()
    ledger.born(10)
    ledger.kind = ACTIVATIONS
    gradient = ledger.born(30)
    ledger.died(ledger.born(60))
    gradient.kind = GRADIENTS
    ledger.settle()
    ledger.died(ledger.born(5))
    ledger.settle()
    curve = [tuple(held[kind] for kind in (OTHER, GRADIENTS, ACTIVATIONS)) for held in ledger.peak_curve]
    assert curve == [(10, 0, 0), (10, 30, 0), (10, 30, 60), (10, 30, 0)]


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    """Each part shows its maximum."""
    ledger = Ledger()
    for number in range(1000):
        ledger.died(ledger.born(500 if number == 700 else 1))
    ledger.settle()
    assert len(ledger.peak_curve) <= MOST_POINTS
    assert max(held[OTHER] for held in ledger.peak_curve) == 500


def test_names_of_modules_outlast_a_peak_a_little_higher() -> None:
    """Only one step's allocations have names; one that needs more by a buffer is not said to be of no module."""
    ledger = Ledger()
    ledger.named, ledger.module = True, "conv"
    ledger.died(ledger.born(100))
    ledger.settle()
    ledger.named, ledger.module = False, ""
    ledger.died(ledger.born(110))
    ledger.settle()
    assert (ledger.peak_bytes, ledger.peak_modules) == (110, {"conv": 100})
    ledger.born(200)
    ledger.settle()
    assert (ledger.peak_bytes, ledger.peak_modules) == (200, {"": 200})


def test_a_peak_is_the_sum_of_its_sites() -> None:
    """Bytes and number by kind and site, of what was there at the peak."""
    ledger = Ledger()
    sites = iter("abaac")
    ledger.site_of = lambda: next(sites)
    ledger.born(10)
    ledger.born(20)
    ledger.kind = ACTIVATIONS
    ledger.born(30)
    ledger.died(ledger.born(40))
    ledger.born(1)
    ledger.settle()
    assert ledger.peak_sites == {(OTHER, "a"): [10, 1], (OTHER, "b"): [20, 1], (ACTIVATIONS, "a"): [70, 2]}
    assert ledger.now() == {**dict.fromkeys(KINDS, 0), OTHER: 30, ACTIVATIONS: 31}


def test_an_equal_peak_counts_where_names_are_kept() -> None:
    """So that the step with names stands for those before; without names the first stands."""
    ledger = Ledger()
    for kind, module, peak_kind in ((OTHER, "", OTHER), (ACTIVATIONS, "", OTHER), (ACTIVATIONS, "conv", ACTIVATIONS)):
        ledger.kind, ledger.module, ledger.named = kind, module, bool(module)
        ledger.died(ledger.born(100))
        ledger.settle()
        assert (ledger.peak[peak_kind], ledger.peak_bytes) == (100, 100)
    assert ledger.peak_modules == {"conv": 100}


def test_a_site_is_the_users_line_with_the_operator_and_its_tensor() -> None:
    """Of an operator's result; a buffer has neither."""
    ledger = Ledger()
    ledger.site_of = site_reader(ledger, SimpleNamespace(operator=torch.ops.aten.add.Tensor))
    ledger.shape = (2, 3), torch.float32
    sites = [ledger.born(1).site for _ in range(2)]
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert [(site.file, site.line, site.operator, site.tensor) for site in sites] == [
        (__file__, line, "add", "float32[2,3]"),
        (__file__, line, "buffer", ""),
    ]


NEW = [
    # names are kept, bytes of a second step after one of 100 -> whether its kinds are those of the peak
    (False, 99, False, "less"),
    (False, 100, False, "the first of two alike stands"),
    (False, 101, True, "more"),
    (True, 99, False, "less, with or without names"),
    (True, 100, True, "with names the later of two alike stands"),
]


@pytest.mark.parametrize(("named", "nbytes", "is_new", "reason"), NEW)
def test_which_of_two_steps_has_the_peak(named: bool, nbytes: int, is_new: bool, reason: str) -> None:
    """The larger one; names of modules decide between equals."""
    ledger = Ledger()
    ledger.died(ledger.born(100))
    ledger.settle()
    ledger.kind, ledger.named = ACTIVATIONS, named
    ledger.died(ledger.born(nbytes))
    assert ledger.has_risen is is_new
    ledger.settle()
    assert (ledger.peak[ACTIVATIONS] > 0) is is_new, reason


def test_a_ledger_begins_with_nothing() -> None:
    """One byte is its first peak, and of no module."""
    ledger = Ledger()
    assert (set(ledger.peak.values()), ledger.peak_modules, ledger.has_risen) == ({0}, {}, False)
    ledger.born(1)
    ledger.settle()
    assert (ledger.peak_bytes, ledger.peak[OTHER], ledger.peak_modules) == (1, 1, {"": 1})


@pytest.mark.parametrize(("events", "points"), [(2, 2), (240, 240), (242, 121), (480, 240), (482, 161)])
def test_a_curve_has_at_most_240_points(events: int, points: int) -> None:
    """Of so many allocations and frees each."""
    ledger = Ledger()
    for _ in range(events // 2):
        ledger.died(ledger.born(1))
    ledger.settle()
    assert len(ledger.peak_curve) == points
