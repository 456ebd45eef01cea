"""What launching work costs the host, by the CPU that a cluster file names."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.cluster import load_cluster
from distsim.kernels.gpu import core_speed, host_of

PRESETS = sorted(path.stem for path in (Path("distsim") / "cluster" / "presets").glob("*.toml"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_with_gpus_names_a_known_cpu(name: str) -> None:
    """No preset with GPUs falls back on the time of an unknown host."""
    cluster = load_cluster(name)
    if cluster.node.num_gpus:
        assert core_speed(cluster.cpu.model) is not None


def test_a_slower_core_needs_longer_for_every_class() -> None:
    """An EPYC 7742 needs longer than an EPYC 9654 for all that it launches."""
    rome, genoa = host_of("AMD EPYC 7742", 9e-6), host_of("AMD EPYC 9654", 9e-6)
    for field in ("operator_s", "view_s", "function_s", "triton_s", "triton_wrapper_s", "collective_s", "message_s"):
        assert getattr(rome, field) > getattr(genoa, field)


def test_an_unknown_cpu_takes_the_operator_of_the_gpu_file() -> None:
    """Without a known core the GPU file's operator scales the other classes."""
    unknown = host_of("Quantum 9000", 9e-6)
    assert unknown.operator_s == 9e-6
    assert unknown.cpu == ""
    twice = host_of("Quantum 9000", 18e-6)
    assert twice.collective_s == pytest.approx(2 * unknown.collective_s)


def test_a_call_of_torch_distributed_costs_more_than_an_operator_and_a_view_less() -> None:
    """The classes are in the order of what they do: view, operator, message, launch of Triton, collective, norm of a
    library."""
    host = host_of("2x Intel Xeon Platinum 8480C", 0.0)
    assert host.operator_s == pytest.approx(9.76e-6, rel=0.01)
    assert host.view_s < host.operator_s < host.message_s < host.triton_s < host.collective_s < host.triton_wrapper_s


@pytest.mark.parametrize(
    ("model", "core", "speed"),
    [
        ("EPYC 7742", "zen2", 3.4 / 1.19), ("EPYC 7R13", "zen3", 3.6), ("EPYC 9554", "zen4", 3.75 * 1.14),
        ("EPYC 9575F", "zen5", 5.0 * 1.14 * 1.17), ("EPYC 9655", "zen5", 4.1 * 1.14 * 1.17),
        ("Xeon Platinum 8275CL", "skylake", 3.6 / 1.19), ("Xeon Platinum 8358", "ice lake", 3.4),
        ("Xeon Platinum 8480C", "golden cove", 3.8 * 1.15), ("Xeon 6776P", "golden cove", 4.0 * 1.15),
        ("NVIDIA Grace", "neoverse v2", 3.4 * 0.52),
    ],
)  # fmt: skip
def test_the_core_of_a_host(model: str, core: str, speed: float) -> None:
    """Its clock, by its instructions a clock beside Zen 3's."""
    assert core_speed(model) == (core, pytest.approx(speed))
