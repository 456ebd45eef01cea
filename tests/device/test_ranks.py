"""What each rank has of its own, and what is refused or answered where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import distsim
from distsim.kernels import Gpu
from distsim.sim.device import nvidia_smi

TRITON = importlib.util.find_spec("triton") is not None
"""It comes with torch for CUDA."""


def ranks(fn: Any, num_ranks: int = 2, on: str = "dgx-h100:1") -> list[Any]:
    return list(distsim.simulate(fn, on=on, nproc_per_node=num_ranks).results)


def raised(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_device_mesh_takes_the_local_rank() -> None:
    """torch chooses the device from LOCAL_RANK where CUDA has not begun, which each rank knows of itself."""

    def body() -> Any:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        begun = torch.cuda.is_initialized()
        if dist.is_available() and os.environ["RANK"] == "0":
            torch.cuda.set_device(3)
        init_device_mesh("cuda", (3,))
        return begun, torch.cuda.current_device(), str(torch.ones(1, device="cuda").device)

    assert ranks(body, 3) == [(False, 3, "cuda:3"), (False, 1, "cuda:1"), (False, 2, "cuda:2")]


def test_visible_devices_are_those_that_a_rank_leaves_itself() -> None:
    """CUDA_VISIBLE_DEVICES that a rank sets before its first use hides the others; what stood there before is not of
    the simulated node."""

    def body() -> Any:
        if os.environ["RANK"] == "0":
            os.environ["CUDA_VISIBLE_DEVICES"] = "2,5"
        count = torch.cuda.device_count()
        torch.cuda.init()
        os.environ["CUDA_VISIBLE_DEVICES"] = "7"
        return count, torch.cuda.device_count(), raised(lambda: torch.cuda.set_device(2))[0]

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        assert ranks(body) == [(2, 2, "AcceleratorError"), (8, 8, "")]
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(("shells", "told"), [("0,1", 1), ("", 0)])
def test_a_shells_visible_devices_are_said_to_hide_none(
    monkeypatch: pytest.MonkeyPatch, shells: str, told: int
) -> None:
    """They are the machine's that simulates; a rank that sets them itself means its node's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shells)

    def body() -> tuple[int, str | None]:
        torch.ones(1, device="cuda")
        return torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)
    assert outcome.results == [(8, None)] * 2
    assert (
        sum("CUDA_VISIBLE_DEVICES=0,1 is ignored, because it describes this machine" in note for note in outcome.notes)
        == told
    )


def test_seeds_are_each_ranks_own() -> None:
    """Ranks that seed alike draw alike; one rank's draws leave another's alone."""

    def body() -> Any:
        rank = int(os.environ["RANK"])
        torch.manual_seed(1 + rank // 2)
        drawn = torch.rand(2, device="cuda").tolist()
        for _ in range(rank):
            torch.rand(2, device="cuda")
        return drawn, torch.cuda.initial_seed(), torch.rand(2).tolist()

    one, two, three, four = ranks(body, 4)
    assert one == two
    assert three == four
    assert one[0] != three[0]
    assert (one[1], three[1]) == (1, 2)


def test_a_cluster_without_gpus() -> None:
    """torch says that there is none; who uses one all the same is told which cluster has them."""

    def body() -> Any:
        torch.cuda.manual_seed_all(3)
        torch.cuda.empty_cache()
        asked = torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.current_accelerator()
        used = [
            raised(lambda: torch.ones(1, device="cuda")),
            raised(torch.cuda.current_device),
            raised(torch.cuda.Stream),
            raised(lambda: torch.Generator("cuda")),
        ]
        return asked, used

    ((asked, used),) = ranks(body, 1, on="ethernet-cpu:1")
    assert asked == (False, 0, None)
    for kind, text in used:
        assert kind == "NotSimulated"
        assert "--on dgx-h100:1" in text


def test_the_machine_answers_as_before() -> None:
    """After a simulation, and for who is no rank, there is no GPU and no CUDA version."""

    def answers() -> Any:
        return (
            torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda, torch.cuda.Stream,
            torch.Generator, torch.accelerator.current_accelerator(), raised(lambda: torch.ones(1, device="cuda")),
        )  # fmt: skip

    before = answers()
    ranks(lambda: torch.ones(1, device="cuda").sum().item(), 1)
    assert before == answers()
    assert not hasattr(torch._C, "_cuda_getDeviceCount") or torch.version.cuda


@pytest.mark.slow
def test_nvidia_smi_shows_the_simulated_gpus() -> None:
    """By its name, by its path and in a shell: the node's GPUs with what they hold; what it lacks is said."""

    def body() -> Any:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")

        def run(*command: str, **how: Any) -> tuple[int, list[str]]:
            done = subprocess.run([*command] if len(command) > 1 else command[0], capture_output=True, text=True, **how)
            return done.returncode, done.stdout.splitlines() or [done.stderr.strip()]

        query = "nvidia-smi --query-gpu=index,memory.total,power.draw --format=csv,{} -i 1"
        return [
            run("/usr/bin/nvidia-smi", "-L"),
            run(*query.format("noheader").split()),
            run(query.format("nounits"), shell=True),
            run("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"),
            run("nvidia-smi", "--query-gpu=frobs", "--format=csv"),
            run("nvidia-smi", "topo", "-m"),
            run("nvidia-smi", "dmon", "-c", "1"),
            run("nvidia-smi", "-q", "-d", "MEMORY,UTILIZATION", "-i", "0"),
            run("nvidia-smi | grep -c H100", shell=True),
            (os.path.isabs(shutil.which("nvidia-smi") or ""), torch.cuda.get_device_properties(0).uuid),
        ]

    listed, plain, csv, used, unknown, topo, monitored, log, table, (there, uuid) = ranks(body, 1)[0]
    assert (listed[0], len(listed[1])) == (0, 8)
    assert listed[1][0] == f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-{uuid})"
    assert plain == (0, ["1, 81008 MiB, [N/A]"])
    assert csv == (0, ["index, memory.total [MiB], power.draw [W]", "1, 81008, [N/A]"])
    assert 1024 < int(used[1][0]) < 2048
    assert used[1][1:] == ["0"] * 7
    assert unknown == (2, ['Field "frobs" is not a valid field to query.'])
    assert topo[0] == 0
    assert topo[1][0].split("\t")[1:5] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    ways = topo[1][5].split("\t")
    assert (ways[0], ways[1], ways[5], ways[9], ways[-4:]) == (
        "GPU4", "NV18", " X ", "SYS", ["56-111,168-223", "1", "", "N/A"],
    )  # fmt: skip
    assert monitored == (2, [f"distsim: nvidia-smi dmon -c 1 is not simulated: use {nvidia_smi._REMEDY}"])
    assert [line.split(": ")[1] for line in log[1] if "Used" in line] == [f"{used[1][0]} MiB"]
    assert table == (0, ["8"])
    assert there


def test_the_table_of_nvidia_smi_is_straight(capsys: pytest.CaptureFixture[str]) -> None:
    """All lines of the table are as wide as its bars."""
    gpu = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "bus_id": "00000000:00:00.0"}
    gpu |= {"compute_cap": "9.0", "total_mib": 81008, "used_mib": 4630, "utilization": 100}
    assert nvidia_smi.main([], json.dumps({"now": "now", "cuda": "12.8", "gpus": [gpu]})) == 0
    assert {len(line) for line in capsys.readouterr().out.splitlines() if line not in ("", "now")} == {91}


def test_triton_is_defined() -> None:
    """A program that imports Triton and defines kernels goes on; what runs inside a kernel alone is refused."""

    def body() -> Any:
        import triton
        import triton.language as tl
        from triton import Config
        from triton.language.extra import libdevice  # noqa: F401 - importing it is the point

        @triton.autotune(configs=[Config({"BLOCK": 64}, num_warps=4)], key=["n"])
        @triton.jit
        def add(x: Any, n: tl.pointer_type(tl.int64), BLOCK: tl.constexpr) -> None:
            tl.program_id(0)

        return (
            triton.cdiv(5, 2),
            triton.next_power_of_2(33),
            add is not None,
            raised(lambda: tl.arange(0, 2)),
        )

    for blocks, power, defined, (kind, text) in ranks(body):
        assert (blocks, power, defined) == (3, 64, True)
        if not TRITON:  # an installed one has errors of its own for that
            assert kind == "NotSimulated"
            assert text.startswith("triton.language.arange is not simulated")
            assert "distsim.kernel_cost(fn, flops=, bytes=)" in text


def launches(**how: Any) -> distsim.Outcome:
    """Launches of a Triton kernel, the first and the last with a declared cost."""

    def body() -> Any:
        import triton

        @triton.jit
        def plain(x: Any, y: Any, n: Any, BLOCK: Any) -> None:
            """Adds."""

        @triton.jit
        def product(x: Any, y: Any, n: Any, BLOCK: Any) -> None:
            """Multiplies."""

        distsim.kernel_cost("triton::product", flops=lambda x, y, n, BLOCK: 2 * n**3, bytes=64)
        x = torch.empty(1 << 24, device="cuda")
        y = torch.zeros(4, device="cuda")
        known = y.tolist()

        def seconds(call: Any, n: int) -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(10_000_000)
            begin.record()
            call[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, x, n, BLOCK=64, num_warps=4)
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) / 1e3

        times = seconds(product, 4096), seconds(plain, 4096)
        plain[(1,)](x, y, 4, BLOCK=64)
        return times, known, y.tolist()

    return distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1, **how)


def test_a_triton_kernel_is_priced() -> None:
    """By what kernel_cost says of it; else by the bytes of its tensors, with a note. Nobody knows what it writes."""
    outcome = launches()
    (product_s, plain_s), known, after = outcome.results[0]
    model = Gpu.named("h100")
    assert plain_s == pytest.approx(2 * 4 * (1 << 24) / (model.memory_bandwidth * 0.87), rel=0.1)
    assert product_s > 2 * 4096**3 / model.spec.chip.flops["fp32"]
    assert (known, after) == ([0.0] * 4, [1.0] * 4)
    notes = [note for note in outcome.notes if note.startswith("Triton kernel")]
    assert [note.split(":")[0] for note in notes] == ["Triton kernel plain"]


@pytest.mark.parametrize("how", [{"strict_kernels": True}, {"data": "real"}])
def test_a_triton_kernel_that_is_refused(how: dict[str, Any]) -> None:
    """With --strict-kernels where its cost was not declared; with --data real any: nobody computes it."""
    (failure,) = launches(check=False, **how).failures
    name = "plain with --strict-kernels" if "strict_kernels" in how else "product with --data real"
    assert failure.message.startswith(f"the Triton kernel {name} is not simulated")


ADD = 'extern "C" __global__ void add(const float* a, float* c, int n) { }'
SCALE = "template <typename T> T scale(T x, T y, T factor) { return factor * x + y; }"
BOTH = "template <typename T> void both(T x, T& out, T& other) { out = x; other = x; }"


def from_source() -> tuple[Any, ...]:
    """Launches of kernels that are compiled from CUDA source."""
    x = torch.ones(1 << 20, device="cuda")
    add = torch.cuda._compile_kernel(ADD, "add")
    scale = torch.cuda.jiterator._create_jit_fn(SCALE, factor=1.0)
    both = torch.cuda.jiterator._create_multi_output_jit_fn(BOTH, num_outputs=2)
    distsim.kernel_cost("cuda::both", bytes=1 << 30)
    times = []
    for call in (lambda: add(grid=(4096, 1, 1), block=(256, 1, 1), args=[x, x, 1 << 20]), lambda: both(x)):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    result = scale(x.half()[:, None], x[:3], factor=2.0)
    outputs = [tuple(out.shape) for out in both(x)]
    wrong = raised(lambda: scale(x, x, other=1.0)), raised(lambda: add(args=[torch.ones(1)]))
    return times[0] * 10 < times[1], tuple(result.shape), result.dtype, outputs, wrong


def test_a_kernel_of_cuda_source_is_priced() -> None:
    """By the bytes of its tensors, with a note, or by its declared cost; what torch refuses is refused in its words."""
    outcome = distsim.simulate(from_source, nproc_per_node=1)
    cheaper, shape, dtype, outputs, wrong = outcome.results[0]
    assert cheaper
    assert (shape, dtype, outputs) == ((1 << 20, 3), torch.float32, [(1 << 20,)] * 2)
    assert wrong == (
        ("KeyError", "'other is not declared in function definition'"),
        ("ValueError", "All tensor arguments must be CUDA tensors or pinned CPU tensors"),
    )
    notes = [note.split(":")[0] for note in outcome.notes if note.startswith("CUDA kernel")]
    assert notes == ["CUDA kernel add", "CUDA kernel scale"]
    with pytest.raises(distsim.RankFailure, match="the CUDA kernel add with --strict-kernels is not simulated"):
        distsim.simulate(from_source, nproc_per_node=1, strict_kernels=True)


@pytest.mark.skipif(TRITON, reason="Triton is installed, as it is on machines without a GPU, too")
def test_triton_is_missing_where_no_gpu_is() -> None:
    """On a cluster without GPUs it is as missing as on such machines."""
    assert ranks(lambda: raised(lambda: __import__("triton"))[0], 1, on="ethernet-cpu:1") == ["ModuleNotFoundError"]


def test_a_file_has_holes_for_unknown_values(tmp_path: Path) -> None:
    """A checkpoint is as long as on a cluster, takes no room for values that nobody knows, and can be loaded."""

    def body() -> Any:
        weights = {"large": torch.randn(4096, 4096, device="cuda"), "known": torch.arange(3, device="cuda")}
        torch.save(weights, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", map_location="cuda:1")
        return str(again["large"].device), tuple(again["large"].shape), again["known"].tolist()

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1)
    assert outcome.results[0] == ("cuda:1", (4096, 4096), [0, 1, 2])
    found = (tmp_path / "model.pt").stat()
    assert found.st_size > 4 * 4096 * 4096
    assert 512 * found.st_blocks < 1 << 20
    assert [note for note in outcome.notes if "unknown values are written as zeros" in note]


def test_what_is_compiled_is_said_and_warns_of_nothing() -> None:
    """Compiled modules run eagerly, without torch's warning of hooks that are ours."""

    def body() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = torch.compile(torch.nn.Linear(8, 8).cuda())
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(3):  # from the second step on it is known which modules take memory
                model(torch.ones(2, 8, device="cuda")).sum().backward()
                optimizer.step()
        return [str(warning.message) for warning in caught if "global hooks" in str(warning.message)]

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1)
    assert outcome.results == [[]]
    assert [note for note in outcome.notes if note.startswith("torch.compile: compiled code runs eagerly")]


def test_many_gpus_have_the_pace_of_the_slowest() -> None:
    """What the clock limits takes longer the more GPUs a job has, as their spread says; what memory limits does not."""

    def body() -> Any:
        big = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
        times = []
        for operator in (lambda: big @ big, lambda: big + big):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            operator()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return times

    (alone,), (first, second) = ranks(body, 1), ranks(body, 2)
    assert first == second
    assert first[1] == pytest.approx(alone[1], rel=1e-9)
    slower = Gpu.named("h100").slowest_of(2) - 1.0
    assert slower > 0.005
    assert 0.9 * slower < first[0] / alone[0] - 1.0 < slower, "but for what its launch takes"


def test_a_group_of_one_may_be_fake() -> None:
    """torchtitan gives the axes of a mesh that have one rank torch's `fake` backend: there is nobody to talk to."""

    def body() -> Any:
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg

        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        own = [dist.new_group([one], backend="fake") for one in range(2)][rank]
        x = torch.full((2,), 3.0, device="cuda")
        dist.all_reduce(x, group=own)
        return x.tolist()

    assert ranks(body) == [[3.0, 3.0]] * 2


def test_the_timeout_of_a_group_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan makes it shorter after the first step; a hang ends then."""

    def body() -> Any:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # public from torch 2.14 on
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        set_timeout(timedelta(seconds=7))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1, device="cuda"))
            torch.cuda.synchronize()
        else:
            time.sleep(60)

    distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2, check=False)
    assert "ran for 7000 milliseconds" in capsys.readouterr().err


def test_a_group_of_several_may_be_fake() -> None:
    """torchtitan's axis over which batches are split is `fake`, too: its collectives move nothing."""

    def body() -> Any:
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg

        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        both = dist.new_group([0, 1], backend="fake")
        x = torch.full((2,), rank + 3.0, device="cuda")
        dist.all_reduce(x, group=both)
        whole = torch.full((2,), 1.0, device="cuda")
        dist.all_reduce(whole)
        return dist.get_world_size(both), dist.get_rank(both), x.tolist(), whole.tolist()

    assert ranks(body) == [(2, rank, [rank + 3.0] * 2, [2.0, 2.0]) for rank in range(2)]


def test_a_default_group_may_be_fake() -> None:
    """One rank stands for eight: the sizes of groups and meshes are those of eight, and nobody is waited for."""

    def body() -> Any:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("fake", rank=2, world_size=8)
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        x = torch.full((2,), 3.0, device="cuda")
        dist.all_reduce(x)
        dist.barrier()
        return dist.get_world_size(), dist.get_rank(), mesh["tp"].size(), x.tolist()

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1)
    assert outcome.results == [(8, 2, 4, [3.0, 3.0])]
    assert any("backend fake" in note for note in outcome.notes)


def test_options_of_nccl_are_taken() -> None:
    """Megatron-core makes groups with ProcessGroupNCCL.Options, which a torch without NCCL lacks; making the group
    itself by hand is refused."""

    def body() -> Any:
        import torch.distributed as dist

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas, options.config.net_name = 8, "IB"
        group = dist.new_group([0, 1], pg_options=options, timeout=timedelta(seconds=30))
        x = torch.ones(2, device="cuda")
        dist.all_reduce(x, group=group)
        by_hand = raised(lambda: dist.ProcessGroupNCCL(None, 0, 2, options))[0]
        return x.tolist(), by_hand

    assert ranks(body) == [([2.0, 2.0], "NotSimulated")] * 2


def test_what_a_group_has_not_is_refused_by_name() -> None:
    """Pools of symmetric memory, hooks of C++, memory of a backend, and a backend that torch has not loaded."""

    def body() -> Any:
        import torch.distributed as dist
        from torch.distributed import _symmetric_memory

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        group: Any = dist.group.WORLD
        group.eager_connect_single_device(torch.device("cuda", dist.get_rank()))
        return [
            raised(call)[1]
            for call in (
                lambda: _symmetric_memory.get_mem_pool("cuda"),
                lambda: group._register_on_completion_hook(print),
                lambda: group.mem_allocator,
                lambda: dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl-unknown"),
            )
        ]

    for answers in ranks(body):
        assert all("is not simulated: " in answer for answer in answers[:-1]), answers
        assert "Unknown backend type nccl-unknown. Use gloo, nccl or mpi" in answers[-1]


def shrunk() -> list[Any]:
    """Shrink a group of three of four ranks, then the default group twice."""
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)

    def sum_in(group: Any = None) -> Any:
        x = torch.full((1,), float(rank), device="cuda")
        dist.all_reduce(x, group=group)
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        return x.item(), dist.get_rank(group), members

    three = dist.new_group([1, 2, 3])
    answers = [raised(lambda: dist.shrink_group([rank])), raised(lambda: dist.shrink_group([4]))[0]]
    if rank in (2, 3):
        answers.append(sum_in(dist.shrink_group([0], group=three)))
    dist.barrier(device_ids=[rank])
    if rank == 1:
        return answers
    assert dist.shrink_group([1]) is dist.group.WORLD
    answers.append(sum_in())
    ends = dist.new_group([0, 2])  # of the ranks as they are numbered now
    if dist.get_rank() in (0, 2):
        answers.append(sum_in(ends)[0])
    if rank == 0:
        return answers
    dist.shrink_group([0], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    answers.append(sum_in())
    dist.destroy_process_group()
    return answers


@pytest.mark.skipif(not hasattr(torch.distributed, "shrink_group"), reason="torch has no shrink_group")
def test_a_group_shrinks() -> None:
    """The remaining ranks alone make the new group; a new default group numbers them anew and ends all others."""
    answers = ranks(shrunk, 4)
    for rank, (itself, outside, *_) in enumerate(answers):
        assert itself[0] == "RuntimeError"
        assert f"Current rank {rank} is in the exclusion list" in itself[1]
        assert outside == "ValueError"
    assert [answer[2:] for answer in answers] == [
        [(5.0, 0, [0, 2, 3]), 3.0],
        [],
        [(5.0, 0, [2, 3]), (5.0, 1, [0, 2, 3]), (5.0, 0, [2, 3])],
        [(5.0, 1, [2, 3]), (5.0, 2, [0, 2, 3]), 3.0, (5.0, 1, [2, 3])],
    ]
