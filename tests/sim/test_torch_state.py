"""torch's state for the whole process: each simulated rank has its own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sim.running import HEAD, Scripts, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import distsim
from distsim.sim import patches
from distsim.sim.isolation.torch_state import torch_state
from distsim.sim.isolation.torch_state.torch_state import TorchState


def test_caches_by_mesh_are_the_ranks_own() -> None:
    """How to redistribute an uneven tensor depends on the rank's coordinate, and torch caches it by mesh."""

    def body() -> Any:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = distribute_tensor(torch.arange(9).reshape(9, 1), mesh, [Shard(0), Shard(0)])
        return tensor.redistribute(placements=[Replicate(), Replicate()]).to_local().flatten().tolist()

    outcome = ranks(body, 4)
    assert outcome.results == [list(range(9))] * 4
    assert outcome.exit_code == 0


def test_rules_for_lists_of_tensors_are_worked_out_once_and_hold_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping and a step of uneven shards come out as without sharding; one rank asks torch for the rule of a list."""
    real = ShardingPropagator.propagate_op_sharding_non_cached
    asked: list[str] = []

    def counted(self: Any, schema: Any) -> Any:
        asked.append(str(schema.op))
        return real(self, schema)

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", counted)
    shapes = [(5, 2), (3, 4), (8,)]

    def made() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(shape) for shape in shapes]

    def body() -> list[list[float]]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (4,))
        parameters = [torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in made()]
        for parameter, value in zip(parameters, made(), strict=True):
            parameter.grad = distribute_tensor(value * 3, mesh, [Shard(0)])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.optim.AdamW(parameters, lr=0.1, foreach=True).step()
        assert all(parameter.device_mesh is mesh for parameter in parameters)
        return [parameter.full_tensor().detach().flatten().tolist() for parameter in parameters]

    plain = [torch.nn.Parameter(value) for value in made()]
    for parameter, value in zip(plain, made(), strict=True):
        parameter.grad = value * 3
    torch.nn.utils.clip_grad_norm_(plain, 1.0)
    torch.optim.AdamW(plain, lr=0.1, foreach=True).step()
    expected = [parameter.detach().flatten().tolist() for parameter in plain]
    for result in ranks(body, 4).results:
        for got, wanted in zip(result, expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
    lists = [op for op in asked if "_foreach_" in op]
    assert len(lists) >= 5
    assert max(lists.count(op) for op in lists) < 4
    assert ShardingPropagator.propagate_op_sharding_non_cached is counted


def test_loss_parallel_on_every_rank() -> None:
    """It puts handlers into DTensor's one dispatcher while it is entered."""

    def body() -> float:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(0)
        logits = torch.randn(4, 16, requires_grad=True)
        with loss_parallel():
            loss = F.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), torch.tensor([1, 2, 3, 4]))
            loss.backward()
        return float(loss.full_tensor().detach() if hasattr(loss, "full_tensor") else loss.detach())

    torch.manual_seed(0)
    expected = float(F.cross_entropy(torch.randn(4, 16), torch.tensor([1, 2, 3, 4])))
    assert all(abs(result - expected) < 1e-5 for result in ranks(body, 4).results)


def test_comm_debug_mode_counts_its_own_rank() -> None:
    """It hooks all modules of the process."""

    def body() -> int:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with CommDebugMode() as mode:
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        return int(mode.get_total_counts())

    assert ranks(body, 2).results == [2, 2]  # forward of the second layer, backward of the first


def test_what_a_rank_writes_into_torch_is_its_own() -> None:
    """Attributes of modules and classes, taken away again too; others and the end see torch's own."""
    real, forward = dist.all_reduce, nn.Linear.forward

    def body() -> tuple[int, bool]:
        dist.init_process_group("gloo")
        calls, mine = [0], dist.all_reduce

        def timed(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return mine(*args, **kwargs)

        dist.all_reduce = timed
        if dist.get_rank() == 1:
            old = nn.Linear.forward
            nn.Linear.forward = lambda self, x: calls.__setitem__(0, calls[0] + 100) or old(self, x)
            torch.Tensor.mine = torch.our_name = True
        layer, tensor = nn.Linear(1, 1), torch.ones(1)
        for _ in range(3):
            dist.all_reduce(tensor)
            layer(tensor)
        if dist.get_rank() == 1:
            nn.Linear.forward = old
            del torch.our_name
        dist.barrier()
        layer(tensor)
        return calls[0], hasattr(torch.Tensor, "mine") or hasattr(torch, "our_name")

    assert ranks(body, 3).results == [(3, False), (303, True), (3, False)]
    assert dist.all_reduce is real
    assert nn.Linear.forward is forward
    assert not hasattr(torch.Tensor, "mine")
    assert type(torch) is type(sys)


def test_global_hooks_are_the_ranks_own() -> None:
    """Module hooks and optimizer hooks for all, removed by their handles."""

    def body() -> list[int]:
        dist.init_process_group("gloo")
        seen = [0, 0]
        handles = [
            register_module_forward_hook(lambda *_: seen.__setitem__(0, seen[0] + 1)),
            register_optimizer_step_pre_hook(lambda *_: seen.__setitem__(1, seen[1] + 1)),
        ]
        layer = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters())
        for number in range(4):
            dist.barrier()
            layer(torch.ones(1)).sum().backward()
            optimizer.step()
            if number == 2:
                for handle in handles:
                    handle.remove()
        return seen

    assert ranks(body, 3).results == [[3, 3]] * 3


def test_backend_flags_are_the_ranks_own() -> None:
    """SDPA, oneDNN, precision and distributions: where they were set, and nowhere after."""

    def look() -> list[Any]:
        return [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.mkldnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.matmul.fp32_precision,
            torch.distributions.Distribution._validate_args,
        ]

    def body() -> list[list[Any]]:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.mkldnn.deterministic = True
            torch.backends.cudnn.benchmark = True
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            torch.distributions.Distribution.set_default_validate_args(False)
        dist.barrier()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if dist.get_rank() == 2 else SDPBackend.MATH):
            dist.barrier()
            inside = look()[:2]
        dist.barrier()
        return [inside, look()]

    before = look()
    first, second, third = ranks(body, 3).results
    assert first == [[False, True], before]
    assert second == [[False, True], [False, True, True, True, "bf16", False]]
    assert third == [[True, False], before]
    assert look() == before


def test_a_module_of_torch_that_a_rank_imports_first(script: Scripts) -> None:
    """What it registers with others holds for all ranks; what the rank changes then does not."""
    ran = script(
        HEAD
        + """
dist.barrier()
import torch.distributed.tensor.experimental as experimental
from torch.distributed.tensor import DTensor
handlers = DTensor._op_dispatcher._custom_op_handlers
before = len(handlers)
if rank == 0:
    handlers["mine"] = None
dist.barrier()
print(before > 4, len(handlers) - before)
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert [ran.of(rank) for rank in (0, 1)] == [["True 1"], ["True 0"]]


def test_a_module_with_the_number_of_one_that_is_gone_is_new() -> None:
    """Python gives the `id` of a dead object to the next one."""
    state = TorchState()

    def adopted() -> int:
        module = ModuleType("torch.nn.made")
        module.Made = type("Made", (), {"__module__": "torch.nn.made"})  # type: ignore[attr-defined]
        before = len(state._guards)
        state.adopt([module])
        state._watched.clear()
        module.__class__ = ModuleType
        assert len(state._guards) > before
        return id(module)

    numbers = [adopted() for _ in range(50)]
    assert len(set(numbers)) < 50, "no number was given twice: the test shows nothing"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_of_torch_that_a_rank_imports_has_nobodys_group_as_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """`group=group.WORLD` of a function is taken when its module is imported: by one rank, for all."""
    import torch.distributed.nn.functional as before

    monkeypatch.setattr(torch.distributed.nn, "functional", before)
    monkeypatch.delitem(sys.modules, before.__name__)

    def body() -> float:
        dist.init_process_group("gloo")
        from torch.distributed.nn.functional import all_reduce

        return float(all_reduce(torch.ones(1)))

    assert ranks(body).results == [2.0, 2.0]


def makes_an_optimizer(patched: int) -> tuple[bool, bool, list[str]]:
    dist.init_process_group("gloo")
    told: list[str] = []
    if dist.get_rank() == patched:

        def step(self: object, closure: object = None) -> None:
            told.append("own")

        torch.optim.Adagrad.step = step  # type: ignore[method-assign,assignment]
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(1))])
    optimizer.register_step_post_hook(lambda *_: told.append("hook"))
    dist.barrier()
    optimizer.step()
    dist.barrier()
    step_now = vars(torch.optim.Adagrad)["step"]
    alike = [0, 0, 0]
    dist.all_gather_object(alike, id(step_now))
    return bool(getattr(step_now, "hooked", False)), alike.count(id(step_now)) > 1, told


def test_wrapped_steps_are_everyones() -> None:
    """The class of an optimizer has one wrapped `step` for all ranks, but for one that has set its own; hooks run."""
    results = ranks(makes_an_optimizer, 3, 1).results
    assert [hooked for hooked, _, _ in results] == [True] * 3
    assert [shared for _, shared, _ in results] == [True, False, True]
    assert [told for _, _, told in results] == [["hook"], ["own", "hook"], ["hook"]]


def brackets(rounds: int) -> list[object]:
    dist.init_process_group("gloo")
    seen: list[object] = []
    for number in range(rounds):
        torch.nn.Bilinear.inside = dist.get_rank(), number  # type: ignore[attr-defined]
        dist.barrier()
        seen.append(torch.nn.Bilinear.inside)  # type: ignore[attr-defined]
        del torch.nn.Bilinear.inside  # type: ignore[attr-defined]
        dist.barrier()
        seen.append(hasattr(torch.nn.Bilinear, "inside"))
    return seen


def test_a_class_that_is_assigned_again_and_again() -> None:
    """An attribute that comes and goes is each rank's own every time."""
    for rank, seen in enumerate(ranks(brackets, 2, 8).results):
        assert seen == [value for number in range(8) for value in ((rank, number), False)]


def test_a_class_assigned_what_it_holds_is_not_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP assigns one of its class twice a forward: nothing is swapped for that at a hand-over."""
    left: list[int] = []
    real = TorchState.leave
    monkeypatch.setattr(TorchState, "leave", lambda self, own: (left.append(1), real(self, own))[1])

    def body() -> int:
        dist.init_process_group("gloo")
        held: Any = nn.Linear.extra_repr
        for _ in range(20):
            nn.Linear.extra_repr = held  # type: ignore[method-assign]
            dist.barrier()
        return len(left)

    assert max(ranks(body, 2).results) < 20


@pytest.mark.parametrize(("module", "name"), [(torch_state, "guards_of"), (patches, "all_patches")])
def test_an_interrupt_at_the_beginning_leaves_the_host_as_it_was(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the first quarter of a second of a simulation: modules are plain again, and the next time all is
    watched that would have been."""
    state, finders = TorchState(), list(sys.meta_path)

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    def begin() -> bool:
        if module is patches:
            return bool(ranks(lambda: type(nn) is not ModuleType, 1).results[0])
        with state.watching():
            return type(nn) is not ModuleType

    with monkeypatch.context() as patched:
        patched.setattr(module, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            begin()
    assert (type(nn), sys.meta_path) == (ModuleType, finders)
    assert begin()
    assert type(nn) is ModuleType


def test_the_empty_shards_of_fsdp2_are_torchs() -> None:
    """What a rank takes of a parameter cut for more ranks than it has rows is torch's; its own function is back."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    name = "_chunk_with_empty"

    def shards() -> list[Any]:
        cuts = [(3, 8), (8, 8), (5, 3), (0, 4), (1, 1)]
        parts = [getattr(_fsdp_param, name)(torch.arange(n * 2.0).reshape(n, 2), ranks, 0) for n, ranks in cuts]
        return [getattr(_fsdp_param, name), [[(p.shape, p.tolist()) for p in several] for several in parts]]

    real, expected = shards()
    ours, seen = distsim.simulate(shards, nproc_per_node=1).results[0]
    assert seen == expected
    assert ours is not real
    assert shards()[0] is real
