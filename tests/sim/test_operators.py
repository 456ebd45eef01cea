"""Operators that a program defines on every rank run that rank's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.errors import RankFailure
from distsim.sim.device import dispatch
from distsim.sim.device.gpu import Accelerators
from tests.sim.running import ranks


def own_body() -> tuple[float, float, float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    @torch.library.custom_op("distsim_test::add_rank", mutates_args=(), schema="(Tensor x) -> Tensor")
    def add_rank(x: torch.Tensor) -> torch.Tensor:
        return x + rank

    add_rank.register_autograd(lambda ctx, grad: grad * (10 + rank))
    dist.barrier()
    x = torch.zeros(1, requires_grad=True)
    y = add_rank(x)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    called = torch.ops.distsim_test.add_rank(torch.zeros(1)).item()
    dist.barrier()
    return y.item(), called, x.grad.item()


def test_each_rank_runs_its_own_body() -> None:
    """All ranks have defined it before any calls it: forward and backward are still each rank's own."""
    assert ranks(own_body).results == [(0.0, 0.0, 10.0), (1.0, 1.0, 11.0)]


def own_library() -> tuple[float, float, float, float, tuple[int, ...]]:
    """Everything of `torch.library` that registers by name, each with a function of this rank's own."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    library = torch.library.Library("distsim_test_library", "DEF")
    library.define("add.one(Tensor x) -> Tensor")
    library.impl("add.one", lambda x: x + rank, "CompositeExplicitAutograd")
    torch.library.define("distsim_test_define::add", "(Tensor x) -> Tensor")
    torch.library.impl("distsim_test_define::add", "cpu")(lambda x: x + 2 * rank)
    torch.library.register_fake("distsim_test_define::add")(lambda x: x.new_empty(rank + 1))
    torch.library.register_autograd("distsim_test_define::add", lambda ctx, grad: grad * (10 + rank))
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("erfinv", lambda x: x + 3 * rank, "CPU")

    @torch.library.triton_op("distsim_test_triton::add", mutates_args=())
    def triton(x: torch.Tensor) -> torch.Tensor:
        return x + rank

    assert triton(torch.zeros(1)).item() == rank
    dist.barrier()
    x = torch.zeros(1, requires_grad=True)
    y = torch.ops.distsim_test_define.add(x)
    y.sum().backward()
    assert x.grad is not None
    answers = torch.ops.distsim_test_library.add(torch.zeros(1)), y, x.grad, torch.erfinv(torch.zeros(1))
    shape = tuple(torch.ops.distsim_test_define.add(torch.empty(1, device="meta")).shape)
    dist.barrier()
    first, second, third, fourth = (answer.item() for answer in answers)
    return first, second, third, fourth, shape


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_each_rank_registers_its_own_functions() -> None:
    """Every rank defines the same operators in one process, a second run defines them again, and nothing stays."""
    for _ in range(2):
        assert ranks(own_library).results == [(0.0, 0.0, 10.0, 0.0, (1,)), (1.0, 2.0, 11.0, 3.0, (2,))]
    assert not hasattr(torch.ops.distsim_test_define, "add")
    assert torch.erfinv(torch.tensor(0.5)).item() == pytest.approx(0.4769, abs=1e-4)


def destroyed() -> float:
    dist.init_process_group("gloo")
    for _ in range(2):
        with torch.library._scoped_library("distsim_test_scoped", "DEF") as library:
            library.define("add(Tensor x) -> Tensor")
            library.impl("add", lambda x: x + dist.get_rank(), "CPU")
            dist.barrier()
            answer = torch.ops.distsim_test_scoped.add(torch.zeros(1)).item()
            if dist.get_rank() == 1:
                dist.barrier()
        if dist.get_rank() == 0:
            dist.barrier()  # rank 0 has destroyed its library while rank 1 still holds its own
    return float(answer)


def test_a_library_ends_with_its_last_rank() -> None:
    """A rank that destroys its library leaves those of other ranks alone, and may make it again."""
    assert ranks(destroyed).results == [0.0, 1.0]


def another_schema() -> None:
    dist.init_process_group("gloo")
    kind = "Tensor" if dist.get_rank() else "int"
    torch.library.define("distsim_test_schema::twice", f"({kind} x) -> Tensor")


def defined_twice() -> None:
    dist.init_process_group("gloo")
    for _ in range(2):
        torch.library.define("distsim_test_twice::twice", "(Tensor x) -> Tensor")


def test_definitions_that_contradict_each_other() -> None:
    """Two schemas of one operator are refused by name; a rank that defines it twice hears what torch says."""
    with pytest.raises(
        RankFailure, match=r'define\("distsim_test_schema::twice"\) with another schema .* not simulated'
    ):
        ranks(another_schema)
    with pytest.raises(RankFailure, match="with the same name and overload name multiple times"):
        ranks(defined_twice)


def on_host_then_gpu() -> tuple[int, int, str]:
    looked.clear()
    x = torch.ones(4)
    torch.nn.functional.linear(x, torch.ones(4, 4)).relu_().sum().item()
    before = len(looked)
    y = x.to("cuda:0")  # names a device
    looked.clear()
    y.add_(1)
    return before, len(looked), str(y.device)


looked: list[object] = []


def test_operators_look_for_gpus_once_one_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stays on the host pays nothing for its node's GPUs; from the first tensor on one, all are seen."""
    find = dispatch.gpu_of

    def counted(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.device | None:
        if not kwargs:  # what makes a tensor may name a device in one
            looked.append(args)
        return find(args, kwargs)

    monkeypatch.setattr(Accelerators, "some_used", False)
    monkeypatch.setattr(dispatch, "gpu_of", counted)
    assert distsim.simulate(on_host_then_gpu, on="dgx-h100:1", nproc_per_node=1).results == [(0, 1, "cuda:0")]


def test_an_operator_that_the_process_has_may_be_registered_by_ranks() -> None:
    """A test imports the module that each rank imports anew; after the run the process has its own function again."""
    mine = torch.library.Library("distsim_before", "FRAGMENT")
    mine.define("double(Tensor x) -> Tensor")
    mine.impl("double", lambda x: x * 20, "CPU")

    def body() -> float:
        library = torch.library.Library("distsim_before", "FRAGMENT")
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        return float(torch.ops.distsim_before.double(torch.ones(())))

    assert distsim.simulate(body, nproc_per_node=2).results == [2.0, 2.0]
    assert float(torch.ops.distsim_before.double(torch.ones(()))) == 20.0
    mine._destroy()
