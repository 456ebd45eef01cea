"""Times, memory and values of stand-ins for Transformer Engine, Liger and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import distsim


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
        import transformer_engine.pytorch as te
        from causal_conv1d import causal_conv1d_fn
        from flash_attn.layers.rotary import apply_rotary_emb_qkv_
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        from flash_attn.ops.triton.layer_norm import rms_norm_fn
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu
        from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

        torch.manual_seed(0)
        mlp = te.LayerNormMLP(32, 64, activation="swiglu", normalization="RMSNorm", bias=False)

        def plain_mlp(x: Tensor) -> Tensor:
            wide = F.linear(F.rms_norm(x, (32,), mlp.layer_norm_weight, 1e-5), mlp.fc1_weight)
            gate, up = wide.chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, mlp.fc2_weight)

        angles = draw(4, 4)
        cos, sin = angles.cos(), angles.sin()

        def rotated(qkv: Tensor) -> Tensor:
            """Pairs of numbers as complex ones."""
            turned = torch.view_as_complex(torch.stack(qkv[:, :, :2].chunk(2, dim=-1), dim=-1))
            turned = torch.view_as_real(turned * torch.complex(cos, sin)[:, None, None])
            return torch.cat((torch.cat(turned.unbind(-1), dim=-1), qkv[:, :, 2:]), dim=2)

        labels, sizes = torch.tensor([1, 5, 0, 2], device="cuda"), torch.tensor([2, 1])
        loss = LigerFusedLinearCrossEntropyLoss()
        return {
            "mlp": agrees(mlp, plain_mlp, draw(4, 3, 32)),
            "norm": agrees(lambda x, w: liger_rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (32,), w, 1e-6),
                           draw(4, 32), draw(32)),
            "swiglu": agrees(liger_swiglu, lambda a, b: F.silu(a) * b, draw(4, 32), draw(4, 32)),
            "loss": agrees(lambda w, x: loss(w, x, labels), lambda w, x: F.cross_entropy(x @ w.t(), labels),
                           draw(9, 32), draw(4, 32)),
            "gmm": agrees(lambda a, b: grouped_gemm.ops.gmm(a, b, sizes, True),
                          lambda a, b: torch.cat([a[:2] @ b[0].t(), a[2:] @ b[1].t()]), draw(3, 8), draw(2, 5, 8)),
            "convolution": agrees(lambda x, w: causal_conv1d_fn(x, w, activation="silu"),
                                  lambda x, w: F.silu(F.conv1d(F.pad(x, (3, 0)), w[:, None], groups=4)),
                                  draw(2, 4, 9), draw(4, 4)),
            "rotary": agrees(lambda x: apply_rotary_emb_qkv_(x, cos, sin), rotated, draw(2, 4, 3, 2, 8)),
            "residual": agrees(lambda x, w, r: torch.cat(rms_norm_fn(x, w, residual=r, prenorm=True)),
                               lambda x, w, r: torch.cat((F.rms_norm(x + r, (32,), w, 1e-6), x + r)),
                               draw(4, 32), draw(32), draw(4, 32)),
            "cross entropy": agrees(lambda x: CrossEntropyLoss()(x, labels), lambda x: F.cross_entropy(x, labels),
                                    draw(4, 9)),
            "gated norm": agrees(lambda x, w, z: rmsnorm_fn(x, w, None, z, norm_before_gate=False),
                                 lambda x, w, z: F.rms_norm(x * F.silu(z), (32,), w, 1e-6),
                                 draw(4, 32), draw(32), draw(4, 32)),
        }  # fmt: skip

    results = simulated(body, data="real").results[0]
    assert [name for name, agreed in results.items() if not agreed] == []


def test_scans_are_recurrences() -> None:
    """Mamba's two scans compute their recurrence, a state after the other."""

    def body() -> Any:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        def plain(u: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            state, outs = torch.zeros(2, 4, 3, device="cuda"), []
            for i in range(u.shape[2]):
                now = F.softplus(step[..., i, None])
                state = (now * a).exp() * state + now * b[:, None, :, i] * u[..., i, None]
                outs.append((state * c[:, None, :, i]).sum(-1))
            return torch.stack(outs, dim=-1)

        def as_chunks(u: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            """Each channel is a head of dimension 1, whose states decay alike."""
            into, out_of = (t.transpose(1, 2).unsqueeze(2) for t in (b, c))
            x = u.transpose(1, 2).unsqueeze(-1)
            out = mamba_chunk_scan_combined(x, step.transpose(1, 2), a[:, 0], into, out_of, 4, dt_softplus=True)
            return out.squeeze(-1).transpose(1, 2)

        torch.manual_seed(0)
        a = -torch.rand(4, 1, device="cuda")
        given = draw(2, 4, 6), draw(2, 4, 6), a.expand(4, 3).contiguous(), draw(2, 3, 6), draw(2, 3, 6)
        one = agrees(lambda *inputs: selective_scan_fn(*inputs, delta_softplus=True), plain, *given)
        rest = (given[0], given[1], given[3], given[4])
        other = agrees(lambda u, s, b, c: as_chunks(u, s, a, b, c),
                       lambda u, s, b, c: plain(u, s, given[2], b, c), *rest)  # fmt: skip
        return one, other

    assert simulated(body, data="real").results == [(True, True)]


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
    half as long, what it gathers has half the bytes, and backward keeps operands of one byte."""

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

    (plain, fp8), shape, kept = simulated(body, ranks=2).results[0]
    assert shape == (8192, 4096)
    assert 0.5 < fp8 / plain < 0.75
    assert kept[2] - kept[0] == pytest.approx(2 * 8192 * 4096 - 16384 * 8192 - 8192 * 4096, abs=2**20)


def test_the_fused_loss_holds_no_logits() -> None:
    """Liger's fused linear cross entropy takes the memory of a chunk of logits, and torch's that of all of them."""

    def body() -> Any:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(65536, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(8192, dtype=torch.long, device="cuda")
        peaks = []
        for loss in (LigerFusedLinearCrossEntropyLoss(), lambda w, x, y: F.cross_entropy((x @ w.t()).float(), y)):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss(weight, x, labels).backward()
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
            x.grad = weight.grad = None
        return peaks

    fused, plain = simulated(body).results[0]
    assert fused < 350  # gradients of 144 MiB, and a few chunks of 16 MiB
    assert plain > 4096


def test_states_of_eight_bits_have_a_byte_a_number() -> None:
    """bitsandbytes' AdamW8bit keeps two bytes and a scale for each 256 numbers; small tensors keep 4 bytes."""

    def body() -> Any:
        from bitsandbytes.optim import Lion8bit, PagedAdamW8bit

        sizes = []
        for kind in (PagedAdamW8bit, Lion8bit):
            weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda", dtype=torch.bfloat16))
            optimizer = kind([weight], lr=1e-4)
            weight.grad = torch.zeros_like(weight)
            before = torch.cuda.memory_allocated()
            optimizer.step()
            sizes.append((torch.cuda.memory_allocated() - before) / 2**20)
        return sizes

    assert simulated(body).results == [pytest.approx([2 + 2 * 4 / 256, 1 + 4 / 256])]


def test_layers_of_experts_and_states_run_a_step() -> None:
    """Each expert gets as many tokens; a dispatch takes the time of an all_to_all; Mamba's blocks keep their shape."""

    def body() -> Any:
        import torch.distributed as dist
        from deep_ep import Buffer
        from mamba_ssm import Mamba, Mamba2
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        x = torch.randn(64, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        args = Arguments(hidden_size=128, ffn_hidden_size=256, moe_num_experts=8, moe_top_k=2, mlp_impl="grouped",
                         fp16=False, bf16=True, moe_expert_model_parallelism=True,
                         expert_parallel_group=dist.group.WORLD)  # fmt: skip
        out, _ = dMoE(args)(x)
        for kind in (Mamba, Mamba2):
            out = kind(128, d_state=16, device="cuda", dtype=torch.bfloat16)(out)
        out.sum().backward()
        buffer = Buffer(dist.group.WORLD, 1 << 20)
        chosen = torch.zeros(128, 2, dtype=torch.int64, device="cuda")
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(chosen, 8)
        tokens = x.detach().view(128, 128)
        received, _, _, counts, handle, event = buffer.dispatch(
            tokens, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank,
            topk_idx=chosen, async_finish=True,
        )  # fmt: skip
        event.current_stream_wait()
        back, _, _ = buffer.combine(received, handle)
        return tuple(out.shape), counts, tuple(back.shape)

    assert simulated(body, ranks=2).results[0] == ((64, 2, 128), [64] * 4, (128, 128))


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
        added = layer.weight.grad_added_to_main_grad, layer.layer_norm_weight.grad_added_to_main_grad
        return enabled, tuple(out.shape), bias, added, tuple(norm.shape), list(layer.state_dict())

    names = ["weight", "layer_norm_weight", "_extra_state"]
    assert simulated(body).results == [(True, (64, 2, 512), None, (True, False), (1,), names)]
