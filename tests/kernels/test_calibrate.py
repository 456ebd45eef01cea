"""`distsim calibrate --ops`: the constants are found again from times that they made."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from distsim.calibration.ops import PROBES, Probe, calibrate_ops, constant, gpu_toml, with_constant
from distsim.cli import main
from distsim.kernels import Gpu
from distsim.kernels.gpu_file import read_gpu


@pytest.mark.slow
def test_constants_are_found_again_from_their_own_times(tmp_path: Path) -> None:
    """A GPU that is an H100 with every probed constant another; the file that is written reads as that GPU."""
    chance = random.Random(1)
    truth = read_gpu("h100")
    for probe in PROBES:
        truth = with_constant(truth, probe.constant, constant(truth, probe.constant) * chance.uniform(0.85, 1.1))
    gpu = Gpu(truth)

    def clock(probe: Probe) -> float:
        return gpu.cost(*probe.make(torch, "meta")).seconds + gpu.gap_s

    lines: list[str] = []
    found, values = calibrate_ops(read_gpu("h100"), clock, lines.append)
    assert len(lines) == len(PROBES)
    for probe in PROBES:
        expected = pytest.approx(clock(probe), rel=0.03)
        assert Gpu(found).cost(*probe.make(torch, "meta")).seconds + gpu.gap_s == expected, probe.constant
    path = tmp_path / "mine.toml"
    path.write_text(gpu_toml("h100", found, {"multiprocessors": "132"}, values), encoding="utf-8")
    read = Gpu.named(str(path))
    for probe in PROBES:
        assert constant(read.spec, probe.constant) == pytest.approx(constant(found, probe.constant), rel=1e-3)
    plateau = constant(found, "gemm.plateau.bf16")
    assert read.spec.gemm.range["bf16"] == pytest.approx((0.9 * plateau, 1.1 * plateau), rel=1e-4)
    assert read.spec.attention.range == read.spec.memory.range == (0.9, 1.1)
    assert {times[2] for times in read.spec.times("bf16").values()} == {1}
    assert read.spec.gemm.plateau["fp8"] == truth.gemm.plateau["fp8"], "what is not measured is borrowed"


def test_what_cannot_be_measured_is_borrowed_and_said() -> None:
    """A torch without flash attention, say."""
    lines: list[str] = []
    found, values = calibrate_ops(read_gpu("a100"), lambda probe: None, lines.append)
    assert found == read_gpu("a100")
    assert values == {}
    assert all("borrowed: no " in line for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """And ends with 2."""
    assert main(["calibrate", "--ops"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "expected a GPU that torch can use, found none" in message


@pytest.mark.parametrize("args", [["--ops", "--on", "gloo"], ["--on", "gloo", "--like", "h100"]])
def test_ops_stands_alone(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One thing is measured at a time; --like is of --ops."""
    assert main(["calibrate", *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1
