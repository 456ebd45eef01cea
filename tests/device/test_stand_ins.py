"""Libraries that only a GPU machine has: torch's operators stand in where a program cannot do without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import distsim
from distsim.errors import NotSimulated, UsageError
from distsim.sim.isolation.modules import own_code


@pytest.fixture(autouse=True)
def _absent() -> Iterator[None]:
    """No library of a stand-in is left over from another test."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in own_code.LIBRARIES]:
        del sys.modules[name]


def simulated(fn: Any, **how: Any) -> Any:
    return distsim.simulate(fn, on="dgx-h100:1", nproc_per_node=1, **how)


def q(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def test_attention_has_torchs_shapes_and_price() -> None:
    """flash_attn's functions give torch's results in their own layout, forward and backward, at FlashAttention-2's
    price; sequences in one row are priced as sequences of one length."""

    def body() -> Any:
        from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
        from flash_attn.flash_attn_interface import flash_attn_with_kvcache
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        def seconds(call: Any) -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(10_000_000)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end)

        x, row = q(4, 1024, 8, 64), q(4096, 8, 64)
        starts = torch.arange(0, 4097, 1024, dtype=torch.int32, device="cuda")
        flash_attn_func(x, x, x, causal=True).sum().backward()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torchs = x.transpose(1, 2)
            own = seconds(lambda: torch.nn.functional.scaled_dot_product_attention(torchs, torchs, torchs))
        return (
            seconds(lambda: flash_attn_func(x, x, x)) / own,
            seconds(lambda: flash_attn_varlen_func(row, row, row, starts, starts, 1024, 1024)) / own,
            tuple(flash_attn_varlen_func(row[:4000], row[:4000], row[:4000], starts, starts, 1500, 1500).shape),
            tuple(flash_attn_qkvpacked_func(q(2, 128, 3, 8, 64)).shape),
            tuple(flash_attn_with_kvcache(q(2, 1, 8, 64), q(2, 512, 8, 64), q(2, 512, 8, 64)).shape),
            tuple(memory_efficient_attention(x, x, x, attn_bias=LowerTriangularMask()).shape),
        )

    outcome = simulated(body)
    plain, varlen, *shapes = outcome.results[0]
    assert plain == pytest.approx(1.0)
    assert varlen == pytest.approx(1.0)
    assert shapes == [(4000, 8, 64), (2, 128, 8, 64), (2, 1, 8, 64), (4, 1024, 8, 64)]
    assert any("flash_attn is not installed: a replacement" in note for note in outcome.notes)


def test_the_rest_of_flash_attn_and_apex() -> None:
    """Rotary embedding, norms, cross entropy, padding and the optimizer run a step."""

    def body() -> Any:
        from apex.normalization import FusedLayerNorm
        from apex.optimizers import FusedAdam
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        from flash_attn.ops.rms_norm import RMSNorm

        model = torch.nn.Sequential(RMSNorm(64), FusedLayerNorm(64)).to("cuda", torch.bfloat16)
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        cos = torch.ones(128, 16, device="cuda", dtype=torch.bfloat16)
        turned = apply_rotary_emb(q(2, 128, 8, 64), cos, cos, interleaved=True)
        rows, places, _, longest, _ = unpad_input(turned.flatten(2), torch.ones(2, 128, device="cuda"))
        out = model(pad_input(rows, places, 2, longest).view(2, 128, 8, 64))
        CrossEntropyLoss()(out.view(-1, 64), torch.zeros(2048, dtype=torch.long, device="cuda")).backward()
        optimizer.step()
        return tuple(out.shape)

    assert simulated(body).results == [(2, 128, 8, 64)]


def test_packed_rotary_embedding_works_in_place() -> None:
    """flash_attn rotates packed queries and keys where they are, and computes angles once for a length."""

    def body() -> Any:
        from flash_attn.layers.rotary import RotaryEmbedding

        rotary = RotaryEmbedding(64)
        rotary(q(2, 128, 8, 64), kv=q(2, 128, 2, 8, 64) * 1)
        query, packed = q(2, 128, 8, 64), q(2, 128, 2, 8, 64) * 1
        before = torch.cuda.memory_allocated()
        turned, kv = rotary(query, kv=packed)
        (turned.sum() + kv.sum()).backward()
        return kv.data_ptr() == packed.data_ptr(), torch.cuda.memory_allocated() - before, query.nbytes

    in_place, added, nbytes = simulated(body).results[0]
    assert in_place
    assert added < 6 * nbytes  # its output and three gradients of one tensor, or of two


def test_sequences_of_one_length_are_not_copied() -> None:
    """The backward pass of flash_attn_varlen_func launches no copy of queries, keys and values."""

    def body() -> None:
        from flash_attn import flash_attn_varlen_func

        row = q(4096, 8, 64)
        starts = torch.arange(0, 4097, 1024, dtype=torch.int32, device="cuda")
        optimizer = torch.optim.SGD([row], lr=0.1)
        for _ in range(2):
            flash_attn_varlen_func(row, row, row, starts, starts, 1024, 1024, causal=True).sum().backward()
            optimizer.step()

    training = simulated(body).training
    assert "slice_backward" not in {operator.name for operator in training.operators}


def test_apex_trains() -> None:
    """Its mixed precision, DDP, batch norm over ranks and LARC run a step; what O2 does is refused by name."""

    def body() -> Any:
        import apex
        from apex.parallel.LARC import LARC

        torch.distributed.init_process_group("nccl")
        group = apex.parallel.create_syncbn_process_group(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).cuda()
        model = apex.parallel.convert_syncbn_model(model, process_group=group)
        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), trust_coefficient=0.001)
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1")
        model = apex.parallel.DistributedDataParallel(model)
        out = model(torch.ones(256, 64, device="cuda"))
        with apex.amp.scale_loss(out.float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        with pytest.raises(NotSimulated, match="opt_level='O2'"):
            apex.amp.initialize(model, optimizer, opt_level="O2")
        return optimizer.param_groups[0]["weight_decay"]

    outcome = simulated(body)
    assert outcome.results == [0.1]
    assert outcome.training is not None
    assert outcome.training.steps == 1


def test_a_program_that_can_do_without_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import whose ImportError is caught, here or by who imports the module, finds nothing."""
    (tmp_path / "uses_flash.py").write_text("import flash_attn\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body() -> Any:
        import contextlib

        found = []
        try:
            import flash_attn  # noqa: F401

            found.append("flash_attn")
        except ImportError:
            pass
        with contextlib.suppress(ModuleNotFoundError):
            import uses_flash  # noqa: F401

            found.append("uses_flash")
        return found

    assert simulated(body).results == [[]]


def test_an_installed_library_that_needs_a_gpu_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiled kernels cannot run on simulated tensors; a folder of the program with such a name is its own."""
    for folder, library in (("site-packages", "bitsandbytes"), ("repository", "megablocks")):
        (tmp_path / folder / library).mkdir(parents=True)
        (tmp_path / folder / library / "__init__.py").write_text("own = 1\nfrom _cuda_kernels import step\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    (tmp_path / "repository" / "megablocks" / "__init__.py").write_text("own = 1\n")

    def body() -> Any:
        try:
            import bitsandbytes
        except ImportError:
            return None
        import megablocks

        return bitsandbytes.optim.Adam8bit.__name__, megablocks.own

    outcome = simulated(body)
    assert outcome.results == [("Adam8bit", 1)]
    assert any("the kernels of bitsandbytes need a GPU: a replacement" in note for note in outcome.notes)


def test_deepspeeds_extensions_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its builders find their extensions loaded: Adam for tensors of a GPU, and on the host torch's own."""
    (tmp_path / "op_builder").mkdir()
    (tmp_path / "op_builder" / "__init__.py").touch()
    (tmp_path / "op_builder" / "builder.py").write_text("class OpBuilder:\n    _loaded_ops = {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body() -> Any:
        from op_builder.builder import OpBuilder

        weight, grad, moment, other = (torch.ones(1024, device="cuda") for _ in range(4))
        before = torch.cuda.memory_allocated()
        lists = [[grad], [weight], [moment], [other]]
        OpBuilder._loaded_ops["fused_adam"].multi_tensor_adam(65536, None, lists, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
        host = [torch.ones(8) for _ in range(2)] + [torch.zeros(8) for _ in range(2)]
        OpBuilder._loaded_ops["cpu_adam"].adam_update(0, 1, 0.1, 0.9, 0.999, 1e-8, 0.0, True, *host)
        return torch.cuda.memory_allocated() - before, host[0][0].item()

    assert simulated(body).results == [(0, pytest.approx(0.9))]


def test_what_a_stand_in_has_not_got_is_refused_by_name() -> None:
    """A name can be imported and passed round; its call says what it is, and what to do."""

    def body() -> Any:
        import transformer_engine.pytorch as te
        from bitsandbytes.nn import SomeLayer
        from flash_attn import something_new

        class Own(te.SomethingNew):
            pass

        assert not isinstance(1, SomeLayer)
        names = []
        for call in (something_new, Own):
            with pytest.raises(distsim.NotSimulated, match=r"set its cost with distsim\.kernel_cost") as error:
                call(1, 2)
            names.append(str(error.value).partition(" ")[0])
        return names

    assert simulated(body).results == [["flash_attn.something_new", "transformer_engine.pytorch.SomethingNew"]]


def test_values_are_computed_or_refused() -> None:
    """With --data real attention has its values; what the stand-in takes for granted is refused."""

    def body() -> Any:
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        x = torch.arange(2 * 4 * 2 * 8, device="cuda", dtype=torch.bfloat16).view(2, 4, 2, 8) / 64
        out = flash_attn_func(x, x, x, causal=True)
        by_torch = torch.nn.functional.scaled_dot_product_attention(*[x.transpose(1, 2).cpu()] * 3, is_causal=True)
        row, starts = x.view(8, 2, 8), torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda")
        with pytest.raises(distsim.NotSimulated, match="flash_attn_varlen_func with --data real"):
            flash_attn_varlen_func(row, row, row, starts, starts, 5, 5)
        return torch.allclose(out.cpu(), by_torch.transpose(1, 2), atol=0.02)

    assert simulated(body, data="real").results == [True]


def test_xformers_operators_have_names() -> None:
    """A list of what is not recomputed names its kernels as operators of torch (lingua), in a second simulation too."""

    def body() -> str:
        import xformers.ops  # noqa: F401

        return str(torch.ops.xformers_flash.flash_fwd.default)

    for _ in range(2):
        assert (
            distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2).results
            == ["xformers_flash.flash_fwd.default"] * 2
        )


def test_a_handler_that_only_raises_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`except ImportError: raise RuntimeError("please install it")` does without nothing (nanotron)."""
    text = "try:\n    import {0}\nexcept ImportError:\n    {1}\n"
    (tmp_path / "asks.py").write_text(text.format("grouped_gemm", "raise RuntimeError('please install it')"))
    (tmp_path / "does_without.py").write_text(text.format("megablocks", "megablocks = None"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def body() -> Any:
        import asks  # type: ignore[import-not-found]
        import does_without  # type: ignore[import-not-found]

        return asks.grouped_gemm.__name__, does_without.megablocks

    assert simulated(body).results == [("grouped_gemm", None)]


def imported() -> tuple[bool, bool]:
    """Return whether a guarded import of flash_attn and one of transformer_engine succeed."""
    try:
        import flash_attn  # noqa: F401

        has_attention = True
    except ImportError:
        has_attention = False
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return has_attention, False
    return has_attention, True


@pytest.mark.parametrize(
    ("libraries", "expected"),
    [(None, (False, False)), ("flash-attn", (True, False)), ("transformer_engine,flash_attn", (True, True))],
)
def test_the_simulated_machine_has_the_libraries_that_are_named(
    libraries: str | None, expected: tuple[bool, bool]
) -> None:
    """A program that does without a library gets its stand-in only where it was asked for."""
    assert simulated(imported, gpu_libraries=libraries).results == [expected]


def test_a_machine_without_gpu_libraries_and_an_unknown_one() -> None:
    """`none` makes an import fail that nothing catches, and a wrong name is one line."""

    def unguarded() -> None:
        import flash_attn  # noqa: F401

    (failure,) = simulated(unguarded, gpu_libraries="none", check=False).failures
    assert failure.type == "ModuleNotFoundError"
    with pytest.raises(UsageError, match="--gpu-libraries flash: expected none, or some of flash_attn, "):
        simulated(unguarded, gpu_libraries="flash")


def test_xformers_masks_of_sequences_in_one_row() -> None:
    """Each attends to itself; the row is split as its tensors were joined (dinov2's nested tensors)."""

    def body() -> Any:
        from xformers.ops import fmha, index_select_cat, memory_efficient_attention, scaled_index_add

        crops = [torch.randn(2, 5, 4, 16, device="cuda"), torch.randn(3, 7, 4, 16, device="cuda")]
        mask, row = fmha.BlockDiagonalMask.from_tensor_list(crops)
        parts = mask.split(memory_efficient_attention(row, row, row, attn_bias=mask))
        alone = [F.scaled_dot_product_attention(*[crop.transpose(1, 2)] * 3).transpose(1, 2) for crop in crops]
        rows, index = torch.ones(3, 8, device="cuda"), torch.tensor([0, 2], device="cuda")
        kept = index_select_cat([rows, rows], [index, index[:1]]).shape
        added = scaled_index_add(rows, index, rows[:2], scaling=rows[0] * 2)
        close = all(torch.allclose(one, other, atol=1e-5) for one, other in zip(parts, alone, strict=True))
        return close, tuple(kept), added[:, 0].tolist()

    assert simulated(body, data="real").results == [(True, (24,), [3.0, 1.0, 3.0])]


def test_a_failure_without_a_library_names_the_flag() -> None:
    """A program that catches the ImportError and stops later, as dinov2 does."""

    def requires() -> None:
        if not any(imported()):
            raise AssertionError("Flash_attn is required")

    notes = simulated(requires, check=False).notes
    assert any("--gpu-libraries flash_attn gives the simulated machine" in note for note in notes)
    assert not any("transformer_engine" in note for note in notes)


def test_extensions_of_flash_attns_repository() -> None:
    """rotary_emb, xentropy_cuda_lib and dropout_layer_norm have the shapes of the compiled ones; rows of a subset are
    refused."""

    def body() -> Any:
        import dropout_layer_norm
        import rotary_emb
        import xentropy_cuda_lib

        x, weight = q(64, 128).detach(), q(128).detach()
        rotary_emb.apply_rotary(x, x, x, x, x, x, False)
        labels = torch.zeros(64, dtype=torch.long, device="cuda")
        losses, sums = xentropy_cuda_lib.forward(x, labels, 0.0)
        grad = xentropy_cuda_lib.backward(losses, x, sums, labels, 0.0, True, 128)
        rest = (weight, None, None, None, None, None)
        plain = dropout_layer_norm.dropout_add_ln_fwd(x, None, *rest, 0.0, 1e-5, 1.0, 0, None, False, True)
        wide = dropout_layer_norm.dropout_add_ln_fwd(x, None, *rest, 0.1, 1e-5, 1.0, 0, None, True, True)
        of_norm = dropout_layer_norm.dropout_add_ln_bwd(
            x, None, wide[1], None, wide[2], wide[3], wide[4], weight, None, None, None, None, 0.1, 1.0, 0, True, True
        )
        with pytest.raises(distsim.NotSimulated, match="subset of rows"):
            dropout_layer_norm.dropout_add_ln_fwd(x, None, weight, None, None, None, labels, None, 0.0, 1e-5, 1.0, 0)
        shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in (*plain[:3], *wide[:4], *of_norm)]
        return losses.dtype, grad is x, shapes

    dtype, is_in_place, shapes = simulated(body).results[0]
    bf16, rows = ((64, 128), torch.bfloat16), ((64,), torch.float32)
    wide = ((64, 128), torch.float32)
    weights = ((128,), torch.bfloat16)
    assert (dtype, is_in_place) == (torch.float32, True)
    assert shapes == [
        bf16,
        None,
        None,
        bf16,
        wide,
        ((64, 128), torch.uint8),
        rows,
        bf16,
        wide,
        weights,
        weights,
        None,
        None,
    ]
