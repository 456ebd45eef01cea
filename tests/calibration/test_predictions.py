"""Predictions of what was left out, and the intervals that are made of them."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest

from distsim.calibration.compare import Bench, MeasuredTable, read_tables
from distsim.calibration.predictions import predicted, split
from distsim.cluster import load_cluster
from distsim.collectives.constants import nccl_constants
from distsim.collectives.uncertainty import SIZES, interval
from tools.fitting.coverage import Error, Widths, covered, ratios
from tools.fitting.fit import left_out_toml, narrowest, without
from tools.fitting.least_squares import fit


def tables(*parts: str) -> list[MeasuredTable]:
    """Tables of the package by parts of their names."""
    return [table for table in read_tables() if any(part in table.name for part in parts)]


def test_a_machine_left_out_is_predicted_without_its_constants() -> None:
    """Sockets were measured on Polaris alone: left out, they are predicted with what other fabrics say."""
    (one,) = predicted(tables("n2x4_nccl2.21_setup1_all_gather"))
    assert one.left_out_us is not None
    assert abs(one.left_out_us / one.fitted_us - 1.0).max() > 0.2
    assert one.few_nodes_us is None


@pytest.mark.parametrize("machine", ["aws_p4de_a100", "aws_p5_n2x8"])
def test_one_efa_tells_of_the_other_what_a_plugins_latency_is_worth(machine: str) -> None:
    """Both plugins tell a latency a fifth to a quarter too long: left out, either is predicted from the other."""
    (one,) = predicted(tables(machine))
    assert one.left_out_us is not None
    small = one.bench.regimes == 0
    assert np.median(abs(one.left_out_us / one.bench.measured_us - 1.0)[small]) < 0.15


def test_more_nodes_are_predicted_from_two() -> None:
    """A table of 256 nodes has a prediction by constants of one and two nodes."""
    (one,) = predicted(tables("n256x4_nccl2.21_setup5_all_gather"))
    assert one.few_nodes_us is not None
    assert (one.fabric, one.nodes) == ("slingshot", "32 and more")


def test_every_kind_of_prediction_has_its_line() -> None:
    """The table goes by constants, fabric and nodes; what shares machine and node count with a fitted one is fitted."""
    cells = split(predicted(tables("snellius_h100_n2x4_all_gather", "polaris_a100_n8x4_nccl2.21_setup5_all_gather")))
    lines = {(cell.kind, cell.fabric, cell.nodes) for cell in cells}
    assert ("machine left out", "ib", "2 nodes") in lines
    assert ("more nodes left out", "slingshot", "3 to 31") in lines
    assert ("more nodes left out", "ib", "2 nodes") not in lines
    assert ("fitted", "all", "all") in lines


@pytest.mark.slow
def test_intervals_hold_eight_in_ten_of_a_machine_they_know_nothing_of() -> None:
    """Over all machines left out: 80 to 85 % of the points with intervals that saw none of the machine's errors;
    half-widths of these at most twice the median error."""
    found = covered(predicted(read_tables()))
    assert found is not None
    assert 0.8 <= found.alone <= 0.85
    assert found.alone <= found.share <= 0.9
    assert found.half_width <= 2.0 * found.error


def error(machine: str, value: float, fabric: str = "ib", size: str = SIZES[1]) -> Error:
    """One of the middle size."""
    return Error(machine, fabric, size, value)


def test_a_width_is_held_to_others_by_how_few_machines_stand_behind_it() -> None:
    """InfiniBand on twelve machines has nearly its own errors, a fabric of one nearly those of all."""
    errors = [error(f"m{number}", 0.1) for number in range(12)] + [error("lone", 0.4, "efa")]
    widths = Widths(errors)
    assert widths.of("ib", SIZES[1]) == pytest.approx(0.1, rel=0.05)
    assert 0.12 < widths.of("efa", SIZES[1]) < 0.3


def test_the_reach_of_widths_is_asked_of_machines_they_do_not_know() -> None:
    """Nine machines err by 0.1 and one by 0.5: measured in what the others say, five times as far; its own errors are
    in none of these widths."""
    errors = [error(f"m{number}", 0.1) for number in range(9)] + [error("odd", 0.5)]
    found = dict(ratios(errors))
    assert found["odd"] == pytest.approx(5.0)
    assert found["m0"] == pytest.approx(1.0)


def test_a_fit_knows_what_it_would_be_without_a_machine() -> None:
    """Left out of a finished fit, a machine's tables leave what a fit without them finds."""
    truth, name = nccl_constants(), "hopper.efficiency_Simple"
    benches = []
    for part, factor in (("together_h100_n1x8_ring_all_gather", 1.0), ("xxrjun_h100_n1x8_all_gather", 1.1)):
        bench = Bench.of(tables(part)[0])
        bench.use(truth.changed({name: truth.values[name] * factor}))
        times = zip(bench.table.rows, bench.times_us().tolist(), strict=True)
        rows = tuple(replace(row, time_us=time_us) for row, time_us in times)
        benches.append(Bench(replace(bench.table, rows=rows), bench.compiler, bench.devices))
    both = fit(benches, truth, [name])
    alone = fit(benches[:1], truth, [name])
    assert without(both.end, lambda table: table.machine == "xxrjun")[name] == pytest.approx(
        alone.constants.values[name], rel=0.01
    )
    assert both.constants.values[name] > 1.01 * alone.constants.values[name]
    kept = tomllib.loads(left_out_toml(both, [bench.table for bench in benches]))
    assert list(kept) == ["together-h100", "xxrjun", "1 and 2 nodes"]
    assert kept["xxrjun"][name] < both.constants.values[name] < kept["together-h100"][name]


def test_a_slow_machine_stays_that_machines() -> None:
    """One cluster loses ten times as much with more nodes as another: most of that is its own, not the fabric's."""
    truth, name = nccl_constants(), "ib.loss"
    benches = []
    for part, factor in (("issue309_spt_h100_ib400_n4x8", 1.0), ("issue309_aion_h100_ib400_n8x8", 10.0)):
        bench = Bench.of(tables(part)[0])
        bench.use(truth.changed({name: truth.values[name] * factor}))
        times = zip(bench.table.rows, bench.times_us().tolist(), strict=True)
        rows = tuple(replace(row, time_us=time_us) for row, time_us in times)
        benches.append(Bench(replace(bench.table, rows=rows), bench.compiler, bench.devices))
    fitted = fit(benches, truth, [name])
    assert fitted.constants.values[name] < 2.0 * truth.values[name]
    assert fitted.own["aion"][name] > 2.0 * fitted.own["spt"][name]


def test_a_preset_of_several_owners_has_the_errors_of_machines_left_out() -> None:
    """Six DGX H100 were fitted: yet another one was not. Sophia is one machine, and that was."""
    many, single = (
        interval(load_cluster("dgx-h100"), 1 << 26, 1, 1.0),
        interval(load_cluster("sophia:2"), 64, 2, 1.0),
    )
    assert many is not None
    assert single is not None
    assert (many.origin, single.origin) == ("left out", "fitted")


def test_an_interval_is_thenarrowest_that_holds_eight_of_ten() -> None:
    """A long tail on one side does not widen it, and the prediction itself is inside."""
    low, high = narrowest({"one": [0.98, 0.99, 1.0, 1.01, 1.01, 1.02, 1.03, 1.04, 1.04, 1.05, 3.0, 9.0]})
    assert (low, high) == (0.98, 1.05)
    assert narrowest({"one": [1.2, 1.3], "another": [1.25] * 8})[0] == 1.0
