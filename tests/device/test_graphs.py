"""CUDA graphs: what was captured runs again at one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distsim


def simulated(fn: Any, nproc: int = 1, **how: Any) -> distsim.Outcome:
    return distsim.simulate(fn, on="dgx-h100:1", nproc_per_node=nproc, **how)


def small_step() -> tuple[Any, torch.Tensor]:
    """A step that is bound by the host, and its static input."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(8, 64, device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step, x


def captured(step: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.parametrize("_again", range(2))
def test_a_replay_has_no_host_cost(_again: int) -> None:
    """A captured step does not run; a replay takes its kernels' time, and is a step with their flops."""

    def body() -> Any:
        step, x = small_step()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def elapsed(run: Any) -> float:
            for _ in range(3):
                x.copy_(torch.ones(8, 64))
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
            return begin.elapsed_time(end)

        eager = elapsed(step)
        graph, loss = captured(step)
        return (eager, elapsed(graph.replay)), loss.item()

    outcome = simulated(body)
    (eager, graphed), loss = outcome.results[0]
    assert graphed < 0.6 * eager
    assert loss == 1.0, "nobody knows what a replay has written"
    assert outcome.training is not None
    assert outcome.training.steps == 3 + 3


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_callables_are_graphed() -> None:
    """torch's own make_graphed_callables, forward and backward."""

    def body() -> Any:
        linear = torch.nn.Linear(64, 64).cuda()
        graphed = torch.cuda.make_graphed_callables(linear, (torch.ones(8, 64, device="cuda", requires_grad=True),))
        out = graphed(torch.ones(8, 64, device="cuda", requires_grad=True))
        out.sum().backward()
        return tuple(out.shape), linear.weight.grad is not None

    assert simulated(body).results == [((8, 64), True)]


def test_what_a_capture_does_not_allow() -> None:
    """The host may not wait within it, as on a GPU; a collective is refused by name; after either it is over."""

    def body() -> Any:
        import torch.distributed as dist

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            captured(lambda: (x + 1).sum().item())
        with pytest.raises(distsim.NotSimulated, match="a collective in a CUDA graph"):
            captured(lambda: dist.all_reduce(x))
        flags = torch.cuda.is_current_stream_capturing(), captured(torch.cuda.is_current_stream_capturing)[1]
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            torch.cuda.CUDAGraph().replay()
        return flags

    with pytest.warns(UserWarning, match="The CUDA Graph is empty"):
        assert simulated(body, nproc=2).results == [(False, True)] * 2


def test_values_are_not_computed_again() -> None:
    """With --data real a replay would have to compute: refused."""

    def body() -> None:
        with pytest.raises(distsim.NotSimulated, match="--data real"):
            torch.cuda.CUDAGraph().capture_begin()

    simulated(body, data="real")
