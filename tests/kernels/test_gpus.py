"""The data files: every preset's GPU has one, every figure in it says where it is from."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

from distsim.cluster import load_cluster, preset_names
from distsim.errors import UsageError
from distsim.kernels import Gpu
from distsim.kernels.gpu_file import gpu_folder, gpu_names, read_gpu
from distsim.kernels.pricing import Attention
from tests.kernels.shapes import meta, priced

pytestmark = pytest.mark.smoke

FILES = sorted(gpu_folder().glob("*.toml"))


def test_the_gpu_of_every_preset_has_a_file() -> None:
    """A cluster that distsim ships can run what it prices; the cluster's own bandwidth and rates hold, and its memory
    means a card, of which torch says a little more or less. Rates are those of the file but of Leonardo's own chip."""
    seen = set()
    for name in preset_names():
        facts = load_cluster(name).node.gpu
        if facts is None:
            continue
        gpu = Gpu.of(facts)
        assert facts.flops_per_s.items() <= gpu.peak_flops.items()
        assert (gpu.peak_flops == read_gpu(gpu.name).chip.flops) is (name != "leonardo")
        assert gpu.memory_bandwidth == facts.memory_bytes_per_s
        assert gpu.memory_bytes == pytest.approx(facts.memory_bytes, rel=0.1)
        seen.add(gpu.name)
    assert {"a100", "a100-80gb", "b200", "gb200", "gh200", "h100", "h200", "rtx4090"} <= seen


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_says_where_it_is_from(path: Path) -> None:
    """A line that sets a number or a quantity ends in its source, a fit, an estimate, or whom it borrows from."""
    bare = []
    for line in path.read_text(encoding="utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#") and key.strip() not in ("name", "title", "source"):
            comment = value.partition("#")[2].strip()
            if len(comment) < 4:
                bare.append(line)
    assert bare == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_source_in_brackets_is_spelled_out(path: Path) -> None:
    """`[DS]` behind a figure is explained in the head of its file, or of the file that it borrows from."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = "\n".join(line for line in lines if line.startswith("#"))
    used = {mark for line in lines if not line.startswith("#") for mark in re.findall(r"#.*", line)}
    marks = {mark for comment in used for mark in re.findall(r"\[([A-Z0-9]+)\]", comment)}
    assert {mark for mark in marks if f"[{mark}]" not in head} == set()


@pytest.mark.parametrize("name", gpu_names())
def test_a_file_reads_whole(name: str) -> None:
    """All keys are there, none is unknown, and rates stay under the peak."""
    spec = read_gpu(name)
    assert spec.name == name
    assert {"fp32", "fp16", "bf16"} <= set(spec.gemm.plateau) & set(spec.chip.flops)
    for kernel in (spec.attention.flash, spec.attention.cudnn, spec.attention.efficient):
        assert max(kernel.forward, kernel.forward_64, kernel.backward) < spec.chip.flops["bf16"]
        assert kernel.backward < kernel.forward


def test_an_unknown_gpu_is_one_line_with_the_known_ones() -> None:
    """The user reads what there is."""
    with pytest.raises(UsageError) as error:
        Gpu.named("h900")
    assert "\n" not in str(error.value)
    assert all(name in str(error.value) for name in ("'h900'", "h100", "mi300x", "rtx4090"))


def test_a_fault_in_a_file_has_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All faults of a file at once, each by its key."""
    text = (gpu_folder() / "h100.toml").read_text(encoding="utf-8")
    broken = text.replace('floor = "2.4us"', 'floor = "2.4 apples"').replace("softmax_long", "softmax_lang")
    (tmp_path / "mine.toml").write_text(broken, encoding="utf-8")
    monkeypatch.setattr("distsim.kernels.gpu_file.gpu_folder", lambda: tmp_path)
    with pytest.raises(
        UsageError,
        match=r"mine\.toml: 3 faults\n  memory\.floor: .*apples.*\n  memory\.softmax_long: .*\n  memory\.softmax_lang",
    ) as error:
        read_gpu("mine")
    assert "did you mean 'softmax_long'" in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "not a regular file"),
        ('base = "mine.toml"', "base: expected the name of another GPU"),
        ("base = 5", "base: expected the name of another GPU"),
        ("base = " + "[" * 5000, "nested"),
    ],
    ids=["a pipe", "its own base", "a number as base", "deep"],
)
def test_a_file_that_is_none_is_refused(
    content: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for a writer, nor asks for its base for ever."""
    monkeypatch.chdir(tmp_path)
    if content:
        Path("mine.toml").write_text(content, encoding="utf-8")
    else:
        os.mkfifo("mine.toml")
    read_gpu.cache_clear()
    with pytest.raises(UsageError, match=expected):
        Gpu.named("mine.toml")


def test_the_memory_tells_the_a100s_apart() -> None:
    """Cluster files call both a100."""
    assert Gpu.named("a100", memory=80e9).name == "a100-80gb"
    assert Gpu.named("a100", memory=40e9).name == "a100"
    assert Gpu.named("NVIDIA-H100-SXM5").name == "h100"


def test_what_a_base_gives_is_kept() -> None:
    """An H200 is an H100 with other memory, and its products are the H100's."""
    h100, h200 = read_gpu("h100"), read_gpu("h200")
    assert h200.chip.memory > h100.chip.memory
    assert h200.gemm == h100.gemm
    own = tomllib.loads((gpu_folder() / "h200.toml").read_text(encoding="utf-8"))
    assert "gemm" not in own, "else this proves nothing"


def test_communication_takes_a_multiprocessor_a_channel() -> None:
    """And memory bandwidth by what it moves, up to what its channels can."""
    gpu = Gpu.named("h100")
    multiprocessors, bandwidth = gpu.comm_load(16)
    assert multiprocessors == 16 / 132
    assert bandwidth == pytest.approx(16 * 20e9 * 3 / 3.35e12)
    assert gpu.comm_load(16, bytes_per_s=50e9)[1] == pytest.approx(150e9 / 3.35e12)
    assert gpu.comm_load(1000) == (1.0, 1.0)


def test_the_slowest_of_many_is_slower() -> None:
    """One GPU is the middle one; the expected largest of 8 normal deviates is 1.42, of 512 it is 3.04."""
    gpu = Gpu.named("h100")
    assert gpu.slowest_of(1) == 1.0
    assert gpu.slowest_of(8) == pytest.approx(1 + 0.015 * 1.42, abs=4e-4)
    assert gpu.slowest_of(512) == pytest.approx(1 + 0.015 * 3.04, abs=4e-4)


@pytest.mark.parametrize(("dtype", "same"), [("bf16", 133.4 / 720.1), ("fp16", 1.0)])
def test_the_rates_of_a_cluster_file_act(dtype: str, same: float) -> None:
    """An H20 as an H100 of 148 TFLOPS multiplies near its peak in bf16, which no power limits, and as before in fp16;
    attention follows: published of an H20 are 126 to 129 TFLOPS by cuDNN (Dao-AILab/flash-attention issue 1310).
    """
    h100, h20 = Gpu.named("h100"), Gpu.named("h100", flops={"bf16": 148e12})
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    left, right = meta(16_384, 8192, dtype=torch_dtype), meta(8192, 8192, dtype=torch_dtype)
    seconds = [priced(gpu, torch.ops.aten.mm.default, left, right).seconds for gpu in (h100, h20)]
    assert seconds[0] / seconds[1] == pytest.approx(same, rel=0.01)
    shape = Attention(batch=4, heads=32, queries=8192, keys=8192, dim=128, value_dim=128)
    one, other = (gpu.attention(shape, 0).seconds for gpu in (h100, h20))
    assert one / other == pytest.approx(148 / 722.3, rel=0.01)
    assert h20.peak_flops == {**h100.peak_flops, "bf16": 148e12}
