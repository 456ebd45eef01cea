"""What checkpoints of simulated GPUs take: time of the host, and room on the disk."""

from __future__ import annotations

import io
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import distsim
from distsim.cluster.files.load import load_cluster, preset_text
from distsim.cluster.graph.link import STORAGE_READ_BYTES_PER_S, STORAGE_WRITE_BYTES_PER_S
from distsim.cluster.show import render_cluster
from distsim.report.training.section import gains
from distsim.report.training.terminal import training_parts

SIZE = 2048
NBYTES = 4 * SIZE * SIZE


def _own_bytes() -> int:
    """Of this process, shared with nobody, and of what it has written to in shared memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean"))) << 10


def test_torch_save_takes_the_time_of_the_file_system(tmp_path: Path) -> None:
    """A rank's host writes and reads at the stated rate; ranks of one node write in turn; none on other nodes waits."""

    def body() -> Any:
        import time

        rank = int(os.environ["RANK"])
        x = torch.randn(SIZE, SIZE, device="cuda")
        torch.cuda.synchronize()
        begun = time.perf_counter()
        torch.save({"x": x.cpu()}, tmp_path / f"{rank}.pt")
        saved = time.perf_counter()
        torch.load(tmp_path / f"{rank}.pt")
        return saved - begun, time.perf_counter() - saved

    outcome = distsim.simulate(body, on="dgx-h100:2", nnodes=2, nproc_per_node=2)
    writes = sorted(write for write, _ in outcome.results)
    once = NBYTES / STORAGE_WRITE_BYTES_PER_S
    assert writes[0] == pytest.approx(writes[1], rel=0.01)
    assert writes[2] - writes[0] == pytest.approx(once, rel=0.01)
    assert once < writes[0] < once + NBYTES / 10e9, "and the copy over PCIe"
    assert outcome.results[0][1] == pytest.approx(NBYTES / STORAGE_READ_BYTES_PER_S, rel=0.1)
    assert outcome.training is not None
    saved = outcome.training.saved
    assert (saved.writes, saved.reads) == (1, 1)
    assert saved.written_bytes == pytest.approx(NBYTES, rel=0.01)
    assert saved.write_s == pytest.approx(2 * once, rel=0.02), "the rank that waited for the other one"


def test_a_tensor_in_a_file_of_its_own_is_not_a_checkpoint(tmp_path: Path) -> None:
    """A dataset that keeps its spectrograms (VITS) waits for the disk, and no checkpoint is reported."""

    def body() -> float:
        import time

        torch.zeros(1, device="cuda")
        begun = time.perf_counter()
        torch.save(torch.ones(SIZE, SIZE), tmp_path / "spec.pt")
        torch.load(tmp_path / "spec.pt")
        return time.perf_counter() - begun

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1)
    spent = NBYTES / STORAGE_WRITE_BYTES_PER_S + NBYTES / STORAGE_READ_BYTES_PER_S
    assert outcome.results[0] == pytest.approx(spent, rel=0.05)
    assert outcome.training is not None
    assert (outcome.training.saved.writes, outcome.training.saved.reads) == (0, 0)


def test_a_step_that_waits_for_its_checkpoint_is_not_host_bound(tmp_path: Path) -> None:
    """The writing has its own share of the mean step, in the table and among what would help."""

    def body() -> None:
        model = torch.nn.Linear(SIZE, SIZE, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(6):
            model(torch.randn(8 * SIZE, SIZE, device="cuda")).sum().backward()
            optimizer.step()
            if step == 3:
                torch.save(model.state_dict(), tmp_path / "x.pt")

    training = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).training
    assert training is not None
    (rank,) = training.ranks
    written_s = NBYTES / STORAGE_WRITE_BYTES_PER_S / 4
    assert rank.saving_s == pytest.approx(written_s, rel=0.01), "a quarter for each of the steps 3 to 6"
    assert rank.host_s < 0.1 * rank.saving_s
    assert not training.host_bound
    assert gains(training)[0].name == "asynchronous checkpoints"
    (span,) = training.saved.spans
    assert span[1] - span[0] == pytest.approx(4 * written_s, rel=0.01)
    console = Console(width=100, file=io.StringIO())
    console.print(*(part for _, part in training_parts(training)))
    assert "saving: waiting until a checkpoint is written" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_cluster_file_says_how_fast_its_storage_is(tmp_path: Path) -> None:
    """node.storage_write and node.storage_read are the rates of that cluster, and `topo show` has them."""

    def body() -> Any:
        torch.save({"x": torch.randn(SIZE, SIZE, device="cuda").cpu()}, tmp_path / "x.pt")
        torch.load(tmp_path / "x.pt")

    text = preset_text("dgx-h100").replace("[node]\n", '[node]\nstorage_write = "1GBps"\nstorage_read = "20GBps"\n')
    (tmp_path / "slow.toml").write_text(text)
    outcome = distsim.simulate(body, on=str(tmp_path / "slow.toml"), nproc_per_node=1)
    assert outcome.training is not None
    saved = outcome.training.saved
    assert saved.write_s == pytest.approx(NBYTES / 1e9, rel=0.01)
    assert saved.read_s == pytest.approx(NBYTES / 20e9, rel=0.01)
    shown = Console(file=io.StringIO(), width=150)
    shown.print(render_cluster(load_cluster(str(tmp_path / "slow.toml"))))
    assert "1 GB/s written, 20.0 GB/s read by a node\n" in re.sub(" +\n", "\n", shown.file.getvalue())  # type: ignore


def test_files_of_dcp_have_holes_and_can_be_loaded(tmp_path: Path) -> None:
    """Unknown values take no room on the disk, known ones come back; writing takes each rank's share of its node."""

    def body() -> Any:
        import time

        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import distribute_tensor, init_device_mesh

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        mesh = init_device_mesh("cuda", (2,))
        weight = distribute_tensor(torch.randn(SIZE, SIZE, device="cuda"), mesh)
        shard = torch.distributed.tensor.DTensor.from_local(
            torch.randn(SIZE, SIZE, device="cuda"), mesh, [torch.distributed.tensor.Shard(0)]
        )
        state = {"weight": weight, "shard": shard, "few": torch.arange(5, device="cuda"), "step": 3}
        torch.cuda.synchronize()
        begun = time.perf_counter()
        dcp.save(state, checkpoint_id=tmp_path / "there")
        seconds = time.perf_counter() - begun
        state["few"] = torch.zeros(5, dtype=torch.int64, device="cuda")
        dcp.load(state, checkpoint_id=tmp_path / "there")
        return seconds, state["few"].tolist(), state["step"], str(state["shard"].to_local().device)

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)
    for rank, (seconds, few, step, device) in enumerate(outcome.results):
        assert (few, step, device) == ([0, 1, 2, 3, 4], 3, f"cuda:{rank}")
        assert seconds > 2 * NBYTES / STORAGE_WRITE_BYTES_PER_S, "a shard each, at half the node's rate"
    files = [path.stat() for path in (tmp_path / "there").glob("*.distcp")]
    assert sum(file.st_size for file in files) > 3 * NBYTES
    assert sum(512 * file.st_blocks for file in files) < 1 << 20


def test_what_the_program_has_written_over_is_kept(tmp_path: Path) -> None:
    """A copy on the host into which the program has put numbers is saved with them."""

    def body() -> Any:
        import torch.distributed.checkpoint as dcp

        copied = torch.randn(SIZE, SIZE, device="cuda").cpu()
        copied.fill_(7.0)
        warnings.simplefilter("ignore")  # that no other ranks are there
        dcp.save({"x": copied}, checkpoint_id=tmp_path / "there", no_dist=True)
        copied.zero_()
        dcp.load({"x": copied}, checkpoint_id=tmp_path / "there", no_dist=True)
        return copied[0, 0].item(), copied[-1, -1].item()

    assert distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results == [(7.0, 7.0)]


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned and shared"])
def test_an_asynchronous_checkpoint_takes_no_memory_here(tmp_path: Path, pinned: bool) -> None:
    """All is staged on the host at once: of every rank on this one. Its files have holes as well; what is known and
    what the program writes over comes back."""

    def body() -> Any:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        dist.init_process_group("cpu:gloo,cuda:nccl")
        rank = dist.get_rank()
        state = {f"unknown{rank}.{i}": torch.randn(SIZE, SIZE, device=f"cuda:{rank}") for i in range(4)}
        state["few"] = torch.arange(5, device=f"cuda:{rank}")
        stager = DefaultStager(StagingOptions(pinned, pinned, False, False))
        before = _own_bytes()
        saving = dcp.async_save(state, checkpoint_id=tmp_path / "there", async_stager=stager)
        grown = _own_bytes() - before
        saving.result()
        few = {"few": torch.zeros(5, dtype=torch.int64)}
        dcp.load(few, checkpoint_id=tmp_path / "there")
        return grown, few["few"].tolist()

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)
    for grown, few in outcome.results:
        assert grown < NBYTES
        assert few == [0, 1, 2, 3, 4]
    files = [path.stat() for path in (tmp_path / "there").glob("*.distcp")]
    assert sum(file.st_size for file in files) > 8 * NBYTES
    assert sum(512 * file.st_blocks for file in files) < 1 << 20
    assert not any("written whole" in note for note in outcome.notes), "DCP leaves holes"


def test_what_is_written_to_a_staged_checkpoint_is_kept(tmp_path: Path) -> None:
    """It was unknown when it was staged; by torch.save and by DCP."""

    def body() -> Any:
        import torch.distributed.checkpoint as dcp

        gpu = torch.randn(SIZE, SIZE, device="cuda")
        here = torch.full((SIZE, SIZE), 7.0)
        here.untyped_storage().copy_(gpu.untyped_storage())
        was = here.any().item()
        here[-1, -1] = 3.0
        warnings.simplefilter("ignore")  # that no other ranks are there
        torch.save(here, tmp_path / "here.pt")
        dcp.save({"x": here}, checkpoint_id=tmp_path / "there", no_dist=True)
        again = {"x": torch.zeros(SIZE, SIZE)}
        dcp.load(again, checkpoint_id=tmp_path / "there", no_dist=True)
        return was, torch.load(tmp_path / "here.pt")[-1, -1].item(), again["x"][-1, -1].item()

    assert distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results == [(False, 3.0, 3.0)]


def test_cached_plans_are_the_ranks_own(tmp_path: Path) -> None:
    """torch keeps them in a class (`enable_plan_caching`): with one for all ranks the second save did not know what
    belonged to the others."""

    def body() -> list[float]:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        dist.init_process_group("nccl")
        name, found = f"own{dist.get_rank()}", 0.0
        torch.cuda.set_device(dist.get_rank())
        for step in range(3):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            state = {name: torch.full((2,), float(step * 10 + dist.get_rank()), device="cuda")}
            dcp.save(state, checkpoint_id=tmp_path / str(step), planner=planner)
            loaded = {name: torch.zeros(2, device="cuda")}
            dcp.load(loaded, checkpoint_id=tmp_path / str(step))
            found = loaded[name].tolist()
        return found

    assert distsim.simulate(body, "dgx-h100:1", nproc_per_node=2).results == [[20.0, 20.0], [21.0, 21.0]]


def test_a_checkpoint_for_another_process_is_written_by_a_thread(tmp_path: Path) -> None:
    """That process would join a process group of its own under the number of its rank."""

    def body() -> None:
        import torch.distributed as dist
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(dist.get_rank())
        state = {"weight": torch.ones(1024, device="cuda")}
        saving = dcp.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        saving.result()

    outcome = distsim.simulate(body, "dgx-h100:1", nproc_per_node=2)
    assert (tmp_path / "__0_0.distcp").exists()
    assert any("a thread of the rank writes the checkpoint" in note for note in outcome.notes)
