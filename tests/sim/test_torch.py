"""What torch does around communication, in a rank: autograd, compile, profiler, data loaders."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from distsim.sim.device.dispatch import ComputeMode


class Reduce(torch.autograd.Function):  # type: ignore[misc]
    """Sums its gradient over the ranks, in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert threading.current_thread() is threading.main_thread()
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def test_backward_runs_in_the_ranks_own_thread() -> None:
    """A collective inside backward, gradient hooks, double backward."""

    def body() -> Any:
        dist.init_process_group("gloo")
        x = torch.ones(3, requires_grad=True)
        Reduce.apply(x).pow(3).sum().backward()
        first = x.grad.tolist()
        (gradient,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        x.grad = None
        x.register_hook(lambda g: g * 2)
        x.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        (3 * x).sum().backward()
        return first, second.tolist(), x.grad.tolist()

    assert ranks(body, 4).results == [([12.0] * 3, [6.0] * 3, [24.0] * 3)] * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """Activation checkpointing recomputes in backward, with the same random numbers."""

    def body() -> list[float]:
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        layer = nn.Linear(8, 8)
        dropped = nn.Dropout(0.5)
        x = torch.ones(4, 8, requires_grad=True)

        def forward(t: torch.Tensor) -> torch.Tensor:
            return dropped(torch.relu(layer(t)))

        state = torch.get_rng_state()
        checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
        recomputed = layer.weight.grad.clone()
        layer.weight.grad = None
        torch.set_rng_state(state)
        forward(x).sum().backward()
        dist.barrier()
        return [(recomputed - layer.weight.grad).abs().max().item()]

    assert ranks(body).results == [[0.0]] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_torchscript_compiles_functions_that_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, which the search for silent faults hears of, is torch's own where torch.jit.script compiles a function
    that calls it (Megatron's fused bias, dropout and addition), and so is a loss."""
    (tmp_path / "scripted.py").write_text(
        "import torch\nimport torch.nn.functional as F\n\n@torch.jit.script\n"
        "def both(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:\n"
        "    return F.cross_entropy(F.dropout(x, 0.5, False), target)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def body() -> Any:
        from scripted import both  # type: ignore[import-not-found]

        return round(both(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)).item(), 4)

    assert ranks(body).results == [0.6931] * 2


@pytest.mark.slow
def test_compiled_functions_compute_the_same() -> None:
    """torch.compile and torch.jit.script inside a rank."""

    def body() -> Any:
        dist.init_process_group("gloo")
        compiled = torch.compile(lambda t: torch.sin(t) + 1, backend="eager")
        value = compiled(torch.zeros(2))
        dist.all_reduce(value)
        return value.tolist()

    assert ranks(body).results == [[2.0, 2.0]] * 2
    compiled = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert not compiled(ComputeMode.__torch_dispatch__.__code__), "the simulator itself was compiled"


def test_profiler_shows_operators_labels_and_collectives(tmp_path: Path) -> None:
    """torch.profiler in all ranks at once: names, virtual durations, a trace file."""

    def body() -> Any:
        dist.init_process_group("gloo")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            tensor = torch.ones(1000)
            with record_function("mine"):
                tensor.add_(1)
                time.sleep(2)
            dist.all_reduce(tensor)
        path = tmp_path / f"trace{dist.get_rank()}.json"
        found.export_chrome_trace(str(path))
        totals = {row.key: row for row in found.key_averages(group_by_input_shape=True)}
        return (
            {key: row.count for key, row in totals.items()},
            totals["mine"].cpu_time_total,
            totals["gloo:all_reduce"].input_shapes,
        )

    for names, label_us, shapes in ranks(body, 3).results:
        assert names == {"aten::ones": 1, "aten::add_": 1, "mine": 1, "c10d::allreduce_": 1, "gloo:all_reduce": 1}
        assert label_us == pytest.approx(2e6, rel=1e-3)
        assert shapes == [[1000]]
    trace = json.loads((tmp_path / "trace2.json").read_text())
    assert {event["name"] for event in trace["traceEvents"]} >= {"mine", "gloo:all_reduce"}
    assert {event["pid"] for event in trace["traceEvents"]} == {2}


def test_data_loader_workers_run_in_process() -> None:
    """num_workers, persistent workers and prefetching give the same batches, with a note; samplers split."""

    class Numbers(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            assert get_worker_info() is None
            return iter(range(4))

    def body() -> Any:
        dist.init_process_group("gloo")
        data = TensorDataset(torch.arange(8.0))
        sampler: Any = DistributedSampler(data, shuffle=True)
        found = []
        for how in (
            {},
            {"num_workers": 2},
            {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4, "timeout": 5},
        ):
            sampler.set_epoch(1)
            loader: Any = DataLoader(data, batch_size=2, sampler=sampler, **how)
            found.append([batch[0].tolist() for batch in loader])
        return found, [b.tolist() for b in DataLoader(Numbers(), 2, False, None, None, 2)]

    outcome = ranks(body)
    (first, numbers), (second, _) = outcome.results
    assert first[0] == first[1] == first[2]
    assert sorted(x for batches in (first[0], second[0]) for batch in batches for x in batch) == list(range(8))
    assert numbers == [[0, 1], [2, 3]]
    assert [note for note in outcome.notes if "DataLoader workers" in note] == outcome.notes
