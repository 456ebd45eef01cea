"""Libraries' own Python on simulated GPUs, where it is installed (distsim/libraries/catalog.py has the commands)."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import distsim

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # what libraries warn of is theirs


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def simulated(fn: Any, ranks: int = 1, **how: Any) -> Any:
    """Return the outcome of a run that calls no kernel without a price."""
    return distsim.simulate(fn, on="dgx-h100:1", nproc_per_node=ranks, strict_kernels=True, **how)


def q(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@needs("flash_attn", "einops")
def test_flash_attn() -> None:
    """Attention over padded rows, a cache and in packed form, rotary embedding, norm and loss run a step."""

    def body() -> Any:
        from flash_attn import flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.layers.rotary import RotaryEmbedding
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        from flash_attn.ops.triton.layer_norm import RMSNorm

        packed = RotaryEmbedding(64, device="cuda")(q(2, 128, 3, 8, 64) * 1)
        out = flash_attn_qkvpacked_func(packed, causal=True).flatten(2)
        rows, places, starts, longest, _ = unpad_input(out, torch.ones(2, 128, dtype=torch.int32, device="cuda"))
        heads = rows.view(-1, 8, 64)
        rows = flash_attn_varlen_func(heads, heads, heads, starts, starts, longest, longest, causal=True).flatten(1)
        norm = RMSNorm(512, device="cuda", dtype=torch.bfloat16)
        scores = norm(pad_input(rows, places, 2, 128))
        CrossEntropyLoss()(scores.view(-1, 512), torch.zeros(256, dtype=torch.long, device="cuda")).backward()
        with torch.no_grad():
            cached = flash_attn_with_kvcache(q(2, 1, 8, 64), q(2, 512, 8, 64), q(2, 512, 8, 64))
        return tuple(scores.shape), norm.weight.grad is not None, tuple(cached.shape)

    assert simulated(body).results == [((2, 128, 512), True, (2, 1, 8, 64))]


@needs("liger_kernel")
def test_the_fused_loss_of_liger_holds_no_logits() -> None:
    """Its linear cross entropy takes the memory of a chunk of logits, and torch's that of all of them."""

    def body() -> Any:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        x, weight = q(8192, 1024), q(65536, 1024)
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


@needs("liger_kernel")
def test_norms_and_activations_of_liger() -> None:
    """Norm, SwiGLU and rotary positions run a step with known prices."""

    def body() -> Any:
        from liger_kernel.transformers import LigerLayerNorm, LigerRMSNorm
        from liger_kernel.transformers.functional import liger_swiglu
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        x = q(4, 128, 512)
        for kind in (LigerRMSNorm, LigerLayerNorm):
            liger_swiglu(*kind(512).to("cuda", torch.bfloat16)(x).chunk(2, dim=-1)).sum().backward()
        cos = torch.ones(1, 128, 64, device="cuda", dtype=torch.bfloat16)
        turned = liger_rotary_pos_emb(q(4, 8, 128, 64) * 1, q(4, 2, 128, 64) * 1, cos, cos)
        return [tuple(t.shape) for t in turned]

    assert simulated(body).results == [[(4, 8, 128, 64), (4, 2, 128, 64)]]


@needs("mamba_ssm", "causal_conv1d", "einops", "transformers")
def test_mamba() -> None:
    """Both generations of its block keep their shape and have gradients; Mamba stores no state of each position."""

    def body() -> Any:
        from mamba_ssm import Mamba, Mamba2

        x = q(4, 2048, 256)
        grown = []
        for kind in (Mamba, Mamba2):
            block = kind(256, device="cuda", dtype=torch.bfloat16)
            before = torch.cuda.memory_allocated()
            out = block(x)
            grown.append((torch.cuda.memory_allocated() - before) / out.nbytes)
            out.sum().backward()
            assert out.shape == x.shape
            assert all(p.grad is not None for p in block.parameters())
        return grown

    one, _ = simulated(body).results[0]
    assert one < 16  # a state of 16 numbers of 4 bytes for each of two channels would be 64 times its output


@needs("bitsandbytes")
def test_states_of_eight_bits_have_a_byte_a_number() -> None:
    """bitsandbytes' optimizers keep a byte a number and a scale for each 256 numbers, paged ones too."""

    def body() -> Any:
        from bitsandbytes.optim import AdamW8bit, Lion8bit, PagedAdamW8bit

        sizes = []
        for kind in (AdamW8bit, PagedAdamW8bit, Lion8bit):
            weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda", dtype=torch.bfloat16))
            optimizer = kind([weight], lr=1e-4)
            weight.grad = torch.zeros_like(weight)
            before = torch.cuda.memory_allocated()
            optimizer.step()
            sizes.append((torch.cuda.memory_allocated() - before) / 2**20)
        return sizes

    two, one = 2 + 2 * 4 / 256, 1 + 4 / 256
    assert simulated(body).results == [pytest.approx([two, two, one], abs=0.01)]


@needs("megablocks", "stk")
def test_experts_of_megablocks() -> None:
    """Its dropless layer runs with expert parallelism, as if each expert got as many tokens."""

    def body() -> Any:
        import torch.distributed as dist
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        args = Arguments(
            hidden_size=128, ffn_hidden_size=256, moe_num_experts=8, moe_top_k=2, mlp_impl="grouped", fp16=False,
            bf16=True, moe_expert_model_parallelism=True, expert_parallel_group=dist.group.WORLD,
        )  # fmt: skip
        x = q(64, 2, 128)
        out, _ = dMoE(args)(x)
        out.sum().backward()
        return tuple(out.shape), x.grad is not None

    outcome = simulated(body, ranks=2, gpu_libraries="megablocks,grouped_gemm")
    assert outcome.results == [((64, 2, 128), True)] * 2
    assert any("each expert is taken to get equally many tokens" in note for note in outcome.notes)


@needs("flash_attn", "transformers", "einops")
def test_a_model_of_transformers_with_flash_attention() -> None:
    """A Llama of transformers trains with attn_implementation="flash_attention_2"."""

    def body() -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
        config = LlamaConfig(vocab_size=1000, attn_implementation="flash_attention_2", **sizes)
        model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
        tokens = torch.randint(0, 1000, (2, 128)).cuda()
        model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss.backward()
        return all(p.grad is not None for p in model.parameters())

    assert simulated(body).results == [True]
