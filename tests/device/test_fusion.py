"""`--fuse`: what a compiled function launches is priced as the compiler's fused kernels."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import distsim
from distsim.kernels import Cost, Gpu
from distsim.kernels.gpu import GRAPH_S, KERNEL_S, fused_cost, host_of

WIDTH = 4096
OPERATOR_S = host_of("2x Intel Xeon Platinum 8480C", 0.0).operator_s


def seconds(call: Any, *tensors: torch.Tensor) -> float:
    """Of *call* on an idle GPU."""
    call(*tensors)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)
    begin.record()
    call(*tensors)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * 2.0 + 1.0).relu()


def run(body: Any, fuse: bool = True) -> distsim.Outcome:
    return distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1, fuse=fuse)


def big(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (WIDTH, WIDTH)), device="cuda")


def fusion_here() -> Any:
    from distsim.sim.isolation.process import require_task

    return require_task().process.accelerators.fusion


def test_a_chain_is_one_kernel_that_reads_once_and_writes_once() -> None:
    """Four kernels in a row cost what one does that reads their input and writes their output."""

    def body() -> list[float]:
        x = big()
        return [seconds(call, x) for call in (torch.compile(chain), chain, torch.tanh)]

    outcome = run(body)
    fused, eager, one = outcome.results[0]
    assert fused == pytest.approx(one, rel=0.02)
    assert eager > 3.5 * one
    assert outcome.training is not None
    assert outcome.training.fused is not None
    found = outcome.training.fused
    assert (found.functions, found.kernels_before, found.kernels_after) == ({"chain": 2}, 8, 2)
    assert found.gpu_saved_s == pytest.approx(2 * (eager - fused), rel=0.05)
    assert found.host_saved_s == pytest.approx(2 * (4 * OPERATOR_S - KERNEL_S - GRAPH_S))


def test_nothing_is_merged_where_nobody_asked() -> None:
    """With --no-fuse a compiled function costs what it costs eagerly, and the report says so."""

    def body() -> list[float]:
        x = big()
        return [seconds(call, x) for call in (torch.compile(chain), chain)]

    outcome = run(body, fuse=False)
    compiled, eager = outcome.results[0]
    assert compiled == pytest.approx(eager)
    assert outcome.training is not None
    assert outcome.training.fused is None
    assert [note for note in outcome.notes if "operator by operator (--no-fuse); nothing is fused" in note]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.utils.mkldnn scripts methods
def test_the_compiler_is_reset() -> None:
    """`torch.compiler.reset` imports the compiler's CUDA graphs, whose names a torch without CUDA lacks."""

    def body() -> bool:
        import torch._inductor.cudagraph_trees

        torch.compiler.reset()
        return torch._inductor.cudagraph_trees is not None

    kept = {name: sys.modules.pop(name) for name in [n for n in sys.modules if n.endswith(".cudagraph_trees")]}
    try:
        assert distsim.simulate(body, "dgx-h100:1", nproc_per_node=1).results == [True]
    finally:
        sys.modules.update(kept)


def test_products_collectives_and_whole_sums_part_kernels() -> None:
    """What surrounds a product is not merged across it, nor what divides by a sum over everything."""

    def body() -> tuple[int, ...]:
        x, weight = big(), big()

        def merged(function: Any, *tensors: torch.Tensor) -> int:
            fusion = fusion_here()
            before = fusion.kernels_after
            torch.compile(function)(*tensors)
            return int(fusion.kernels_after - before)

        return (
            merged(lambda a, b: torch.relu(torch.tanh(a) @ b).sin(), x, weight),
            merged(lambda a: a.exp() / a.exp().sum(), x),
            merged(lambda a: a.exp() / a.exp().sum(-1, keepdim=True), x),
            merged(lambda a: F.layer_norm(a + 1.0, (WIDTH,)).relu(), x),
            merged(lambda a, b: (a.tanh(), b.tanh()), x, weight),
            merged(lambda a: a.t() / a.t().exp().amax(-1, keepdim=True), x),
        )

    assert run(body).results == [(3, 3, 1, 1, 2, 2)], "a sum over everything goes twice, as one across rows does"


def test_what_is_read_later_is_written() -> None:
    """A result that lives on is paid for, one that died in the kernel is not."""

    def keeps(x: torch.Tensor) -> Any:
        y = torch.tanh(x)
        return y, y.relu()

    def body() -> list[float]:
        x = big()
        return [seconds(torch.compile(call), x) for call in (lambda x: torch.tanh(x).relu(), keeps)]

    both, kept = run(body).results[0]
    assert kept == pytest.approx(1.5 * both, rel=0.05)


def test_backward_of_a_compiled_module_is_merged_as_well() -> None:
    """What backward needs of activation and norm is computed again from the product, which alone stays in memory;
    backward's kernels are fewer, the rest of the program's are not."""

    def body() -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH)).cuda()
        module.compile()
        loss = module(big()).mul(2.0).tanh().sum()
        fusion = fusion_here()
        forward = fusion.kernels_before, fusion.kernels_after
        loss.backward()
        torch.cuda.synchronize()
        backward = fusion.kernels_before - forward[0], fusion.kernels_after - forward[1]
        return forward, backward, torch.cuda.max_memory_allocated()

    outcome = run(body)
    forward, backward, memory = outcome.results[0]
    assert outcome.training is not None
    assert outcome.training.fused is not None
    assert outcome.training.fused.functions == {"Sequential": 1}
    assert forward == (3, 2), "the product; activation and norm"
    assert backward[1] < backward[0]

    def eager() -> int:
        module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH)).cuda()
        module(big()).mul(2.0).tanh().sum().backward()
        return torch.cuda.max_memory_allocated()

    assert run(eager).results[0] - memory == pytest.approx(4 * WIDTH * WIDTH, rel=0.001)


def test_what_a_later_kernel_reads_is_computed_there_again() -> None:
    """As torch's compiler inlines it: a product between the two kernels costs a read of what it is computed from."""

    def later(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        return torch.mm(y + 1.0, weight) + y

    def never(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        return torch.mm(y + 1.0, weight) + 1.0

    def body() -> list[float]:
        x, weight = big(), big()
        return [seconds(torch.compile(call), x, weight) for call in (later, never)] + [seconds(torch.tanh, x)]

    read, left, once = run(body).results[0]
    assert read - left == pytest.approx(once / 2, rel=0.15)


class Norm(torch.nn.Module):
    """As OLMo-core writes it: in float32, with a cast of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight.type_as(wide) * wide).to(x.dtype)


class TwoProducts(torch.nn.Module):
    """Two products and a norm; *kind* says in which order."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, Norm()
        self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "between":
            return self.second(self.norm(self.first(x)))
        if self.kind == "after":
            return x + self.norm(self.first(x))
        if self.kind == "twice":
            x = x + self.norm(self.first(x))
            return x + self.norm(self.second(x))
        return F.silu(self.first(x)) * self.second(x)


@pytest.mark.parametrize(("kind", "kept"), [("between", 3), ("after", 2), ("twice", 4), ("gated", 3)])
def test_forward_keeps_what_the_partitioner_saves(kind: str, kept: int) -> None:
    """The products, what backward multiplies with, and the result, each in bfloat16: what is elementwise, or a norm's
    float32, is computed again.
    """

    def body() -> float:
        module = TwoProducts(kind).cuda().to(torch.bfloat16)
        x = torch.ones(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = torch.cuda.memory_allocated()
        result = torch.compile(module)(x)
        return (torch.cuda.memory_allocated() - before) / result.nbytes

    assert run(body).results[0] == pytest.approx(kept, rel=0.01)


def test_what_compiled_code_leaves_elsewhere_is_there() -> None:
    """A tensor that a module keeps on itself has memory and an address when its call returns."""

    class Keeps(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first, self.second = x * 2.0, x * 3.0
            return torch.mm(x, x)

    def body() -> tuple[bool, int]:
        module, x = Keeps(), big().requires_grad_()
        compiled = torch.compile(module)
        before = torch.cuda.memory_allocated()
        result = compiled(x)
        kept = torch.cuda.memory_allocated() - before - result.nbytes
        return bool(module.second.data_ptr()), kept // x.nbytes

    assert run(body).results[0] == (True, 2)


def test_a_norm_is_merged_with_what_surrounds_it() -> None:
    """torch's fused norm is taken apart by the compiler."""

    def body() -> int:
        x = big()
        torch.compile(lambda x: torch.nn.functional.rms_norm(x * 2.0, (WIDTH,)) + 1.0)(x)
        return int(fusion_here().kernels_after)

    assert run(body).results[0] == 1


def test_what_lives_in_a_fused_kernel_alone_takes_no_memory() -> None:
    """Of a chain, only what it reads and what comes out are in memory; eagerly two of its tensors are there at once."""

    def body() -> list[int]:
        x = big()
        peaks = []
        for call in (chain, torch.compile(chain)):
            torch.cuda.reset_peak_memory_stats()
            call(x)
            peaks.append(torch.cuda.max_memory_allocated() // x.nbytes)
        return peaks

    assert run(body).results[0] == [3, 2]


class Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_every_result_has_its_memory() -> None:
    """A result has memory in whatever object it comes out, beside others or alone."""

    def body() -> list[int]:
        x = big()
        x @ x  # cuBLAS takes its memory
        sizes = []
        for make in (
            lambda x: (x * 3.0, Kept(x * 2.0)),
            lambda x: {"a": x * 3.0, "b": [None, {"c": Kept(x * 2.0)}]},
            lambda x: ((y := x * 2.0), x @ y),
            lambda x: (Kept(y := x * 2.0), x @ y, y + 1.0)[:2],
        ):
            before = torch.cuda.memory_allocated()
            result = torch.compile(make)(x)
            sizes.append((torch.cuda.memory_allocated() - before) // x.nbytes)
            del result
            sizes.append(torch.cuda.memory_allocated() - before)
        return sizes

    assert run(body).results[0] == run(body, fuse=False).results[0]


@pytest.mark.filterwarnings("error")
def test_a_distributed_result_has_its_memory() -> None:
    """The local part of a DTensor is written, and its mesh is not searched for tensors."""

    def body() -> int:
        mesh, x = init_device_mesh("cuda", (1,)), big()
        before = torch.cuda.memory_allocated()
        result = torch.compile(lambda: (DTensor.from_local(x * 2.0, mesh), x @ x))()
        return (torch.cuda.memory_allocated() - before) // x.nbytes + 0 * len(result)

    assert run(body).results == [2]


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_program_keeps_is_written_when_it_is_read(grad: bool) -> None:
    """A tensor that compiled code leaves in a list has memory once something outside of it reads it; without autograd,
    which could keep it, at once."""

    def body() -> Any:
        x, weight = big(1024, 1024).requires_grad_(grad), big(1024, 1024)
        weight @ weight  # cuBLAS takes its memory

        def grown(read: Any) -> tuple[int, ...]:
            kept: list[torch.Tensor] = []

            def function(x: torch.Tensor) -> torch.Tensor:
                kept.append(torch.tanh(x))
                return (kept[0] * 2.0) @ weight

            before = torch.cuda.memory_allocated()
            result = torch.compile(function)(x)
            unread = torch.cuda.memory_allocated() - before - result.nbytes
            answer = read(kept[0].detach())
            once_read = torch.cuda.memory_allocated() - before - result.nbytes
            del answer, result
            kept.clear()
            return unread // x.nbytes, once_read // x.nbytes, torch.cuda.memory_allocated() - before

        reads = (torch.Tensor.sum, torch.Tensor.cpu, torch.Tensor.data_ptr, torch.clone, lambda x: x[0, 0].item())
        return [grown(read) for read in reads]

    at_once = int(not grad)
    sizes = run(body).results[0]
    assert sizes == [(at_once, 2 if number == 3 else 1, 0) for number in range(5)]


def test_memory_counts_what_waits_to_be_merged() -> None:
    """torch.cuda.memory_allocated and addresses know of tensors whose kernel is held back: fresh ones within compiled
    code, gradients right after backward."""

    def body() -> Any:
        x = big()

        def inside(x: torch.Tensor) -> Any:
            before = torch.cuda.memory_allocated()
            both = x * 2.0, x + 1.0
            return (torch.cuda.memory_allocated() - before) // x.nbytes, len({y.data_ptr() for y in both})

        norm = torch.nn.LayerNorm(WIDTH, device="cuda")
        norm.compile()
        norm(x).sum().backward()
        before = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        return torch.compile(inside)(x), torch.cuda.memory_allocated() - before

    assert run(body).results == [((2, 2), 0)]


def test_forward_that_a_checkpoint_runs_again_keeps_no_more_than_the_first() -> None:
    """Compiled forward within backward is a graph of its own: the norm's result alone is written for the product."""

    def body() -> int:
        layers = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU()
        block = torch.nn.Sequential(*layers, torch.nn.Linear(2 * WIDTH, WIDTH)).cuda()
        block.compile()
        checkpoint(block, big().requires_grad_(), use_reentrant=False).sum().backward()
        return torch.cuda.max_memory_allocated()

    assert run(body, fuse=False).results[0] - run(body).results[0] >= 4 * WIDTH * WIDTH


class Residual(torch.nn.Module):
    """Two products; *last* is what the second one goes through before it is added to the input."""

    def __init__(self, last: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = big(), big(), last
        for weight in (self.first, self.second):
            weight.requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(F.gelu(x @ self.first) @ self.second)


@pytest.mark.parametrize(("last", "compiled", "kept"), [("Identity", 0, 2), ("Identity", 1, 1), ("GELU", 1, 2)])
def test_of_the_products_a_checkpoint_keeps_those_have_memory_that_backward_reads(
    last: str, compiled: int, kept: int
) -> None:
    """The sum of a product and the input needs neither in backward, unless backward computes a function of the product
    again. Eagerly the checkpoint holds what its policy names."""

    def body() -> list[int]:
        keeps = partial(create_selective_checkpoint_contexts, lambda ctx, func, *_, **__: policy(func))
        block, x = Residual(getattr(torch.nn, last)()), big().requires_grad_()
        if compiled:
            block.compile()
        before = torch.cuda.memory_allocated()
        y = checkpoint(block, x, use_reentrant=False, context_fn=keeps)
        held = torch.cuda.memory_allocated() - before - y.nbytes
        y.sum().backward()
        return [held // y.nbytes, block.second.grad.shape[0]]

    def policy(func: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "mm" in str(func) else CheckpointPolicy.PREFER_RECOMPUTE

    assert run(body).results[0] == [kept, WIDTH]


def test_a_product_that_a_program_keeps_has_memory_once_it_is_read() -> None:
    """Nothing of backward reads it, and the program does so later."""

    def body() -> list[int]:
        kept: list[torch.Tensor] = []

        def call(x: torch.Tensor) -> torch.Tensor:
            kept.append(x @ x)
            return x + kept[0]

        x = big().requires_grad_()
        before = torch.cuda.memory_allocated()
        y = torch.compile(call)(x)
        sizes = [torch.cuda.memory_allocated() - before]
        total = kept[0].detach() + y.detach()
        return [size // y.nbytes for size in (*sizes, torch.cuda.memory_allocated() - before)] + [total.shape[0]]

    assert run(body).results[0] == [1, 3, WIDTH]


def test_what_a_graph_has_computed_it_does_not_compute_again() -> None:
    """Of two equal operators before products one is launched; not if their input was written in between, nor if a view
    of it is read in another order, nor of random numbers."""

    def products(x: torch.Tensor, first: Any, second: Any, between: Any = None) -> torch.Tensor:
        y = first(x) @ x
        if between is not None:
            between(x)
        return y @ second(x)

    def body() -> list[int]:
        pairs = [
            (torch.tanh, torch.tanh),
            (torch.tanh, torch.tanh, lambda x: x.add_(1.0) @ x),
            (torch.tanh, lambda x: torch.tanh(x.t())),
            (F.dropout, F.dropout),
        ]
        kernels = []
        for pair in pairs:
            before = fusion_here().kernels_after
            torch.compile(partial(products, first=pair[0], second=pair[1], between=(*pair, None)[2]))(big(64, 64))
            kernels.append(fusion_here().kernels_after - before)
        return kernels

    assert run(body).results[0] == [3, 6, 4, 4]


def test_a_capture_holds_all_of_a_compiled_backward() -> None:
    """The last kernel of backward, the bias's gradient, is part of the CUDA graph."""

    def body() -> list[str]:
        linear = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
        linear.compile()
        x, graph = big(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x)
            y.backward(y.detach())
        return [str(name) for _, _, name in graph.captured.kernels]

    assert run(body).results == [["aten.addmm.default", "aten.mm.default", "sum"]]


def test_cuda_graphs_cost_the_host_nothing_for_each_kernel() -> None:
    """`mode="reduce-overhead"` replays what it compiled."""

    def body() -> float:
        x = big()
        before = fusion_here().host_saved_s
        plain, replayed = torch.compile(chain), torch.compile(chain, mode="reduce-overhead")
        plain(x)
        first = fusion_here().host_saved_s - before
        replayed(x)
        return float(fusion_here().host_saved_s - before - 2 * first)

    assert run(body).results[0] == pytest.approx(KERNEL_S)


def test_a_fused_kernel_is_never_dearer_than_its_parts() -> None:
    """Where parts read less than the whole would, they are taken as they are."""
    gpu = Gpu.named("h100")
    parts = [Cost(3e-6, 1, 0, 1000, "elementwise", True)] * 2
    assert fused_cost(gpu, parts, 1 << 30, 1 << 30).seconds == pytest.approx(6e-6 + gpu.gap_s)
    assert fused_cost(gpu, parts[:1], 600, 600) == parts[0]


def test_a_sum_of_all_reads_its_input_once() -> None:
    """Its second kernel reads what the first one left, a few bytes; a norm's backward reads both operands twice."""
    gpu, size = Gpu.named("h100"), 1 << 30
    map_of_all = Cost(1.0, 1, 0, size, "elementwise", True)
    seconds = {
        kind: fused_cost(gpu, [map_of_all, Cost(1.0, kernels, 0, size, kind, True)], size, 0).seconds
        for kind, kernels in (("reduction", 2), ("norm", 2))
    }
    once = size / (gpu.memory_bandwidth * gpu.spec.memory.reduction)
    assert seconds["reduction"] == pytest.approx(once, rel=0.05)
    assert seconds["norm"] == pytest.approx(2 * once, rel=0.05)
