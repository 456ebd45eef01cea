"""Times, memory and values of replaced libraries, and of compiled extensions below libraries' own Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import distsim
from distsim.errors import NotSimulated


def simulated(fn: Any, ranks: int = 1, **how: Any) -> Any:
    return distsim.simulate(fn, on="dgx-h100:1", nproc_per_node=ranks, **how)


def agrees(ours: Any, reference: Any, *inputs: Tensor) -> bool:
    """Whether both give the same outputs and gradients."""
    results: list[list[Tensor]] = []
    for fn in (ours, reference):
        given = [t.detach().clone().requires_grad_() for t in inputs]
        out = fn(*given)
        out.float().square().sum().backward()
        results.append([out.detach().cpu(), *[t.grad.cpu() for t in given if t.grad is not None]])
    pairs = zip(*results, strict=True)
    return all(torch.allclose(one, other, atol=1e-3, rtol=1e-3) for one, other in pairs)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def test_values_are_those_of_torchs_operators() -> None:
    """With --data real the kernels compute what they compute on a GPU, and so do their gradients."""

    def body() -> Any:
        import grouped_gemm.ops
        import scaled_upper_triang_masked_softmax_cuda as softmax
        import transformer_engine.pytorch as te
        from apex.optimizers import FusedAdam
        from flash_attn.layers.rotary import apply_rotary_emb_kv_
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        torch.manual_seed(0)
        mlp = te.LayerNormMLP(32, 64, activation="swiglu", normalization="RMSNorm", bias=False)

        def plain_mlp(x: Tensor) -> Tensor:
            wide = F.linear(F.rms_norm(x, (32,), mlp.layer_norm_weight, 1e-5), mlp.fc1_weight)
            gate, up = wide.chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, mlp.fc2_weight)

        angles = draw(4, 4)
        cos, sin = angles.cos(), angles.sin()

        def rotated(kv: Tensor) -> Tensor:
            """Pairs of numbers as complex ones."""
            turned = torch.view_as_complex(torch.stack(kv[:, :, :1].chunk(2, dim=-1), dim=-1))
            turned = torch.view_as_real(turned * torch.complex(cos, sin)[:, None, None])
            return torch.cat((torch.cat(turned.unbind(-1), dim=-1), kv[:, :, 1:]), dim=2)

        def causal(x: Tensor) -> Tensor:
            return (x * 0.5).masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)

        def stepped(kind: Any, **options: Any) -> Tensor:
            weight = torch.nn.Parameter(torch.arange(8.0, device="cuda"))
            optimizer = kind([weight], lr=0.1, weight_decay=0.1, **options)
            for _ in range(2):
                optimizer.zero_grad()
                weight.square().sum().backward()
                optimizer.step()
            return weight.detach()

        sizes = torch.tensor([2, 1])
        return {
            "mlp": agrees(mlp, plain_mlp, draw(4, 3, 32)),
            "gmm": agrees(lambda a, b: grouped_gemm.ops.gmm(a, b, sizes, True),
                          lambda a, b: torch.cat([a[:2] @ b[0].t(), a[2:] @ b[1].t()]), draw(3, 8), draw(2, 5, 8)),
            "rotary": agrees(lambda x: apply_rotary_emb_kv_(x, cos, sin), rotated, draw(2, 4, 2, 2, 8)),
            "residual": agrees(
                lambda x, w, r: torch.cat(layer_norm_fn(x, w, None, residual=r, prenorm=True, is_rms_norm=True)),
                lambda x, w, r: torch.cat((F.rms_norm(x + r, (32,), w, 1e-6), x + r)),
                draw(4, 32), draw(32), draw(4, 32),
            ),
            "softmax": agrees(lambda x: softmax.forward(x, 0.5), causal, draw(2, 4, 4)),
            "adam": torch.allclose(stepped(FusedAdam), stepped(torch.optim.AdamW), atol=1e-5),
        }  # fmt: skip

    results = simulated(body, data="real").results[0]
    assert [name for name, agreed in results.items() if not agreed] == []


def test_compiled_extensions_below_mamba_and_megablocks() -> None:
    """A scan takes the time of its exponentials where its states are many, and the convolution that of its bytes; each
    expert gets as many tokens, which the host knows."""

    def body() -> Any:
        import causal_conv1d_cuda
        import megablocks_ops
        import selective_scan_cuda

        def scan(states: int) -> float:
            u, a = draw(4, 5120, 2048), draw(5120, states)
            b = draw(4, 1, states, 2048)
            out, x, out_z = selective_scan_cuda.fwd(u, u, a, b, b, None, u, None, True)
            assert (out.shape, x.shape, out_z.shape) == (u.shape, (4, 5120, 1, 2 * states), u.shape)
            given = selective_scan_cuda.bwd(u, u, a, b, b, None, u, None, out, x, out, None, True, False)
            assert [None if t is None else t.shape for t in given] == [
                *(t.shape for t in (u, u, a, b, b)), None, None, u.shape,
            ]  # fmt: skip
            return timed(lambda: selective_scan_cuda.fwd(u, u, a, b, b, None, u, None, True))

        x, weight = draw(4, 5120, 2048), draw(5120, 4)
        conv_ms = timed(lambda: causal_conv1d_cuda.causal_conv1d_fwd(x, weight, None, None, None, x, None, True))
        copy_ms = timed(lambda: x.clone())
        counts = megablocks_ops.histogram(torch.zeros(1026, dtype=torch.int32, device="cuda"), 4)
        return scan(64) / scan(16), conv_ms / copy_ms, counts.tolist()

    more_states, conv, counts = simulated(body).results[0]
    assert more_states > 2
    assert conv == pytest.approx(1.0, rel=0.05)
    assert counts == [257, 257, 256, 256]


def timed(call: Any) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(100_000_000)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def test_fp8_products_take_half_the_time_and_are_shared_by_the_group() -> None:
    """A tensor-parallel pair of linear layers gathers and scatters in each direction; in fp8 its products take about
    half as long, what it gathers has half the bytes, and backward keeps operands of one byte. Delayed scaling reduces
    the maxima of inputs, weights and outputs of all products of a region at once, and after backward once more."""

    def body() -> Any:
        import torch.distributed as dist
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        mlp = te.LayerNormMLP(
            4096, 16384, bias=False, set_parallel_mode=True, sequence_parallel=True, tp_group=dist.group.WORLD,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        x = torch.randn(2048, 4, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        milliseconds, kept = [], []
        for enabled in (False, True):

            def step(enabled: bool = enabled) -> None:
                with te.fp8_autocast(enabled, fp8_recipe=DelayedScaling(), fp8_group=dist.group.WORLD):
                    out = mlp(x)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # what collectives have used is free from here on
                kept.append(torch.cuda.memory_allocated())
                out.sum().backward()

            mlp.zero_grad()
            x.grad = None
            step()
            milliseconds.append(timed(step))
        return milliseconds, tuple(mlp.fc1_weight.shape), kept

    outcome = simulated(body, ranks=2)
    (plain, fp8), shape, kept = outcome.results[0]
    maxima = [call for call in outcome.records[0] if call.op == "all_reduce"]
    assert [call.reduce_op for call in maxima] == ["MAX"] * 4  # of two steps
    assert maxima[0].input_shapes == maxima[2].input_shapes == ((3 * 2,),)
    assert shape == (8192, 4096)
    assert 0.5 < fp8 / plain < 0.75
    assert kept[2] - kept[0] == pytest.approx(2 * 8192 * 4096 - 16384 * 8192 - 8192 * 4096, abs=2**20)


@pytest.mark.parametrize("made_in_fp8", [False, True])
@pytest.mark.parametrize("experts", [0, 4])
def test_a_weight_is_cast_for_the_first_micro_batch_of_a_step(experts: int, made_in_fp8: bool) -> None:
    """Later ones read its copies and keep none of their own; without a word on micro-batches each casts for itself. The
    next step writes its copies where those of this step are. A weight that is made in fp8 needs no copies."""

    def body() -> Any:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling

        options = {"bias": False, "params_dtype": torch.bfloat16}
        x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        more, milliseconds, outs = [], [], []
        with te.fp8_model_init(enabled=made_in_fp8):
            layer = te.GroupedLinear(experts, 4096, 2048, **options) if experts else te.Linear(4096, 2048, **options)
        for first in (True, False, None, True):
            before = torch.cuda.memory_allocated()

            def forward(first: bool | None = first) -> None:
                with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
                    outs.append(layer(x, *([[16] * experts] if experts else []), is_first_microbatch=first))

            forward()
            more.append(torch.cuda.memory_allocated() - before)
            milliseconds.append(timed(forward))
        sum(out.sum() for out in outs).backward()
        return more, milliseconds

    (first, later, each, again), (cast, read, cast_each, _) = simulated(body).results[0]
    weight, own = max(1, experts) * 4096 * 2048, 2 * 64 * 4096 + 2 * 64 * 2048
    if made_in_fp8:
        assert first == later == each == again <= own
        assert cast == pytest.approx(read)
        return
    assert first == pytest.approx(2 * weight, abs=own)
    assert each == pytest.approx(weight, abs=weight + own)
    assert later == again <= own
    assert read < 0.8 * cast == pytest.approx(0.8 * cast_each, rel=0.1)


def test_tokens_are_dispatched_and_combined() -> None:
    """Each expert gets as many tokens, filled up to its alignment, and a dispatch takes the time of an all_to_all
    (deep_ep). A rank gets each token once that chose one of its experts: with 2 choices of 2 ranks, 3 of 4 tokens."""

    def body() -> Any:
        import torch.distributed as dist
        from deep_ep import Buffer

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        buffer = Buffer(dist.group.WORLD, 1 << 20)
        chosen = torch.zeros(128, 2, dtype=torch.int64, device="cuda")
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(chosen, 8)
        tokens = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
        received, _, _, counts, handle, event = buffer.dispatch(
            tokens, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank,
            topk_idx=chosen, async_finish=True,
        )  # fmt: skip
        event.current_stream_wait()
        back, _, _ = buffer.combine(received, handle)
        aligned = buffer.dispatch(tokens, num_tokens_per_expert=per_expert, topk_idx=chosen, expert_alignment=48)[3]
        single = buffer.dispatch(tokens, topk_idx=chosen[:, :1])[0]
        return counts, aligned, *(tuple(t.shape) for t in (received, back, single))

    outcome = simulated(body, ranks=2)
    assert outcome.results[0] == ([64] * 4, [96] * 4, (2 * 96, 128), (128, 128), (2 * 64, 128))
    moved = [call.input_shapes for call in outcome.records[0] if call.op == "all_to_all_single"]
    assert moved == [((2 * rows, 128),) for rows in (96, 96, 96, 64)]


def test_a_subclass_of_a_layer_as_megatron_has_it() -> None:
    """Megatron-core subclasses Transformer Engine's layers, and has weight gradients added to main_grad, in fp8."""

    def body() -> Any:
        import transformer_engine as te
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast
        from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm

        class Column(te.pytorch.LayerNormLinear):
            def __init__(self) -> None:
                super().__init__(
                    in_features=256, out_features=512, bias=False, normalization="RMSNorm", return_bias=True,
                    fuse_wgrad_accumulation=True, parallel_mode="column", params_dtype=torch.bfloat16, ub_name="qkv",
                )  # fmt: skip

        layer = Column()
        for p in layer.parameters():
            p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape, device="cuda"), False
        x = torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with fp8_autocast(fp8_recipe=te.common.recipe.DelayedScaling(amax_history_len=16)):
            enabled = FP8GlobalStateManager.is_fp8_enabled()
            out, bias = layer(x, is_first_microbatch=True)
        out.sum().backward()
        norm, _ = multi_tensor_applier(multi_tensor_l2norm, None, [[layer.weight.main_grad]], False)
        with pytest.raises(NotSimulated, match="--delay-wgrad-compute"):
            layer.backward_dw()
        added = layer.weight.grad_added_to_main_grad, layer.layer_norm_weight.grad_added_to_main_grad
        return enabled, tuple(out.shape), bias, added, tuple(norm.shape), list(layer.state_dict())

    names = ["weight", "layer_norm_weight", "_extra_state"]
    assert simulated(body).results == [(True, (64, 2, 512), None, (True, False), (1,), names)]


def test_what_megatron_splits_and_keeps_on_the_gpu() -> None:
    """Megatron-core has Transformer Engine cut queries, keys and values apart, and asks it for a context for
    activations on the host, which is refused only where they are to be moved there."""

    def body() -> Any:
        from transformer_engine.pytorch.attention import _SplitAlongDim
        from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context

        mixed = torch.randn(8, 2, 12, device="cuda", requires_grad=True)
        query, key, value = _SplitAlongDim.apply(mixed, 2, [8, 2, 2])
        context, synchronized = get_cpu_offload_context(False, 0, 2, True, False, False)
        with context:
            (query.sum() + synchronized(key).sum() + value.sum()).backward()
        with pytest.raises(NotSimulated, match="cpu-offloading-num-layers"):
            get_cpu_offload_context(True, 1, 2, True, False, False)
        return [tuple(part.shape) for part in (query, key, value)], tuple(mixed.grad.shape)

    shapes = [(8, 2, 8), (8, 2, 2), (8, 2, 2)]
    assert simulated(body, gpu_libraries="transformer_engine").results == [(shapes, (8, 2, 12))]


def test_context_parallel_attention_is_that_of_the_whole_sequence() -> None:
    """Two ranks with the first and last, and the middle quarters of a sequence (cp_comm_type a2a)."""

    def body() -> Any:
        import torch.distributed as dist
        import transformer_engine.pytorch as te

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        torch.manual_seed(0)
        attention = te.DotProductAttention(4, 8, 2, attn_mask_type="causal", cp_comm_type="a2a")
        whole = [draw(16, 2, heads, 8).requires_grad_() for heads in (4, 2, 2)]
        out = attention(*whole)
        mine = torch.tensor([0, 3] if dist.get_rank() == 0 else [1, 2], device="cuda")

        def part(t: Tensor) -> Tensor:
            return t.detach().view(4, 4, *t.shape[1:]).index_select(0, mine).flatten(0, 1)

        shared = [part(t).requires_grad_() for t in whole]
        attention.set_context_parallel_group(dist.group.WORLD, cp_comm_type="a2a")
        shared_out = attention(*shared)
        for result in (out, shared_out):
            result.square().sum().backward()
        pairs = [(out, shared_out), *((one.grad, other.grad) for one, other in zip(whole, shared, strict=True))]
        return [torch.allclose(part(one), other, atol=1e-4) for one, other in pairs]

    assert simulated(body, 2, data="real").results == [[True] * 4] * 2


def test_a_ring_of_keys_and_values_hides_behind_attention() -> None:
    """With p2p, half of a sequence takes half of the time, forward and backward; other ways are refused by name."""

    def body() -> Any:
        import torch.distributed as dist
        import transformer_engine.pytorch as te

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        attention = te.DotProductAttention(32, 128, 8, attn_mask_type="causal")
        times = []
        for length, group in ((16384, None), (8192, dist.group.WORLD)):
            attention.set_context_parallel_group(group)
            looks = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
            three = [torch.empty(length, 1, heads, 128, **looks) for heads in (32, 8, 8)]
            attention(*three).sum().backward()
            times.append(timed(lambda three=three: attention(*three).sum().backward()))
        with pytest.raises(NotSimulated, match="cp_comm_type='all_gather'"):
            attention.set_context_parallel_group(dist.group.WORLD, cp_comm_type="all_gather")
        with pytest.raises(NotSimulated, match="packed sequences"):
            attention(*three, qkv_format="thd")
        return times[1] / times[0]

    outcome = simulated(body, 2)
    assert all(0.5 < share < 0.6 for share in outcome.results)
    (sends,) = (total for total in outcome.collectives if total.op == "send")
    pair_bytes = 2 * 8192 * 8 * 128 * 2
    assert (sends.count, sends.bytes) == (12, 12 * pair_bytes), (
        "of 2 ranks, twice: forward 1, backward 1 and the gradients"
    )


def test_rows_of_experts_are_filled_up_for_fp8() -> None:
    """And cut off again, with gradients; what is a multiple already is not copied."""

    def body() -> Any:
        import transformer_engine.pytorch as te

        rows = draw(70, 4).requires_grad_()
        padding, unpadding = te.Fp8Padding(2, 32), te.Fp8Unpadding(2, 32)
        filled, splits = padding(rows, [40, 30])
        unpadding(filled, [40, 30]).sum().backward()
        whole = draw(64, 4)
        values = torch.equal(rows.grad, torch.ones_like(rows)), filled[40:64].abs().sum().item()
        return tuple(filled.shape), splits, padding(whole, [32, 32])[0] is whole, values

    assert simulated(body, data="real").results == [((96, 4), [64, 32], True, (True, 0.0))]


def test_the_loss_overwrites_the_logits() -> None:
    """parallel_cross_entropy has the values of torch's, and needs no second memory of the size of the logits."""

    def values() -> Any:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        target = torch.tensor([[1, 2], [0, 3]], device="cuda")
        return agrees(
            lambda x: parallel_cross_entropy(x, target),
            lambda x: F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(2, 2),
            draw(2, 2, 5),
        )

    def memory() -> Any:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        logits = torch.empty(4096, 1, 32_000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.zeros(4096, 1, dtype=torch.int64, device="cuda")
        before = torch.cuda.memory_allocated()
        parallel_cross_entropy(logits * 1, target).sum().backward()
        return (torch.cuda.max_memory_allocated() - before) / logits.nbytes

    assert simulated(values, data="real").results == [True]
    assert simulated(memory).results[0] == pytest.approx(2, abs=0.1), "a copy of the logits, and their gradient"


def test_tokens_move_to_their_experts_and_back() -> None:
    """transformer_engine.pytorch.permutation, with gradients; those of experts are added to main_grad, and autograd
    gets one buffer for all weights of a shape."""

    def body() -> Any:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch import permutation
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.module.base import get_dummy_wgrad, get_workspace

        tokens, probs = draw(64, 32).requires_grad_(), draw(64, 8).requires_grad_()
        choices = torch.zeros(64, 8, dtype=torch.bool, device="cuda")
        rows, weights, row_map = permutation.moe_permute_with_probs(tokens, probs, choices, num_out_tokens=128)
        sizes, order = torch.tensor([64, 64], device="cuda"), torch.tensor([1, 0], device="cuda")
        rows, weights = permutation.moe_sort_chunks_by_index_with_probs(rows, weights, sizes, order)
        experts = te.GroupedLinear(2, 32, 32, bias=False, fuse_wgrad_accumulation=True)
        for weight in experts.parameters():
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        out = experts(rows, [64, 64]) * weights[:, None]
        permutation.moe_unpermute(out, row_map, restore_shape=tokens.shape).sum().backward()
        both = [weight.grad.data_ptr() for weight in experts.parameters()]
        product = general_gemm(tokens.detach(), out.detach(), get_workspace(), torch.float32, layout="NT")[0]
        shared = get_dummy_wgrad([32, 32], torch.float32).data_ptr()
        added = [weight.grad_added_to_main_grad for weight in experts.parameters()]
        return tokens.grad.shape, probs.grad.shape, both == [shared, shared], added, product.shape

    shapes = simulated(body).results[0]
    assert shapes == ((64, 32), (64, 8), True, [True, True], (32, 32))
